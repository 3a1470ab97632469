// The tensor cores' kernel for each pair of operand types, compiled separately.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_H_
#define JAXOPS_OPS_MATMUL_WGMMA_H_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "core/handler.h"
#include "ops/matmul/problem.h"

namespace jaxops::matmul {

// An f32 operand in parts (SplitOperand).
inline constexpr int kSplitSlices = 3;        // stored matrices per operand matrix
inline constexpr int kSplitBlock = 64;        // a block's side; each block has its own scale
inline constexpr float kLowScale = 0x1p-12f;  // the factor for products with low parts

// The type for results that are not f32: the operands' type, or bf16 for 8-bit operands.
template <class T>
using WgmmaResult = std::conditional_t<sizeof(T) == 1, __nv_bfloat16, T>;

// An operand as the kernel reads it: the caller's array, or a copy made for it.
struct WgmmaOperand {
  const void* data;
  bool transposed;                // as in Problem
  int64_t slices, stride;         // matrices (with parts: all stored ones); elements from row to row
  const float* scales = nullptr;  // for f32 in parts
  int piece = 0;                  // bytes that threads load at a time (wgmma_load.cuh); 0: the copy engine does
};

// The operand that two blocks in a cluster share: each loads half of every tile for both. Their tiles lie side by side,
// in one row if lhs is shared, in one column if rhs is. The order is part of the calling convention.
enum class SharedOperand : int32_t { kNone, kLhs, kRhs, kCount };

// The most rows, columns and terms in a product: a tile beyond the last must still fit 32-bit counts
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
  int promote;    // after this many k tiles, sums are promoted to f32 registers; 0: never
  int splits;
  float* partials;       // [splits, batches, m, n]; null: clusters of blocks sum a split's parts
  const int32_t* unfit;  // if not null and not 0 on the device: leave, another kernel does it
  bool wide_out;         // f32 results
};

// Returns cudaErrorNotSupported if no kernel has this tile or takes these sizes, rows or plans, or if there is no
// driver. T, V: __nv_bfloat16, __half, float (TF32), hopper::E4M3, hopper::E5M2.
template <class T, class V>
cudaError_t LaunchWgmma(cudaStream_t stream, const Problem& problem, const WgmmaPlan& plan);

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_H_
