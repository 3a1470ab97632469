// Loads of operands by threads, in pieces of 4 or 8 bytes, where rows are not aligned to the 16 bytes that the copy
// engine asks for.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_PIECES_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_PIECES_CUH_

#include <cstdint>

#include "core/async_copy.cuh"
#include "hopper/barrier.cuh"
#include "hopper/tensor_copy.cuh"
#include "ops/matmul/wgmma_ring.cuh"
#include "ops/matmul/wgmma_work.cuh"

namespace jaxops::matmul {

// Loads kRows rows by 128 bytes as the copy engine does (hopper::LoadBox): with its swizzle, and zeros for what lies
// beyond an edge. By a warpgroup, kPiece rows at a time. row, byte: the first.
template <int kPiece, int kRows>
__device__ void LoadBoxInPieces(uint32_t target, const OperandInPieces& operand, int byte, int row, int slice) {
  constexpr int kOfRow = hopper::kBoxRowBytes / kPiece;
  const int thread = threadIdx.x % kWarpgroup;
  const int line = thread / kOfRow, within = thread % kOfRow * kPiece;
  const int rows = byte + within < operand.row_bytes ? operand.rows - row - line : 0;  // that are left
  const uint8_t* from =
      operand.data + slice * operand.slice_bytes + (row + line) * int64_t{operand.row_bytes} + byte + within;
  const int step = operand.row_bytes * kPiece;
  // Lines 4 apart differ by that bit of the swizzle, lines 8 apart by none.
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

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_PIECES_CUH_
