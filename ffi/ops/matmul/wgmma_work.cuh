// What the blocks of the tensor cores' kernel do: tiles of the result, kinds of product, and who takes which tile when.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_WORK_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_WORK_CUH_

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "core/types.cuh"
#include "hopper/barrier.cuh"
#include "hopper/tensor_copy.cuh"
#include "hopper/wgmma.cuh"
#include "ops/matmul/problem.h"

namespace jaxops::matmul {

using hopper::Barrier;
using hopper::kBlockBytes;
using hopper::kWarpgroup;
using hopper::Major;

enum class Schedule { kCooperative, kPingPong };

// The result's tile of one block, the warpgroups that multiply, and the stages of the ring. Less than 64 rows are for
// products of no more rows: only these are loaded; what is multiplied beyond them is never stored.
template <int kRows_, int kColumns_, int kMultipliers_, int kStages_, Schedule kSchedule_ = Schedule::kCooperative,
          int kResident_ = 1, int kStaging_ = 2>
struct WgmmaTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kMultipliers = kMultipliers_, kStages = kStages_;
  static constexpr bool kPingPong = kSchedule_ == Schedule::kPingPong;
  static constexpr int kResident = kResident_;  // blocks of a multiprocessor
  static constexpr int kThreads = (kMultipliers + 1) * kWarpgroup;
  static constexpr bool kWhole = kRows % 64 == 0;
  static constexpr int kBlocks = kWhole ? kRows / 64 / (kPingPong ? 1 : kMultipliers) : 1;  // of 64 rows, a warpgroup
  // With more sums than these in registers there is no room for a store that is not the copy engine's.
  static constexpr bool kStoresAnyRows = kBlocks * kColumns <= 256;
  static constexpr int kLhsBytes = kRows * hopper::kBoxRowBytes, kRhsBytes = kColumns * hopper::kBoxRowBytes;
  static constexpr int kStageBytes = kLhsBytes + kRhsBytes;
  static constexpr int kStagingBuffers = kStaging_;  // of 64 rows by 128 bytes: a warpgroup's results on their way out
  static constexpr int kStagingBytes = kStagingBuffers * kBlockBytes;
  static constexpr int kBarrierBytes = 2 * kStages * 8;
  static constexpr int kBiasBytes = kColumns * 4 * (kPingPong ? 2 : 1);  // of a tile in work
  static constexpr int kSharedBytes =                                    // 1024: to align the stages
      1024 + kStages * kStageBytes + kMultipliers * kStagingBytes + kBarrierBytes + kBiasBytes;
  // Whether clusters may sum the parts of a tile: there must be room for the sums in the ring.
  static constexpr bool kSplitsInCluster =
      !kPingPong && kBlocks * kColumns <= 128 && kMultipliers * kBlocks * 64 * kColumns * 4 <= kStages * kStageBytes;
  static_assert((kWhole || (kRows % 8 == 0 && kMultipliers == 1)) && kColumns % 64 == 0 &&
                kResident * (kSharedBytes + 1024) <= 228 << 10);
};

// What is multiplied, and how. T, V: the operands' types (float: TF32). kTerms: 1, or 3 to multiply operands that are
// split in two parts (high and low bits): low high + high low + high high. kPromotes: the tensor cores' sums, which are
// truncated at each step, are added to f32 sums in registers after every few k tiles.
template <class T_, class V_, Major kLhs_, Major kRhs_, int kTerms_ = 1, bool kPromotes_ = false>
struct Product {
  using T = T_;
  using V = V_;
  static constexpr Major kLhs = kLhs_, kRhs = kRhs_;
  static constexpr int kTerms = kTerms_;
  static constexpr bool kPromotes = kPromotes_;
  static constexpr int kDepth = hopper::kBoxRowBytes / sizeof(T);  // of a k tile
  // The parts, high 0 and low 1, that term `term` multiplies.
  static __device__ int LhsPart(int term) { return kTerms == 3 && term == 0; }
  static __device__ int RhsPart(int term) { return kTerms == 3 && term == 1; }
  // 16-bit results have the operands' type; those of 8-bit operands are bf16.
  using Narrow = std::conditional_t<sizeof(T) == 2, T, __nv_bfloat16>;
};

struct WgmmaArguments {
  CUtensorMap lhs, rhs, out, preactivation;
  Problem problem;
  int splits;            // of k
  int cluster;           // 1, or splits: the parts of a tile are the blocks of a cluster
  int band;              // tile rows
  int promote;           // k tiles, counted for each term, after which sums are promoted
  bool wide_out;         // results are f32
  bool boxes_out;        // results can be stored by the copy engine
  const int32_t* unfit;  // if not null and not 0: leave, another kernel does it
};

// A tile of the result and a range of k.
struct WgmmaWork {
  int row, column;
  int first, last;  // k tiles
  int batch;
  int slice;  // of out
};

template <class Tile, class P>
class WgmmaWorks {
 public:
  __device__ explicit WgmmaWorks(const WgmmaArguments& arguments)
      : arguments_(arguments),
        rows_(Ceiling(arguments.problem.m, Tile::kRows)),
        columns_(Ceiling(arguments.problem.n, Tile::kColumns)),
        depth_(Ceiling(arguments.problem.k, P::kDepth)),
        batches_(static_cast<uint32_t>(arguments.problem.batches)) {}

  // This block's works are first(), first() + step(), ... below count().
  __device__ uint32_t count() const { return per_split() * arguments_.splits; }
  __device__ uint32_t first() const {
    if (arguments_.cluster == 1) return blockIdx.x;
    return per_split() * hopper::ClusterRank() + blockIdx.x / arguments_.cluster;
  }
  __device__ uint32_t step() const { return arguments_.cluster == 1 ? gridDim.x : count(); }

  __device__ WgmmaWork At(uint32_t index) const {
    const uint32_t tiles = rows_ * columns_, band_rows = arguments_.band;
    uint32_t slice = 0, split = 0;
    if (count() > tiles) {
      slice = index / tiles;
      index -= slice * tiles;
      split = arguments_.splits == 1 ? 0 : slice / batches_;
    }
    const uint32_t per_band = band_rows * columns_, band = index / per_band, within = index - band * per_band;
    const uint32_t height = min(band_rows, rows_ - band * band_rows);
    const uint32_t column = within / height, row = band * band_rows + within - column * height;
    return {static_cast<int>(row * Tile::kRows),
            static_cast<int>((band % 2 ? columns_ - 1 - column : column) * Tile::kColumns),
            static_cast<int>(uint64_t{depth_} * split / arguments_.splits),
            static_cast<int>(uint64_t{depth_} * (split + 1) / arguments_.splits),
            static_cast<int>(slice - split * batches_),
            static_cast<int>(slice)};
  }

 private:
  static __device__ uint32_t Ceiling(int64_t size, int tile) {
    return (static_cast<uint32_t>(size) + tile - 1) / tile;  // LaunchTile has seen that all fits into 31 bits
  }
  __device__ uint32_t per_split() const { return rows_ * columns_ * batches_; }

  const WgmmaArguments& arguments_;
  const uint32_t rows_, columns_, depth_, batches_;
};

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_WORK_CUH_
