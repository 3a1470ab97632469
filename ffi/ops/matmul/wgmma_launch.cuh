// matmul on Hopper's tensor cores: the kernel, and its launches.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_LAUNCH_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_LAUNCH_CUH_

#include <algorithm>
#include <cstdint>

#include "core/launch.cuh"
#include "core/shared_memory.cuh"
#include "hopper/barrier.cuh"
#include "hopper/tensor_copy.cuh"
#include "ops/matmul/wgmma.h"
#include "ops/matmul/wgmma_compute.cuh"
#include "ops/matmul/wgmma_load.cuh"
#include "ops/matmul/wgmma_store.cuh"
#include "ops/matmul/wgmma_work.cuh"

#if __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "wgmma needs sm_90a: for sm_90 WgmmaMatmul would be empty, and launched on Hopper all the same"
#endif

namespace jaxops::matmul {

// Registers per thread: a block's warpgroups share 65,536, in steps of 8. A single multiplying warpgroup has enough
// without moving any.
inline constexpr int kLoaderRegisters = 40, kMultiplierRegisters = 232;

template <class Tile, class P>
__global__ void __launch_bounds__(Tile::kThreads, 1) WgmmaMatmul(const __grid_constant__ WgmmaArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (arguments.unfit && *arguments.unfit) return;
  extern __shared__ uint8_t shared[];
  const uint32_t stages = (SharedAddress(shared) + 1023) & ~1023u;
  const uint32_t staging = stages + Tile::kStages * Tile::kStageBytes;
  const Ring<Tile> ring = {stages, staging + Tile::kMultipliers * Tile::kStagingBytes};
  const uint32_t bias = ring.barriers + Tile::kBarrierBytes;
  // Multipliers wait until the ring's barriers are ready; the loader does not wait for them, because its code
  // takes a while to arrive when it runs for the first time. Barriers 1, 2, 4, 5: SyncTile, turns.
  constexpr int kReady = 6;
  const bool in_pieces = P::kTakesPieces && arguments.in_pieces();
  const int ready_threads = (in_pieces ? kWarpgroup : 32) + Tile::kMultipliers * kWarpgroup;
  constexpr int kReleases = 4 * (Tile::kPingPong ? 1 : Tile::kMultipliers);  // per stage: one from each warp
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler knows that it is the same for all lanes
  const int warpgroup = warp / 4;
  const bool summed = Tile::kMostParts > 1 && arguments.summed(), in_cluster = summed || arguments.paired();
  if (warpgroup == 0) {
    if (warp == 0) {
      if (hopper::ElectLane()) {
        if (!arguments.lhs_piece) hopper::Prefetch(arguments.lhs);
        if (!arguments.rhs_piece) hopper::Prefetch(arguments.rhs);
        if (arguments.lhs_edge.bytes) hopper::Prefetch(arguments.lhs_at_edge);
        if (arguments.rhs_edge.bytes) hopper::Prefetch(arguments.rhs_at_edge);
        for (int stage = 0; stage < Tile::kStages; ++stage) {
          ring.Full(stage).Initialize(in_pieces ? 1 + kWarpgroup : 1);
          ring.Empty(stage).Initialize(kReleases << arguments.paired());
        }
        if (summed) {
          ring.Free().Initialize(4 * Tile::kMultipliers);
          ring.Sums().Initialize(1);
          ring.Sums().ArriveAndExpect((arguments.parts - 1) * Tile::kSumBytes);
        }
        hopper::FenceBarriers();
      }
      __syncwarp();
      hopper::NamedArrive(kReady, ready_threads);
    } else if (in_pieces) {
      hopper::NamedSync(kReady, ready_threads);
    }
    if (in_cluster) hopper::ClusterArrive();
    if (arguments.paired()) hopper::ClusterWait();  // the other block's barriers are ready
    if constexpr (Tile::kMultipliers == 2) hopper::ReleaseRegisters<kLoaderRegisters>();
    if (in_pieces) {
      if constexpr (P::kTakesPieces) LoadAllInPieces<Tile, P>(arguments, ring, warp);
    } else if (warp == 0) {
      if constexpr (P::kInParts) {
        LoadParts<Tile, P>(arguments, ring);
      } else {
        LoadAll<Tile, P>(arguments, ring);
      }
    }
    if (summed) hopper::ClusterWait();  // needs nothing from others; but racecheck hangs if a thread never waits
  } else {
    if (in_cluster) hopper::ClusterArrive();
    hopper::NamedSync(kReady, ready_threads);
    if (arguments.paired()) hopper::ClusterWait();
    if constexpr (Tile::kMultipliers == 2) hopper::AcquireRegisters<kMultiplierRegisters>();
    if (arguments.boxes_out && warp == 4 && hopper::ElectLane()) hopper::Prefetch(arguments.out);
    if constexpr (P::kInParts) {
      MultiplyParts<Tile, P>(arguments, ring, staging + (warpgroup - 1) * Tile::kStagingBytes, bias, warpgroup - 1);
    } else if constexpr (P::kTurned) {
      MultiplyTurned<Tile, P>(arguments, ring, warpgroup - 1);
    } else {
      MultiplyAll<Tile, P>(arguments, ring, staging + (warpgroup - 1) * Tile::kStagingBytes, bias, warpgroup - 1);
    }
  }
#endif
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
  // The tensor cores would cut off the bits that TF32 does not hold; the copy engine rounds.
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

// The most elements in a row that threads load: 8 rows are stepped over in 32 bits.
inline constexpr int64_t kMaxPieces = int64_t{1} << 26;  // per row (jaxops/_limits.py)

inline OperandInPieces InPieces(const WgmmaOperand& operand, int64_t rows) {
  const int64_t row_bytes = operand.stride * 2;
  return {static_cast<const uint8_t*>(operand.data), rows * row_bytes, static_cast<int>(rows),
          static_cast<int>(row_bytes)};
}

template <class Tile, class P>
cudaError_t LaunchTile(cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  using T = typename P::T;  // the copy engine treats all 8-bit floats in rhs alike
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
  const int64_t row_packs = tiles(p.n, kPartialCount), packs = p.batches * p.m * row_packs;  // in partial results
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
    constexpr int kGroup = 8;  // rows in the swizzle
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

// The plan's tile among Tiles.
template <class P, class... Tiles>
cudaError_t LaunchPlanned(Types<Tiles...>, cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  cudaError_t status = cudaErrorNotSupported;
  (void)((plan.tile_rows == Tiles::kRows && plan.tile_columns == Tiles::kColumns &&
          plan.ping_pong == Tiles::kPingPong && (status = LaunchTile<Tiles, P>(stream, p, plan), true)) ||
         ...);
  return status;
}

using Tiles16Bit = Types<WgmmaTile<64, 64, 1, 12>, WgmmaTile<64, 128, 1, 8>, WgmmaTile<64, 192, 1, 6>,
                         WgmmaTile<128, 128, 2, 6>, WgmmaTile<128, 128, 2, 6, Schedule::kPingPong>,
                         WgmmaTile<128, 192, 2, 4, Schedule::kPingPong, 4>, WgmmaTile<128, 256, 2, 4>>;

// 16-bit operands, each along k or its other axis; not both transposed.
template <class T>
cudaError_t Launch16Bit(cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  constexpr Major kDepth = Major::kDepth, kSpace = Major::kSpace;
  if (plan.in_parts || plan.promote) return cudaErrorNotSupported;
  const auto launch = [&]<Major kLhs, Major kRhs> {
    return LaunchPlanned<Product<T, T, kLhs, kRhs>>(Tiles16Bit{}, stream, p, plan);
  };
  if (!plan.rhs.transposed)
    return plan.lhs.transposed ? launch.template operator()<kSpace, kSpace>()
                               : launch.template operator()<kDepth, kSpace>();
  return plan.lhs.transposed ? cudaErrorNotSupported : launch.template operator()<kDepth, kDepth>();
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_LAUNCH_CUH_
