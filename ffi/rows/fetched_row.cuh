// Rows that are fetched ahead: threads copy the next rows into shared memory, asynchronously, while they work on the
// present ones. Of aligned rows each thread copies its own packs; unaligned ones are staged by all threads together.
#ifndef JAXOPS_ROWS_FETCHED_ROW_CUH_
#define JAXOPS_ROWS_FETCHED_ROW_CUH_

#include <cstdint>

#include "core/async_copy.cuh"
#include "core/shared_memory.cuh"
#include "rows/row.cuh"

namespace jaxops::rows {

// A placement that fetches rows kStages - 1 ahead. kShared: parameters are kept in shared memory, not in registers.
// kKept: the row's packs are. kPackVectors: 16 bytes each, that a pack may take there. kAhead: the next row is begun
// before the present one is finished, where blocks share a row.
template <class P, int kStages_, bool kShared_ = false, bool kKept_ = !kShared_ && P::kPacks <= 4,
          int kPackVectors_ = 1>
struct Looped : P {
  static constexpr int kStages = kStages_, kPackVectors = kPackVectors_;
  static constexpr bool kShared = kShared_, kKept = kKept_;
  static constexpr bool kAhead = P::kClusters && kStages > 2;
};

// A row whose packs have been fetched into shared memory: [warp][input][stage][pack][vector][lane], 16 bytes each;
// behind a warp's packs the parameters that are kept there, [parameter][pack][vector][lane]. So the distance of a
// thread's vectors is compiled in, however many threads there are.
template <class Base, int kParameters>
class FetchedRow : public Base {
 public:
  using P = typename Base::P;
  using A = typename Base::A;
  static constexpr int kV = Base::kV;
  static constexpr bool kFetches = kV > 1;
  // Packs beyond the columns: zeros are copied each time, which takes no branches, or stay from the beginning.
  // Kernels that fetch several rows ahead copy the zeros: it was faster.
  static constexpr bool kFetchesZeros = Base::kPadded && P::kAhead;
  static constexpr int kVectors = kV * static_cast<int>(sizeof(A)) / 16;  // of a parameter's pack
  static constexpr int kPlaces = Base::kHeldPacks * P::kPackVectors;      // of a stage: vectors
  static int SharedBytes(const Team& team, int inputs) {
    if (!kFetches) return 0;
    const int parameters = P::kShared ? kParameters * kVectors : 0;
    return (inputs * P::kStages * kPlaces + parameters * Base::kHeldPacks) * ThreadsOf<P>(team) * 16;
  }
  static_assert(!P::kShared || kFetches);

