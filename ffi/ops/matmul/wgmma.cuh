// matmul on Hopper's tensor cores: wgmma, operands brought by the copy engine (TMA).
//
// A block has one warpgroup that loads and one or two that multiply. Tiles of the operands pass through a ring of
// stages in shared memory: `full` barriers say that a stage has arrived, `empty` ones that it may be filled again.
// Blocks are persistent and take tiles of the result in turn, in bands of tile rows that go back and forth, so that
// blocks which run together share operands in the L2 cache. With two warpgroups that multiply, either each takes half
// of a tile's rows (cooperative), or each takes tiles of its own and one stores its tile while the other multiplies
// (ping-pong). The parts of a product that is split along k are summed in a fixed order: by the first block of a
// cluster, which reads the others' sums from their shared memory, or, where they are many, as f32 partial results in
// memory by a kernel of its own.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_CUH_

#include <cstdint>

#include "core/shared_memory.cuh"
#include "hopper/barrier.cuh"
#include "hopper/tensor_copy.cuh"
#include "hopper/wgmma.cuh"
#include "ops/matmul/wgmma_parts.cuh"
#include "ops/matmul/wgmma_ring.cuh"
#include "ops/matmul/wgmma_store.cuh"
#include "ops/matmul/wgmma_work.cuh"

#if __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "wgmma needs sm_90a: for sm_90 WgmmaMatmul would be empty, and launched on Hopper all the same"
#endif

namespace jaxops::matmul {

// Loads kSize rows (of m or n) of an operand's k tile.
template <Major kMajor, int kSize, int kDepth>
__device__ void LoadTile(uint32_t target, const CUtensorMap& map, Barrier barrier, int first, int k_tile, int slice) {
  if constexpr (kMajor == Major::kDepth) {
    hopper::LoadBox(target, map, barrier, k_tile * kDepth, first, slice);
  } else {
#pragma unroll
    for (int block = 0; block < kSize / 64; ++block)
      hopper::LoadBox(target + block * kBlockBytes, map, barrier, first + block * 64, k_tile * kDepth, slice);
  }
}

template <class Tile, class P>
__device__ void LoadAll(const WgmmaArguments& arguments, const Ring<Tile>& ring) {
  const WgmmaWorks<Tile, P> works(arguments);
  RingPlace<Tile> place{0, 1};
  works.ForEach([&](const WgmmaWork& work) {
    int lhs, rhs;  // operands' matrices
    arguments.matrices.At(work.batch, &lhs, &rhs);
#pragma unroll 1
    for (int k_tile = work.first; k_tile < work.last; ++k_tile) {
      ring.Empty(place.stage).Wait(place.parity);
      const Barrier full = ring.Full(place.stage);
      full.ArriveAndExpect(Tile::kStageBytes);
      LoadTile<P::kLhs, Tile::kRows, P::kDepth>(ring.Lhs(place.stage), arguments.lhs, full, work.row, k_tile, lhs);
      LoadTile<P::kRhs, Tile::kColumns, P::kDepth>(ring.Rhs(place.stage), arguments.rhs, full, work.column, k_tile,
                                                   rhs);
      place.Advance();
    }
  });
}

template <bool kSecond, class T>
__device__ T& Either(T& first, T& second) {
  if constexpr (kSecond) {
    return second;
  } else {
    return first;
  }
}

template <class Tile, class P>
__device__ void MultiplyAll(const WgmmaArguments& arguments, const Ring<Tile>& ring, uint32_t staging, uint32_t bias,
                            int warpgroup) {
  using T = typename P::T;
  using V = typename P::V;
  constexpr int kBlocks = Tile::kBlocks, kColumns = Tile::kColumns;
  const WgmmaWorks<Tile, P> works(arguments);
  ResultStore<Tile, typename P::Result, sizeof(T) == 1> store(arguments, staging, bias, warpgroup);
  RingPlace<Tile> place;
  float sums[kBlocks][kColumns / 2];
  float promoted[kBlocks][kColumns / 2];  // not used, hence no registers, without promotion
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) ring.Empty(stage).Arrive();
  };
  // Ping-pong: barrier 4 + w is warpgroup w's turn to multiply; the first one's comes first.
  constexpr int kTurn = 4;
  if (Tile::kPingPong && warpgroup == 1) hopper::NamedArrive(kTurn, 2 * kWarpgroup);
  int turn = 1;
  works.ForEach([&](const WgmmaWork& work) {
    const int depth = work.last - work.first;
    turn ^= 1;
    if (Tile::kPingPong && turn != warpgroup) {
      place.Skip(depth);
      return;
    }
    store.FetchBias(work);
    if constexpr (Tile::kPingPong) hopper::NamedSync(kTurn + warpgroup, 2 * kWarpgroup);
    const int first_block = Tile::kPingPong ? 0 : warpgroup * kBlocks;
    if constexpr (P::kPromotes) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) promoted[block][i] = 0;
    }
    int pending = -1;   // the stage of the products that may still be running
    bool fresh = true;  // the sums are to be overwritten
    int since = 0;      // k tiles since the sums were promoted
    for (int i = 0; i < depth; ++i) {
      ring.Full(place.stage).Wait(place.parity);
      BeginProducts<T, V, Tile, P>(ring.Lhs(place.stage) + first_block * kBlockBytes, ring.Rhs(place.stage), sums,
                                   !fresh);
      fresh = false;
      if (pending >= 0) {
        hopper::WaitProducts<1>();
        release(pending);
      }
      pending = place.stage;
      place.Advance();
      if constexpr (P::kPromotes) {
        if (++since == arguments.promote || i + 1 == depth) {
          hopper::WaitProducts<0>();
          release(pending);
#pragma unroll
          for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int j = 0; j < kColumns / 2; ++j) promoted[block][j] += sums[block][j];
          pending = -1, fresh = true, since = 0;
        }
      }
    }
    if constexpr (Tile::kPingPong) hopper::NamedArrive(kTurn + 1 - warpgroup, 2 * kWarpgroup);
    hopper::WaitProducts<0>();
    if (pending >= 0) release(pending);
    store.AwaitBias();
    auto& results = Either<P::kPromotes>(sums, promoted);
    if constexpr (Tile::kSplitsInCluster) {
      if (arguments.cluster > 1 && !SumCluster<Tile>(arguments, ring.stages, warpgroup, results)) return;
    }
    store.Store(results, work.row + first_block * 64, work);
  });
  store.Finish();
}

