// matmul on Hopper's tensor cores: how sums in registers become results in memory.
//
// ResultStore scales, biases, activates and rounds the sums, and puts them into shared memory for the copy engine.
// Unaligned rows leave through RowWindows, turned products through TurnedStore. SumPartials adds a split k's partial
// results.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_STORE_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_STORE_CUH_

#include <cstdint>
#include <type_traits>

#include "core/async_copy.cuh"
#include "core/types.cuh"
#include "core/vector_store.cuh"
#include "hopper/barrier.cuh"
#include "hopper/tensor_copy.cuh"
#include "ops/matmul/epilogue.cuh"
#include "ops/matmul/wgmma_work.cuh"

namespace jaxops::matmul {

// Takes 16 rows of a tile through shared memory, in 128-byte windows. There, a row begins as many bytes after a
// multiple of 16 (its shift) as in memory. So whole 16-byte pieces can be stored, and single elements only at the row's
// two ends. A row has two windows in turn: a piece that extends beyond one is stored with the next. Rows whose numbers
// differ by 8 have the same shift.
template <class U>
class RowWindows {
 public:
  static constexpr int kRows = 16, kWindow = 128, kColumns = kWindow / sizeof(U);
  static constexpr int kStagingBytes = kRows * 2 * kWindow;

  RowWindows() = default;
  // staging: kStagingBytes, aligned to 256; out: where the first row's part in the tile begins; n: elements from row to
  // row; rows, columns: how many there are.
  __device__ RowWindows(uint32_t staging, U* out, int64_t n, int rows, int columns, uint32_t lane)
      : staged_row_(staging + lane / 4 * kRowBytes),
        piece_row_(staging + lane / 8 * kRowBytes),
        pieces_(lane / 8 * kPiece + lane % 8 * kPiece),
        bytes_(columns * kBytes),
        rows_(rows - static_cast<int>(lane / 8)),
        eight_rows_(8 * n * kBytes) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(out);
    const int64_t pitch = n * kBytes;
    words_ = (start | pitch) % 4 == 0;
    staged_ = lane / 4 * kPiece + lane % 4 * 2 * kBytes + (start + lane / 4 * pitch) % kPiece;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      to_[i] = start + (i * 4 + lane / 8) * pitch;
      shift_[i] = static_cast<int>(to_[i] % kPiece);
      to_[i] -= shift_[i];
    }
  }

  // Stores the next window's columns; z: the thread's sums for them, in MultiplyAdd's order; last: the rows' last
  // window.
  template <int kCount>
  __device__ void Store(int window, const float (&z)[kCount], bool last, uint32_t lane) const {
    static_assert(kCount * 2 == kColumns);
    const uint32_t first = window * kWindow;
    __syncwarp();  // the previous window has been read
    bool staged = false;
    if constexpr (kBytes == 2) {
      if (words_) StagePairs(first, z);
      staged = words_;
    }
    if (!staged) {
      StageElements<0>(first, z);
      StageElements<1>(first, z);
    }
    __syncwarp();
    StorePieces(first, lane);
    if (window == 0) StoreEnds<false>(lane);
    if (last) StoreEnds<true>(lane);
  }

 private:
  static constexpr int kBytes = sizeof(U), kPiece = 16, kRowBytes = 2 * kWindow;

  // Where byte `at` in a row lies; the row's windows begin at `row`. Each row is turned by 16 bytes more than the one
  // before, so that threads use all shared-memory banks; `at` counts that, too.
  static __device__ uint32_t Turned(uint32_t row, uint32_t at) { return row | (at % kRowBytes); }

  template <int kCount>
  __device__ void StagePairs(uint32_t first, const float (&z)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const uint32_t place = Turned(staged_row_, staged_ + first + i * 2 * kBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        StoreShared(place + half * 8 * kRowBytes, ToPack<U, 2>([&](int j) { return z[i + half * 2 + j]; }).words[0]);
    }
  }
  template <int kElement, int kCount>
  __device__ void StageElements(uint32_t first, const float (&z)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const uint32_t place = Turned(staged_row_, staged_ + kElement * kBytes + first + i * 2 * kBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float value = z[i + half * 2 + kElement];
        if constexpr (kBytes == 4) {
          StoreShared(place + half * 8 * kRowBytes, __float_as_uint(value));
        } else {
          StoreShared(place + half * 8 * kRowBytes,
                      static_cast<uint16_t>(ToPack<U, 2>([&](int) { return value; }).words[0]));
        }
      }
    }
  }

  // A lane stores its piece in each fourth row.
  __device__ void StorePieces(uint32_t first, uint32_t lane) const {
    uint4 pieces[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pieces[i] = LoadPiece(Turned(piece_row_, pieces_ + i % 2 * 4 * kPiece + first) + i * 4 * kRowBytes);
    const int at = first + lane % 8 * kPiece;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int inside = at - shift_[i % 2];
      if (inside >= 0 && inside + kPiece <= bytes_ && i * 4 < rows_)
        StoreVector(reinterpret_cast<uint4*>(to_[i % 2] + at + i / 2 * eight_rows_), pieces[i]);
    }
  }

  // The tile's elements in each row's first or last piece: a lane has an element in some rows.
  template <bool kLast>
  __device__ void StoreEnds(uint32_t lane) const {
    constexpr uint32_t kElements = kPiece / kBytes;
    if (kElements < 8 && lane % 8 >= kElements) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int shift = shift_[i % 2], end = shift + bytes_, piece = kLast ? end & -kPiece : 0;
      const int at = piece + lane % 8 * kBytes;
      const bool partial = kLast ? piece > 0 || shift == 0 : shift > 0;  // a short row's only piece is the first
      if (!partial || at < shift || at >= end || i * 4 >= rows_) continue;
      const uint32_t turned = lane / 8 * kPiece + i % 2 * 4 * kPiece;
      Copy(to_[i % 2] + at + i / 2 * eight_rows_, Turned(piece_row_, turned + at) + i * 4 * kRowBytes);
    }
  }
  static __device__ void Copy(uintptr_t to, uint32_t from) {
    const size_t address = __cvta_generic_to_global(reinterpret_cast<void*>(to));
    if constexpr (kBytes == 4) {
      asm volatile("{\n.reg .b32 e;\nld.shared.b32 e, [%1];\nst.global.b32 [%0], e;\n}" ::"l"(address), "r"(from)
                   : "memory");
    } else {
      asm volatile("{\n.reg .b16 e;\nld.shared.b16 e, [%1];\nst.global.b16 [%0], e;\n}" ::"l"(address), "r"(from)
                   : "memory");
    }
  }

  static __device__ void StoreShared(uint32_t place, uint32_t word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(place), "r"(word) : "memory");
  }
  static __device__ void StoreShared(uint32_t place, uint16_t half) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(place), "h"(half) : "memory");
  }
  static __device__ uint4 LoadPiece(uint32_t place) {
    uint4 piece;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                 : "r"(place)
                 : "memory");
    return piece;
  }

  uint32_t staged_row_, staged_;  // the thread's first two elements: their row's windows, their place
  uint32_t piece_row_, pieces_;   // the lane's pieces
  uintptr_t to_[2];               // the piece's address in its first two rows, aligned
  int shift_[2], bytes_, rows_;
  int64_t eight_rows_;
  bool words_;  // all rows are aligned to 4 bytes
};

