// What happens to a sum of products before it is stored: bias, activation, rounding.
#ifndef JAXOPS_OPS_MATMUL_EPILOGUE_CUH_
#define JAXOPS_OPS_MATMUL_EPILOGUE_CUH_

#include <cmath>

#include "core/launch.cuh"
#include "core/types.cuh"
#include "ops/matmul/problem.h"

namespace jaxops::matmul {

template <class A>
__device__ A Activate(Activation activation, A z) {
  switch (activation) {
    case Activation::kRelu:
      return z < 0 ? A{0} : z;  // NaN stays NaN
    case Activation::kGelu:     // z / 2 (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3)))
      return A(0.5) * z * (1 + tanh(A(0.7978845608028654) * (z + A(0.044715) * z * z * z)));
    case Activation::kGeluExact:  // z / 2 erfc(-z / sqrt(2))
      return A(0.5) * z * erfc(z * A(-0.7071067811865476));
    case Activation::kSilu:
      return z / (1 + exp(-z));
    default:
      return z;
  }
}

// Stores kCount adjacent elements of row `row`, the first in column `column`; those outside the result are left out.
template <class U, class A, int kCount>
__device__ void StoreRow(const Problem& p, int64_t batch, int64_t bias_offset, int64_t row, int64_t column,
                         const A (&sums)[kCount]) {
  if (row >= p.m || column >= p.n) return;
  const A* const bias = p.bias ? static_cast<const A*>(p.bias) + bias_offset + row * p.bias_row_stride : nullptr;
  Pack<U, kCount> results = {}, preactivations = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool inside = column + i < p.n;
    const A z = bias && inside ? sums[i] + bias[(column + i) * p.bias_column_stride] : sums[i];
    preactivations.Set(i, static_cast<U>(z));
    results.Set(i, static_cast<U>(Activate(p.activation, z)));
  }
  const int64_t offset = (batch * p.m + row) * p.n + column;
  const auto store = [&](void* target, const Pack<U, kCount>& values) {
    U* const to = static_cast<U*>(target) + offset;
    if (p.n % kCount == 0) {  // then every row starts at a pack's alignment
      *reinterpret_cast<Pack<U, kCount>*>(to) = values;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (column + i < p.n) to[i] = values.Get(i);
    }
  };
  store(p.out, results);
  if (p.preactivation) store(p.preactivation, preactivations);
}

// The tile of block `block`: tiles are visited in bands of 8 tile rows, so that blocks that run together share
// operands.
struct Tile {
  int64_t row, column, batch;
};
__device__ inline Tile TileOf(const Problem& p, int64_t block, int tile_rows, int tile_columns) {
  constexpr int64_t kBand = 8;
  const int64_t rows = (p.m + tile_rows - 1) / tile_rows, columns = (p.n + tile_columns - 1) / tile_columns;
  const int64_t batch = block / (rows * columns), tile = block % (rows * columns);
  const int64_t band = tile / (kBand * columns), within = tile % (kBand * columns);
  const int64_t height = min(kBand, rows - band * kBand);
  return {(band * kBand + within % height) * tile_rows, within / height * tile_columns, batch};
}

// Launches one block a tile.
template <class Kernel>
cudaError_t LaunchTiles(cudaStream_t stream, Kernel kernel, const Problem& p, int tile_rows, int tile_columns,
                        int threads, int shared_bytes) {
  const int64_t tiles = ((p.m + tile_rows - 1) / tile_rows) * ((p.n + tile_columns - 1) / tile_columns) * p.batches;
  return Launch(stream, kernel, {tiles, threads, 1, static_cast<size_t>(shared_bytes)}, p);
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_EPILOGUE_CUH_
