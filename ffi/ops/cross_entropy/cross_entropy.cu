// The cross entropy's kernels: one for rows with adjacent elements, read in packs, and one for rows in any layout. A
// pack is 16 bytes. The forward pass reads a row once, with a running maximum and sum in each thread. The backward pass
// maps elements. The pass that does both holds the row in registers in between: in a few lanes, a block or a cluster. A
// lane is one of the threads in a block that share a row.
#include <bit>
#include <limits>

#include "core/launch.cuh"
#include "core/types.cuh"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/cross_entropy/summary.cuh"
#include "rows/math.cuh"

namespace jaxops {
namespace {

using Pass = CrossEntropyPass;

// `lanes` threads in each of `parts` blocks share a row. The blocks are a cluster if they must join anything. A block
// with more threads has several rows, and then there is one part. With blocks of 512 threads and half as many parts,
// the pass that does both took 1.08 times as long for 50304 f32 logits, and .98 to 1.01 times for 16-bit ones.
constexpr int kMostBits = 8, kMostThreads = 1 << kMostBits;
constexpr int kMostParts = 16;
// The packs that a thread holds in the pass that does both, and the packs that it has in flight in the other passes.
constexpr int kHeld = 8, kInFlight = 4;

struct PackedArguments {
  const void* x;
  void* dx;
  const int32_t* labels;  // or null
  const uint8_t* where;   // or null
  Axes<1> where_rows;
  int64_t where_step;                    // from column to column
  float *origin, *total, *picked, *sum;  // picked, sum: or null
  const float *dtotal, *dpicked, *dsum;  // dpicked, dsum: or null; in a backward pass with `total` the first is dlog
  float cap, reciprocal, z_loss;         // cap: 0 without one; reciprocal: 1 / cap
  int64_t rows;
  int columns;
  int lane_bits, parts;  // lanes are a power of two; a block of fewer threads has a row, or a part of one

  __host__ __device__ int lanes() const { return 1 << lane_bits; }
};

// The terms in a row's gradient: dz = (an exponential at `level`) total + sum, and `picked` at the label.
template <class A>
struct Cotangents {
  Level<A> level;
  A total, picked, sum;
  int label;  // -1: none
  __device__ bool zero() const { return total == 0 && picked == 0 && sum == 0; }
};

// dlog (1 + 2 z_loss logsumexp) / total, or dlog itself if it is dtotal already (total: null); for exponentials at a
// level.
template <class A>
__device__ A TotalCotangent(A dlog, A origin, const A* total, A z_loss) {
  if (dlog == 0) return 0;
  if (total) dlog *= (z_loss == 0 ? A{1} : 1 + 2 * z_loss * (origin + rows::Log(*total))) / *total;
  return dlog * Level<A>(origin).Correction(origin);
}

// The packs for a part of a row, that is one block's run of its columns: the aligned vectors that hold its elements.
template <class T>
struct PartOfRow {
  static constexpr int kPack = kPackOf<T>;
  using P = Pack<T, kPack>;

  const P* from;   // the row's first pack in x
  P* to;           // and in dx
  int begin, end;  // this part's packs
  int head;        // elements in the first pack before the row
  int columns;
  int first, last;  // the row's packs that also hold other elements, or extend beyond the buffer; -1: there is none

  __device__ PartOfRow(const PackedArguments& a, int64_t row, int part) : columns(a.columns) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(a.x), dx = reinterpret_cast<uintptr_t>(a.dx);
    const int64_t start = static_cast<int64_t>(address % 16 / sizeof(T)) + row * a.columns;
    head = static_cast<int>(start % kPack);
    from = reinterpret_cast<const P*>(address / 16 * 16) + start / kPack;
    to = reinterpret_cast<P*>(dx / 16 * 16) + start / kPack;
    const int count = (head + columns + kPack - 1) / kPack,
              share = a.parts == 1 ? count : (count + a.parts - 1) / a.parts;
    begin = min(share * part, count);
    end = min(begin + share, count);
    first = head ? 0 : -1;
    last = (head + columns) % kPack ? count - 1 : -1;
    if (row >= a.rows) begin = end = 0;
  }
  // A pack's first column.
  __device__ int Column(int pack) const { return pack * kPack - head; }
  __device__ bool IsEdge(int pack) const { return pack == first || pack == last; }
  __device__ bool IsInside(int column) const { return column >= 0 && column < columns; }

