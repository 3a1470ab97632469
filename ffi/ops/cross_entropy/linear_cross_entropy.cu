// The linear cross entropy's forward pass: a product whose epilogue reduces each tile of logits to a summary for each
// row (LogitSummaries), and a kernel that joins each row's summaries, in their order. Logits never reach memory.
//   x [m, k], w [k, stride] or [n, k], labels [m], [bias [n]] -> origin, total, picked, [sum] [m], summaries
// w's rows may be longer than n (`columns`), so that they are aligned.
// The results are cross_entropy_fwd's (cross_entropy.h) for the logits x w + bias. Product and sum are rounded to the
// operands' dtype, as they are where the backward pass computes them again. `summaries` is a workspace, f32 [values,
// tiles, m]: for each tile of columns and each row the largest logit, the total at its level and, if wanted, the sum.
#include <limits>
#include <optional>
#include <utility>

#include "core/launch.cuh"
#include "core/shape.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/cross_entropy/summary.cuh"
#include "ops/matmul/block_product.cuh"
#include "ops/matmul/wgmma_pass.cuh"

namespace jaxops {
namespace {

using matmul::Major;
using matmul::WgmmaWork;

constexpr char kHandler[] = "linear_cross_entropy_fwd";
// The size of a result tile; jaxops/ops/_linear_cross_entropy.py sizes the workspace for such tiles.
constexpr int kTileRows = 128, kTileColumns = 192;

struct LinearProblem {
  int64_t m, n, k;
  int64_t stride;            // from row to row in w [k, n]
  const void *x, *w, *bias;  // bias: or null
  const int32_t* labels;
  float *origin, *total, *picked, *sum;  // sum: or null
  float* summaries;
  float cap, reciprocal;  // cap: 0 without one; reciprocal: 1 / cap

  __host__ __device__ int64_t tiles() const { return (n + kTileColumns - 1) / kTileColumns; }
  // Stores a row's summary for a tile.
  __device__ void Store(const Summary<float>& summary, int64_t tile, int64_t row) const {
    const int64_t at = tile * m + row, plane = tiles() * m;
    summaries[at] = summary.max;
    summaries[plane + at] = summary.total;
    if (sum) summaries[2 * plane + at] = summary.sum;
  }
  __device__ Summary<float> Load(int64_t tile, int64_t row) const {
    const int64_t at = tile * m + row, plane = tiles() * m;
    return {summaries[at], summaries[plane + at], sum ? summaries[2 * plane + at] : 0};
  }
};

template <class T>
__device__ float Round(float value) {
  return static_cast<float>(static_cast<T>(value));
}

// x times w, on Hopper's tensor cores.
template <class T_, bool kTransposed>
struct LogitSummaries {
  using T = T_;
  using P = matmul::Product<T, T, Major::kDepth, kTransposed ? Major::kDepth : Major::kSpace>;
  using Tile = matmul::WgmmaTile<kTileRows, kTileColumns, 2, 5, matmul::Schedule::kPingPong, 0>;
  using SumTile = Tile;
  static constexpr int kCount = Tile::kColumns / 2;  // a thread's sums in a block of 64 rows
  using Sums = float[Tile::kBlocks][kCount];

  struct Arguments : matmul::WgmmaArguments {
    LinearProblem linear;
  };

  static __device__ void Prefetch(const Arguments& arguments) {
    if (arguments.rhs_edge.bytes) hopper::Prefetch(arguments.rhs_at_edge);
  }

  static __device__ void LoadRhs(const Arguments&, const matmul::TileLoads& loads, const matmul::Ring<Tile>& ring,
                                 int stage, int column, int k_tile) {
    matmul::LoadTile<P::kRhs, Tile::kColumns, P::kDepth>(ring.Rhs(stage), loads.rhs, ring.Full(stage), column, k_tile,
                                                         0);
  }

  // Four lanes share a row. In each block of 64 rows a lane has two rows, 8 apart, and in each 8 columns it has two
  // adjacent ones: sum i is in row i / 2 % 2 and column i / 4 * 8 + i % 2, counted from the lane's first ones.
  class Epilogue {
   public:
    __device__ Epilogue(const Arguments& arguments, const matmul::PassMemory&, int) : p_(arguments.linear) {}

    // To the compiler, a tile's first product reads the sums that it overwrites. Without zeros here, the last tile's
    // sums would occupy registers throughout the epilogue.
    __device__ void Begin(const WgmmaWork&, Sums& sums) const {
#pragma unroll
      for (auto& block : sums)
#pragma unroll
        for (float& sum : block) sum = 0;
    }

