// 16-bit products with few rows (decoding). Nearly all their time goes to streaming rhs, the weights, from memory.
//
// A block takes some result columns; its warps take k tiles in turn. Each warp fills its own ring by cp.async, across
// the block's tiles, and waits for no other warp until the sums are added. Such a block loads sooner, and ends sooner,
// than one that fetches descriptors for the copy engine and sums over a cluster. For the tensor cores the result's
// columns are rows, 16 at a time, and its rows are columns, 16 or 32.
#ifndef JAXOPS_OPS_MATMUL_FEW_ROWS_CUH_
#define JAXOPS_OPS_MATMUL_FEW_ROWS_CUH_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/async_copy.cuh"
#include "core/launch.cuh"
#include "core/shared_memory.cuh"
#include "core/types.cuh"
#include "ops/matmul/epilogue.cuh"
#include "ops/matmul/mma.cuh"

namespace jaxops::matmul {

// A tile's rows, 16 or 32. In the calling convention, 16 rows select this kernel.
inline constexpr int kFewRows = 16, kMoreRows = 32;

// An rhs k tile has 4096 bytes; with 16 columns it has 2048. If rhs's rows lie along n, memory is faster the longer the
// stretch that is read from each row.
template <int kRows_, int kColumns_, bool kRhsTransposed_>
struct FewRowsTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr bool kRhsTransposed = kRhsTransposed_;
  static constexpr int kDepth = std::min(64, 2048 / kColumns);  // per k tile
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kStages = (kColumns < 32 ? 5 : 4) - (kRows > 16);
  static constexpr int kStep = kWarps * kDepth;  // from one of a warp's k tiles to its next
  static constexpr int kRhsBytes = kColumns * kDepth * 2, kStageBytes = kRhsBytes + kRows * kDepth * 2;
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kPitch = kColumns + 4;  // floats; a row of sums and the second next are 8 banks apart
  // Warps that have sums in shared memory at once: half of them if there is no room for all; the others add to these.
  static constexpr int kSummers = kRows > 16 ? kWarps / 2 : kWarps;
  static constexpr int kSharedBytes = kRingBytes + kSummers * kRows * kPitch * 4;
  static_assert(kSharedBytes + 1024 <= 228 << 10);
};
using FewRowsTiles =
    Types<FewRowsTile<16, 16, true>, FewRowsTile<16, 32, true>, FewRowsTile<16, 32, false>, FewRowsTile<16, 64, false>,
          FewRowsTile<32, 16, true>, FewRowsTile<32, 32, true>, FewRowsTile<32, 32, false>>;

// Lines with kPieces pieces of 16 bytes each, ordered so that equal pieces in 8 lines lie in different banks.
template <int kPieces>
struct SwizzledLines {
  static constexpr int kTogether = kPieces < 8 ? 8 / kPieces : 1;  // lines that lie side by side in the banks
  static constexpr int Turn(int line) { return line / kTogether % (kPieces < 8 ? kPieces : 8) * 16; }
  // In bytes. For lines and pieces that are multiples of powers of two above line and piece, Place(line + lines, piece
  // + pieces) is (Place(line, piece) ^ Turn(lines) ^ 16 pieces) + Lines(lines): constants except the lane's place.
  static __device__ uint32_t Place(int line, int piece) { return Lines(line) + (piece * 16 ^ Turn(line)); }
  static constexpr int Lines(int lines) { return lines * kPieces * 16; }
};

// A block's tiles in turn, and the warp's k tiles in each: says which to load next. Absent rows and columns are neither
// loaded nor stored; beyond the end of k are zeros.
template <class T, class Tile>
class FewRowsLoader {
  static constexpr bool kRhsTransposed = Tile::kRhsTransposed;
  static constexpr int kRhsPieces = (kRhsTransposed ? Tile::kDepth : Tile::kColumns) / 8, kLhsPieces = Tile::kDepth / 8;

 public:
  using RhsLines = SwizzledLines<kRhsPieces>;
  using LhsLines = SwizzledLines<kLhsPieces>;

  __device__ FewRowsLoader(const Problem& p, uint32_t columns, uint32_t tiles)
      : p_(p), columns_(columns), tiles_(tiles) {
    Begin();
  }
  __device__ void LoadNext(uint32_t stage) {
    if (tile_ < tiles_) {
      if (whole_columns_ && k_ + Tile::kDepth <= p_.k) {
        Load<true>(stage);
      } else {
        Load<false>(stage);
      }
      k_ += Tile::kStep;
      rhs_ += Tile::kStep * (kRhsTransposed ? 1 : p_.n);
      lhs_ += Tile::kStep;
      if (k_ >= p_.k) {
        tile_ += gridDim.x;
        Begin();
      }
    }
    CommitCopies();  // an empty group keeps the number of pending groups the same to the end
  }

