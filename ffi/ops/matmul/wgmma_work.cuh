// matmul on Hopper's tensor cores (wgmma): the tiles, a block's work, and the ring of stages that a block's warps
// share. Read the kernel's files in this order: wgmma_work, wgmma_load, wgmma_compute, wgmma_store, wgmma_launch.
// wgmma_pass.cuh is for products with a larger epilogue.
//
// A block has one warpgroup that loads and one or two that multiply. Operand tiles pass through a ring of stages in
// shared memory. A `full` barrier says that a stage has arrived, an `empty` one that it may be filled again. Blocks are
// persistent. They take result tiles in turn, in bands of tile rows that go back and forth, so that blocks that run
// together share operands in the L2 cache.
//
// Two multiplying warpgroups work in one of two ways. Cooperative: each takes half of a tile's rows. Ping-pong: each
// takes whole tiles, and stores one while the other multiplies.
//
// k may be split in parts. Their sums are added in a fixed order: by a cluster's first block, after the others have
// sent their sums to its shared memory; or, if there are many parts, by a kernel that reads f32 partial results from
// memory.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_WORK_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_WORK_CUH_

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/types.cuh"
#include "hopper/barrier.cuh"
#include "hopper/tensor_copy.cuh"
#include "hopper/wgmma.cuh"
#include "ops/matmul/epilogue.cuh"
#include "ops/matmul/problem.h"
#include "ops/matmul/wgmma.h"

namespace jaxops::matmul {

using hopper::Barrier;
using hopper::kBlockBytes;
using hopper::kWarpgroup;
using hopper::Major;

enum class Schedule { kCooperative, kPingPong };

// One block's result tile, the warpgroups that multiply, and the ring's stages. kParts: tiles per operand in a stage.
template <int kRows_, int kColumns_, int kMultipliers_, int kStages_, Schedule kSchedule_ = Schedule::kCooperative,
          int kStaging_ = 2, int kParts_ = 1>
struct WgmmaTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kMultipliers = kMultipliers_, kStages = kStages_;
  static constexpr int kParts = kParts_;
  static constexpr bool kPingPong = kSchedule_ == Schedule::kPingPong;
  static constexpr int kThreads = (kMultipliers + 1) * kWarpgroup;
  static constexpr int kBlocks = kRows / 64 / (kPingPong ? 1 : kMultipliers);  // 64 rows each, per warpgroup
  // Otherwise the copy engine stores results: while a warpgroup has a whole tile's sums in registers, there is no room
  // for more.
  static constexpr bool kStoresAnyRows = !kPingPong;
  static constexpr int kLhsBytes = kRows * hopper::kBoxRowBytes, kRhsBytes = kColumns * hopper::kBoxRowBytes;
  static constexpr int kStageBytes = kParts * (kLhsBytes + kRhsBytes);
  static constexpr int kStagingBuffers = kStaging_;  // 64 rows by 128 bytes: a warpgroup's results on their way out
  static constexpr int kStagingBytes = kStagingBuffers * kBlockBytes;
  static constexpr int kBarrierBytes = (2 * kStages + 2) * 8;
  static constexpr int kSumBytes = kRows * kColumns * 4;
  static constexpr int kSums = kRows * kColumns / kWarpgroup / (kPingPong ? 1 : kMultipliers);  // per thread
  static constexpr int kBiasBytes = kColumns * 4 * (kPingPong ? 2 : 1);                         // for tiles in work
  static constexpr int kSharedBytes =  // 1024: to align the stages
      1024 + kStages * kStageBytes + kMultipliers * kStagingBytes + kBarrierBytes + kBiasBytes;
  // The most parts per tile that a cluster may sum: the ring must have room for all parts' sums except one.
  static constexpr int kMostParts = kPingPong || kSums > 64 ? 1 : std::min(8, 1 + kStages * kStageBytes / kSumBytes);
  static_assert(kRows % 64 == 0 && kColumns % 64 == 0 && kSharedBytes + 1024 <= 228 << 10);
};

// Which numbers are multiplied, and how. T, V: the operands' types (float: TF32). kPromotes: the tensor cores' sums,
// which are truncated at each step, are added to f32 sums in registers after every few k tiles. kInParts: f32 operands
// that SplitOperands has split.
template <class T_, class V_, Major kLhs_, Major kRhs_, bool kPromotes_ = false, bool kInParts_ = false>
struct Product {
  using T = T_;
  using V = V_;
  static constexpr Major kLhs = kLhs_, kRhs = kRhs_;
  static constexpr bool kPromotes = kPromotes_, kInParts = kInParts_;
  static constexpr int kDepth = hopper::kBoxRowBytes / sizeof(T) * (kInParts ? 2 : 1);  // per k tile
  static constexpr bool kTakesPieces = sizeof(T) == 2;                                  // operands that threads load
  static constexpr bool kTurned = sizeof(T) == 4 && kRhs == Major::kSpace;              // see wgmma_compute.cuh
  using Result = WgmmaResult<T>;
  // For activations of results with type U.
  template <class U>
  static constexpr Accuracy kAccuracy = sizeof(T) == 4 && !kInParts ? Accuracy::kNarrow : kAccuracyFor<U>;
};