  // Loads the packs index, index + step, ..., all at once; -inf beyond the row. Packs from `end` on stay as they are.
  template <int kPacks>
  __device__ void Load(P (&packs)[kPacks], int index, int step) const {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int pack = index + k * step;
      if (pack < end && !IsEdge(pack)) packs[k] = from[pack];
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int pack = index + k * step;
      if (pack >= end || !IsEdge(pack)) continue;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const T* const element = reinterpret_cast<const T*>(from + pack) + i;
        packs[k].Set(i,
                     IsInside(Column(pack) + i) ? *element : static_cast<T>(-std::numeric_limits<float>::infinity()));
      }
    }
  }
  __device__ void Store(int pack, const P& value) const {
    if (!IsEdge(pack)) {
      to[pack] = value;
      return;
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      if (IsInside(Column(pack) + i)) reinterpret_cast<T*>(to + pack)[i] = value.Get(i);
  }
};

// How a thread processes its packs in a row.
template <class T, bool kOptions>
struct Element {
  using Part = PartOfRow<T>;
  using P = typename Part::P;
  static constexpr int kPack = Part::kPack;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  const PackedArguments& a;
  const Part& part;
  const uint8_t* where;  // the row's mask

  __device__ bool Takes(int column) const { return !where || where[column * a.where_step] & 1; }

  // Adds the packs index, index + step, ... up to the part's end.
  template <int kPacks>
  __device__ void Add(const P (&packs)[kPacks], int index, int step, Summary<float>* all) const {
    if constexpr (kOptions) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k)
        if (index + k * step < part.end) AddLogits(packs[k], part.Column(index + k * step), all);
    } else {
      float max = -kInfinity;
#pragma unroll
      for (int k = 0; k < kPacks; ++k)
        if (index + k * step < part.end) max = fmaxf(max, Largest(packs[k]));
      all->Raise(max);
      const auto level = all->Level();
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (index + k * step >= part.end) continue;
        float total = 0;
#pragma unroll
        for (int i = 0; i < kPack; ++i) total += level.Exponential(packs[k].template Widen<float>(i));
        all->total += total;
      }
    }
  }
  // Stores the gradients for the packs index, index + step, ... If a row's cotangents are 0, its level is 0, too.
  template <int kPacks>
  __device__ void StoreGradient(P (&packs)[kPacks], int index, int step, const Cotangents<float>& d) const {
    if (d.zero()) {
#pragma unroll
      for (P& pack : packs) pack = {};
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k)
      if (index + k * step < part.end) part.Store(index + k * step, Gradient(packs[k], index + k * step, d));
  }

 private:
  __device__ P Gradient(const P& pack, int index, const Cotangents<float>& d) const {
    const int column = part.Column(index);
    float dz[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      float z = pack.template Widen<float>(i);
      if constexpr (kOptions) {
        z = Logit<T>(z, a.cap, a.reciprocal);
        const float slope = a.cap == 0 ? 1.0f : Slope(z, a.reciprocal);
        const bool takes = part.IsInside(column + i) && Takes(column + i);
        dz[i] = takes ? fmaf(d.level.Exponential(z), d.total, d.sum) * slope : 0;
        if (column + i == d.label) dz[i] += d.picked * slope;
      } else {
        dz[i] = d.level.Exponential(z) * d.total;
      }
    }
    if constexpr (!kOptions) {
      if ((part.head + d.label) / kPack == index) {  // without a label `picked` is 0
#pragma unroll
        for (int i = 0; i < kPack; ++i)
          if (column + i == d.label) dz[i] += d.picked;
      }
    }
    return ToPack<T, kPack>([&](int i) { return dz[i]; });
  }
  __device__ static float Largest(const P& pack) {
    if constexpr (sizeof(T) == 2) {
      using Two = typename P::Two;
      Two two = reinterpret_cast<const Two&>(pack.words[0]);
#pragma unroll
      for (int w = 1; w < kPack / 2; ++w) two = __hmax2(two, reinterpret_cast<const Two&>(pack.words[w]));
      const Pack<T, 2> both = {{reinterpret_cast<const uint32_t&>(two)}};
      return fmaxf(both.template Widen<float>(0), both.template Widen<float>(1));
    } else {
      return fmaxf(fmaxf(pack.lane[0], pack.lane[1]), fmaxf(pack.lane[2], pack.lane[3]));
    }
  }
  __device__ void AddLogits(const P& pack, int column, Summary<float>* all) const {
    float z[kPack], max = -kInfinity, total = 0;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      z[i] = Logit<T>(pack.template Widen<float>(i), a.cap, a.reciprocal);
      const bool takes = part.IsInside(column + i) && Takes(column + i);
      if (takes) all->sum += z[i];
      z[i] = takes ? z[i] : -kInfinity;
      max = fmaxf(max, z[i]);
    }
    all->Raise(max);
    const auto level = all->Level();
