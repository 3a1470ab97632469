// matmul on Hopper's tensor cores: the warpgroups that multiply.
//
// MultiplyAll takes both operands from shared memory, and serves all dtypes. MultiplyParts is for f32 in full
// precision, whose operands come in parts. MultiplyTurned is for f32 as TF32 with rhs along n: the tensor cores take
// f32 from shared memory only along k, and from registers along any axis. It computes the turned product, out^T = rhs^T
// lhs^T, for which threads read rhs^T. A thread reads two adjacent rhs columns at a time, and has and stores the sums
// for the same result columns.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_COMPUTE_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_COMPUTE_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "core/shared_memory.cuh"
#include "hopper/barrier.cuh"
#include "hopper/wgmma.cuh"
#include "ops/matmul/wgmma_load.cuh"
#include "ops/matmul/wgmma_store.cuh"
#include "ops/matmul/wgmma_work.cuh"

namespace jaxops::matmul {

// Frees the stages that a warp has multiplied, in both blocks of a pair. Without branches: they cost much of a short k
// tile's time.
template <class Tile>
class StageRelease {
 public:
  __device__ StageRelease(const WgmmaArguments& arguments, const Ring<Tile>& ring)
      : ring_(ring),
        own_(threadIdx.x % 32 == 0),
        both_(own_ && arguments.paired()),
        other_(hopper::AddressIn(hopper::ClusterRank() ^ arguments.paired(), ring.Empty(0).address)) {}

  __device__ void operator()(int stage) const {
    ring_.Empty(stage).ArriveIf(own_);
    Barrier::ArriveInClusterIf(both_, other_ + stage * 8);
  }

 private:
  const Ring<Tile>& ring_;
  const bool own_, both_;
  const uint32_t other_;
};

// Begins the products for two tiles in shared memory, with the warpgroup's lhs rows. A, B: the elements in their
// 128-byte rows. add: whether to add to the sums; otherwise they are overwritten.
template <class A, class B, class Tile, class P>
__device__ void BeginProducts(uint32_t lhs_tile, uint32_t rhs_tile, float (&sums)[Tile::kBlocks][Tile::kColumns / 2],
                              bool add) {
  const uint64_t lhs = hopper::Descriptor(lhs_tile), rhs = hopper::Descriptor(rhs_tile);
  hopper::FenceRegisters();
#pragma unroll
  for (int step = 0; step < hopper::kSteps; ++step)
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block)
      hopper::MultiplyAdd<A, B, Tile::kColumns, P::kLhs, P::kRhs>(
          sums[block], lhs + (block * kBlockBytes + step * hopper::kStepBytes<P::kLhs>) / 16,
          rhs + step * hopper::kStepBytes<P::kRhs> / 16, step || add);
  hopper::CommitProducts();
}

// Adds the sums from a tile's other parts, in order, to the first part's, and is true in the first part's block. The
// other blocks send their sums into its ring once the ring is free: each block has one work.
template <class Tile, int kBlocks, int kSums>
__device__ bool SumCluster(const WgmmaArguments& arguments, const Ring<Tile>& ring, int warpgroup,
                           float (&sums)[kBlocks][kSums]) {
  constexpr int kGroups = kSums / 4;  // 4 sums each
  const int own_part = static_cast<int>(hopper::ClusterRank());
  const auto place = [&](int part, int block, int group) {
    const int line = (warpgroup * kBlocks + block) * kGroups + group;
    return ring.stages + (part - 1) * Tile::kSumBytes + (line * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  };
  hopper::ClusterWait();  // the others run
  if (own_part > 0) {
    const uint32_t sums_arrived = hopper::AddressIn(0, ring.Sums().address);
    const uint32_t shift = hopper::AddressIn(0, ring.stages) - ring.stages;
    ring.Free().Wait(0);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const float* const own = &sums[block][group * 4];
        hopper::StoreInCluster(place(own_part, block, group) + shift, make_float4(own[0], own[1], own[2], own[3]),
                               sums_arrived);
      }
    return false;
  }
  const int lane = threadIdx.x % 32;
  const bool tells = lane > 0 && lane < arguments.parts;
  Barrier::ArriveInClusterIf(tells, hopper::AddressIn(tells ? lane : 0, ring.Free().address));
  ring.Sums().WaitForCluster(0);
  for (int other = 1; other < arguments.parts; ++other) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        float* const own = &sums[block][group * 4];
        const float4 v = LoadShared<float4>(place(other, block, group));
        own[0] += v.x, own[1] += v.y, own[2] += v.z, own[3] += v.w;
      }
  }
  return true;
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
    int pending = -1;   // the stage whose products may still be running
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

