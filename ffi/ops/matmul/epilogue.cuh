// What happens to a sum of products before it is stored: bias, activation, rounding.
#ifndef JAXOPS_OPS_MATMUL_EPILOGUE_CUH_
#define JAXOPS_OPS_MATMUL_EPILOGUE_CUH_

#include <cmath>

#include "core/launch.cuh"
#include "core/types.cuh"
#include "ops/matmul/problem.h"

namespace jaxops::matmul {

// Within 2 units in the last place of e^x, in a third of expf's instructions: 2^t of the rounded product t = x log2(e),
// times what the rounding left out.
__device__ inline float Exp(float x) {
  constexpr float kLog2E = 1.4426950408889634f, kLow = 1.9259629911266175e-8f, kLn2 = 0.6931471805599453f;
  const float t = x * kLog2E;
  const float rest = fmaf(x, kLow, fmaf(x, kLog2E, -t)), power = exp2f(t);
  return isinf(power) || power == 0 ? power : fmaf(power, rest * kLn2, power);
}
__device__ inline float Divide(float a, float b) { return __fdividef(a, b); }  // within 2 units in the last place

// t exp(-x^2 + polynomial(t)) with t = 1 / (1 + |x| / 2) for x >= 0, and 2 - that for x < 0: within 1.2e-7 of erfc
// relative to it everywhere (a Chebyshev fit, Press et al., Numerical Recipes, 6.2), in a third of erfcf's
// instructions.
__device__ inline float Erfc(float x) {
  const float t = Divide(1.0f, fmaf(0.5f, fabsf(x), 1.0f));
  float sum = 0.17087277f;
  for (const float coefficient : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f,
                                  0.37409196f, 1.00002368f, -1.26551223f})
    sum = fmaf(sum, t, coefficient);
  const float y = t * Exp(fmaf(-x, x, sum));
  return x < 0 ? 2 - y : y;  // no number for no number
}

// One switch for all values: within it they stay in registers.
template <class A, int kCount>
__device__ void Activate(Activation activation, A (&z)[kCount]) {
  const auto each = [&](const auto& function) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] = function(z[i]);
  };
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      each([](A x) { return x < 0 ? A{0} : x; });  // NaN stays NaN
      break;
    case Activation::kGelu:  // z / 2 (1 + tanh(u)) = z / (1 + exp(-2 u)), u = sqrt(2 / pi) (z + 0.044715 z^3)
      each([](A x) { return Divide(x, 1 + Exp(A(-1.5957691216057308) * (x + A(0.044715) * x * x * x))); });
      break;
    case Activation::kGeluExact:  // z / 2 erfc(-z / sqrt(2))
      each([](A x) { return A(0.5) * x * Erfc(x * A(-0.7071067811865476)); });
      break;
    default:  // silu
      each([](A x) { return Divide(x, 1 + Exp(-x)); });
  }
}

// Stores kCount adjacent elements of row `row`, the first in column `column`; those outside the result are left out.
template <class U, class A, int kCount>
__device__ void StoreRow(const Problem& p, int64_t batch, int64_t bias_offset, int64_t row, int64_t column,
                         const A (&sums)[kCount]) {
  if (row >= p.m || column >= p.n) return;
  const A* const bias = p.bias ? static_cast<const A*>(p.bias) + bias_offset + row * p.bias_row_stride : nullptr;
  A z[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool inside = column + i < p.n;
    z[i] = bias && inside ? sums[i] + bias[(column + i) * p.bias_column_stride] : sums[i];
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
  if (p.preactivation) store(p.preactivation, ToPack<U, kCount>([&](int i) { return z[i]; }));
  Activate(p.activation, z);
  store(p.out, ToPack<U, kCount>([&](int i) { return z[i]; }));
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