#pragma unroll
    for (int i = 0; i < kPack; ++i) total += level.Exponential(z[i]);
    all->total += total;
  }
};

// Joins a whole row's summary from its threads' summaries, for all of them: maxima first, then sums at one level. Joins
// once. Constructed at the kernel's start, so that the blocks wait for each other while they load.
template <bool kOptions>
class Joining {
 public:
  __device__ Joining(int lanes, int parts) : lanes_(lanes), parts_(parts) {
    if (parts == 1) return;
    if (threadIdx.x == 0) rows::InitByteBarrier(Barrier());
    rows::ClusterArrive();
  }

  __device__ void Join(Summary<float>* all) const {
    Shuffle(min(lanes_, 32), all);
    if (lanes_ > 32) {
      __shared__ Summary<float> of_warps[kMostWarps];
      const int warps = lanes_ / 32, warp = threadIdx.x / 32;
      if (threadIdx.x % 32 == 0) of_warps[warp] = *all;
      __syncthreads();
      const int other = threadIdx.x % kMostWarps;
      *all = other < warps ? of_warps[warp / warps * warps + other] : Summary<float>::None();
      Shuffle(kMostWarps, all);
    }
    if (parts_ > 1) {
      // Each block sends its summary to all blocks. None ends before it has all summaries.
      __shared__ Summary<float> of_blocks[kMostParts];
      rows::ClusterWait();
      if (threadIdx.x == 0) rows::ExpectBytes(Barrier(), parts_ * static_cast<int>(sizeof(Summary<float>)));
      if (static_cast<int>(threadIdx.x) < parts_)
        rows::SendToBlock(*all, &of_blocks[rows::ClusterRank()], Barrier(), threadIdx.x);
      rows::WaitForBytes(Barrier(), 0);
      const int block = threadIdx.x % kMostParts;
      *all = block < parts_ ? of_blocks[block] : Summary<float>::None();
      Shuffle(kMostParts, all);
    }
  }

 private:
  static constexpr int kMostWarps = kMostThreads / 32;

  static __device__ uint64_t* Barrier() {
    __shared__ uint64_t barrier;
    return &barrier;
  }
  __device__ static void Shuffle(int lanes, Summary<float>* all) {
    float max = all->max;
    for (int distance = lanes / 2; distance > 0; distance /= 2)
      max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, distance));
    all->Raise(max);
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      all->total += __shfl_xor_sync(0xffffffffu, all->total, distance);
      if constexpr (kOptions) all->sum += __shfl_xor_sync(0xffffffffu, all->sum, distance);
    }
  }
  int lanes_, parts_;
};