    __device__ void Store(const Sums& sums, const WgmmaWork& work) const {
      // All are rounded first, to pairs, which frees the registers that the sums had.
      float pairs[1][kRows * kPairs];
#pragma unroll
      for (int i = 0; i < kRows * kPairs; ++i) {
        const int row = i / kPairs, first = i % kPairs * 4 + row % 2 * 2;
        pairs[0][i] = __uint_as_float(ToPack<T, 2>([&](int k) { return sums[row / 2][first + k]; }).words[0]);
        asm volatile("" : "+f"(pairs[0][i]));
      }
      const int warp = threadIdx.x % hopper::kWarpgroup / 32, row = work.row + warp * 16 + threadIdx.x % 32 / 4;
#pragma unroll 1
      // A loop, because code four times as long is slower: for 8192 x 768 x 50304, with a bare product of 0.96 ms, an
      // H200 took 1.10 ms unrolled and 0.99 in a loop.
      for (int i = 0; i < kRows; ++i) {
        float own[kPairs];
        matmul::SelectGroup<0, kRows>(pairs, i, own);
        Reduce(own, row + i / 2 * 64 + i % 2 * 8, work);
      }
    }

    __device__ void Finish() const {}

   private:
    using Pair = Pack<T, 2>;
    static constexpr int kRows = 2 * Tile::kBlocks, kPairs = kCount / 4;  // a lane's rows; its pairs in each

    // Stores the summary of a row's logits in the tile, and the label's logit, if it is among them.
    __device__ void Reduce(const float (&words)[kPairs], int row, const WgmmaWork& work) const {
      Pair pairs[kPairs];
#pragma unroll
      for (int j = 0; j < kPairs; ++j) pairs[j].words[0] = __float_as_uint(words[j]);
      const int64_t label = row < p_.m ? ColumnOfLabel(p_.labels[row], p_.n) : -1;
      const int first = work.column + threadIdx.x % 4 * 2, left = static_cast<int>(p_.n) - first;
      if (p_.bias) {
        const T* const bias = static_cast<const T*>(p_.bias) + first;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const auto logit = [&](int k) {
            return pairs[j].template Widen<float>(k) + (j * 8 + k < left ? static_cast<float>(bias[j * 8 + k]) : 0);
          };
          pairs[j] = ToPack<T, 2>(logit);
        }
      }
      if (static_cast<int>(p_.n) - work.column < Tile::kColumns) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j)
#pragma unroll
          for (int k = 0; k < 2; ++k)
            if (j * 8 + k >= left) pairs[j].Set(k, static_cast<T>(-std::numeric_limits<float>::infinity()));
      }
      Pair largest = pairs[0];
#pragma unroll
      for (int j = 1; j < kPairs; ++j) largest = Larger(largest, pairs[j]);
      float max = fmaxf(largest.template Widen<float>(0), largest.template Widen<float>(1));
      for (const int step : {1, 2}) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
      max = Logit<T>(max, p_.cap, p_.reciprocal);  // which grows with the logit
      Summary<float> summary = {max, 0, 0};
      const auto level = summary.Level();
      float totals[2] = {};
      if (p_.cap == 0 && !p_.sum) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j)
#pragma unroll
          for (int k = 0; k < 2; ++k) totals[k] += level.Exponential(pairs[j].template Widen<float>(k));
      } else {
#pragma unroll
        for (int j = 0; j < kPairs; ++j)
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            if (j * 8 + k >= left) continue;
            const float z = Logit<T>(pairs[j].template Widen<float>(k), p_.cap, p_.reciprocal);
            totals[k] += level.Exponential(z);
            summary.sum += z;
          }
      }
      summary.total = totals[0] + totals[1];
      for (const int step : {1, 2}) {
        summary.total += __shfl_xor_sync(~0u, summary.total, step);
        summary.sum += __shfl_xor_sync(~0u, summary.sum, step);
      }
      if (threadIdx.x % 4 == 0 && row < p_.m) p_.Store(summary, work.column / Tile::kColumns, row);
      if (label >= first && label - first < Tile::kColumns && (label - first) % 8 < 2) {
        const int at = static_cast<int>(label) - first;
        // By a mask: from at / 8 == j, the compiler would conclude pairs[at / 8], and keep pairs in memory.
        const uint32_t mask = 1u << at / 8;
        Pair picked = {};
#pragma unroll
        for (int j = 0; j < kPairs; ++j) picked.words[0] |= mask >> j & 1 ? pairs[j].words[0] : 0;
        const float z = at % 2 ? picked.template Widen<float>(1) : picked.template Widen<float>(0);
        p_.picked[row] = Logit<T>(z, p_.cap, p_.reciprocal);
      }
    }

    const LinearProblem& p_;
  };
};