// Group `index` with kSize sums, chosen at run time by halving: register indices must be constants.
template <int kFirst, int kCount, int kBlocks, int kSums, int kSize>
__device__ void SelectGroup(const float (&sums)[kBlocks][kSums], int index, float (&group)[kSize]) {
  if constexpr (kCount == 1) {
    constexpr int kGroups = kSums / kSize;  // per block
#pragma unroll
    for (int i = 0; i < kSize; ++i) group[i] = sums[kFirst / kGroups][kFirst % kGroups * kSize + i];
  } else if (index < kFirst + kCount / 2) {
    SelectGroup<kFirst, kCount / 2>(sums, index, group);
  } else {
    SelectGroup<kFirst + kCount / 2, kCount - kCount / 2>(sums, index, group);
  }
}

// A warp's buffers in shared memory, 16 rows by 128 bytes each, from which the copy engine stores results.
template <class Tile>
class StagedBoxes {
 public:
  // staging: the warpgroup's buffers.
  __device__ explicit StagedBoxes(uint32_t staging) : staging_(staging) {}

  __device__ void Finish() const {
    if (hopper::ElectLane()) hopper::WaitStoresRead<0>();  // the kernel's end makes their writes visible
  }

 protected:
  // Read anew at each use: if these values lived on, they would push sums out of the registers.
  static __device__ int thread() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % kWarpgroup;
  }
  static __device__ int warp() { return thread() / 32; }
  static __device__ int lane() { return thread() % 32; }

  // Waits until the warp's part of the next buffer is free, and returns that buffer, in which each warp has 16 rows.
  // The count goes on across tiles: the buffer is never the one handed out last. kAhead: buffers acquired before it and
  // not yet handed out.
  template <int kAhead = 0>
  __device__ uint32_t Acquire() {
    const uint32_t buffer = staging_ + next_ * kBlockBytes;
    next_ = next_ + 1 == Tile::kStagingBuffers ? 0 : next_ + 1;
    if (hopper::ElectLane()) hopper::WaitStoresRead<Tile::kStagingBuffers - 1 - kAhead>();
    __syncwarp();
    return buffer;
  }
  // Sends the warp's part of a buffer to rows from `row` (the buffer's first) and columns from `column` on.
  static __device__ void HandOutBox(const CUtensorMap& map, uint32_t buffer, int row, int column, int slice) {
    hopper::FenceSharedForCopies();
    __syncwarp();
    const int line = warp() * 16;
    if (hopper::ElectLane()) hopper::StoreBox(map, buffer + line * hopper::kBoxRowBytes, column, row + line, slice);
  }

  // Writes values into rows with the swizzle that the copy engine expects, from the buffer's column 16 `group` on.
  template <class U, int kCount>
  static __device__ void Stage(uint32_t buffer, int group, const float (&z)[kCount]) {
    const int lane = StagedBoxes::lane(), line = warp() * 16;
#pragma unroll
    for (int first = 0; first < kCount; first += 8, ++group) {
      if constexpr (sizeof(U) == 2) {
        const auto pair = [&](int i) { return ToPack<U, 2>([&](int j) { return z[first + i + j]; }).words[0]; };
        const uint32_t place = Place(buffer, line + lane % 16, group * 2 + lane / 16);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(pair(0)),
                     "r"(pair(2)), "r"(pair(4)), "r"(pair(6))
                     : "memory");
      } else {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const int at = group * 16 + lane % 4 * 2 + i / 4 * 8;
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(Place(buffer, line + lane / 4 + (i & 2) * 4, at / 4) +
                                                                at % 4 * 4),
                       "f"(z[first + i]), "f"(z[first + i + 1])
                       : "memory");
        }
      }
    }
  }
  static __device__ uint32_t Place(uint32_t buffer, int line, int piece) {
    return buffer + line * hopper::kBoxRowBytes + (piece ^ line % 8) * 16;
  }

  const uint32_t staging_;

 private:
  uint32_t next_ = 0;
};