template <class T, Pass kPass, bool kOptions>
__global__ void __launch_bounds__(kMostThreads, 4) PackedRows(const __grid_constant__ PackedArguments a) {
  using P = typename PartOfRow<T>::P;
  const int lane = threadIdx.x & (a.lanes() - 1), step = min(a.lanes(), static_cast<int>(blockDim.x));
  const Joining<kOptions> joining(step, kPass == Pass::kBackward ? 1 : a.parts);
  int64_t rows_before = blockIdx.x;
  int part_of_row = 0;
  if (a.parts > 1) {
    rows_before = blockIdx.x / a.parts;
    part_of_row = blockIdx.x % a.parts;
  }
  const int64_t row = rows_before * max(blockDim.x >> a.lane_bits, 1u) + (threadIdx.x >> a.lane_bits);
  const PartOfRow<T> part(a, row, part_of_row);
  const bool there = row < a.rows, first = there && lane == 0 && part_of_row == 0;
  const uint8_t* const where = kOptions && a.where && there ? a.where + a.where_rows.Offset(0, row) : nullptr;
  const Element<T, kOptions> element = {a, part, where};
  Cotangents<float> d = {{}, 0, 0, 0, -1};
  if (a.labels && there) d.label = static_cast<int>(ColumnOfLabel(a.labels[row], a.columns));
  if constexpr (kPass != Pass::kForward) {
    if (there) {
      d.total = a.dtotal[row];
      d.picked = a.dpicked && d.label >= 0 ? a.dpicked[row] : 0;
      d.sum = a.dsum ? a.dsum[row] : 0;
    }
  }
  // Reads the values that the row's first thread needs, joins, and writes each row's values; returns the origin.
  const auto finish = [&](Summary<float>* all) {
    float picked = std::numeric_limits<float>::quiet_NaN();
    if (first && d.label >= 0) picked = static_cast<float>(static_cast<const T*>(a.x)[row * a.columns + d.label]);
    joining.Join(all);
    const float origin = all->Origin();
    all->total *= Level<float>(origin).Correction(origin);
    if (first) {
      a.origin[row] = origin;
      a.total[row] = all->total;
      if (a.picked) a.picked[row] = Logit<float>(picked, a.cap, a.reciprocal);
      if (kOptions && a.sum) a.sum[row] = all->sum;
    }
    return origin;
  };
  if constexpr (kPass == Pass::kForward) {
    Summary<float> all = Summary<float>::None();
    for (int pack = part.begin + lane; pack < part.end; pack += kInFlight * step) {
      P packs[kInFlight];
      part.Load(packs, pack, step);
      element.Add(packs, pack, step, &all);
    }
    finish(&all);
  } else if constexpr (kPass == Pass::kBackward) {
    constexpr int kWorthSkipping = 4096;  // columns: in short rows loads would wait for the cotangents
    const bool skipped = a.columns >= kWorthSkipping && d.zero();
    const float origin = there ? a.origin[row] : 0;
    d.total = TotalCotangent(d.total, origin, a.total && there ? a.total + row : nullptr, a.z_loss);
    d.level = Level<float>(d.zero() ? 0 : origin);
    for (int pack = part.begin + lane; pack < part.end; pack += kInFlight * step) {
      P packs[kInFlight];
      if (!skipped) part.Load(packs, pack, step);
      element.StoreGradient(packs, pack, step, d);
    }
  } else {
    P packs[kHeld];
    const int pack = part.begin + lane;
    part.Load(packs, pack, step);
    Summary<float> all = Summary<float>::None();
    element.Add(packs, pack, step, &all);
    const float origin = finish(&all);
    d.total = TotalCotangent(d.total, origin, &all.total, a.z_loss);
    d.level = Level<float>(d.zero() ? 0 : origin);
    element.StoreGradient(packs, pack, step, d);
  }
}

// Rows in any layout and dtype, 256 threads per block. A row's threads are adjacent; or, if neighbouring rows' elements
// are adjacent, the threads for 32 rows are.
constexpr int kGeneralThreads = 256;

template <class T>
struct GeneralArguments {
  using A = Accumulator<T>;
  RowShape<CrossEntropyCall::kSlots> shape;
  Tensor<const T> x;
  Tensor<T> dx;
  const int32_t* labels;
  const uint8_t* where;
  A *origin, *total, *picked, *sum;
  const A *dtotal, *dpicked, *dsum;
  A cap, reciprocal, z_loss;
};

__device__ inline double LoadElement(const double* x, int64_t at) { return x[at]; }
__device__ inline void StoreElement(double* x, int64_t at, double value) { x[at] = value; }
__device__ inline float LoadElement(const AnyTensor& x, int64_t at) {
  if (x.type == DataType::F32) return static_cast<const float*>(x.data)[at];
  if (x.type == DataType::F16) return __half2float(static_cast<const __half*>(x.data)[at]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(x.data)[at]);
}
__device__ inline void StoreElement(const AnyTensor& x, int64_t at, float value) {
  if (x.type == DataType::F32) {
    static_cast<float*>(x.data)[at] = value;
  } else if (x.type == DataType::F16) {
    static_cast<__half*>(x.data)[at] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(x.data)[at] = __float2bfloat16_rn(value);
  }
}

