// matmul on Hopper's tensor cores: wgmma, operands brought by the copy engine (TMA).
//
// A block has one warpgroup that loads and one or two that multiply. Tiles of the operands pass through a ring of
// stages in shared memory: `full` barriers say that a stage has arrived, `empty` ones that it may be filled again.
// Blocks are persistent and take tiles of the result in turn, in bands of tile rows that go back and forth, so that
// blocks which run together share operands in the L2 cache. With two warpgroups that multiply, either each takes half
// of a tile's rows (cooperative), or each takes tiles of its own and one stores its tile while the other multiplies
// (ping-pong). The parts of a product that is split along k are summed in a fixed order: by the first block of a
// cluster, to whose shared memory the others send their sums, or, where they are many, as f32 partial results in memory
// by a kernel of its own.
//
// Rows of an operand that do not begin at 128 bytes lie across two lines of the L2 cache each, and the loads of all
// blocks take twice as long. Then two blocks of adjacent tiles form a cluster and share that operand: each loads half
// of every tile for both. Rows that are not even aligned to 16 bytes, which the copy engine asks for, are copied first,
// or loaded by threads (wgmma_pieces.cuh). Results with such rows are stored by warps (wgmma_rows.cuh).
//
// f32 operands are rounded to TF32 by the copy engine, and rhs along n is multiplied from registers (wgmma_turned.cuh);
// in full precision they come in parts (wgmma_parts.cuh).
#ifndef JAXOPS_OPS_MATMUL_WGMMA_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_CUH_

#include <cstdint>

#include "core/shared_memory.cuh"
#include "hopper/barrier.cuh"
#include "hopper/tensor_copy.cuh"
#include "hopper/wgmma.cuh"
#include "ops/matmul/wgmma_parts.cuh"
#include "ops/matmul/wgmma_pieces.cuh"
#include "ops/matmul/wgmma_ring.cuh"
#include "ops/matmul/wgmma_store.cuh"
#include "ops/matmul/wgmma_turned.cuh"
#include "ops/matmul/wgmma_work.cuh"

#if __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "wgmma needs sm_90a: for sm_90 WgmmaMatmul would be empty, and launched on Hopper all the same"
#endif

namespace jaxops::matmul {

// Loads kSize rows (of m or n) of an operand's k tile.
template <Major kMajor, int kSize, int kDepth>
__device__ void LoadTile(uint32_t target, const CUtensorMap& map, Barrier barrier, int first, int k_tile, int slice,
                         bool once = false) {
  if constexpr (kMajor == Major::kDepth) {
    hopper::LoadBox(target, map, barrier, k_tile * kDepth, first, slice, once);
  } else {
#pragma unroll
    for (int box = 0; box < kSize / kDepth; ++box)  // of kDepth rows of 128 bytes, which hold as many elements
      hopper::LoadBox(target + box * kDepth * hopper::kBoxRowBytes, map, barrier, first + box * kDepth, k_tile * kDepth,
                      slice, once);
  }
}

// Loads one half of it for both blocks of a pair. Boxes have half as many rows.
template <Major kMajor, int kSize, int kDepth>
__device__ void LoadHalf(uint32_t target, const CUtensorMap& map, Barrier barrier, int first, int k_tile, int slice) {
  const int half = static_cast<int>(hopper::ClusterRank());
  if constexpr (kMajor == Major::kDepth) {
    constexpr int kHalf = kSize / 2;
    hopper::LoadBoxForPair(target + half * kHalf * hopper::kBoxRowBytes, map, barrier, k_tile * kDepth,
                           first + half * kHalf, slice);
  } else {
    target += half * kDepth / 2 * hopper::kBoxRowBytes;
#pragma unroll
    for (int box = 0; box < kSize / kDepth; ++box)
      hopper::LoadBoxForPair(target + box * kDepth * hopper::kBoxRowBytes, map, barrier, first + box * kDepth,
                             k_tile * kDepth + half * kDepth / 2, slice);
  }
}

// How the copy engine loads a work's tiles.
struct TileLoads {
  const CUtensorMap &lhs, &rhs;
  int bytes;