// Registers a thread: 65,536 for a block's warpgroups, in steps of 8. With one warpgroup that multiplies there are
// enough without moving any.
inline constexpr int kLoaderRegisters = 40, kMultiplierRegisters = 232;

template <class Tile, class P>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    WgmmaMatmul(const __grid_constant__ WgmmaArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (arguments.unfit && *arguments.unfit) return;
  if (threadIdx.x == 0) {
    hopper::Prefetch(arguments.lhs);
    hopper::Prefetch(arguments.rhs);
  }
  extern __shared__ uint8_t shared[];
  const uint32_t stages = (SharedAddress(shared) + 1023) & ~1023u;
  const uint32_t staging = stages + Tile::kStages * Tile::kStageBytes;
  const Ring<Tile> ring = {stages, staging + Tile::kMultipliers * Tile::kStagingBytes};
  const uint32_t bias = ring.barriers + Tile::kBarrierBytes;
  // Multipliers wait until the ring's barriers are ready; the loader does not wait for them, as its code, run for the
  // first time, comes slowly. Barriers 1 to 5: SyncTile, SumCluster, turns.
  constexpr int kReady = 6, kReadyThreads = 32 + Tile::kMultipliers * kWarpgroup;
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 0) {
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) {
        for (int stage = 0; stage < Tile::kStages; ++stage) {
          ring.Full(stage).Initialize(1);
          ring.Empty(stage).Initialize(4 * (Tile::kPingPong ? 1 : Tile::kMultipliers));  // a warp each
        }
        hopper::FenceBarriers();
      }
      __syncwarp();
      hopper::NamedArrive(kReady, kReadyThreads);
    }
    if constexpr (Tile::kMultipliers == 2) hopper::ReleaseRegisters<kLoaderRegisters>();
    if (threadIdx.x == 0) {
      if constexpr (P::kInParts) {
        LoadParts<Tile, P>(arguments, ring);
      } else {
        LoadAll<Tile, P>(arguments, ring);
      }
    }
    if (Tile::kSplitsInCluster && arguments.cluster > 1) {  // as the others do in SumCluster
      hopper::ClusterArrive();
      hopper::ClusterWait();
      hopper::ClusterArrive();
    }
  } else {
    hopper::NamedSync(kReady, kReadyThreads);
    if constexpr (Tile::kMultipliers == 2) hopper::AcquireRegisters<kMultiplierRegisters>();
    if (arguments.boxes_out && threadIdx.x == kWarpgroup) hopper::Prefetch(arguments.out);
    if constexpr (P::kInParts) {
      MultiplyParts<Tile, P>(arguments, ring, staging + (warpgroup - 1) * Tile::kStagingBytes, bias, warpgroup - 1);
    } else {
      MultiplyAll<Tile, P>(arguments, ring, staging + (warpgroup - 1) * Tile::kStagingBytes, bias, warpgroup - 1);
    }
  }
  if (Tile::kSplitsInCluster && arguments.cluster > 1)
    hopper::ClusterWait();  // nobody leaves while its sums may be read
#endif
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_CUH_
