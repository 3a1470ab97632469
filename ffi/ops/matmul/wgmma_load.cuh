// matmul on Hopper's tensor cores: how operands get into the ring, by the copy engine (TMA) or by threads.
//
// The copy engine needs rows aligned to 16 bytes. Other operands are copied first, or threads load them in pieces of 4
// or 8 bytes. If rows do not begin at 128 bytes, each lies across two L2 lines, and loads take longer. Two
// blocks with adjacent tiles then form a cluster and share that operand: each loads half of every tile for both.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_LOAD_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_LOAD_CUH_

#include <cstdint>

#include "core/async_copy.cuh"
#include "hopper/barrier.cuh"
#include "hopper/tensor_copy.cuh"
#include "ops/matmul/wgmma_work.cuh"

namespace jaxops::matmul {

// Loads kRows rows by 128 bytes as the copy engine does (hopper::LoadBox): with its swizzle, and zeros beyond an edge.
// A warpgroup loads kPiece rows at a time. row, byte: the first.
template <int kPiece, int kRows>
__device__ void LoadBoxInPieces(uint32_t target, const OperandInPieces& operand, int byte, int row, int slice) {
  constexpr int kOfRow = hopper::kBoxRowBytes / kPiece;
  const int thread = threadIdx.x % kWarpgroup;
  const int line = thread / kOfRow, within = thread % kOfRow * kPiece;
  const int rows = byte + within < operand.row_bytes ? operand.rows - row - line : 0;  // that are left
  const uint8_t* from =
      operand.data + slice * operand.slice_bytes + (row + line) * int64_t{operand.row_bytes} + byte + within;
  const int step = operand.row_bytes * kPiece;
  // Lines 4 apart differ by that swizzle bit, lines 8 apart by none.
  const uint32_t place = target + line * hopper::kBoxRowBytes + (within ^ line % 8 * 16);
#pragma unroll
  for (int first = 0; first < kRows; first += kPiece, from += step)
    CopyAsync<kPiece>((place ^ first % 8 * 16) + first * hopper::kBoxRowBytes, from, first < rows ? kPiece : 0);
}

template <Major kMajor, int kSize, int kPiece>
__device__ void LoadTileInPieces(uint32_t target, const OperandInPieces& operand, int first, int k_tile, int slice) {
  constexpr int kDepth = 64;
  if constexpr (kMajor == Major::kDepth) {
    LoadBoxInPieces<kPiece, kSize>(target, operand, k_tile * hopper::kBoxRowBytes, first, slice);
  } else {
#pragma unroll 1
    for (int block = 0; block < kSize / 64; ++block)
      LoadBoxInPieces<kPiece, kDepth>(target + block * kBlockBytes, operand, (first + block * 64) * 2, k_tile * kDepth,
                                      slice);
  }
}

template <Major kMajor, int kSize>
__device__ void LoadTileInPieces(uint32_t target, const OperandInPieces& operand, int piece, int first, int k_tile,
                                 int slice) {
  if (piece == 8) {
    LoadTileInPieces<kMajor, kSize, 8>(target, operand, first, k_tile, slice);
  } else {
    LoadTileInPieces<kMajor, kSize, 4>(target, operand, first, k_tile, slice);
  }
}

// Loads kSize rows (m or n) from an operand's k tile.
template <Major kMajor, int kSize, int kDepth>
__device__ void LoadTile(uint32_t target, const CUtensorMap& map, Barrier barrier, int first, int k_tile, int slice,
                         bool once = false) {
  if constexpr (kMajor == Major::kDepth) {
    hopper::LoadBox(target, map, barrier, k_tile * kDepth, first, slice, once);
  } else {
#pragma unroll
    for (int box = 0; box < kSize / kDepth; ++box)  // kDepth rows, each 128 bytes, which hold as many elements
      hopper::LoadBox(target + box * kDepth * hopper::kBoxRowBytes, map, barrier, first + box * kDepth, k_tile * kDepth,
                      slice, once);
  }
}

// Loads half of the tile for both blocks of a pair. Boxes have half as many rows.
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

// Calls visit(work, lhs, rhs, fill) for each work in the block; lhs, rhs: the operands' matrices. fill(load) calls
// load(stage, k_tile) for each k tile in the work, as soon as the stage is free. Returns the ring's next place.
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
    // One loop per way to load, without branches: multiplying a small tile takes hardly longer than a lane needs to
    // issue its loads.
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
  // Waits until the pair's other block has used all that this block loaded for it, and arrives here no more.
  if (arguments.paired())
    for (int i = 0; i < Tile::kStages; ++i, place.Advance()) ring.Empty(place.stage).Wait(place.parity);
}

// The same by all the warpgroup's warps, if an operand comes in pieces; the first has the copy engine load the other.
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

// The block scales (SplitOperand) for a tile's k tile.
template <class Tile>
struct TileScales {
  static constexpr int kLhsBlocks = Tile::kRows / kSplitBlock, kRhsBlocks = Tile::kColumns / kSplitBlock;
  float lhs[kLhsBlocks], rhs[kRhsBlocks];

  // Whether f16 stores all parts. Otherwise they are in TF32, and a stage holds half a k tile.
  __device__ bool InF16() const {
    float least = lhs[0];
#pragma unroll
    for (float scale : lhs) least = fminf(least, scale);
#pragma unroll
    for (float scale : rhs) least = fminf(least, scale);
    return least > 0;
  }
};

// The scales for a work's k tiles.
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

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_LOAD_CUH_
