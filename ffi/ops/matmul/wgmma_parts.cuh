// Products of f32 operands in parts, in full precision.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_PARTS_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_PARTS_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "hopper/wgmma.cuh"
#include "ops/matmul/wgmma_launch.h"
#include "ops/matmul/wgmma_ring.cuh"
#include "ops/matmul/wgmma_store.cuh"
#include "ops/matmul/wgmma_work.cuh"

namespace jaxops::matmul {

// A k tile of f32 operands in parts (SplitOperand) is multiplied in two halves: low high + high low in f16, then high
// high in TF32; or, if f16 cannot hold the parts of a block of 64 x 64 elements, both halves of k in TF32.
template <class Tile>
struct TileParts {
  static constexpr int kLhsBlocks = Tile::kRows / kSplitBlock, kRhsBlocks = Tile::kColumns / kSplitBlock;
  float lhs[kLhsBlocks], rhs[kRhsBlocks];  // the blocks' scales

  __device__ bool InF16() const {
    float least = lhs[0];
#pragma unroll
    for (float scale : lhs) least = fminf(least, scale);
#pragma unroll
    for (float scale : rhs) least = fminf(least, scale);
    return least > 0;
  }
  // Stages of the ring that a half takes.
  static __device__ int Stages(bool in_f16) { return in_f16 ? 2 : 3; }

  // Which part a stage's 128 bytes along k are of, and their first column in floats.
  struct Place {
    int part, column;
  };
  struct Places {
    Place lhs, rhs;
  };
  // depth: k tiles of the operands.
  static __device__ Places At(bool in_f16, int half, int stage, int k_tile, int depth) {
    const bool narrow = in_f16 && half == 0;
    const int column = k_tile * 64 + (in_f16 ? stage : half) * 32;
    const Place high = narrow ? Place{1, k_tile * 32} : Place{0, column};
    const Place low = narrow ? Place{1, (depth + k_tile) * 32} : Place{2, column};
    const bool whole = in_f16 ? half == 1 : stage == 2;
    return {!whole && stage == 0 ? low : high, !whole && stage == 1 ? low : high};
  }
};

// The scales of a work's k tiles.
template <class Tile>
class PartsOfWork {
 public:
  using Parts = TileParts<Tile>;
  __device__ PartsOfWork(const WgmmaArguments& arguments, const WgmmaWork& work, int lhs_matrix, int rhs_matrix)
      : arguments_(arguments) {
    Find(arguments.problem.m, lhs_matrix, work.row, lhs_);
    Find(arguments.problem.n, rhs_matrix, work.column, rhs_);
  }
  __device__ Parts At(int k_tile) const {
    Parts parts;
#pragma unroll
    for (int i = 0; i < Parts::kLhsBlocks; ++i) parts.lhs[i] = arguments_.lhs_scales[lhs_[i] + k_tile];
#pragma unroll
    for (int i = 0; i < Parts::kRhsBlocks; ++i) parts.rhs[i] = arguments_.rhs_scales[rhs_[i] + k_tile];
    return parts;
  }

 private:
  template <int kBlocks>
  __device__ void Find(int64_t size, int matrix, int first, uint32_t (&places)[kBlocks]) const {
    const uint32_t blocks = static_cast<uint32_t>((size + kSplitBlock - 1) / kSplitBlock);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      places[i] = (matrix * blocks + min(first / kSplitBlock + i, blocks - 1)) * arguments_.raster.depth;
  }