// Takes a warp's sums from registers to memory, through shared memory, 16 rows by 128 bytes at a time.
template <class Tile, class P>
class ResultStore : public StagedBoxes<Tile> {
 public:
  using Result = typename P::Result;
  using Sums = float[Tile::kBlocks][Tile::kColumns / 2];  // as in hopper::MultiplyAdd, 64 rows a block

  // staging: the warpgroup's buffers; bias: shared by all warpgroups that multiply.
  __device__ ResultStore(const WgmmaArguments& arguments, uint32_t staging, uint32_t bias, int warpgroup)
      : Boxes(staging),
        arguments_(arguments),
        bias_(bias + (Tile::kPingPong ? warpgroup * Tile::kColumns * 4 : 0)),
        warpgroup_(warpgroup) {}

  // Begins to fetch the bias for a tile's columns, if it is the same for all rows; called before the tile's sums are
  // ready.
  __device__ void FetchBias(const WgmmaWork& work) const {
    const Problem& p = arguments_.problem;
    if (!HasColumnBias()) return;
    SyncTile();  // the last tile's has been used
    const float* const from = Bias(work);
    for (int i = Tile::kPingPong ? thread() : threadIdx.x - kWarpgroup; i < Tile::kColumns; i += kTileThreads) {
      const int64_t column = min(int64_t{work.column + i}, p.n - 1);
      CopyAsync<4>(bias_ + i * 4, from + column * p.bias_column_stride, 4);
    }
    CommitCopies();
  }
  // Waits until the bias is there; called by all threads that fetched it.
  __device__ void AwaitBias() const {
    if (!HasColumnBias()) return;
    WaitCopies<0>();
    SyncTile();
  }

