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

// The scales of the blocks (SplitOperand) of a tile's k tile.
template <class Tile>
struct TileScales {
  static constexpr int kLhsBlocks = Tile::kRows / kSplitBlock, kRhsBlocks = Tile::kColumns / kSplitBlock;
  float lhs[kLhsBlocks], rhs[kRhsBlocks];

  // Whether all parts are there in f16. Else they are in TF32, of which a stage holds half of a k tile.
  __device__ bool InF16() const {
    float least = lhs[0];
#pragma unroll
    for (float scale : lhs) least = fminf(least, scale);
#pragma unroll
    for (float scale : rhs) least = fminf(least, scale);
    return least > 0;
  }
};

// Those of a work's k tiles.
template <class Tile>
class ScalesOfWork {
 public:
  using Scales = TileScales<Tile>;
  __device__ ScalesOfWork(const WgmmaArguments& arguments, const WgmmaWork& work, int lhs_matrix, int rhs_matrix)
      : arguments_(arguments) {
    Find(arguments.problem.m, lhs_matrix, work.row, lhs_);
    Find(arguments.problem.n, rhs_matrix, work.column, rhs_);
  }
  __device__ Scales At(int k_tile) const {
    Scales scales;
#pragma unroll
    for (int i = 0; i < Scales::kLhsBlocks; ++i) scales.lhs[i] = arguments_.lhs_scales[lhs_[i] + k_tile];
#pragma unroll
    for (int i = 0; i < Scales::kRhsBlocks; ++i) scales.rhs[i] = arguments_.rhs_scales[rhs_[i] + k_tile];
    return scales;
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
  uint32_t lhs_[Scales::kLhsBlocks], rhs_[Scales::kRhsBlocks];
};

template <class Tile, class P>
__device__ void LoadParts(const WgmmaArguments& arguments, const Ring<Tile>& ring) {
  const WgmmaWorks<Tile, P> works(arguments);
  const int depth = static_cast<int>(arguments.raster.depth);
  RingPlace<Tile> place{0, 1};
  works.ForEach([&](const WgmmaWork& work) {
    int lhs, rhs;  // operands' matrices
    arguments.matrices.At(work.batch, &lhs, &rhs);
    const ScalesOfWork<Tile> scales(arguments, work, lhs, rhs);
    for (int k_tile = work.first; k_tile < work.last; ++k_tile) {
      const bool in_f16 = scales.At(k_tile).InF16();
      for (int stage = 0; stage < (in_f16 ? 1 : 2); ++stage) {
        ring.Empty(place.stage).Wait(place.parity);
        if (hopper::ElectLane()) {
          const Barrier full = ring.Full(place.stage);
          full.ArriveAndExpect(Tile::kStageBytes);
#pragma unroll
          for (int part = 0; part < Tile::kParts; ++part) {
            const int column = (in_f16 ? part * depth + k_tile : k_tile * 2 + stage) * 32;  // in floats
            const int slice = in_f16 ? 0 : 1 + part;
            hopper::LoadBox(ring.Lhs(place.stage, part), arguments.lhs, full, column, work.row,
                            lhs * kSplitSlices + slice);
            hopper::LoadBox(ring.Rhs(place.stage, part), arguments.rhs, full, column, work.column,
                            rhs * kSplitSlices + slice);
          }
        }
        place.Advance();
      }
    }
  });
}

// Long sums in the tensor cores are truncated: those of each k tile are promoted, added to f32 sums in registers. The
// products of high and low parts come first, so that they are promoted while high parts are multiplied; ptxas takes
// no more than that.
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
  // Begins the products of a stage. add: to the sums.
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

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_PARTS_CUH_
