// Rows that are fetched ahead: threads copy the next rows into shared memory, asynchronously, while they work on the
// present ones. If rows are aligned, each thread copies its own packs (16 bytes each). If they are not, all threads
// together copy the aligned vectors around the row: the row is staged. docs/adding.md explains placement, looped and
// staged.
#ifndef JAXOPS_ROWS_FETCHED_ROW_CUH_
#define JAXOPS_ROWS_FETCHED_ROW_CUH_

#include <cstdint>

#include "core/async_copy.cuh"
#include "core/shared_memory.cuh"
#include "rows/row.cuh"

namespace jaxops::rows {

// A placement that fetches rows kStages - 1 ahead. kShared: parameters are kept in shared memory instead of registers.
// kKept: the row's packs are kept in registers. kPackVectors: the most 16-byte vectors per pack in shared memory.
// kAhead: if blocks share a row, the next row is begun before the present one is finished.
template <class P, int kStages_, bool kShared_ = false, bool kKept_ = !kShared_ && P::kPacks <= 4,
          int kPackVectors_ = 1>
struct Looped : P {
  static constexpr int kStages = kStages_, kPackVectors = kPackVectors_;
  static constexpr bool kShared = kShared_, kKept = kKept_;
  static constexpr bool kAhead = P::kClusters && kStages > 2;
};

// A row whose packs have been fetched into shared memory: [warp][input][stage][pack][vector][lane], 16 bytes each.
// Behind a warp's packs lie the parameters that are kept there: [parameter][pack][vector][lane]. In this order the
// distance between a thread's vectors is a compile-time constant, whatever the number of threads.
template <class Base, int kParameters>
class FetchedRow : public Base {
 public:
  using P = typename Base::P;
  using A = typename Base::A;
  static constexpr int kV = Base::kV;
  static constexpr bool kFetches = kV > 1;
  // Packs beyond the columns are zeros. Either they are copied each time, which takes no branches, or they are written
  // once and stay. Kernels that fetch several rows ahead copy the zeros, because that was faster.
  static constexpr bool kFetchesZeros = Base::kPadded && P::kAhead;
  static constexpr int kVectors = kV * static_cast<int>(sizeof(A)) / 16;  // per parameter pack
  static constexpr int kPlaces = Base::kHeldPacks * P::kPackVectors;      // vectors per stage
  static int SharedBytes(const Team& team, int inputs) {
    if (!kFetches) return 0;
    const int parameters = P::kShared ? kParameters * kVectors : 0;
    return (inputs * P::kStages * kPlaces + parameters * Base::kHeldPacks) * ThreadsOf<P>(team) * 16;
  }
  static_assert(!P::kShared || kFetches);

  // inputs: how many are fetched.
  __device__ FetchedRow(const typename Base::Geometry& geometry, char* shared, int inputs) : Base(geometry) {
    const int packs = inputs * P::kStages * kPlaces * kStride;  // bytes per warp
    constexpr int kOfParameters = P::kShared ? kParameters * kVectors * Base::kHeldPacks * kStride : 0;
    slots_ = SharedAddress(shared) + threadIdx.x / 32 * (packs + kOfParameters) + threadIdx.x % 32 * 16;
    asm volatile("" : "+r"(slots_));  // opaque, or the compiler would compute it anew for each use
    stage_ = slots_;
    parameters_ = slots_ + packs;
    if constexpr (Base::kPadded && !kFetchesZeros) {
      this->ForEachPack([&](int pack, int column) {
        if (column < this->columns()) return;
        for (int k = 0; k < P::kStages * inputs; ++k)
#pragma unroll
          for (int v = 0; v < P::kPackVectors; ++v)
            StoreShared(slots_ + (k * kPlaces + pack * P::kPackVectors + v) * kStride, uint4{});
      });
    }
  }

  // Sets where the present rows' packs are.
  __device__ void SetStage(int stage) { stage_ = slots_ + stage * kPlaces * kStride; }

