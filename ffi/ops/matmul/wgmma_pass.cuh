// A product on Hopper's tensor cores whose epilogue is more than a result's: the kernel for any Pass, and its launch.
//
// The kernel is wgmma_work.cuh's ping-pong kernel for 16-bit operands: two warpgroups take tiles in turn, and one
// multiplies while the other finishes its tile. A Pass defines
//   P, SumTile, Tile, Sums: the product, its tile, the results' tile, and a thread's sums;
//   Arguments: WgmmaArguments and further fields; Prefetch(arguments);
//   LoadRhs(...): how a k tile of rhs comes into a stage;
//   Epilogue(arguments, memory, warpgroup), whose Begin(work, sums) runs before a tile's products, Store(sums, work)
//   after them, and Finish() at the end.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_PASS_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_PASS_CUH_

#include <algorithm>
#include <cstdint>

#include "core/launch.cuh"
#include "ops/matmul/wgmma_compute.cuh"
#include "ops/matmul/wgmma_launch.cuh"

namespace jaxops::matmul {

// The memory, beside the ring, that the multiplying warpgroups have. barriers: each warp has kPassBarriers for the
// pass.
struct PassMemory {
  uint32_t staging, barriers;
};
inline constexpr int kPassBarriers = 2;

template <class Pass>
__device__ void LoadForPass(const typename Pass::Arguments& arguments, const Ring<typename Pass::Tile>& ring) {
  using Tile = typename Pass::Tile;
  using P = typename Pass::P;
  FillRing<Tile, P>(arguments, ring, [&](const WgmmaWork& work, int, int, const auto& fill) {
    const TileLoads loads(arguments, work);
    fill([&](int stage, int k_tile) {
      if (!hopper::ElectLane()) return;
      ring.Full(stage).ArriveAndExpect(loads.bytes);
      LoadTile<P::kLhs, Tile::kRows, P::kDepth>(ring.Lhs(stage), loads.lhs, ring.Full(stage), work.row, k_tile, 0);
      Pass::LoadRhs(arguments, loads, ring, stage, work.column, k_tile);
    });
  });
}

// The warpgroups take tiles in turn, as in MultiplyAll.
template <class Pass>
__device__ void MultiplyForPass(const typename Pass::Arguments& arguments, const Ring<typename Pass::Tile>& ring,
                                const PassMemory& memory, int warpgroup) {
  using Tile = typename Pass::Tile;
  using P = typename Pass::P;
  constexpr int kTurn = 4;  // barrier kTurn + w: warpgroup w's turn to multiply
  const WgmmaWorks<Tile, P> works(arguments);
  typename Pass::Epilogue epilogue(arguments, memory, warpgroup);
  RingPlace<Tile> place;
  typename Pass::Sums sums;
  const StageRelease<Tile> release(arguments, ring);
  if (warpgroup == 1) hopper::NamedArrive(kTurn, 2 * kWarpgroup);
  int turn = 1;
  works.ForEach([&](const WgmmaWork& work) {
    const int depth = work.last - work.first;
    turn ^= 1;
    if (turn != warpgroup) {
      place.Skip(depth);
      return;
    }
    epilogue.Begin(work, sums);
    hopper::NamedSync(kTurn + warpgroup, 2 * kWarpgroup);
    int pending = -1;  // the stage whose products may still be running
    for (int i = 0; i < depth; ++i) {
      ring.Full(place.stage).Wait(place.parity);
      BeginProducts<typename P::T, typename P::V, typename Pass::SumTile, P>(ring.Lhs(place.stage),
                                                                             ring.Rhs(place.stage), sums, i > 0);
      if (pending >= 0) {
        hopper::WaitProducts<1>();
        release(pending);
      }
      pending = place.stage;
      place.Advance();
    }
    hopper::NamedArrive(kTurn + 1 - warpgroup, 2 * kWarpgroup);
    hopper::WaitProducts<0>();
    hopper::Settle(sums);
    release(pending);
    epilogue.Store(sums, work);
  });
  epilogue.Finish();
}

template <class Pass>
__global__ void __launch_bounds__(Pass::Tile::kThreads, 1)
    WgmmaPass(const __grid_constant__ typename Pass::Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = typename Pass::Tile;
  extern __shared__ uint8_t shared[];
  const uint32_t stages = (SharedAddress(shared) + 1023) & ~1023u;
  const uint32_t staging = stages + Tile::kStages * Tile::kStageBytes;
  const Ring<Tile> ring = {stages, staging + Tile::kMultipliers * Tile::kStagingBytes};
  static_assert(Tile::kMultipliers * 4 * kPassBarriers * 8 <= Tile::kBiasBytes);   // there is no bias
  constexpr int kReady = 6, kReadyThreads = 32 + Tile::kMultipliers * kWarpgroup;  // as in WgmmaMatmul
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int warpgroup = warp / 4;
  if (warpgroup == 0) {
    if (warp == 0) {
      if (hopper::ElectLane()) {
        hopper::Prefetch(arguments.lhs);
        hopper::Prefetch(arguments.rhs);
        if (arguments.lhs_edge.bytes) hopper::Prefetch(arguments.lhs_at_edge);
        Pass::Prefetch(arguments);
        for (int stage = 0; stage < Tile::kStages; ++stage) {
          ring.Full(stage).Initialize(1);
          ring.Empty(stage).Initialize(4);  // one for each warp in a warpgroup
        }
        hopper::FenceBarriers();
      }
      __syncwarp();
      hopper::NamedArrive(kReady, kReadyThreads);
    }
    hopper::ReleaseRegisters<kLoaderRegisters>();
    if (warp == 0) LoadForPass<Pass>(arguments, ring);
  } else {
    hopper::NamedSync(kReady, kReadyThreads);
    hopper::AcquireRegisters<kMultiplierRegisters>();
    MultiplyForPass<Pass>(arguments, ring,
                          {staging + (warpgroup - 1) * Tile::kStagingBytes, ring.barriers + Tile::kBarrierBytes},
                          warpgroup - 1);
  }
#endif
}

// Describes x in boxes of box_rows rows.
template <class T>
cudaError_t DescribeMatrix(const void* x, int64_t rows, int64_t columns, int box_rows, CUtensorMap* map) {
  return hopper::Describe(hopper::TensorView{x, kCopyType<T>, sizeof(T), columns, rows, 1, columns, box_rows}, map);
}

// Describes an operand along k: its whole tiles, and the rest in the last tile.
template <class T>
cudaError_t DescribeAlongDepth(const void* x, int64_t rows, int64_t k, int tile, CUtensorMap* map, TileEdge* edge,
                               CUtensorMap* at_edge) {
  constexpr int kGroup = 8;  // rows in the swizzle
  const int rest = static_cast<int>(rows % tile + kGroup - 1) / kGroup * kGroup;
  const cudaError_t status = DescribeMatrix<T>(x, rows, k, tile, map);
  if (status != cudaSuccess || rest % tile == 0) return status;
  *edge = {static_cast<int>(rows / tile * tile), (tile - rest) * hopper::kBoxRowBytes};
  return DescribeMatrix<T>(x, rows, k, rest, at_edge);
}

// Launches a pass over [m, k] @ [k, n], whose maps are in the arguments. cudaErrorNotSupported if there are too many
// tiles.
template <class Pass>
cudaError_t LaunchPass(cudaStream_t stream, int64_t m, int64_t n, int64_t k, int band,
                       typename Pass::Arguments& arguments) {
  using Tile = typename Pass::Tile;
  const auto tiles = [](int64_t size, int tile) { return (size + tile - 1) / tile; };
  const int64_t rows = tiles(m, Tile::kRows), columns = tiles(n, Tile::kColumns), works = rows * columns;
  if (std::max({m, n, k, columns * band}) > kMaxMatrixSize || works > kMaxMatrixSize / 2) return cudaErrorNotSupported;
  arguments.raster = Raster(static_cast<uint32_t>(rows), static_cast<uint32_t>(columns),
                            static_cast<uint32_t>(tiles(k, Pass::P::kDepth)), 1, 1, band);
  arguments.parts = 1;
  arguments.stage_bytes = Tile::kStageBytes;
  int multiprocessors = 0;
  const cudaError_t status = CountMultiprocessors(&multiprocessors);
  if (status != cudaSuccess) return status;
  return Launch(stream, WgmmaPass<Pass>,
                {std::min<int64_t>(works, multiprocessors), Tile::kThreads, 1, Tile::kSharedBytes}, arguments);
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_PASS_CUH_