 private:
  static constexpr int kRhsLines = 32 / kRhsPieces, kLhsLines = 32 / kLhsPieces;  // that a warp loads at once
  static __device__ int lane() { return threadIdx.x % 32; }
  static __device__ int rhs_line() { return lane() / kRhsPieces; }
  static __device__ int rhs_piece() { return lane() % kRhsPieces; }
  static __device__ int lhs_line() { return lane() / kLhsPieces; }
  static __device__ int lhs_piece() { return lane() % kLhsPieces; }

  __device__ void Begin() {
    const uint32_t batch = tile_ / columns_;
    const Offsets offsets = p_.batch.At(batch);
    column_ = int64_t{tile_ - batch * columns_} * Tile::kColumns;
    whole_columns_ = column_ + Tile::kColumns <= p_.n;
    k_ = threadIdx.x / 32 * Tile::kDepth;
    lhs_ = static_cast<const T*>(p_.lhs) + offsets.lhs + lhs_line() * p_.k + lhs_piece() * 8 + k_;
    rhs_ = static_cast<const T*>(p_.rhs) + offsets.rhs + rhs_piece() * 8 +
           (kRhsTransposed ? (column_ + rhs_line()) * p_.k + k_ : (k_ + rhs_line()) * p_.n + column_);
  }
  // kInside: rhs's whole k tile.
  template <bool kInside>
  __device__ void Load(uint32_t stage) const {
    const int64_t stride = kRhsTransposed ? p_.k : p_.n;
    const uint32_t rhs_place = stage + RhsLines::Place(rhs_line(), rhs_piece());
    const T* rhs = rhs_;
#pragma unroll
    for (int i = 0; i < Tile::kRhsBytes / (32 * 16); ++i, rhs += kRhsLines * stride) {
      const int line = i * kRhsLines;
      const uint32_t target = (rhs_place ^ RhsLines::Turn(line)) + RhsLines::Lines(line);
      const int64_t column = column_ + (kRhsTransposed ? line + rhs_line() : rhs_piece() * 8);
      const int64_t k = k_ + (kRhsTransposed ? rhs_piece() * 8 : line + rhs_line());
      if (kInside || k < p_.k) {
        if (kInside || column < p_.n) CopyAsyncOnce(target, rhs);
      } else {
        StoreShared(target, uint4{});
      }
    }
    static_assert(Tile::kRows % kLhsLines == 0);
    const uint32_t lhs_place = stage + Tile::kRhsBytes + LhsLines::Place(lhs_line(), lhs_piece());
    const T* lhs = lhs_;
#pragma unroll
    for (int i = 0; i < Tile::kRows / kLhsLines; ++i, lhs += kLhsLines * p_.k) {
      const int row = i * kLhsLines;
      const uint32_t target = (lhs_place ^ LhsLines::Turn(row)) + LhsLines::Lines(row);
      if (kInside || k_ + lhs_piece() * 8 < p_.k) {
        if (lhs_line() + row < p_.m) CopyAsync<16>(target, lhs, 16);
      } else {
        StoreShared(target, uint4{});
      }
    }
  }

  const Problem& p_;
  const uint32_t columns_, tiles_;
  uint32_t tile_ = blockIdx.x;
  const T *lhs_, *rhs_;  // the lane's first pieces
  int64_t column_, k_;
  bool whole_columns_;
};

// Both operands' rows begin at multiples of 16 bytes. wide_out: results are f32. columns: tiles per result row; tiles:
// all.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    FewRowsMatmul(const __grid_constant__ Problem p, bool wide_out, uint32_t columns, uint32_t tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Loader = FewRowsLoader<T, Tile>;
  using RhsLines = Loader::RhsLines;
  using LhsLines = Loader::LhsLines;
  constexpr bool kRhsTransposed = Tile::kRhsTransposed;
  constexpr int kColumnBlocks = Tile::kColumns / 16, kRowBlocks = Tile::kRows / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t ring = SharedAddress(shared) + warp * Tile::kStages * Tile::kStageBytes;
  using Row = float[Tile::kPitch];
  Row* const sums_of_warps = reinterpret_cast<Row*>(shared + Tile::kRingBytes);
  // Where a stage holds the lane's matrix rows, as LoadMatrices wants them: for lhs (0, 0), (0, 8), (8, 0), (8, 8) as
  // (row, k), 8 by 8 each, and the same in the next 16 rows; for rhs (0, 0), (8, 0), (0, 8), (8, 8) as (column, k).
  const int quarter = lane / 8, line = lane % 8;
  const uint32_t lhs_place = LhsLines::Place(quarter / 2 * 8 + line, quarter % 2);
  const uint32_t rhs_place = kRhsTransposed ? RhsLines::Place(quarter % 2 * 8 + line, quarter / 2)
                                            : RhsLines::Place(quarter / 2 * 8 + line, quarter % 2);
  Loader loader(p, columns, tiles);
  int place = 0, free = 0;  // the stage to multiply next, and to fill
  const auto next = [](int stage) { return stage + 1 == Tile::kStages ? 0 : stage + 1; };