template <class T, Pass kPass>
__global__ void __launch_bounds__(kGeneralThreads) GeneralRows(const __grid_constant__ GeneralArguments<T> a) {
  using A = Accumulator<T>;
  using Call = CrossEntropyCall;
  constexpr int kWarps = kGeneralThreads / 32;
  const int near = threadIdx.x % 32, far = threadIdx.x / 32;
  const bool across = a.shape.across;
  const int lanes = across ? kWarps : 32, lane = across ? far : near, of_block = across ? near : far;
  const int64_t row = blockIdx.x * static_cast<int64_t>(kGeneralThreads / lanes) + of_block;
  const int64_t rows = a.shape.rows.total, columns = row < rows ? a.shape.columns.total : 0;
  int64_t start[Call::kSlots] = {};
  if (row < rows) a.shape.rows.Offsets(row, start);
  // Calls visit(offset in x, whether it takes part) for an element.
  const auto find = [&](int64_t column, const auto& visit) {
    int64_t at[Call::kSlots];
    a.shape.columns.Offsets(column, at);
    visit(start[Call::kFull] + at[Call::kFull], !a.where || a.where[start[Call::kWhere] + at[Call::kWhere]] & 1);
  };
  const int64_t at_row = start[Call::kRow];
  Cotangents<A> d = {{}, 0, 0, 0, -1};
  if (a.labels && row < rows) d.label = static_cast<int>(ColumnOfLabel(a.labels[at_row], columns));
  if constexpr (kPass != Pass::kForward) {
    if (row < rows) {
      d.total = a.dtotal[at_row];
      d.picked = a.dpicked && d.label >= 0 ? a.dpicked[at_row] : 0;
      d.sum = a.dsum ? a.dsum[at_row] : 0;
      if constexpr (kPass == Pass::kBackward) {
        d.level = Level<A>(a.origin[at_row]);
        d.total = TotalCotangent<A>(d.total, a.origin[at_row], nullptr, 0);
      }
    }
  }
  if constexpr (kPass != Pass::kBackward) {
    // A few elements at a time: the total is rescaled less often, and sums of sums are rounded less than one long sum.
    constexpr int kTogether = 8;
    Summary<A> all = Summary<A>::None();
    for (int64_t first = lane; first < columns; first += kTogether * lanes) {
      A z[kTogether], larger = -std::numeric_limits<A>::infinity(), total = 0;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int64_t column = first + i * lanes;
        z[i] = -std::numeric_limits<A>::infinity();
        if (column >= columns) continue;
        find(column, [&](int64_t offset, bool takes) {
          const A logit = Logit<A>(static_cast<A>(LoadElement(a.x, offset)), a.cap, a.reciprocal);
          if (column == d.label) a.picked[at_row] = logit;
          if (!takes) return;
          z[i] = logit;
          larger = fmax(larger, logit);
          all.sum += logit;
        });
      }
      all.Raise(larger);
      const auto level = all.Level();
#pragma unroll
      for (int i = 0; i < kTogether; ++i) total += level.Exponential(z[i]);
      all.total += total;
    }
    __shared__ Summary<A> shared[kGeneralThreads];
    shared[threadIdx.x] = all;
    __syncthreads();
    const int step = across ? 32 : 1, base = across ? near : far * 32;
    all = shared[base];
    for (int k = 1; k < lanes; ++k) all.Add(shared[base + k * step]);
    const A origin = all.Origin();
    all.total *= Level<A>(origin).Correction(origin);
    if (row < rows && lane == 0) {
      a.origin[at_row] = origin;
      a.total[at_row] = all.total;
      if (a.sum) a.sum[at_row] = all.sum;
      if (a.picked && d.label < 0) a.picked[at_row] = std::numeric_limits<A>::quiet_NaN();
    }
    if constexpr (kPass == Pass::kBoth) {
      d.level = Level<A>(origin);
      d.total = TotalCotangent<A>(d.total, origin, &all.total, a.z_loss);
    }
  }
  if constexpr (kPass != Pass::kForward) {
    const bool zero = d.zero();
    for (int64_t column = lane; column < columns; column += lanes) {
      find(column, [&](int64_t offset, bool takes) {
        A dz = 0;
        if (!zero) {
          const A z = Logit<A>(static_cast<A>(LoadElement(a.x, offset)), a.cap, a.reciprocal);
          const A slope = a.cap == 0 ? A{1} : Slope(z, a.reciprocal);
          dz = takes ? (d.level.Exponential(z) * d.total + d.sum) * slope : A{0};
          if (column == d.label) dz += d.picked * slope;
        }
        StoreElement(a.dx, offset, dz);
      });
    }
  }
}