  // inputs: how many are fetched.
  __device__ FetchedRow(const typename Base::Geometry& geometry, char* shared, int inputs) : Base(geometry) {
    const int packs = inputs * P::kStages * kPlaces * kStride;  // bytes of a warp
    constexpr int kOfParameters = P::kShared ? kParameters * kVectors * Base::kHeldPacks * kStride : 0;
    slots_ = SharedAddress(shared) + threadIdx.x / 32 * (packs + kOfParameters) + threadIdx.x % 32 * 16;
    asm volatile("" : "+r"(slots_));  // opaque: else it would be computed anew for each use
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

  // Where the present rows' packs are.
  __device__ void SetStage(int stage) { stage_ = slots_ + stage * kPlaces * kStride; }

  // Turns to the rows of another; what joins the threads stays.
  __device__ void Follow(const FetchedRow& other) {
    this->live_ = other.live_;
#pragma unroll
    for (int slot = 0; slot < Base::kSlots; ++slot) this->offsets_[slot] = other.offsets_[slot];
  }

  // Begins to fetch the present rows' packs of an input. Rows of single elements are not fetched but read when wanted.
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

  // Kept in registers where there is room, else read where it is wanted.
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
  // Rows to which something is added are not fetched.
  template <class Source, class Target>
  __device__ auto LoadSum(const Source& x, const Source&, const Target&) const {
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
  // Where a pack of the present rows is.
  template <int kInput>
  __device__ uint32_t Slot(int pack) const {
    return stage_ + (kInput * P::kStages * kPlaces + pack * P::kPackVectors) * kStride;
  }

  static constexpr int kStride = 32 * 16;  // bytes from a vector to the thread's next
  uint32_t slots_, stage_, parameters_;    // this thread's share of shared memory
};

// A placement whose rows are fetched kStages - 1 ahead by all threads of the row together, as aligned vectors of
// elements of kBytes each, and read one by one: see StagedRow. kKept: the row's values are kept in registers.
template <class P, int kBytes_, int kStages_, bool kKept_ = true>
struct Staged : P {
  static constexpr int kBytes = kBytes_, kStages = kStages_, kSure = SureElements(P::kPacks, P::kClusters);
  static constexpr bool kStaged = true, kKept = kKept_;
  static constexpr bool kAhead = P::kClusters && kStages > 2;
};

// A row that begins anywhere in a vector: its aligned vectors are copied, and each thread reads its elements out of
// them one by one. The columns of a thread are the same for all rows, and so are its parameters and sums. Base: a row
// of single elements.
template <class Base, int kParameters>
class StagedRow : public Base {
 public:
  using P = typename Base::P;
  using A = typename Base::A;
  static_assert(Base::kV == 1 && Base::kLayout == Layout::kPlain);
  static constexpr int kPer = 16 / P::kBytes;     // elements of a vector
  static constexpr int kSector = 32 / P::kBytes;  // of global memory
  static constexpr int kRounds =
      (P::kPacks + kPer - 1) / kPer + (P::kPacks % kPer == 0);  // in which a thread copies them
  // Vectors that hold a block's columns of a row, wherever in a sector they begin. There are at least kPer lanes.
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

  // Where the present rows' vectors are.
  __device__ void SetStage(int stage) { stage_ = slots_ + stage * stride_; }

  // Turns to the row of another; what joins the threads stays.
  __device__ void Follow(const StagedRow& other) {
    this->live_ = other.live_;
#pragma unroll
    for (int slot = 0; slot < Base::kSlots; ++slot) this->offsets_[slot] = other.offsets_[slot];
  }

  // What the row's threads have copied until now is there for all of them, and what they have read may be overwritten.
  static __device__ void Sync() {
    if constexpr (P::kInWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // Begins to copy the row's vectors of an input; zeros behind its end, or if there is no such row.
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

  // Results take the place of the first input, which is gone then, and leave as whole vectors but for those that the
  // row shares with its neighbours.
  template <class T, class E>
  __device__ void Store(T* tensor, const E& expression, A = 0) const {
    static_assert(sizeof(T) == P::kBytes);
    constexpr int kFew = 8;  // that are read before one is written, as the compiler cannot tell them apart
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
  // Rows to which something is added are not fetched.
  template <class T>
  __device__ auto LoadSum(const T* x, const T*, T*) const {
    return Load<0>(x);
  }

  // An expression that is the same for all rows, computed now and kept.
  template <int kNumber, class E>
  __device__ auto KeepParameter(const E& expression) const {
    typename Base::template Held<A> kept = {};
    this->ForEachPackInside([&](int pack, int column) { kept.packs[pack].lane[0] = expression(pack, column)(0); });
    return kept;
  }

 private:
  // How far behind the beginning of a sector the row begins.
  __device__ int Shift() const { return static_cast<int>(static_cast<uint32_t>(this->Origin(0)) % kSector); }
  // The block's first vector of a tensor.
  template <class T>
  __device__ T* Vectors(T* tensor) const {
    return tensor + (this->Origin(0) + (first_ - Shift()));
  }
  // Where this thread's first element of an input is.
  template <int kInput>
  __device__ uint32_t Place() const {
    return stage_ + kInput * P::kStages * stride_ + (Shift() + thread_) * P::kBytes;
  }

  int thread_;                    // of the row's in this block
  int first_;                     // the block's first column
  int lanes_, vectors_, stride_;  // of a row in this block; stride_: bytes from a stage to the next
  uint32_t slots_, stage_;
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_FETCHED_ROW_CUH_