#pragma unroll 1
  for (; free < Tile::kStages - 1; ++free) loader.LoadNext(ring + free * Tile::kStageBytes);
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float sums[kColumnBlocks][kRowBlocks][4] = {};
    int64_t k = warp * Tile::kDepth;
    do {  // a warp has one k tile at least, be it beyond the end
      WaitCopies<Tile::kStages - 2>();
      __syncwarp();  // the stage has arrived for all lanes, and none reads the one that is filled next
      loader.LoadNext(ring + free * Tile::kStageBytes);
      free = next(free);
      const uint32_t rhs = ring + place * Tile::kStageBytes, lhs = rhs + Tile::kRhsBytes;
      place = next(place);
#pragma unroll
      for (int step = 0; step < Tile::kDepth; step += 16) {
        uint32_t right[Tile::kRows / 16][4];
#pragma unroll
        for (int half = 0; half < Tile::kRows / 16; ++half)
          LoadMatrices<false>(right[half], lhs + (lhs_place ^ step * 2) + LhsLines::Lines(half * 16));
#pragma unroll
        for (int block = 0; block < kColumnBlocks; ++block) {
          uint32_t left[4];
          const int down = kRhsTransposed ? block * 16 : step, along = kRhsTransposed ? step : block * 16;
          LoadMatrices<!kRhsTransposed>(left, rhs + (rhs_place ^ along * 2) + RhsLines::Lines(down));
#pragma unroll
          for (int row = 0; row < kRowBlocks; ++row)
            Mma<T>(sums[block][row], left, right[row / 2][row % 2 * 2], right[row / 2][row % 2 * 2 + 1]);
        }
      }
    } while ((k += Tile::kStep) < p.k);
    const auto for_each_sum = [&](const auto& visit) {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; ++block)
#pragma unroll
        for (int row = 0; row < kRowBlocks; ++row)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            visit(sums_of_warps[warp % Tile::kSummers * Tile::kRows + row * 8 + lane % 4 * 2 + i % 2]
                               [block * 16 + i / 2 * 8 + lane / 4],
                  sums[block][row][i]);
    };
    if (warp >= Tile::kWarps - Tile::kSummers) for_each_sum([](float& place, float sum) { place = sum; });
    __syncthreads();
    if constexpr (Tile::kSummers < Tile::kWarps) {
      if (warp < Tile::kSummers) for_each_sum([](float& place, float sum) { place += sum; });
      __syncthreads();
    }
    const uint32_t batch = tile / columns;
    const int64_t first_column = int64_t{tile - batch * columns} * Tile::kColumns;
    constexpr int kCount = 4, kPacks = Tile::kColumns / kCount;  // a thread's adjacent results; such packs per row
    for (int pack = threadIdx.x; pack < Tile::kRows * kPacks; pack += Tile::kThreads) {
      const int row = pack / kPacks, column = pack % kPacks * kCount;
      float values[kCount] = {};
#pragma unroll
      for (int other = 0; other < Tile::kSummers; ++other) {  // in order
        const float4 add = *reinterpret_cast<const float4*>(&sums_of_warps[other * Tile::kRows + row][column]);
        values[0] += add.x, values[1] += add.y, values[2] += add.z, values[3] += add.w;
      }
      const Offsets offsets = p.batch.At(batch);
      if (wide_out) {
        StoreRow<float>(p, batch, offsets, row, first_column + column, values);
      } else {
        StoreRow<T>(p, batch, offsets, row, first_column + column, values);
      }
    }
    if (tile + gridDim.x < tiles) __syncthreads();  // the sums have been read
  }
#endif
}

// cudaErrorNotSupported if there is no such tile, or none for operands with this layout.
template <class T>
cudaError_t LaunchFewRows(cudaStream_t stream, const Problem& p, bool wide_out, int tile_columns) {
  const bool aligned = p.k % 8 == 0 && p.rhs_stride() % 8 == 0 && IsAligned(p.lhs) && IsAligned(p.rhs);
  if (p.lhs_transposed || p.m > kMoreRows || !aligned) return cudaErrorNotSupported;
  int multiprocessors = 0;
  if (const cudaError_t status = CountMultiprocessors(&multiprocessors); status != cudaSuccess) return status;
  const int64_t columns = (p.n + tile_columns - 1) / tile_columns, tiles = columns * p.batches;
  if (tiles > std::numeric_limits<int32_t>::max()) return cudaErrorNotSupported;
  const int rows = p.m <= kFewRows ? kFewRows : kMoreRows;
  return First(
      FewRowsTiles{}, cudaErrorNotSupported,
      [=, &p]<class Tile> {
        return Tile::kRows == rows && Tile::kColumns == tile_columns && Tile::kRhsTransposed == p.rhs_transposed;
      },
      [=, &p]<class Tile> {
        const Grid grid = {std::min<int64_t>(tiles, multiprocessors), Tile::kThreads, 1, Tile::kSharedBytes};
        return Launch(stream, FewRowsMatmul<T, Tile>, grid, p, wide_out, static_cast<uint32_t>(columns),
                      static_cast<uint32_t>(tiles));
      });
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_FEW_ROWS_CUH_