  // Stores the rows from `row` on and the columns in the work's tile.
  __device__ void Store(const Sums& sums, int row, const WgmmaWork& work) {
    if (std::is_same_v<Result, float> || arguments_.wide_out) {
      StoreAs<float>(sums, row, work);
    } else {
      StoreAs<Result>(sums, row, work);
    }
  }

 private:
  using Boxes = StagedBoxes<Tile>;
  using Boxes::Acquire, Boxes::HandOutBox, Boxes::lane, Boxes::staging_, Boxes::thread, Boxes::warp;

  static constexpr bool kFreeScale = sizeof(typename P::T) == 1;  // scales belong to the short code too

  // The threads that share a tile.
  static constexpr int kTileThreads = Tile::kPingPong ? kWarpgroup : Tile::kMultipliers * kWarpgroup;
  __device__ void SyncTile() const { hopper::NamedSync(Tile::kPingPong ? 1 + warpgroup_ : 1, kTileThreads); }

  __device__ bool HasColumnBias() const { return arguments_.problem.bias && arguments_.problem.bias_row_stride == 0; }
  __device__ const float* Bias(const WgmmaWork& work) const {
    const Problem& p = arguments_.problem;
    return static_cast<const float*>(p.bias) + (p.batches > 1 ? p.batch.At(work.batch).bias : 0);
  }
  __device__ float Scale(const WgmmaWork& work) const {
    const Problem& p = arguments_.problem;
    return p.scale ? static_cast<const float*>(p.scale)[p.batches > 1 ? p.batch.At(work.batch).scale : 0] : 1;
  }

  template <class U>
  __device__ void StoreAs(const Sums& sums, int row, const WgmmaWork& work) {
    const Problem& p = arguments_.problem;
    if (p.bias || p.activation != Activation::kNone || p.preactivation || !arguments_.boxes_out ||
        (!kFreeScale && p.scale)) {
      StoreFinished<U>(sums, row, work);
    } else {
      StorePlain<U>(sums, row, work);
    }
  }

