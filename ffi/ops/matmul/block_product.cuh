// A plain product in shared memory, for kernels whose operands the copy engine cannot take, such as a slice that begins
// between multiples of 16 bytes, and for other GPUs, to which an exported program may come. Slow, and small.
#ifndef JAXOPS_OPS_MATMUL_BLOCK_PRODUCT_CUH_
#define JAXOPS_OPS_MATMUL_BLOCK_PRODUCT_CUH_

#include <cstdint>

namespace jaxops::matmul {

// A block has kSide x kSide threads, one for each of its results.
inline constexpr int kSide = 16;
inline int64_t CountBlocks(int64_t m, int64_t n) { return ((m + kSide - 1) / kSide) * ((n + kSide - 1) / kSide); }

struct Place {
  int64_t row, column;
};
// The thread's result, if the grid has CountBlocks(m, n) blocks.
__device__ inline Place PlaceInBlocks(int64_t n) {
  const int64_t across = (n + kSide - 1) / kSide;
  return {blockIdx.x / across * kSide + threadIdx.x / kSide, blockIdx.x % across * kSide + threadIdx.x % kSide};
}

template <class T>
__device__ float Element(const void* data, int64_t at, bool inside) {
  return inside ? static_cast<float>(static_cast<const T*>(data)[at]) : 0.0f;
}

// Adds the block's rows in lhs [m, k] times each rhs, [k, n] or [n, k], to the thread's sums, at row and column.
template <class T, bool kTransposed, int kProducts>
__device__ void MultiplyInBlock(const void* lhs, const void* const (&rhs)[kProducts], int64_t m, int64_t n, int64_t k,
                                int64_t row, int64_t column, float (&sums)[kProducts]) {
  __shared__ float left[kSide][kSide + 1], right[kProducts][kSide][kSide + 1];
  const int i = threadIdx.x / kSide, j = threadIdx.x % kSide;
  const int64_t first_column = column - j;
  for (int64_t first = 0; first < k; first += kSide) {
    left[i][j] = Element<T>(lhs, row * k + first + j, row < m && first + j < k);
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      if constexpr (kTransposed) {
        right[product][j][i] =
            Element<T>(rhs[product], (first_column + i) * k + first + j, first_column + i < n && first + j < k);
      } else {
        right[product][i][j] = Element<T>(rhs[product], (first + i) * n + column, first + i < k && column < n);
      }
    }
    __syncthreads();
#pragma unroll
    for (int at = 0; at < kSide; ++at)
#pragma unroll
      for (int product = 0; product < kProducts; ++product)
        sums[product] = fmaf(left[i][at], right[product][at][j], sums[product]);
    __syncthreads();
  }
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_BLOCK_PRODUCT_CUH_
