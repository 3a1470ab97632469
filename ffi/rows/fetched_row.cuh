// Rows that are fetched ahead: each thread copies its own packs of the next rows into shared memory, asynchronously,
// while it works on the present ones.
#ifndef JAXOPS_ROWS_FETCHED_ROW_CUH_
#define JAXOPS_ROWS_FETCHED_ROW_CUH_

#include <cstdint>

#include "core/async_copy.cuh"
#include "core/shared_memory.cuh"
#include "rows/row.cuh"

namespace jaxops::rows {

// A placement whose rows are fetched kStages - 1 ahead. kShared: parameters are kept in shared memory, not in
// registers. kKept: the row's packs are. kAhead: the next row is begun before the present one is finished, which is
// where blocks share a row and there is a stage for it.
template <class P, int kStages_, bool kShared_ = false, bool kKept_ = !kShared_ && P::kRows == 1 && P::kPacks <= 4>
struct Looped : P {
  static constexpr int kStages = kStages_;
  static constexpr bool kShared = kShared_, kKept = kKept_;
  static constexpr bool kAhead = P::kCluster > 1 && kStages > 2;
};

// A row whose packs have been fetched into shared memory: [input][stage][pack][thread], 16 bytes each; behind them the
// parameters that are kept there, [parameter][pack][16 bytes][thread].
template <class Base, int kParameters>
class FetchedRow : public Base {
 public:
  using P = typename Base::P;
  using A = typename Base::A;
  static constexpr int kV = Base::kV;
  static constexpr bool kFetches = kV > 1;
  // Packs beyond the columns: zeros are copied each time, which takes no branches, or stay from the beginning.
  // TUNING.md has which is faster.
  static constexpr bool kFetchesZeros = Base::kPadded && P::kAhead;
  static constexpr int kVectorStride = P::kThreads * 16;
  static constexpr int kStageStride = Base::kHeldPacks * kVectorStride;
  static constexpr int kInputStride = P::kStages * kStageStride;
  static constexpr int kVectors = kV * static_cast<int>(sizeof(A)) / 16;  // of a parameter's pack
  static constexpr int kParameterStride = P::kShared ? Base::kPerRow * kVectors * kVectorStride : 0;
  static constexpr int SharedBytes(int inputs) {
    return kFetches ? inputs * kInputStride + kParameters * kParameterStride : 0;
  }
  static_assert(!P::kShared || kFetches);

  // inputs: how many are fetched.
  __device__ FetchedRow(const typename Base::Geometry& geometry, char* shared, int inputs)
      : Base(geometry), slots_(SharedAddress(shared) + threadIdx.x * 16) {
    asm volatile("" : "+r"(slots_));  // opaque: else it would be computed anew for each use
    stage_ = slots_;
    parameters_ = slots_ + inputs * kInputStride;
    if constexpr (Base::kPadded && !kFetchesZeros) {
      this->ForEachPack([&](int pack, int column) {
        if (column < this->columns()) return;
        for (int k = 0; k < P::kStages * inputs; ++k)
          StoreShared(slots_ + k * kStageStride + pack * kVectorStride, uint4{});
      });
    }
  }

  // Where the present rows' packs are.
  __device__ void SetStage(int stage) { stage_ = slots_ + stage * kStageStride; }

  // Turns to the rows of another; what joins the threads stays.
  __device__ void Follow(const FetchedRow& other) {
    this->limit_ = other.limit_;
#pragma unroll
    for (int s = 0; s < Base::kStarts; ++s) {
      this->live_[s] = other.live_[s];
      this->shift_[s] = other.shift_[s];
      this->readable_[s] = other.readable_[s];
#pragma unroll
      for (int slot = 0; slot < Base::kSlots; ++slot) this->offsets_[s][slot] = other.offsets_[s][slot];
    }
  }