// The operand matrices that a batch index multiplies.
struct MatrixIndices {
  int axes;
  Divisor32 sizes[kMaxBatchAxes];
  uint32_t lhs[kMaxBatchAxes], rhs[kMaxBatchAxes];

  MatrixIndices() = default;
  explicit MatrixIndices(const Problem& p) : axes(p.batch.axes) {
    for (int axis = 0; axis < axes; ++axis) {
      sizes[axis] = Divisor32(static_cast<uint32_t>(p.batch.sizes[axis]));
      lhs[axis] = static_cast<uint32_t>(p.batch.strides[axis].lhs / (p.m * p.k));
      rhs[axis] = static_cast<uint32_t>(p.batch.strides[axis].rhs / (p.k * p.n));
    }
  }
  __device__ void At(uint32_t index, int* lhs_matrix, int* rhs_matrix) const {
    uint32_t left = 0, right = 0;
#pragma unroll 1
    for (int axis = axes - 1; axis >= 0; --axis) {
      const uint32_t rest = sizes[axis].Divide(index), i = index - rest * sizes[axis].divisor;
      left += i * lhs[axis];
      right += i * rhs[axis];
      index = rest;
    }
    *lhs_matrix = static_cast<int>(left);
    *rhs_matrix = static_cast<int>(right);
  }
};

// The order of tiles (or tile pairs): bands of tile rows that go back and forth, matrix by matrix, k part by k part.
struct Raster {
  uint32_t rows, columns, depth;  // in tiles
  uint32_t part_count, count;     // works in each k part, and in all
  uint32_t splits;
  Divisor32 matrix, band;  // how many tiles each has
  Divisor32 batches, band_rows, last_band_rows;

  Raster() = default;
  // All fits into 31 bits.
  Raster(uint32_t rows, uint32_t columns, uint32_t depth, uint32_t batches, uint32_t splits, uint32_t band_rows)
      : rows(rows),
        columns(columns),
        depth(depth),
        part_count(rows * columns * batches),
        count(part_count * splits),
        splits(splits),
        matrix(rows * columns),
        band(band_rows * columns),
        batches(batches),
        band_rows(band_rows),
        last_band_rows((rows - 1) % band_rows + 1) {}
};

// An operand that threads load (wgmma_load.cuh): [slices, rows, row_bytes] without gaps.
struct OperandInPieces {
  const uint8_t* data;
  int64_t slice_bytes;
  int rows, row_bytes;
};

// Where an operand's last tiles begin, if they extend beyond its rows. Only rows that exist are loaded: loading others
// would take longer. bytes: how many fewer.
struct TileEdge {
  int first = std::numeric_limits<int>::max();
  int bytes = 0;
};

// The fields that a block needs before its first load come first and lie together: each part of the arguments is
// fetched when it is first read, which takes hundreds of cycles.
struct WgmmaArguments {
  Raster raster;
  int parts;  // 1, or how often k is split: each block in a cluster has a part of a tile
  SharedOperand shared;
  int stage_bytes;  // that the copy engine loads
  TileEdge lhs_edge, rhs_edge;
  int lhs_piece, rhs_piece;  // row alignment in bytes, 4 or 8, if threads load the operand; else 0
  bool rhs_once;             // each element is loaded by one block, once
  Triangle triangle;         // the problem's; lhs_transposed too
  bool lhs_transposed;
  const int32_t* unfit;  // if not null and not 0: leave, another kernel does it
  MatrixIndices matrices;
  int promote;                           // after this many k tiles sums are promoted
  bool wide_out;                         // results are f32, whatever the operands
  bool boxes_out;                        // results can be stored by the copy engine
  const float *lhs_scales, *rhs_scales;  // for f32 in parts
  OperandInPieces lhs_pieces, rhs_pieces;
  Problem problem;
  CUtensorMap lhs, rhs, lhs_at_edge, rhs_at_edge, out, preactivation;

  __device__ bool paired() const { return shared != SharedOperand::kNone; }
  __device__ bool in_pieces() const { return lhs_piece || rhs_piece; }
  __device__ bool summed() const { return parts > 1; }
};

// A result tile and a k range, which is never empty.
struct WgmmaWork {
  int row, column;
  int first, last;  // k tiles
  int batch;
  int slice;  // in out
};

