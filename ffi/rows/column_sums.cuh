// Sums over the rows of each group, column by column, of up to two functions of the elements: parameter gradients.
// Each chunk of rows is summed by its own blocks into the workspace; a second kernel adds the chunks in their order, so
// that the result is the same in every run.
#ifndef JAXOPS_ROWS_COLUMN_SUMS_CUH_
#define JAXOPS_ROWS_COLUMN_SUMS_CUH_

#include <cstdint>
#include <limits>

#include "core/row_shape.h"
#include "core/types.cuh"

namespace jaxops::rows {

template <class A>
struct ColumnSums {
  A first, second;
};

// Where the two sums go; null for one that is not wanted. The workspace has a plane [groups, chunks, columns] for each
// that is.
template <class A>
struct SumResults {
  int64_t chunks;
  A *workspace, *first, *second;
};

// Rows of adjacent elements: a warp takes 32 columns, the 8 warps of a block every eighth row of the chunk.
// Rows of strided elements (inner > 1): a block takes one column; its threads walk along the inner axis.
inline constexpr int kSumThreads = 256;

template <bool kStrided, class A, class Op>
__global__ void __launch_bounds__(kSumThreads)
    SumChunkKernel(const Op op, const RowShape shape, const SumResults<A> results) {
  const int64_t chunks = results.chunks;
  constexpr int kTile = kStrided ? 1 : 32;
  const int64_t tiles = (shape.columns + kTile - 1) / kTile;
  const int64_t tile = blockIdx.x % tiles, chunk = blockIdx.x / tiles % chunks, group = blockIdx.x / tiles / chunks;
  const int64_t column = tile * kTile + (kStrided ? 0 : threadIdx.x % 32);
  const int64_t rows = shape.rows_per_group(), end = rows * (chunk + 1) / chunks;
  ColumnSums<A> sum = {0, 0};
  if (column < shape.columns) {
    for (int64_t row = rows * chunk / chunks + threadIdx.x / kTile; row < end; row += kSumThreads / kTile) {
      const int64_t outer = kStrided ? row / shape.inner : row, i = kStrided ? row % shape.inner : 0;
      const int64_t offset = ((group * shape.rows + outer) * shape.columns + column) * shape.inner + i;
      const ColumnSums<A> value = op(group * rows + row, offset);
      sum.first += value.first;
      sum.second += value.second;
    }
  }
  // The threads of a column lie kTile apart; halving their number keeps the order of additions fixed.
  __shared__ A shared[2][kSumThreads];
  shared[0][threadIdx.x] = sum.first;
  shared[1][threadIdx.x] = sum.second;
  for (int half = kSumThreads / 2; half >= kTile; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      shared[0][threadIdx.x] += shared[0][threadIdx.x + half];
      shared[1][threadIdx.x] += shared[1][threadIdx.x + half];
    }
  }
  if (threadIdx.x < kTile && column < shape.columns) {
    A* out = results.workspace + (group * chunks + chunk) * shape.columns + column;
    if (results.first) *out = shared[0][threadIdx.x], out += shape.groups * chunks * shape.columns;
    if (results.second) *out = shared[1][threadIdx.x];
  }
}

// Adds up the chunks in the workspace, in double: a block takes 32 sums, each of its warps every eighth chunk.
template <class A>
__global__ void __launch_bounds__(kSumThreads) AddChunksKernel(const RowShape shape, const SumResults<A> results) {
  constexpr int kWarps = kSumThreads / 32;
  const int planes = (results.first != nullptr) + (results.second != nullptr), warp = threadIdx.x / 32;
  const int64_t sums = shape.groups * shape.columns, k = blockIdx.x * int64_t{32} + threadIdx.x % 32;
  const int64_t plane = k / sums, group = k % sums / shape.columns, column = k % shape.columns;
  __shared__ double shared[kWarps][32];
  double total = 0;
  if (plane < planes) {
    const A* const parts = results.workspace + (plane * shape.groups + group) * results.chunks * shape.columns + column;
    for (int64_t chunk = warp; chunk < results.chunks; chunk += kWarps) total += parts[chunk * shape.columns];
  }
  shared[warp][threadIdx.x % 32] = total;
  __syncthreads();
  if (warp > 0 || plane >= planes) return;
  for (int w = 1; w < kWarps; ++w) total += shared[w][threadIdx.x];
  (plane == 0 && results.first ? results.first : results.second)[k % sums] = static_cast<A>(total);
}

template <class A>
cudaError_t LaunchAddChunks(cudaStream_t stream, const RowShape& shape, const SumResults<A>& results) {
  const int64_t planes = (results.first != nullptr) + (results.second != nullptr);
  const int64_t sums = shape.groups * shape.columns * planes;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((sums + 31) / 32));
  config.blockDim = dim3(kSumThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, AddChunksKernel<A>, shape, results);
}

// op(row, offset of the element) -> ColumnSums
template <class A, class Op>
cudaError_t LaunchColumnSums(cudaStream_t stream, const Op& op, const RowShape& shape, const SumResults<A>& results) {
  const bool strided = shape.inner > 1;
  const int64_t tiles = strided ? shape.columns : (shape.columns + 31) / 32;
  const int64_t blocks = tiles * results.chunks * shape.groups;
  if (blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kSumThreads);
  config.stream = stream;
  const auto kernel = strided ? SumChunkKernel<true, A, Op> : SumChunkKernel<false, A, Op>;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, op, shape, results);
  return status != cudaSuccess ? status : LaunchAddChunks(stream, shape, results);
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_COLUMN_SUMS_CUH_