  __device__ TileLoads(const WgmmaArguments& arguments, const WgmmaWork& work)
      : lhs(work.row >= arguments.lhs_edge.first ? arguments.lhs_at_edge : arguments.lhs),
        rhs(work.column >= arguments.rhs_edge.first ? arguments.rhs_at_edge : arguments.rhs),
        bytes(arguments.stage_bytes - (work.row >= arguments.lhs_edge.first ? arguments.lhs_edge.bytes : 0) -
              (work.column >= arguments.rhs_edge.first ? arguments.rhs_edge.bytes : 0)) {}
};

// Calls visit(work, lhs, rhs, fill) for each of the block's works; lhs, rhs: the operands' matrices. fill(load) calls
// load(stage, k_tile) for each of the work's k tiles as soon as the stage is free. Where the ring goes on from.
template <class Tile, class P, class Visit>
__device__ RingPlace<Tile> FillRing(const WgmmaArguments& arguments, const Ring<Tile>& ring, const Visit& visit) {
  const WgmmaWorks<Tile, P> works(arguments);
  RingPlace<Tile> place{0, 1};
  works.ForEach([&](const WgmmaWork& work) {
    int lhs, rhs;
    arguments.matrices.At(work.batch, &lhs, &rhs);
    visit(work, lhs, rhs, [&](const auto& load) {
#pragma unroll 1
      for (int k_tile = work.first; k_tile < work.last; ++k_tile) {
        ring.Empty(place.stage).Wait(place.parity);
        load(place.stage, k_tile);
        place.Advance();
      }
    });
  });
  return place;
}

template <class Tile, class P>
__device__ void LoadAll(const WgmmaArguments& arguments, const Ring<Tile>& ring) {
  const auto visit = [&](const WgmmaWork& work, int lhs, int rhs, const auto& fill) {
    const TileLoads loads(arguments, work);
    // A loop for each way of loading, without branches: multiplying a small tile takes hardly longer than a lane needs
    // to issue its loads.
    const auto fill_with = [&]<SharedOperand kShared, bool kRhsOnce> {
      fill([&](int stage, int k_tile) {
        if (!hopper::ElectLane()) return;
        const Barrier full = ring.Full(stage);
        full.ArriveAndExpect(loads.bytes);
        const uint32_t lhs_tile = ring.Lhs(stage), rhs_tile = ring.Rhs(stage);
        if constexpr (kShared == SharedOperand::kLhs) {
          LoadHalf<P::kLhs, Tile::kRows, P::kDepth>(lhs_tile, loads.lhs, full, work.row, k_tile, lhs);
        } else {
          LoadTile<P::kLhs, Tile::kRows, P::kDepth>(lhs_tile, loads.lhs, full, work.row, k_tile, lhs);
        }
        if constexpr (kShared == SharedOperand::kRhs) {
          LoadHalf<P::kRhs, Tile::kColumns, P::kDepth>(rhs_tile, loads.rhs, full, work.column, k_tile, rhs);
        } else {
          LoadTile<P::kRhs, Tile::kColumns, P::kDepth>(rhs_tile, loads.rhs, full, work.column, k_tile, rhs, kRhsOnce);
        }
      });
    };
    if (arguments.shared == SharedOperand::kLhs) {
      fill_with.template operator()<SharedOperand::kLhs, false>();
    } else if (arguments.shared == SharedOperand::kRhs) {
      fill_with.template operator()<SharedOperand::kRhs, false>();
    } else if (arguments.rhs_once) {
      fill_with.template operator()<SharedOperand::kNone, true>();
    } else {
      fill_with.template operator()<SharedOperand::kNone, false>();
    }
  };
  RingPlace<Tile> place = FillRing<Tile, P>(arguments, ring, visit);
  // Waits until the other block of the pair has used all that this one loaded for it, and arrives here no more.
  if (arguments.paired())
    for (int i = 0; i < Tile::kStages; ++i, place.Advance()) ring.Empty(place.stage).Wait(place.parity);
}

// The same by all warps of the warpgroup, if an operand comes in pieces; the first has the copy engine load the other.
template <class Tile, class P>
__device__ void LoadAllInPieces(const WgmmaArguments& arguments, const Ring<Tile>& ring, int warp) {
  const int lhs_piece = arguments.lhs_piece, rhs_piece = arguments.rhs_piece;
  const auto visit = [&](const WgmmaWork& work, int lhs, int rhs, const auto& fill) {
    const TileLoads loads(arguments, work);
    fill([&](int stage, int k_tile) {
      const Barrier full = ring.Full(stage);
      const uint32_t lhs_tile = ring.Lhs(stage), rhs_tile = ring.Rhs(stage);
      if (warp == 0 && hopper::ElectLane()) {
        full.ArriveAndExpect(loads.bytes);
        if (!lhs_piece) LoadTile<P::kLhs, Tile::kRows, P::kDepth>(lhs_tile, loads.lhs, full, work.row, k_tile, lhs);
        if (!rhs_piece)
          LoadTile<P::kRhs, Tile::kColumns, P::kDepth>(rhs_tile, loads.rhs, full, work.column, k_tile, rhs);
      }
      if (lhs_piece)
        LoadTileInPieces<P::kLhs, Tile::kRows>(lhs_tile, arguments.lhs_pieces, lhs_piece, work.row, k_tile, lhs);
      if (rhs_piece)
        LoadTileInPieces<P::kRhs, Tile::kColumns>(rhs_tile, arguments.rhs_pieces, rhs_piece, work.column, k_tile, rhs);
      full.ArriveWhenCopied();
    });
  };
  FillRing<Tile, P>(arguments, ring, visit);
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
  ResultStore<Tile, P> store(arguments, staging, bias, warpgroup);
  RingPlace<Tile> place;
  float sums[kBlocks][kColumns / 2];
  float promoted[kBlocks][kColumns / 2];  // not used, hence no registers, without promotion
  const bool in_pieces = P::kTakesPieces && arguments.in_pieces();
  const StageRelease<Tile> release(arguments, ring);
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
    const auto multiply = [&]<bool kLoadedByThreads> {
      for (int i = 0; i < depth; ++i) {
        ring.Full(place.stage).Wait(place.parity);
        // The tensor cores read shared memory as the copy engine does.
        if constexpr (kLoadedByThreads) hopper::FenceSharedForCopies();
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
            hopper::Settle(sums);
            release(pending);
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
#pragma unroll
              for (int j = 0; j < kColumns / 2; ++j) promoted[block][j] += sums[block][j];
            pending = -1, fresh = true, since = 0;
          }
        }
      }
    };
    if (in_pieces) {
      multiply.template operator()<true>();
    } else {
      multiply.template operator()<false>();
    }
    if constexpr (Tile::kPingPong) hopper::NamedArrive(kTurn + 1 - warpgroup, 2 * kWarpgroup);
    hopper::WaitProducts<0>();
    hopper::Settle(sums);
    if (pending >= 0) release(pending);
    store.AwaitBias();
    auto& results = Either<P::kPromotes>(sums, promoted);
    if constexpr (Tile::kMostParts > 1) {
      if (arguments.summed() && !SumCluster(arguments, ring, warpgroup, results)) return;
    }
    store.Store(results, work.row + first_block * 64, work);
  });
  store.Finish();
}

// Registers per thread: a block's warpgroups share 65,536, in steps of 8. With a single warpgroup that multiplies there
// are enough without moving any.
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
  // Multipliers wait until the ring's barriers are ready; the loader does not wait for them, as its code, run for the
  // first time, comes slowly. Barriers 1, 2, 4, 5: SyncTile, turns.
  constexpr int kReady = 6;
  const bool in_pieces = P::kTakesPieces && arguments.in_pieces();
  const int ready_threads = (in_pieces ? kWarpgroup : 32) + Tile::kMultipliers * kWarpgroup;
  constexpr int kReleases = 4 * (Tile::kPingPong ? 1 : Tile::kMultipliers);  // of a stage: a warp each
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
    if (summed) hopper::ClusterWait();  // needs nothing of others; but racecheck hangs if a thread never waits
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

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_CUH_