// Whether PackedRows takes a call.
bool IsPacked(const CrossEntropyCall& call) {
  using Call = CrossEntropyCall;
  const auto& columns = call.shape.columns;
  if (call.x->element_type() == DataType::F64 || columns.count != 1) return false;
  if (columns.total > 1 && (call.shape.across || columns.strides[0][Call::kFull] != 1)) return false;
  const auto misplaced = [](const std::optional<AnyBuffer>& x) {
    return reinterpret_cast<uintptr_t>(x->untyped_data()) % 16;
  };
  return !call.dx || misplaced(call.x) == misplaced(call.dx);
}

// log2(n), rounded up.
int Bits(int64_t n) { return std::bit_width(static_cast<uint64_t>(std::max<int64_t>(n, 1) - 1)); }

// The lanes and parts in a pass, and the threads per block; 0 if a cluster with `most_parts` blocks does not hold a
// row.
template <class T>
int Place(Pass pass, int multiprocessors, int most_parts, PackedArguments* a) {
  constexpr int64_t kPack = kPackOf<T>;
  const bool whole = a->columns % kPack == 0 && IsAligned(a->x);
  const int64_t packs = (a->columns + kPack - 1) / kPack + !whole, threads = (packs + kHeld - 1) / kHeld;
  const int more_parts = std::min(most_parts, 8);  // for few rows
  // The pass that does both is faster with two blocks per multiprocessor, the others with one: an H200 reads 64 rows of
  // 32000 bf16 logits in 6.0 us in 4 parts, and in 9.2 us in 8.
  const int enough = multiprocessors * (pass == Pass::kBoth ? 2 : 1);
  const auto few = [&](int most) { return 2 * a->parts <= most && a->rows * a->parts < enough; };
  if (pass == Pass::kBoth && threads > kMostThreads) {
    // Takes as few blocks as hold the row, with as many warps as hold a block's part.
    a->lane_bits = kMostBits;
    a->parts = static_cast<int>((threads + kMostThreads - 1) / kMostThreads);
    if (a->parts > most_parts) return 0;
    while (few(more_parts)) a->parts *= 2;
    const int64_t share = (packs + a->parts - 1) / a->parts;
    return static_cast<int>((share + 32 * kHeld - 1) / (32 * kHeld)) * 32;
  }
  a->lane_bits = std::min(Bits(threads), kMostBits);
  a->parts = 1;
  // If there are few rows, each gets more threads, then more blocks, as long as the threads have packs.
  while (a->lane_bits < kMostBits && (a->rows << a->lane_bits) < multiprocessors * kMostThreads &&
         packs > 2 * a->lanes()) {
    ++a->lane_bits;
  }
  const int most = pass == Pass::kBackward ? 1024 : more_parts;
  while (a->lane_bits == kMostBits && few(most) && packs > 2 * a->parts * a->lanes()) a->parts *= 2;
  return kMostThreads;
}

template <class T, Pass kPass>
cudaError_t LaunchPacked(Device stream, const CrossEntropyCall& call, PackedArguments a) {
  using Call = CrossEntropyCall;
  int multiprocessors = 0;
  if (const cudaError_t status = CountMultiprocessors(&multiprocessors); status != cudaSuccess) return status;
  if (a.where) {
    a.where_rows = call.shape.rows.Only(Call::kWhere);
    a.where_step = call.shape.columns.strides[0][Call::kWhere];
  }
  const bool options = a.where || a.cap != 0 || a.sum || a.dsum;
  const auto kernel = options ? PackedRows<T, kPass, true> : PackedRows<T, kPass, false>;
  for (int most_parts = std::min(MostClusterBlocks(), kMostParts);; most_parts = a.parts / 2) {
    const int threads = Place<T>(kPass, multiprocessors, most_parts, &a);
    if (threads == 0) {
      if (const cudaError_t status = LaunchPacked<T, Pass::kForward>(stream, call, a); status != cudaSuccess)
        return status;
      return LaunchPacked<T, Pass::kBackward>(stream, call, a);
    }
    const int teams = std::max(threads >> a.lane_bits, 1);
    const Grid grid = {(a.rows + teams - 1) / teams * a.parts, threads, kPass == Pass::kBackward ? 1 : a.parts};
    if (ClustersFit(kernel, grid)) return Launch(stream, kernel, grid, a);
  }
}