  // Begins to fetch the present rows' packs of an input. Rows of single elements are not fetched but read when wanted.
  template <int kInput, class T>
  __device__ void Fetch(const T* tensor) const {
    if constexpr (kFetches) {
      constexpr int kBytes = sizeof(T) * kV;
      const int end = min(this->columns(), this->limit_);
      const auto fetch = [&](int pack, int column) {
        const int64_t offset = this->Offset(0, pack, column);
        int bytes = kBytes;
        if constexpr (Base::kShifted) {  // the tensor may end within the last row's last pack
          const int64_t left = (this->geometry_.size - offset) * int64_t{sizeof(T)};
          bytes = left < kBytes ? static_cast<int>(left) : kBytes;
        }
        if (Base::kPadded && !this->live(pack)) bytes = 0;
        if (kFetchesZeros && column >= end) bytes = 0;
        CopyAsync<kBytes>(stage_ + kInput * kInputStride + pack * kVectorStride, tensor + offset, bytes);
      };
      if constexpr (kFetchesZeros) {
        this->ForEachPack(fetch);
      } else {
        this->ForEachPackBefore(end, fetch);
      }
    }
  }

  // Kept in registers where there is room, else read where it is wanted.
  template <int kInput, class T>
  __device__ auto Load(const T* tensor, T outside = T(0.0f)) const {
    if constexpr (!kFetches) {
      return Base::template Load<kInput>(tensor, outside);
    } else {
      const auto fetched = [this, outside](int pack, int column) {
        auto values = LoadShared<Pack<T, kV>>(stage_ + kInput * kInputStride + pack * kVectorStride);
        this->Clip(values, column, outside);
        return values;
      };
      if constexpr (P::kKept) {
        typename Base::template Held<T> held;
        if constexpr (!Base::kPadded) held = {};
        this->ForEachPack([&](int pack, int column) { held.packs[pack] = fetched(pack, column); });
        return held;
      } else {
        return [fetched](int pack, int column) {
          return [values = fetched(pack, column)](int i) { return values.template Widen<A>(i); };
        };
      }
    }
  }
  // Rows to which something is added are not fetched.
  template <class T>
  __device__ auto LoadSum(const T* x, const T*, T*) const {
    return Load<0>(x);
  }

  // Elements of 16 bits cost two instructions to unpack; f32 is as good as kept.
  template <class E>
  __device__ auto KeepFew(const E& expression) const {
    if constexpr (P::kKept && kV == 8 && Base::kHeldPacks <= 2) {
      return this->Keep(expression);
    } else {
      return expression;
    }
  }

  // An expression that is the same for all rows, computed now and kept; zeros beyond the columns.
  template <int kNumber, class E>
  __device__ auto KeepParameter(const E& expression) const {
    struct Registers {
      Pack<A, kV> packs[Base::kPerRow];
      __device__ auto operator()(int pack, int) const {
        return [values = packs[pack % Base::kPerRow]](int i) { return values.lane[i]; };
      }
    };
    const auto place = [first = parameters_ + kNumber * kParameterStride](int pack, int vector) {
      return first + (pack % Base::kPerRow * kVectors + vector) * kVectorStride;
    };
    Registers kept = {};
    this->ForEachPack([&](int pack, int column) {
      if (pack >= Base::kPerRow) return;
      Pack<A, kV> values = {};
      if (column < this->columns()) {
        const auto value = expression(pack, column);
#pragma unroll
        for (int i = 0; i < kV; ++i) values.lane[i] = value(i);
      }
      if constexpr (P::kShared) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) StoreShared(place(pack, v), reinterpret_cast<const uint4*>(&values)[v]);
      } else {
        kept.packs[pack] = values;
      }
    });
    if constexpr (P::kShared) {
      return [place](int pack, int) {
        Pack<A, kV> values;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) reinterpret_cast<uint4*>(&values)[v] = LoadShared<uint4>(place(pack, v));
        return [=](int i) { return values.lane[i]; };
      };
    } else {
      return kept;
    }
  }

 private:
  uint32_t slots_, stage_, parameters_;  // this thread's share of shared memory
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_FETCHED_ROW_CUH_