  // Stores sums that are only rounded: short code, unrolled.
  template <class U>
  __device__ void StorePlain(const Sums& sums, int row, const WgmmaWork& work) {
    constexpr int kWidth = hopper::kBoxRowBytes / sizeof(U);
    const float scale = kFreeScale ? Scale(work) : 1;
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block)
#pragma unroll
      for (int chunk = 0; chunk < Tile::kColumns / kWidth; ++chunk) {
        const uint32_t buffer = Acquire();
#pragma unroll
        for (int group = 0; group < kWidth / 16; ++group) {
          float z[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) z[i] = sums[block][chunk * kWidth / 2 + group * 8 + i] * scale;
          Boxes::template Stage<U>(buffer, group, z);
        }
        HandOutBox(arguments_.out, buffer, row + block * 64, work.column + chunk * kWidth, work.slice);
      }
  }

  // Stores sums with scale, bias and activation, or to rows with any alignment: long code, once, in a loop. Unrolled,
  // the kernels were up to half slower, probably because the instruction cache had no room.
  template <class U>
  __device__ void StoreFinished(const Sums& sums, int first_row, const WgmmaWork& work) {
    // Columns per buffer and per group of sums. Larger groups are better as long as registers last.
    constexpr int kWidth = hopper::kBoxRowBytes / sizeof(U);
    constexpr int kGroup = Tile::kBlocks * Tile::kColumns <= 256 ? kWidth : 16;
    constexpr int kGroups = Tile::kColumns / kGroup, kCount = Tile::kBlocks * kGroups;
    const Problem& p = arguments_.problem;
    const bool boxes = !Tile::kStoresAnyRows || arguments_.boxes_out;
    const bool twice = p.preactivation && !boxes;  // there is room for only one of them at a time
    const float scale = Scale(work);
    uint32_t buffer = 0, before = 0;  // for results and preactivations
    [[maybe_unused]] RowWindows<U> windows;
#pragma unroll 1
    for (int step = 0; step < kCount << twice; ++step) {
      const bool preactivations = twice && step < kCount;  // only preactivations in this step
      const int index = step < kCount ? step : step - kCount;
      const int row = first_row + index / kGroups * 64, in_row = index % kGroups * kGroup, in_buffer = in_row % kWidth;
      if (boxes && in_buffer == 0) {
        buffer = Acquire();
        if (p.preactivation) before = Boxes::template Acquire<1>();
      }
      float z[kGroup / 2];
      SelectGroup<0, kCount>(sums, index, z);
      if (p.scale) {
#pragma unroll
        for (float& value : z) value *= scale;
      }
      if (HasColumnBias()) {
        AddColumnBias(z, bias_ + in_row * 4);
      } else if (p.bias) {
        AddBias(z, Bias(work), row, work.column + in_row);
      }
      if (boxes && p.preactivation) Boxes::template Stage<U>(before, in_buffer / 16, z);
      if (!preactivations) Activate<P::template kAccuracy<U>>(p.activation, z);
      if (boxes) {
        Boxes::template Stage<U>(buffer, in_buffer / 16, z);
        if (in_buffer + kGroup < kWidth) continue;
        const int column = work.column + in_row - in_buffer;
        HandOutBox(arguments_.out, buffer, row, column, work.slice);
        if (p.preactivation) HandOutBox(arguments_.preactivation, before, row, column, work.slice);
      } else if constexpr (Tile::kStoresAnyRows) {
        const int columns = static_cast<int>(min(p.n - work.column, int64_t{Tile::kColumns}));
        if (in_row == 0) {
          const int64_t first = row + warp() * RowWindows<U>::kRows;
          U* const out = static_cast<U*>(preactivations ? p.preactivation : p.out);
          windows = RowWindows<U>(staging_ + warp() * RowWindows<U>::kStagingBytes,
                                  out + (work.slice * p.m + first) * p.n + work.column, p.n,
                                  static_cast<int>(min(p.m - first, int64_t{RowWindows<U>::kRows})), columns, lane());
        }
        const bool last = in_row + kWidth >= columns;
        windows.Store(in_row / kWidth, z, last, lane());
        if (last) step += kGroups - 1 - index % kGroups;
      }
    }
  }

  // z: the thread's 8 sums in each 16 columns, in MultiplyAdd's order; bias: these columns' in shared memory.
  template <int kCount>
  static __device__ void AddColumnBias(float (&z)[kCount], uint32_t bias) {
    const uint32_t own = bias + lane() % 4 * 8;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float first, second;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(own + i * 8) : "memory");
      z[i] += first;
      z[i + 1] += second;
      z[i + 2] += first;
      z[i + 3] += second;
    }
  }
  template <int kCount>
  __device__ void AddBias(float (&z)[kCount], const float* bias, int first_row, int first_column) const {
    const Problem& p = arguments_.problem;
    const int row = first_row + warp() * 16 + lane() / 4, column = first_column + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = row + (i & 2) * 4, c = column + i / 4 * 8 + i % 2;
      if (r < p.m && c < p.n) z[i] += bias[r * p.bias_row_stride + c * p.bias_column_stride];
    }
  }

  const WgmmaArguments& arguments_;
  const uint32_t bias_;
  const int warpgroup_;
};

// Takes a thread's sums from a tile to memory. The thread has pairs of adjacent columns (2 i + h, h = column) in two
// adjacent rows, every 8 rows. The result's rows are aligned to 16 bytes, because rhs's rows are.
template <class P>
class TurnedStore {
 public:
  // Called before the sums are ready: fetches the bias for the thread's columns, if it is the same for all rows.
  // column: the first one.
  __device__ TurnedStore(const Problem& p, const WgmmaWork& work, int column)
      : p_(p), work_(work), row_(work.row + threadIdx.x % 4 * 2), column_(column) {
    if (p.scale) scale_ = static_cast<const float*>(p.scale)[p.batch.At(work.batch).scale];
    if (column < p.n && p.bias && p.bias_row_stride == 0) bias_ = make_float2(*Bias(0, 0), *Bias(0, 1));
  }