template <Pass kPass>
Error Run(const char* handler, Device stream, const CrossEntropyCall& call) {
  if (call.shape.size() == 0) return Error::Success();
  const DataType type = call.x->element_type();
  if (IsPacked(call)) {
    PackedArguments a = {};
    a.x = call.x->untyped_data();
    a.dx = call.dx ? call.dx->untyped_data() : nullptr;
    a.labels = DataOrNull<int32_t>(call.labels);
    a.where = DataOrNull<uint8_t>(call.where);
    a.origin = DataOrNull<float>(call.origin);
    a.total = DataOrNull<float>(call.total);
    a.picked = DataOrNull<float>(call.picked);
    a.sum = DataOrNull<float>(call.sum);
    a.dtotal = DataOrNull<float>(call.dtotal);
    a.dpicked = DataOrNull<float>(call.dpicked);
    a.dsum = DataOrNull<float>(call.dsum);
    a.cap = static_cast<float>(call.cap);
    a.reciprocal = static_cast<float>(call.cap > 0 ? 1 / call.cap : 0);
    a.z_loss = static_cast<float>(call.z_loss);
    a.rows = call.shape.total_rows();
    a.columns = static_cast<int>(call.shape.columns.total);
    return First(
        Types<__nv_bfloat16, __half, float>{}, Invalid(handler, "no kernel for this element type"),
        [=]<class T> { return type == kDataType<T>; },
        [&]<class T> { return FromCuda(handler, LaunchPacked<T, kPass>(stream, call, a)); });
  }
  const auto general = [&]<class T> {
    using A = Accumulator<T>;
    GeneralArguments<T> a = {call.shape,
                             Data<const T>(*call.x),
                             DataOrNull<T>(call.dx),
                             DataOrNull<int32_t>(call.labels),
                             DataOrNull<uint8_t>(call.where),
                             DataOrNull<A>(call.origin),
                             DataOrNull<A>(call.total),
                             DataOrNull<A>(call.picked),
                             DataOrNull<A>(call.sum),
                             DataOrNull<A>(call.dtotal),
                             DataOrNull<A>(call.dpicked),
                             DataOrNull<A>(call.dsum),
                             static_cast<A>(call.cap),
                             static_cast<A>(call.cap > 0 ? 1 / call.cap : 0),
                             static_cast<A>(call.z_loss)};
    const int64_t rows = call.shape.across ? 32 : kGeneralThreads / 32;
    const Grid grid = {(call.shape.total_rows() + rows - 1) / rows, kGeneralThreads};
    return FromCuda(handler, Launch(stream, GeneralRows<T, kPass>, grid, a));
  };
  if (type == DataType::F64) return general.template operator()<double>();
  return general.template operator()<AnyFloat>();
}

Error Forward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
              double cap, bool has_labels, bool has_where, bool has_sum) {
  const char* handler = "cross_entropy_fwd";
  CrossEntropyCall call;
  JAXOPS_RETURN_IF_ERROR(
      ParseCrossEntropy(handler, Pass::kForward, axes, cap, 0, has_labels, has_where, has_sum, args, results, &call));
  return Run<Pass::kForward>(handler, stream, call);
}

Error Backward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               double cap, bool has_labels, bool has_where, bool has_dsum) {
  const char* handler = "cross_entropy_bwd";
  CrossEntropyCall call;
  JAXOPS_RETURN_IF_ERROR(
      ParseCrossEntropy(handler, Pass::kBackward, axes, cap, 0, has_labels, has_where, has_dsum, args, results, &call));
  return Run<Pass::kBackward>(handler, stream, call);
}

Error ForwardBackward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
                      double cap, bool has_labels, bool has_where, bool has_dsum, double z_loss) {
  const char* handler = "cross_entropy_fwd_bwd";
  CrossEntropyCall call;
  JAXOPS_RETURN_IF_ERROR(ParseCrossEntropy(handler, Pass::kBoth, axes, cap, z_loss, has_labels, has_where, has_dsum,
                                           args, results, &call));
  return Run<Pass::kBoth>(handler, stream, call);
}

}  // namespace
}  // namespace jaxops

JAXOPS_CROSS_ENTROPY_HANDLERS;