  // Turns to another row's elements; the members that join the threads stay.
  __device__ void Follow(const FetchedRow& other) {
    this->live_ = other.live_;
#pragma unroll
    for (int slot = 0; slot < Base::kSlots; ++slot) this->offsets_[slot] = other.offsets_[slot];
  }

  // Begins to fetch one input's packs for the present rows. Single elements are not fetched; they are read when they
  // are used.
  template <int kInput, class Source>
  __device__ void Fetch(const Source& tensor) const {
    if constexpr (kFetches) {
      const int end = this->columns();
      const auto fetch = [&](int pack, int column) {
        const int64_t offset = this->Offset(0, pack, column);
        int inside = kV;
        if (Base::kPadded && !this->live()) inside = 0;
        if (kFetchesZeros && column >= end) inside = 0;
        CopyPackAsync<kV>(Slot<kInput>(pack), kStride, tensor + offset, inside);
      };
      if constexpr (kFetchesZeros) {
        this->ForEachPack(fetch);
      } else {
        this->ForEachPackBefore(end, fetch);
      }
    }
  }

  // Keeps the row in registers if there is room; otherwise each use reads it from shared memory.
  template <int kInput, class Source>
  __device__ auto Load(const Source& tensor,
                       [[maybe_unused]] ElementOf<Source> outside = ElementOf<Source>(0.0f)) const {
    if constexpr (!kFetches) {
      return Base::template Load<kInput>(tensor, outside);
    } else {
      const auto fetched = [this, tensor](int pack, int) {
        return LoadSharedPack<kV>(tensor, Slot<kInput>(pack), kStride);
      };
      if constexpr (P::kKept) {
        typename Base::template Held<ElementOf<Source>> held;
        if constexpr (!Base::kPadded) held = {};
        if constexpr (std::is_same_v<Source, AnyTensor>) {
          AnyPack<kV> read[Base::kHeldPacks] = {};
          this->ForEachPack(
              [&](int pack, int) { read[pack] = LoadSharedAny<kV>(tensor, Slot<kInput>(pack), kStride); });
          WidenAll(tensor, read, held.packs);
        } else {
          this->ForEachPack([&](int pack, int column) { held.packs[pack] = fetched(pack, column); });
        }
        return held;
      } else {
        return [fetched](int pack, int column) {
          return [values = fetched(pack, column)](int i) { return values.template Widen<A>(i); };
        };
      }
    }
  }
  // If a residual is added to the rows, they are not fetched.
  template <class Source, class Target>
  __device__ auto LoadSum(const Source& x, const Source&, const Target&) const {
    return Load<0>(x);
  }

  // Unpacking 16-bit elements takes two instructions; reading f32 costs no more than keeping it.
  template <class E>
  __device__ auto KeepFew(const E& expression) const {
    if constexpr (P::kKept && kV == 8 && Base::kHeldPacks <= 2) {
      return this->Keep(expression);
    } else {
      return expression;
    }
  }

