// The way of a warp's results to rows in memory that are not aligned to 16 bytes, which the copy engine cannot write.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_ROWS_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_ROWS_CUH_

#include <cstdint>

#include "core/types.cuh"
#include "core/vector_store.cuh"
#include "hopper/tensor_copy.cuh"

namespace jaxops::matmul {

// 16 rows of a tile, on their way through shared memory in windows of 128 bytes. There, a row begins as many bytes
// behind a multiple of 16 (its shift) as in memory, so that whole pieces of 16 bytes can be stored, and by elements
// only what remains at its two ends. A row has two windows in turn: what reaches beyond one is stored with the next.
// Rows whose numbers differ by 8 have the same shift.
template <class U>
class RowWindows {
 public:
  static constexpr int kRows = 16, kWindow = 128, kColumns = kWindow / sizeof(U);
  static constexpr int kStagingBytes = kRows * 2 * kWindow;

  RowWindows() = default;
  // staging: kStagingBytes, aligned to 256; out: where the first row's part in the tile begins; n: elements from row to
  // row; rows, columns: that there are.
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

  // Stores the next window's columns; z: the thread's sums of them, in the order of MultiplyAdd; last: of the rows.
  template <int kCount>
  __device__ void Store(int window, const float (&z)[kCount], bool last, uint32_t lane) const {
    static_assert(kCount * 2 == kColumns);
    const uint32_t first = window * kWindow;
    __syncwarp();  // the window before has been read
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

  // Where byte `at` of a row lies, whose windows begin at `row`. Rows are turned, each by 16 bytes more, so that
  // threads use all banks of shared memory; `at` counts that, too.
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

  // A lane stores its piece of each fourth row.
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

  // What of the first or last piece of each row is the tile's: a lane has an element of some rows.
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
  uintptr_t to_[2];               // of its first two rows, aligned
  int shift_[2], bytes_, rows_;
  int64_t eight_rows_;
  bool words_;  // all rows are aligned to 4 bytes
};

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_ROWS_CUH_