// The tensor cores truncate long sums. So each k tile's sums are promoted: added to f32 sums in registers. High times
// low parts come first, so that they are promoted while high parts are multiplied; ptxas takes no more overlap than
// that.
template <class Tile, class P>
__device__ void MultiplyParts(const WgmmaArguments& arguments, const Ring<Tile>& ring, uint32_t staging, uint32_t bias,
                              int warpgroup) {
  static_assert(Tile::kBlocks == 1 && !Tile::kPingPong && Tile::kParts == 2);
  using Scales = TileScales<Tile>;
  constexpr int kColumns = Tile::kColumns;
  const WgmmaWorks<Tile, P> works(arguments);
  ResultStore<Tile, P> store(arguments, staging, bias, warpgroup);
  RingPlace<Tile> place;
  float high[1][kColumns / 2], mixed[1][kColumns / 2], promoted[1][kColumns / 2];
  // Begins a stage's products. add: whether to add to the sums.
  const auto multiply = [&]<class T>(bool add) {
    ring.Full(place.stage).Wait(place.parity);
    const auto begin = [&](int lhs_part, int rhs_part, auto& sums, bool add) {
      BeginProducts<T, T, Tile, P>(ring.Lhs(place.stage, lhs_part) + warpgroup * kBlockBytes,
                                   ring.Rhs(place.stage, rhs_part), sums, add);
    };
    begin(0, 1, mixed, add);
    begin(1, 0, mixed, true);
    begin(0, 0, high, add);
  };
  const auto release = [&] {
    if (threadIdx.x % 32 == 0) ring.Empty(place.stage).Arrive();
    place.Advance();
  };
  works.ForEach([&](const WgmmaWork& work) {
    store.FetchBias(work);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) promoted[0][i] = 0;
    int lhs, rhs;  // operands' matrices
    arguments.matrices.At(work.batch, &lhs, &rhs);
    const ScalesOfWork<Tile> scales_of(arguments, work, lhs, rhs);
    Scales scales = scales_of.At(work.first);
    for (int k_tile = work.first; k_tile < work.last; ++k_tile) {
      const bool in_f16 = scales.InF16();
      const float own = fabsf(Scales::kLhsBlocks > 1 && warpgroup ? scales.lhs[Scales::kLhsBlocks - 1] : scales.lhs[0]);
      float factors[Scales::kRhsBlocks];
#pragma unroll
      for (int i = 0; i < Scales::kRhsBlocks; ++i) factors[i] = own * fabsf(scales.rhs[i]);
      scales = scales_of.At(min(k_tile + 1, work.last - 1));
      const auto promote = [&](const auto& sums, float factor) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) promoted[0][i] += sums[0][i] * (factors[i / 32] * factor);
      };
      if (in_f16) {
        multiply.template operator()<__half>(false);
      } else {
        multiply.template operator()<float>(false);
        hopper::WaitProducts<0>();
        release();
        multiply.template operator()<float>(true);
      }
      hopper::WaitProducts<1>();
      hopper::Settle(mixed);
      promote(mixed, kLowScale);
      hopper::WaitProducts<0>();
      hopper::Settle(high);
      release();
      promote(high, 1);
    }
    store.AwaitBias();
    if constexpr (Tile::kMostParts > 1) {
      if (arguments.summed() && !SumCluster(arguments, ring, warpgroup, promoted)) return;
    }
    store.Store(promoted, work.row + warpgroup * 64, work);
  });
  store.Finish();
}