  // Computes an expression that is the same for all rows, and keeps it, with zeros beyond the columns.
  template <int kNumber, class E>
  __device__ auto KeepParameter(const E& expression) const {
    struct Registers {
      Pack<A, kV> packs[Base::kHeldPacks];
      __device__ auto operator()(int pack, int) const {
        return [values = packs[pack]](int i) { return values.lane[i]; };
      }
    };
    const auto place = [first = parameters_](int pack, int vector) {
      return first + ((kNumber * Base::kHeldPacks + pack) * kVectors + vector) * kStride;
    };
    Registers kept = {};
    this->ForEachPack([&](int pack, int column) {
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
  // Where one of the present rows' packs is.
  template <int kInput>
  __device__ uint32_t Slot(int pack) const {
    return stage_ + (kInput * P::kStages * kPlaces + pack * P::kPackVectors) * kStride;
  }

  static constexpr int kStride = 32 * 16;  // bytes from one of the thread's vectors to its next
  uint32_t slots_, stage_, parameters_;    // this thread's share of shared memory
};

// A placement with rows that all their threads fetch together, kStages - 1 rows ahead, as aligned vectors. Elements
// have kBytes bytes and are read one by one: see StagedRow. kKept: the row's values are kept in registers.
template <class P, int kBytes_, int kStages_, bool kKept_ = true>
struct Staged : P {
  static constexpr int kBytes = kBytes_, kStages = kStages_, kSure = SureElements(P::kPacks, P::kClusters);
  static constexpr bool kStaged = true, kKept = kKept_;
  static constexpr bool kAhead = P::kClusters && kStages > 2;
};

// A row that begins anywhere in a vector. Its aligned vectors are copied, and each thread reads its elements from them
// one by one. A thread has the same columns in all rows, so its parameters and sums stay the same too. Base: a row of
// single elements.
template <class Base, int kParameters>
class StagedRow : public Base {
 public:
  using P = typename Base::P;
  using A = typename Base::A;
  static_assert(Base::kV == 1 && Base::kLayout == Layout::kPlain);
  static constexpr int kPer = 16 / P::kBytes;     // elements per vector
  static constexpr int kSector = 32 / P::kBytes;  // elements per sector of global memory
  static constexpr int kRounds = (P::kPacks + kPer - 1) / kPer + (P::kPacks % kPer == 0);  // copies per thread
  // The vectors that hold a block's columns of a row, wherever the row begins in a sector. There are at least kPer
  // lanes.
  static __host__ __device__ int VectorsOf(int lanes) { return (P::kPacks * lanes + kSector) / kPer; }
  static int SharedBytes(const Team& team, int inputs) {
    return inputs * P::kStages * TeamsOf<P>(team) * VectorsOf(team.lanes) * 16;
  }

  __device__ StagedRow(const typename Base::Geometry& geometry, char* shared, int)
      : Base(geometry),
        thread_(LaneOfThread<P>(geometry.team)),
        first_(this->lane_ - thread_),
        lanes_(P::kInWarp || P::kLanes ? LanesOf<P>(geometry.team) : static_cast<int>(blockDim.x)),
        vectors_(VectorsOf(lanes_)),
        stride_(TeamsOf<P>(geometry.team) * vectors_ * 16),
        slots_(SharedAddress(shared) + Base::Team() * (vectors_ * 16)),
        stage_(slots_) {}

  // Sets where the present rows' vectors are.
  __device__ void SetStage(int stage) { stage_ = slots_ + stage * stride_; }

  // Turns to another row; the members that join the threads stay.
  __device__ void Follow(const StagedRow& other) {
    this->live_ = other.live_;
#pragma unroll
    for (int slot = 0; slot < Base::kSlots; ++slot) this->offsets_[slot] = other.offsets_[slot];
  }

  // Afterwards all threads in the row see the elements copied until now, and elements that they have read may be
  // overwritten.
  static __device__ void Sync() {
    if constexpr (P::kInWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // Begins to copy one input's vectors for the row. Zeros stand behind the row's end, and everywhere if there is no
  // such row.
  template <int kInput, class T>
  __device__ void Fetch(const T* tensor) const {
    static_assert(sizeof(T) == P::kBytes);
    const int end = this->live() ? this->end() - first_ + Shift() : 0;
    const T* const source = Vectors(tensor);
#pragma unroll
    for (int k = 0; k < kRounds; ++k) {
      const int vector = thread_ + k * lanes_;
      const int inside = min(max(end - vector * kPer, 0), kPer) * P::kBytes;
      if (vector < vectors_)
        CopyAsync<16>(stage_ + kInput * P::kStages * stride_ + vector * 16, source + vector * kPer, inside);
    }
  }

  template <int kInput, class T>
  __device__ auto Load(const T*, T outside = T(0.0f)) const {
    const auto read = [this, first = Place<kInput>(), outside](int pack, int column) {
      const auto value = static_cast<A>(LoadShared<T>(first + pack * (lanes_ * P::kBytes)));
      return static_cast<A>(outside) == 0 || this->Begins(pack, column) ? value : static_cast<A>(outside);
    };
    if constexpr (P::kKept) {
      typename Base::template Held<A> held;
      this->ForEachPack([&](int pack, int column) { held.packs[pack].lane[0] = read(pack, column); });
      return held;
    } else {
      return [read](int pack, int column) { return [value = read(pack, column)](int) { return value; }; };
    }
  }

  // Results overwrite the first input, which is no longer needed. They leave as whole vectors, except the vectors that
  // the row shares with its neighbours.
  template <class T, class E>
  __device__ void Store(T* tensor, const E& expression, A = 0) const {
    static_assert(sizeof(T) == P::kBytes);
    constexpr int kFew =
        8;  // elements that are read before one is written, because the compiler cannot tell them apart
    const uint32_t place = Place<0>();
#pragma unroll
    for (int begin = 0; begin < P::kPacks; begin += kFew) {
      T results[kFew];
#pragma unroll
      for (int k = 0; k < kFew; ++k)
        if (begin + k < P::kPacks) results[k] = T(expression(begin + k, first_ + thread_ + (begin + k) * lanes_)(0));
#pragma unroll
      for (int k = 0; k < kFew; ++k)
        if (begin + k < P::kPacks) StoreShared(place + (begin + k) * (lanes_ * P::kBytes), results[k]);
    }
    Sync();
    if (!this->live()) return;
    const int begin = Shift(), end = begin + max(this->end() - first_, 0);
    T* const target = Vectors(tensor);
#pragma unroll
    for (int k = 0; k < kRounds; ++k) {
      const int vector = thread_ + k * lanes_;
      if (vector * kPer >= begin && vector * kPer + kPer <= end)
        *reinterpret_cast<uint4*>(target + vector * kPer) = LoadShared<uint4>(stage_ + vector * 16);
    }
    if (thread_ >= kPer) return;
    const auto copy = [&](int element) { target[element] = LoadShared<T>(stage_ + element * P::kBytes); };
    const int head = begin - begin % kPer + thread_, tail = end - end % kPer + thread_;
    if (begin % kPer && head >= begin && head < end) copy(head);
    if (tail >= begin && tail < end && (tail != head || begin % kPer == 0)) copy(tail);
  }
  // If a residual is added to the rows, they are not fetched.
  template <class T>
  __device__ auto LoadSum(const T* x, const T*, T*) const {
    return Load<0>(x);
  }

  // Computes an expression that is the same for all rows, and keeps it.
  template <int kNumber, class E>
  __device__ auto KeepParameter(const E& expression) const {
    typename Base::template Held<A> kept = {};
    this->ForEachPackInside([&](int pack, int column) { kept.packs[pack].lane[0] = expression(pack, column)(0); });
    return kept;
  }

 private:
  // How many elements the row begins behind a sector's start.
  __device__ int Shift() const { return static_cast<int>(static_cast<uint32_t>(this->Origin(0)) % kSector); }
  // The block's first vector in a tensor.
  template <class T>
  __device__ T* Vectors(T* tensor) const {
    return tensor + (this->Origin(0) + (first_ - Shift()));
  }
  // Where this thread's first element of an input is.
  template <int kInput>
  __device__ uint32_t Place() const {
    return stage_ + kInput * P::kStages * stride_ + (Shift() + thread_) * P::kBytes;
  }

  int thread_;                    // this thread among the row's threads in this block
  int first_;                     // the block's first column
  int lanes_, vectors_, stride_;  // per row in this block; stride_: bytes from one stage to the next
  uint32_t slots_, stage_;
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_FETCHED_ROW_CUH_
