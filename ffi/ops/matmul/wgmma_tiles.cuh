// Launches of the tensor cores' kernel: which tiles there are, what the copy engine is told, partial results summed.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_TILES_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_TILES_CUH_

#include <algorithm>
#include <cstdint>

#include "core/launch.cuh"
#include "ops/matmul/epilogue.cuh"
#include "ops/matmul/wgmma.cuh"
#include "ops/matmul/wgmma_launch.h"

namespace jaxops::matmul {

// out = activation(the sum of the partial results, in order, + bias). A block takes 32 packs of 4 adjacent elements; a
// warp sums every 8th partial result, the first warp their sums. row_packs, rows: packs of a row, rows of a matrix.
inline constexpr int kPartialCount = 4, kPartialWarps = 8;
template <class U>
__global__ void __launch_bounds__(kPartialWarps * 32)
    SumPartials(const Problem p, const Divisor32 row_packs, const Divisor32 rows, const float* partials, int splits) {
  constexpr int kAtOnce = 8;  // loads of a thread under way
  __shared__ float4 sums[kPartialWarps][32];
  const int64_t size = p.batches * p.m * p.n;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t index = blockIdx.x * 32 + lane, line = row_packs.Divide(index), batch = rows.Divide(line);
  const int64_t column = (index - line * row_packs.divisor) * int64_t{kPartialCount};
  const bool inside = line < p.batches * p.m;
  float4 sum = {};
  if (inside) {
    const float* const from = partials + line * p.n + column;
    for (int first = warp; first < splits; first += kAtOnce * kPartialWarps) {
      float4 parts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float4& part = parts[i] = {};
        if (first + i * kPartialWarps >= splits) continue;
        const float* const values = from + (first + i * kPartialWarps) * size;
        if (p.n % kPartialCount == 0) {
          part = *reinterpret_cast<const float4*>(values);
        } else {
          part.x = values[0];
          if (column + 1 < p.n) part.y = values[1];
          if (column + 2 < p.n) part.z = values[2];
          if (column + 3 < p.n) part.w = values[3];
        }
      }
#pragma unroll
      for (const float4& part : parts)
        sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || !inside) return;
#pragma unroll
  for (int i = 1; i < kPartialWarps; ++i) {
    const float4 add = sums[i][lane];
    sum = make_float4(sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w);
  }
  const float values[kPartialCount] = {sum.x, sum.y, sum.z, sum.w};
  StoreRow<U>(p, batch, p.batch.At(batch), line - batch * rows.divisor, column, values);
}

template <class T>
inline constexpr CUtensorMapDataType kCopyType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
template <>
inline constexpr CUtensorMapDataType kCopyType<__nv_bfloat16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <>
inline constexpr CUtensorMapDataType kCopyType<__half> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
template <>
inline constexpr CUtensorMapDataType kCopyType<float> = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;

template <class T>
hopper::TensorView View(const WgmmaOperand& operand, Major major, int64_t space, int64_t depth, int tile, bool halves) {
  const bool along_depth = major == Major::kDepth, in_parts = operand.scales;
  if (in_parts) depth = operand.stride;  // there are zeros
  // The tensor cores would cut off what TF32 does not hold; the copy engine rounds.
  const bool rounded = std::is_same_v<T, float> && !in_parts;
  return {operand.data,
          rounded ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : kCopyType<T>,
          sizeof(T),
          along_depth ? depth : space,
          along_depth ? space : depth,
          operand.slices,
          operand.stride,
          (along_depth ? tile : static_cast<int>(hopper::kBoxRowBytes / sizeof(T))) >> halves};
}

// The most elements of a row that threads load: 8 rows are stepped over in 32 bits.
inline constexpr int64_t kMaxPieces = int64_t{1} << 26;  // of a row (jaxops/_limits.py)

inline OperandInPieces InPieces(const WgmmaOperand& operand, int64_t rows) {
  const int64_t row_bytes = operand.stride * 2;
  return {static_cast<const uint8_t*>(operand.data), rows * row_bytes, static_cast<int>(rows),
          static_cast<int>(row_bytes)};
}

template <class Tile, class P>
  requires(!Tile::kFewRows || P::kLhs == Major::kDepth)
cudaError_t LaunchTile(cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  using T = typename P::T;  // other 8-bit floats of rhs are all the same to the copy engine
  const bool split = plan.partials != nullptr, wide = split || plan.wide_out;
  const bool in_cluster = plan.splits > 1 && !split;
  if (in_cluster && plan.splits > Tile::kMostParts) return cudaErrorNotSupported;
  const auto tiles = [](int64_t size, int tile) { return (size + tile - 1) / tile; };
  const bool paired = plan.shared != SharedOperand::kNone, rhs_shared = plan.shared == SharedOperand::kRhs,
             lhs_shared = plan.shared == SharedOperand::kLhs;
  if (paired && (in_cluster || P::kInParts || p.triangle != Triangle::kNone)) return cudaErrorNotSupported;
  for (const WgmmaOperand& operand : {plan.lhs, plan.rhs})
    if (operand.piece && (paired || !P::kTakesPieces || operand.stride > kMaxPieces)) return cudaErrorNotSupported;
  const int64_t rows = tiles(p.m, Tile::kRows << rhs_shared), columns = tiles(p.n, Tile::kColumns << lhs_shared);
  const int64_t works = rows * columns * p.batches * plan.splits;
  const int64_t row_packs = tiles(p.n, kPartialCount), packs = p.batches * p.m * row_packs;  // of partial results
  if (std::max({p.m, p.n, p.k, columns * plan.band}) > kMaxMatrixSize || works > kMaxMatrixSize / 2 ||
      (split && packs > kMaxMatrixSize))
    return cudaErrorNotSupported;
  WgmmaArguments arguments = {};
  arguments.problem = p;
  arguments.matrices = MatrixIndices(p);
  arguments.raster =
      Raster(static_cast<uint32_t>(rows), static_cast<uint32_t>(columns), static_cast<uint32_t>(tiles(p.k, P::kDepth)),
             static_cast<uint32_t>(p.batches), plan.splits, std::max(1, plan.band >> rhs_shared));
  arguments.shared = plan.shared;
  arguments.stage_bytes =
      Tile::kParts * ((plan.lhs.piece ? 0 : Tile::kLhsBytes) + (plan.rhs.piece ? 0 : Tile::kRhsBytes));
  arguments.lhs_piece = plan.lhs.piece;
  arguments.rhs_piece = plan.rhs.piece;
  arguments.lhs_pieces = InPieces(plan.lhs, plan.lhs.transposed ? p.k : p.m);
  arguments.rhs_pieces = InPieces(plan.rhs, plan.rhs.transposed ? p.n : p.k);
  arguments.rhs_once = rows == 1;
  for (int axis = 0; axis < p.batch.axes; ++axis) arguments.rhs_once &= p.batch.strides[axis].rhs != 0;
  arguments.parts = in_cluster ? plan.splits : 1;
  arguments.triangle = p.triangle;
  arguments.lhs_transposed = p.lhs_transposed;
  arguments.lhs_scales = plan.lhs.scales;
  arguments.rhs_scales = plan.rhs.scales;
  arguments.promote = plan.promote;
  arguments.wide_out = wide;
  arguments.unfit = plan.unfit;
  Problem& q = arguments.problem;
  if (split) {
    q.out = plan.partials;
    q.scale = q.bias = q.preactivation = nullptr;
    q.bias_row_stride = q.bias_column_stride = 0;
    q.activation = Activation::kNone;
  }
  cudaError_t status = cudaSuccess;
  if (!plan.lhs.piece)
    status = hopper::Describe(View<T>(plan.lhs, P::kLhs, p.m, p.k, Tile::kRows, lhs_shared), &arguments.lhs);
  if (!plan.rhs.piece && status == cudaSuccess)
    status = hopper::Describe(View<T>(plan.rhs, P::kRhs, p.n, p.k, Tile::kColumns, rhs_shared), &arguments.rhs);
  const auto describe_edge = [&](const WgmmaOperand& operand, Major major, int64_t space, int tile, TileEdge* edge,
                                 CUtensorMap* map) {
    constexpr int kGroup = 8;  // rows of the swizzle
    const int rest = static_cast<int>(tiles(space % tile, kGroup)) * kGroup;
    if (status != cudaSuccess || P::kInParts || operand.piece || major != Major::kDepth || rest % tile == 0) return;
    *edge = {static_cast<int>(space / tile * tile), (tile - rest) * hopper::kBoxRowBytes};
    status = hopper::Describe(View<T>(operand, major, space, p.k, rest, false), map);
  };
  if (!lhs_shared) describe_edge(plan.lhs, P::kLhs, p.m, Tile::kRows, &arguments.lhs_edge, &arguments.lhs_at_edge);
  if (!rhs_shared) describe_edge(plan.rhs, P::kRhs, p.n, Tile::kColumns, &arguments.rhs_edge, &arguments.rhs_at_edge);
  const int out_bytes = wide ? 4 : 2;
  const bool aligned = p.n * out_bytes % 16 == 0;
  if (!aligned && (P::kTurned || !Tile::kStoresAnyRows)) return cudaErrorNotSupported;
  arguments.boxes_out = aligned && !P::kTurned;
  if (arguments.boxes_out && status == cudaSuccess) {
    hopper::TensorView view = {q.out,     wide ? kCopyType<float> : kCopyType<typename P::Result>,
                               out_bytes, p.n,
                               p.m,       p.batches * (split ? plan.splits : 1),
                               p.n,       16};
    status = hopper::Describe(view, &arguments.out);
    if (q.preactivation && status == cudaSuccess) {
      view.data = q.preactivation;
      status = hopper::Describe(view, &arguments.preactivation);
    }
  }
  if (status != cudaSuccess) return status;
  int multiprocessors = 0;
  status = CountMultiprocessors(&multiprocessors);
  if (status != cudaSuccess) return status;
  status = Launch(stream, WgmmaMatmul<Tile, P>,
                  {(in_cluster ? works : std::min<int64_t>(works, multiprocessors >> paired)) << paired, Tile::kThreads,
                   arguments.parts << paired, Tile::kSharedBytes},
                  arguments);
  if (!split || status != cudaSuccess) return status;
  return Launch(stream, plan.wide_out ? SumPartials<float> : SumPartials<typename P::Result>,
                {tiles(packs, 32), kPartialWarps * 32}, p, Divisor32(static_cast<uint32_t>(row_packs)),
                Divisor32(static_cast<uint32_t>(p.m)), plan.partials, plan.splits);
}

// Rows along m are loaded 64 at a time, and not for few of them.
template <class Tile, class P>
cudaError_t LaunchTile(cudaStream_t, const Problem&, const WgmmaPlan&) {
  return cudaErrorNotSupported;
}

// The tile of the plan among Tiles.
template <class P, class... Tiles>
cudaError_t LaunchPlanned(Types<Tiles...>, cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  cudaError_t status = cudaErrorNotSupported;
  (void)((plan.tile_rows == Tiles::kRows && plan.tile_columns == Tiles::kColumns &&
          plan.ping_pong == Tiles::kPingPong && (status = LaunchTile<Tiles, P>(stream, p, plan), true)) ||
         ...);
  return status;
}

using WgmmaTiles =
    Types<WgmmaTile<64, 64, 1, 12>, WgmmaTile<64, 128, 1, 8>, WgmmaTile<64, 192, 1, 6>, WgmmaTile<64, 256, 1, 4>,
          WgmmaTile<128, 128, 2, 6>, WgmmaTile<128, 128, 2, 6, Schedule::kPingPong>,
          WgmmaTile<128, 192, 2, 4, Schedule::kPingPong, 4>, WgmmaTile<128, 256, 2, 4>>;
// Promoted sums take twice the registers, those of operands in parts three times.
template <int kRows, int kColumns, int kMultipliers, int kStages>
using PartsTile = WgmmaTile<kRows, kColumns, kMultipliers, kStages, Schedule::kCooperative, 2, 2>;
using PartsTiles = Types<PartsTile<64, 128, 1, 4>, PartsTile<128, 128, 2, 3>>;
template <int kRows, int kColumns, int kStages>
using TurnedTile = WgmmaTile<kRows, kColumns, kColumns / 64, kStages, Schedule::kCooperative, 0>;
using TurnedTiles = Types<TurnedTile<64, 64, 12>, TurnedTile<128, 64, 8>, TurnedTile<128, 128, 6>,
                          TurnedTile<192, 128, 5>, TurnedTile<256, 128, 4>>;
using PromotedTiles =
    Types<WgmmaTile<64, 64, 1, 12>, WgmmaTile<64, 128, 1, 8>, WgmmaTile<128, 128, 2, 6>, WgmmaTile<128, 192, 2, 4>>;

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_TILES_CUH_
