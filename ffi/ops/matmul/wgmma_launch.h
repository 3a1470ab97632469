// The tensor cores' kernel for each pair of operand types, compiled apart.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_LAUNCH_H_
#define JAXOPS_OPS_MATMUL_WGMMA_LAUNCH_H_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "core/handler.h"
#include "ops/matmul/problem.h"

namespace jaxops::matmul {

// An f32 operand in parts (SplitOperand): matrices that are stored for each of its own, the side of the blocks that are
// scaled each by its own number, and what low parts are to be multiplied by.
inline constexpr int kSplitSlices = 3, kSplitBlock = 64;
inline constexpr float kLowScale = 0x1p-12f;

// The type of results that are not f32: the operands', or of 8-bit operands bf16.
template <class T>
using WgmmaResult = std::conditional_t<sizeof(T) == 1, __nv_bfloat16, T>;

// An operand as the kernel reads it: the caller's array, or a copy made for it.
struct WgmmaOperand {
  const void* data;
  bool transposed;                // as in Problem
  int64_t slices, stride;         // matrices (of parts: all that are stored); elements from row to row
  const float* scales = nullptr;  // of f32 in parts
  int piece = 0;                  // bytes that threads load at a time (wgmma_pieces.cuh); 0: the copy engine does
};

// An operand of which two blocks of a cluster, whose tiles lie side by side, load half of each tile for both: lhs, if
// they are tiles of one row, or rhs, of one column. The order is part of the calling convention.
enum class SharedOperand : int32_t { kNone, kLhs, kRhs, kCount };

// The rows, columns and terms of a product, which are counted in 32 bits with those of a tile beyond the last
// (jaxops/_limits.py).
inline constexpr int64_t kMaxMatrixSize = (int64_t{1} << 31) - 1 - 512;

// How a product is computed; chosen by jaxops/ops/_matmul_choice.py.
struct WgmmaPlan {
  WgmmaOperand lhs, rhs;
  int tile_rows, tile_columns;
  bool ping_pong;
  int band;  // tile rows, see WgmmaWorks
  SharedOperand shared;
  bool in_parts;  // f32 in full precision
  int promote;    // k tiles after which sums are promoted to f32 registers; 0: never
  int splits;
  float* partials;       // [splits, batches, m, n]; null: the parts of a split are summed by clusters of blocks
  const int32_t* unfit;  // if not null and not 0 on the device: leave, another kernel does it
  bool wide_out;         // f32 results
};

// cudaErrorNotSupported if there is no such tile, or not for such sizes, rows or plans, or no driver. T, V:
// __nv_bfloat16, __half, float (TF32), hopper::E4M3, hopper::E5M2.
template <class T, class V>
cudaError_t LaunchWgmma(cudaStream_t stream, const Problem& problem, const WgmmaPlan& plan);

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_LAUNCH_H_