// Does the same for operands that the copy engine cannot take, and on other GPUs. A block takes a tile's columns for
// kSide rows; threads side by side share a row.
template <class T, bool kTransposed>
__global__ void __launch_bounds__(matmul::kSide* matmul::kSide) GeneralSummaries(const LinearProblem p) {
  constexpr int kSide = matmul::kSide;
  const int64_t tile = blockIdx.x % p.tiles(), row = blockIdx.x / p.tiles() * kSide + threadIdx.x / kSide;
  const int64_t label = row < p.m ? ColumnOfLabel(p.labels[row], p.n) : -1;
  Summary<float> summary = Summary<float>::None();
  for (int first = 0; first < kTileColumns; first += kSide) {
    const int64_t column = tile * kTileColumns + first + threadIdx.x % kSide;
    float sums[1] = {};
    matmul::MultiplyInBlock<T, kTransposed, 1>(p.x, {p.w}, p.m, kTransposed ? p.n : p.stride, p.k, row, column, sums);
    if (row >= p.m || column >= p.n) continue;
    float z = Round<T>(sums[0]);
    if (p.bias) z = Round<T>(z + static_cast<float>(static_cast<const T*>(p.bias)[column]));
    z = Logit<T>(z, p.cap, p.reciprocal);
    if (column == label) p.picked[row] = z;
    summary.Raise(z);
    summary.total += summary.Level().Exponential(z);
    summary.sum += z;
  }
  for (int step = 1; step < kSide; step *= 2)
    summary.Add({__shfl_xor_sync(~0u, summary.max, step), __shfl_xor_sync(~0u, summary.total, step),
                 __shfl_xor_sync(~0u, summary.sum, step)});
  if (row < p.m && threadIdx.x % kSide == 0) p.Store(summary, tile, row);
}