template <class Tile, class P>
class WgmmaWorks {
 public:
  __device__ explicit WgmmaWorks(const WgmmaArguments& arguments) : arguments_(arguments) {}

  // Calls visit(work) for this block's works, in order.
  template <class Visit>
  __device__ void ForEach(const Visit& visit) const {
    const uint32_t count = arguments_.raster.count;
    const bool in_cluster = arguments_.parts > 1;  // then each block has one work
    const uint32_t step = in_cluster ? count : gridDim.x >> arguments_.paired();
    const uint32_t part = in_cluster ? hopper::ClusterRank() : 0;
    for (uint32_t index = arguments_.raster.part_count * part + hopper::ClusterIndex(); index < count; index += step) {
      WgmmaWork work = At(index);
      // The compiler does not see that all lanes go through the same k tiles, and would have a warp give way (YIELD) in
      // each: 50 cycles.
      work.first = __shfl_sync(~0u, work.first, 0);
      work.last = __shfl_sync(~0u, work.last, 0);
      if (in_cluster || !IsLeftOut(work)) visit(work);
    }
  }

 private:
  __device__ WgmmaWork At(uint32_t index) const {
    const Raster& raster = arguments_.raster;
    const uint32_t slice = raster.matrix.Divide(index), split = raster.splits == 1 ? 0 : raster.batches.Divide(slice);
    const uint32_t batch = slice - split * raster.batches.divisor;
    index -= slice * raster.matrix.divisor;
    const uint32_t band = raster.band.Divide(index), within = index - band * raster.band.divisor;
    const uint32_t first_row = band * raster.band_rows.divisor;
    const Divisor32& height =
        first_row + raster.band_rows.divisor > raster.rows ? raster.last_band_rows : raster.band_rows;
    uint32_t column = height.Divide(within), row = first_row + within - column * height.divisor;
    // If rows differ in their work, blocks get early and late ones in turn.
    const bool turned = arguments_.triangle != Triangle::kNone && batch % 2;
    if (turned) row = raster.rows - 1 - row;
    if (band % 2) column = raster.columns - 1 - column;
    if (arguments_.shared == SharedOperand::kRhs) row = row * 2 + hopper::ClusterRank();
    if (arguments_.shared == SharedOperand::kLhs) column = column * 2 + hopper::ClusterRank();
    WgmmaWork work = {static_cast<int>(row * Tile::kRows),
                      static_cast<int>(column * Tile::kColumns),
                      0,
                      static_cast<int>(raster.depth),
                      static_cast<int>(batch),
                      static_cast<int>(slice)};
    if (raster.splits > 1) {
      work.first = static_cast<int>(uint64_t{raster.depth} * split / raster.splits);
      work.last = static_cast<int>(uint64_t{raster.depth} * (split + 1) / raster.splits);
    }
    if (arguments_.triangle == Triangle::kLhs) SkipZeros(work);
    return work;
  }

  // lhs entries above the diagonal need not be multiplied. One k tile, perhaps all zeros, remains: with sums that began
  // as zeros instead, ptxas would serialise the products.
  __device__ void SkipZeros(WgmmaWork& work) const {
    if (arguments_.lhs_transposed) {
      work.first = min(max(work.first, work.row / P::kDepth), work.last - 1);
    } else {
      work.last = max(min(work.last, (work.row + Tile::kRows + P::kDepth - 1) / P::kDepth), work.first + 1);
    }
  }
  // Result entries above the diagonal need not be written.
  __device__ bool IsLeftOut(const WgmmaWork& work) const {
    return arguments_.triangle == Triangle::kResult && work.column >= work.row + Tile::kRows;
  }

  const WgmmaArguments& arguments_;
};

// The place in the ring: stages recur, and the parity of their barriers' phase changes with each round.
template <class Tile>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Advance() {
    if (++stage == Tile::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void Skip(int count) {
    const int next = stage + count;
    parity ^= next / Tile::kStages & 1;
    stage = next % Tile::kStages;
  }
};

template <class Tile>
struct Ring {
  uint32_t stages, barriers;

  __device__ uint32_t Lhs(int stage, int part = 0) const {
    return stages + stage * Tile::kStageBytes + part * Tile::kLhsBytes;
  }
  __device__ uint32_t Rhs(int stage, int part = 0) const { return Lhs(stage, Tile::kParts) + part * Tile::kRhsBytes; }
  __device__ Barrier Full(int stage) const { return {barriers + stage * 8}; }
  __device__ Barrier Empty(int stage) const { return {barriers + (Tile::kStages + stage) * 8}; }
  // For SumCluster: the first part's ring is free for the other parts' sums; these have arrived.
  __device__ Barrier Free() const { return Empty(Tile::kStages); }
  __device__ Barrier Sums() const { return Empty(Tile::kStages + 1); }
};

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_WORK_CUH_