  const WgmmaArguments& arguments_;
  uint32_t lhs_[Parts::kLhsBlocks], rhs_[Parts::kRhsBlocks];
};

template <class Tile, class P>
__device__ void LoadParts(const WgmmaArguments& arguments, const Ring<Tile>& ring) {
  using Parts = TileParts<Tile>;
  const WgmmaWorks<Tile, P> works(arguments);
  RingPlace<Tile> place{0, 1};
  works.ForEach([&](const WgmmaWork& work) {
    int lhs, rhs;  // operands' matrices
    arguments.matrices.At(work.batch, &lhs, &rhs);
    const PartsOfWork<Tile> parts(arguments, work, lhs, rhs);
    for (int k_tile = work.first; k_tile < work.last; ++k_tile) {
      const bool in_f16 = parts.At(k_tile).InF16();
      for (int half = 0; half < 2; ++half)
        for (int stage = 0; stage < Parts::Stages(in_f16); ++stage) {
          const auto at = Parts::At(in_f16, half, stage, k_tile, static_cast<int>(arguments.raster.depth));
          ring.Empty(place.stage).Wait(place.parity);
          const Barrier full = ring.Full(place.stage);
          full.ArriveAndExpect(Tile::kStageBytes);
          hopper::LoadBox(ring.Lhs(place.stage), arguments.lhs, full, at.lhs.column, work.row,
                          lhs * kSplitParts + at.lhs.part);
          hopper::LoadBox(ring.Rhs(place.stage), arguments.rhs, full, at.rhs.column, work.column,
                          rhs * kSplitParts + at.rhs.part);
          place.Advance();
        }
    }
  });
}

// Long sums in the tensor cores are truncated: those of each half of a k tile are promoted, added to f32 sums, while
// the products of the next half run; but ptxas takes that once a k tile. One warpgroup waits for its products after the
// second half, the other after the first, so that one of them keeps the tensor cores busy.
template <class Tile, class P>
__device__ void MultiplyParts(const WgmmaArguments& arguments, const Ring<Tile>& ring, uint32_t staging, uint32_t bias,
                              int warpgroup) {
  static_assert(Tile::kBlocks == 1 && !Tile::kPingPong);
  constexpr int kColumns = Tile::kColumns;
  const WgmmaWorks<Tile, P> works(arguments);
  ResultStore<Tile, typename P::Narrow, false> store(arguments, staging, bias, warpgroup);
  RingPlace<Tile> place;
  float sums[1][kColumns / 2], promoted[1][kColumns / 2];
  works.ForEach([&](const WgmmaWork& work) {
    store.FetchBias(work);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) promoted[0][i] = 0;
    int pending = -1;  // the stage of the products that may still be running
    const auto release = [&] {
      if (threadIdx.x % 32 == 0) ring.Empty(pending).Arrive();
    };
    // Begins the products of the stage that comes next, and waits for those of the one before. add: to the sums.
    const auto multiply = [&]<class T>(auto& sums, bool add) {
      ring.Full(place.stage).Wait(place.parity);
      BeginProducts<T, T, Tile, P>(ring, place.stage, warpgroup, sums, add);
      hopper::WaitProducts<1>();
      if (pending >= 0) release();
      pending = place.stage;
      place.Advance();
    };
    const auto settle = [&] {
      hopper::WaitProducts<0>();
      release();
      pending = -1;
    };
    using Parts = TileParts<Tile>;
    float first_sums[1][kColumns / 2];
    int lhs, rhs;  // operands' matrices
    arguments.matrices.At(work.batch, &lhs, &rhs);
    const PartsOfWork<Tile> parts_of(arguments, work, lhs, rhs);
    float factors[Parts::kRhsBlocks];
    const auto set_factors = [&](const Parts& parts) {
      const float own = fabsf(Parts::kLhsBlocks > 1 && warpgroup ? parts.lhs[Parts::kLhsBlocks - 1] : parts.lhs[0]);
#pragma unroll
      for (int i = 0; i < Parts::kRhsBlocks; ++i) factors[i] = own * fabsf(parts.rhs[i]);
    };
    const auto promote = [&](const auto& sums) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) promoted[0][i] += sums[0][i] * factors[i / 32];
    };
    const auto begin_first = [&](bool in_f16) {
      if (in_f16) {
        multiply.template operator()<__half>(first_sums, false);
      } else {
        multiply.template operator()<float>(first_sums, false);
      }
    };
    const auto end_first = [&](bool in_f16) {
      if (in_f16) {
        multiply.template operator()<__half>(first_sums, true);
      } else {
        multiply.template operator()<float>(first_sums, true);
        multiply.template operator()<float>(first_sums, true);
      }
    };
    const auto end_second = [&](bool in_f16) {
      multiply.template operator()<float>(sums, true);
      if (!in_f16) multiply.template operator()<float>(sums, true);
    };
    Parts parts = parts_of.At(work.first);
    if (Tile::kMultipliers == 1 || warpgroup == 0) {
      for (int k_tile = work.first; k_tile < work.last; ++k_tile) {
        const bool in_f16 = parts.InF16();
        set_factors(parts);
        parts = parts_of.At(min(k_tile + 1, work.last - 1));
        begin_first(in_f16);
        end_first(in_f16);
        multiply.template operator()<float>(sums, false);
        promote(first_sums);
        end_second(in_f16);
        settle();
        promote(sums);
      }
    } else {
      bool in_f16 = parts.InF16();
      begin_first(in_f16);
      end_first(in_f16);
      settle();
      set_factors(parts);
      promote(first_sums);
      for (int k_tile = work.first + 1; k_tile < work.last; ++k_tile) {
        parts = parts_of.At(k_tile);
        multiply.template operator()<float>(sums, false);
        end_second(in_f16);
        in_f16 = parts.InF16();
        begin_first(in_f16);
        promote(sums);
        end_first(in_f16);
        set_factors(parts);
        settle();
        promote(first_sums);
      }
      multiply.template operator()<float>(sums, false);
      end_second(in_f16);
      settle();
      promote(sums);
    }
    hopper::WaitProducts<0>();
    store.AwaitBias();
    if constexpr (Tile::kSplitsInCluster) {
      if (arguments.cluster > 1 && !SumCluster<Tile>(arguments, ring.stages, warpgroup, promoted)) return;
    }
    store.Store(promoted, work.row + warpgroup * 64, work);
  });
  store.Finish();
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_PARTS_CUH_