// Joins each row's summaries. A block takes 32 rows, and each of its warps takes every eighth tile.
constexpr int kJoiningWarps = 8;
__global__ void __launch_bounds__(kJoiningWarps * 32) JoinSummaries(const LinearProblem p) {
  __shared__ Summary<float> of_warps[kJoiningWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x * int64_t{32} + lane;
  Summary<float> all = Summary<float>::None();
  if (row < p.m) {
#pragma unroll 4
    for (int64_t tile = warp; tile < p.tiles(); tile += kJoiningWarps) all.Add(p.Load(tile, row));
  }
  of_warps[warp][lane] = all;
  __syncthreads();
  if (warp > 0 || row >= p.m) return;
  for (int other = 1; other < kJoiningWarps; ++other) all.Add(of_warps[other][lane]);
  const float origin = all.Origin();
  p.origin[row] = origin;
  p.total[row] = all.total * Level<float>(origin).Correction(origin);
  if (p.sum) p.sum[row] = all.sum;
  if (ColumnOfLabel(p.labels[row], p.n) < 0) p.picked[row] = std::numeric_limits<float>::quiet_NaN();
}

template <class T, bool kTransposed>
cudaError_t LaunchSummaries(cudaStream_t stream, const LinearProblem& p, int band) {
  using Pass = LogitSummaries<T, kTransposed>;
  const bool fits = IsAligned(p.x) && IsAligned(p.w) && p.k > 0 && p.k % 8 == 0 && (kTransposed || p.stride % 8 == 0);
  if (fits && CompiledCapability() == kHopper) {
    typename Pass::Arguments arguments = {};
    arguments.linear = p;
    cudaError_t status = matmul::DescribeAlongDepth<T>(p.x, p.m, p.k, kTileRows, &arguments.lhs, &arguments.lhs_edge,
                                                       &arguments.lhs_at_edge);
    if (status == cudaSuccess) {
      status = kTransposed ? matmul::DescribeAlongDepth<T>(p.w, p.n, p.k, kTileColumns, &arguments.rhs,
                                                           &arguments.rhs_edge, &arguments.rhs_at_edge)
                           : matmul::DescribeMatrix<T>(p.w, p.k, p.stride, Pass::P::kDepth, &arguments.rhs);
    }
    if (status == cudaSuccess) status = matmul::LaunchPass<Pass>(stream, p.m, p.n, p.k, band, arguments);
    if (status != cudaErrorNotSupported) return status;
  }
  const int64_t row_blocks = (p.m + matmul::kSide - 1) / matmul::kSide;
  return Launch(stream, GeneralSummaries<T, kTransposed>, {row_blocks * p.tiles(), matmul::kSide * matmul::kSide}, p);
}

Error LinearForward(Device stream, AnyBuffer x, AnyBuffer w, AnyBuffer labels, ffi::RemainingArgs rest,
                    BufferResult origin, BufferResult total, BufferResult picked, ffi::RemainingRets more,
                    bool transposed, int64_t columns, bool has_bias, bool has_sum, double cap, int32_t band) {
  LinearProblem p = {};
  p.m = MatrixSize(x, 0);
  p.n = columns;
  p.k = MatrixSize(x, 1);
  p.stride = MatrixSize(w, 1);
  if (columns < 0 || columns > MatrixSize(w, transposed ? 0 : 1)) return Invalid(kHandler, "w has fewer columns");
  std::optional<AnyBuffer> bias, sum, summaries;
  BufferReader<ffi::RemainingArgs> operands(kHandler, rest);
  if (has_bias) JAXOPS_RETURN_IF_ERROR(operands.Take(&bias));
  JAXOPS_RETURN_IF_ERROR(operands.End());
  BufferReader<ffi::RemainingRets> results(kHandler, more);
  if (has_sum) JAXOPS_RETURN_IF_ERROR(results.Take(&sum));
  JAXOPS_RETURN_IF_ERROR(results.Take(&summaries));
  JAXOPS_RETURN_IF_ERROR(results.End());
  const DataType type = x.element_type();
  const int64_t w_rows = transposed ? p.n : p.k, w_columns = transposed ? p.k : p.stride;
  JAXOPS_RETURN_IF_ERROR(CheckShape(kHandler, "x", x, type, {p.m, p.k}));
  JAXOPS_RETURN_IF_ERROR(CheckShape(kHandler, "w", w, type, {w_rows, w_columns}));
  JAXOPS_RETURN_IF_ERROR(CheckShape(kHandler, "labels", labels, DataType::S32, {p.m}));
  if (bias) JAXOPS_RETURN_IF_ERROR(CheckShape(kHandler, "bias", *bias, type, {p.n}));
  for (const auto& [name, buffer] :
       {std::pair("origin", *origin), std::pair("total", *total), std::pair("picked", *picked)})
    JAXOPS_RETURN_IF_ERROR(CheckShape(kHandler, name, buffer, DataType::F32, {p.m}));
  if (sum) JAXOPS_RETURN_IF_ERROR(CheckShape(kHandler, "sum", *sum, DataType::F32, {p.m}));
  JAXOPS_RETURN_IF_ERROR(
      CheckShape(kHandler, "the workspace", *summaries, DataType::F32, {2 + has_sum, p.tiles(), p.m}));
  if (!std::isfinite(cap) || cap < 0) return Invalid(kHandler, "cap must be finite and at least 0");
  if (band < 1 || band > 64) return Invalid(kHandler, "band out of range");  // columns times a band fit 32 bits
  if (p.m == 0) return Error::Success();
  p.x = x.untyped_data();
  p.w = w.untyped_data();
  p.bias = bias ? bias->untyped_data() : nullptr;
  p.labels = Data<int32_t>(labels);
  p.origin = Data<float>(*origin);
  p.total = Data<float>(*total);
  p.picked = Data<float>(*picked);
  p.sum = DataOrNull<float>(sum);
  p.summaries = Data<float>(*summaries);
  p.cap = static_cast<float>(cap);
  p.reciprocal = static_cast<float>(cap > 0 ? 1 / cap : 0);
  cudaError_t status = cudaSuccess;
  if (p.n > 0) {
    const auto launch = [&]<class T> {
      status = transposed ? LaunchSummaries<T, true>(stream, p, band) : LaunchSummaries<T, false>(stream, p, band);
      return Error::Success();
    };
    JAXOPS_RETURN_IF_ERROR(First(
        Types<__nv_bfloat16, __half>{}, Invalid(kHandler, "no kernel for this element type"),
        [=]<class T> { return type == kDataType<T>; }, launch));
  }
  if (status == cudaSuccess) status = Launch(stream, JoinSummaries, {(p.m + 31) / 32, kJoiningWarps * 32}, p);
  return FromCuda(kHandler, status);
}

}  // namespace
}  // namespace jaxops

JAXOPS_HANDLER(linear_cross_entropy_fwd, jaxops::LinearForward,
               Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .RemainingArgs()
                   .Ret<jaxops::AnyBuffer>()
                   .Ret<jaxops::AnyBuffer>()
                   .Ret<jaxops::AnyBuffer>()
                   .RemainingRets()
                   .Attr<bool>("transposed")
                   .Attr<int64_t>("columns")
                   .Attr<bool>("has_bias")
                   .Attr<bool>("has_sum")
                   .Attr<double>("cap")
                   .Attr<int32_t>("band"));