  template <int kSums>
  __device__ void Store(const float (&sums)[1][kSums]) const {
    if (column_ >= p_.n) return;
    const int64_t first = (int64_t{work_.slice} * p_.m + row_) * p_.n + column_;
    const bool same = p_.bias_row_stride == 0;  // all rows have the same bias
    if (!p_.preactivation && p_.activation == Activation::kNone && same) {
      // Without this sum ptxas would move all sums in each k tile, to and from the register pairs that are stored.
      StoreGroups<kSums>(p_.out, first, 0,
                         [&](int i) { return fmaf(sums[0][i], scale_, i % 4 < 2 ? bias_.x : bias_.y); });
      return;
    }
    constexpr int kAtOnce =
        kSums == 128 ? 8 : 16;  // measured: more code takes longer, and less has too little to do at a time
#pragma unroll 1
    for (int step = 0; step < kSums / kAtOnce; ++step) {
      float z[kAtOnce];
      SelectGroup<0, kSums / kAtOnce>(sums, step, z);
      const int group = step * kAtOnce / 4;
      if (same) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) z[i] = fmaf(z[i], scale_, i % 4 < 2 ? bias_.x : bias_.y);
      } else {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) z[i] = fmaf(z[i], scale_, *Bias((group + i / 4) * 8 + i % 2, i % 4 / 2));
      }
      if (p_.preactivation) StoreGroups<kAtOnce>(p_.preactivation, first, group, [&](int i) { return z[i]; });
      Activate<P::template kAccuracy<float>>(p_.activation, z);
      StoreGroups<kAtOnce>(p_.out, first, group, [&](int i) { return z[i]; });
    }
  }

 private:
  // The bias for a row and a column, counted from the first ones.
  __device__ const float* Bias(int row, int column) const {
    return static_cast<const float*>(p_.bias) + p_.batch.At(work_.batch).bias +
           min(int64_t{row_ + row}, p_.m - 1) * p_.bias_row_stride + (column_ + column) * p_.bias_column_stride;
  }
  // Stores kCount values, from groups with 8 rows, from `group` on.
  template <int kCount, class Value>
  __device__ void StoreGroups(void* target, int64_t first, int group, const Value& value) const {
    float* const out = static_cast<float*>(target) + first + group * 8 * p_.n;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (row_ + (group + i) * 8 + j < p_.m)
          StoreVector(reinterpret_cast<float2*>(out + (i * 8 + j) * p_.n),
                      make_float2(value(4 * i + j), value(4 * i + 2 + j)));
  }

  const Problem& p_;
  const WgmmaWork& work_;
  const int row_, column_;
  float scale_ = 1;
  float2 bias_ = {};
};

// out = activation(the sum of the partial results, in order, + bias). A block takes 32 packs, each with 4 adjacent
// elements; a warp sums every 8th partial result, and the first warp sums the warps' results. row_packs, rows: packs
// per row, rows per matrix.
inline constexpr int kPartialCount = 4, kPartialWarps = 8;
template <class U>
__global__ void __launch_bounds__(kPartialWarps * 32)
    SumPartials(const Problem p, const Divisor32 row_packs, const Divisor32 rows, const float* partials, int splits) {
  constexpr int kAtOnce = 8;  // a thread's loads in flight
  __shared__ float4 sums[kPartialWarps][32];
  const int64_t size = p.batches * p.m * p.n;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t index = blockIdx.x * 32 + lane, line = row_packs.Divide(index), batch = rows.Divide(line);
  const int64_t column = (index - line * row_packs.divisor) * int64_t{kPartialCount};
  const bool inside = line < p.batches * p.m;
  float4 sum = {};
  if (inside) {
    const float* const from = partials + line * p.n + column;
    for (int first = warp; first < splits; first += kAtOnce * kPartialWarps) {
      float4 parts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float4& part = parts[i] = {};
        if (first + i * kPartialWarps >= splits) continue;
        const float* const values = from + (first + i * kPartialWarps) * size;
        if (p.n % kPartialCount == 0) {
          part = *reinterpret_cast<const float4*>(values);
        } else {
          part.x = values[0];
          if (column + 1 < p.n) part.y = values[1];
          if (column + 2 < p.n) part.z = values[2];
          if (column + 3 < p.n) part.w = values[3];
        }
      }
#pragma unroll
      for (const float4& part : parts)
        sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || !inside) return;
#pragma unroll
  for (int i = 1; i < kPartialWarps; ++i) {
    const float4 add = sums[i][lane];
    sum = make_float4(sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w);
  }
  const float values[kPartialCount] = {sum.x, sum.y, sum.z, sum.w};
  StoreRow<U>(p, batch, p.batch.At(batch), line - batch * rows.divisor, column, values);
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_STORE_CUH_