// A thread's part in an rhs k tile, 64 columns per warpgroup, as hopper::MultiplyAddFromRegisters takes it: from two
// adjacent columns the rows 8 i + t and 8 i + t + 4, t = thread % 4.
class TurnedFragments {
 public:
  // The first of the two, among the warpgroup's columns. Two warps share a box with 32 columns; a thread reads one half
  // of the 16-byte piece Piece(). With these numbers and halves the swizzle leads all threads that read at the same
  // time to different banks.
  static __device__ int Column() { return Box() * 32 + Piece() * 4 + Half() * 2; }

  // rhs_tile: the warpgroup's columns.
  __device__ void Load(uint32_t rhs_tile) {
    const int row = threadIdx.x % 4;
    const uint32_t low = rhs_tile + (Box() * 32 + row) * hopper::kBoxRowBytes + (Piece() ^ row) * 16 + Half() * 8;
    const uint32_t high = (low ^ 64) + 4 * hopper::kBoxRowBytes;
#pragma unroll
    for (int step = 0; step < hopper::kSteps; ++step)
#pragma unroll
      for (int quad = 0; quad < 2; ++quad) {
        const uint2 pair = LoadShared<uint2>((quad ? high : low) + step * 8 * hopper::kBoxRowBytes);
        values_[step][2 * quad] = pair.x, values_[step][2 * quad + 1] = pair.y;
      }
  }

  // Begins the products with an lhs k tile, all its kRows rows.
  template <int kRows>
  __device__ void Multiply(uint32_t lhs_tile, float (&sums)[kRows / 2], bool add) const {
    const uint64_t lhs = hopper::Descriptor(lhs_tile);
    hopper::FenceRegisters();
#pragma unroll
    for (int step = 0; step < hopper::kSteps; ++step)
      hopper::MultiplyAddFromRegisters<kRows>(sums, values_[step], lhs + step * hopper::kStepBytes<Major::kDepth> / 16,
                                              step || add);
    hopper::CommitProducts();
  }

  // After hopper::WaitProducts.
  __device__ void Settle() { hopper::Settle(values_); }

 private:
  static __device__ int Warp() { return threadIdx.x % kWarpgroup / 32; }
  static __device__ int Group() { return threadIdx.x % 32 / 4; }
  static __device__ int Box() { return Warp() / 2; }
  static __device__ int Piece() { return Group() / 2 + Group() % 2 * 4; }
  static __device__ int Half() { return (Warp() ^ Group() / 2) % 2; }

  uint32_t values_[hopper::kSteps][4];
};

template <class Tile, class P>
__device__ void MultiplyTurned(const WgmmaArguments& arguments, const Ring<Tile>& ring, int warpgroup) {
  constexpr int kRows = Tile::kRows, kColumns = 64;  // per warpgroup
  static_assert(Tile::kColumns == Tile::kMultipliers * kColumns && !Tile::kPingPong);
  const WgmmaWorks<Tile, P> works(arguments);
  RingPlace<Tile> place;
  float sums[1][kRows / 2];
  TurnedFragments even, odd;
  const auto load = [&](TurnedFragments& fragments) {
    ring.Full(place.stage).Wait(place.parity);
    fragments.Load(ring.Rhs(place.stage) + warpgroup * kColumns * hopper::kBoxRowBytes);
  };
  const StageRelease<Tile> release(arguments, ring);
  works.ForEach([&](const WgmmaWork& work) {
    const int depth = work.last - work.first;
    const TurnedStore<P> store(arguments.problem, work, work.column + warpgroup * kColumns + TurnedFragments::Column());
    // K tile i's products run while the next fragments are read.
    const auto multiply = [&](int i, TurnedFragments& own, TurnedFragments& next) {
      const int stage = place.stage;
      own.Multiply<kRows>(ring.Lhs(stage), sums[0], i > 0);
      place.Advance();
      if (i + 1 < depth) load(next);
      hopper::WaitProducts<0>();
      own.Settle();
      release(stage);
    };
    load(even);
    for (int i = 0; i < depth; i += 2) {
      multiply(i, even, odd);
      if (i + 1 < depth) multiply(i + 1, odd, even);
    }
    hopper::Settle(sums);
    if constexpr (Tile::kMostParts > 1) {
      if (arguments.summed() && !SumCluster(arguments, ring, warpgroup, sums)) return;
    }
    store.Store(sums);
  });
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_COMPUTE_CUH_
