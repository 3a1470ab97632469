// A product's epilogue: scales its sums, adds the bias, applies the activation and rounds.
#ifndef JAXOPS_OPS_MATMUL_EPILOGUE_CUH_
#define JAXOPS_OPS_MATMUL_EPILOGUE_CUH_

#include <cmath>

#include "core/launch.cuh"
#include "core/types.cuh"
#include "core/vector_store.cuh"
#include "ops/matmul/problem.h"

namespace jaxops::matmul {

// How exact activations are. Exact: a few units in the last place of an f32. Fast, for 16-bit results and TF32
// products: relative errors near 2^-22 max(1, |log2(result)|), and no results below 2^-126. Divide says where both give
// 0.
enum class Accuracy { kFull, kNarrow };
template <class U>
inline constexpr Accuracy kAccuracyFor = sizeof(U) == 2 ? Accuracy::kNarrow : Accuracy::kFull;

__device__ inline float NarrowExp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
inline constexpr float kLog2E = 1.4426950408889634f;
// e^x within 2 units in the last place, with a third of expf's instructions: 2^t for the rounded product t = x log2(e),
// times a correction for the rounding.
template <Accuracy kAccuracy = Accuracy::kFull>
__device__ float Exp(float x) {
  constexpr float kLow = 1.9259629911266175e-8f, kLn2 = 0.6931471805599453f;
  const float t = x * kLog2E;
  if constexpr (kAccuracy == Accuracy::kNarrow) return NarrowExp2(t);
  const float rest = fmaf(x, kLow, fmaf(x, kLog2E, -t)), power = exp2f(t);
  return isinf(power) || power == 0 ? power : fmaf(power, rest * kLn2, power);
}
// a / b within 2 units in the last place for 1 <= b <= 2^126; 0 for larger b, so silu(-88) is 0, not -5e-37.
template <Accuracy kAccuracy = Accuracy::kFull>
__device__ float Divide(float a, float b) {
  if constexpr (kAccuracy == Accuracy::kNarrow) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
    return a * reciprocal;
  }
  return __fdividef(a, b);
}

// t exp(-x^2 + polynomial(t)) with t = 1 / (1 + |x| / 2) for x >= 0, and 2 minus it for x < 0: within 1.2e-7 of erfc,
// relative to it, everywhere (a Chebyshev fit, Press et al., Numerical Recipes, 6.2), in a third of erfcf's
// instructions.
template <Accuracy kAccuracy = Accuracy::kFull>
__device__ float Erfc(float x) {
  const float t = Divide<kAccuracy>(1.0f, fmaf(0.5f, fabsf(x), 1.0f));
  float sum = 0.17087277f;
  for (const float coefficient : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f,
                                  0.37409196f, 1.00002368f, -1.26551223f})
    sum = fmaf(sum, t, coefficient);
  const float y = t * Exp<kAccuracy>(fmaf(-x, x, sum));
  return x < 0 ? 2 - y : y;  // NaN for NaN
}

// gelu: -2 u = z (kGeluLinear + kGeluCubic z^2), u = sqrt(2 / pi) (z + 0.044715 z^3).
inline constexpr float kGeluLinear = -1.5957691216057308f, kGeluCubic = 0.044715f * kGeluLinear;

// One switch for all values, so that they stay in registers.
template <Accuracy kAccuracy = Accuracy::kFull, int kCount>
__device__ void Activate(Activation activation, float (&z)[kCount]) {
  const auto each = [&](const auto& function) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] = function(z[i]);
  };
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      each([](float x) { return x < 0 ? 0.0f : x; });  // NaN stays NaN
      break;
    case Activation::kGelu:  // z / 2 (1 + tanh(u)) = z / (1 + exp(-2 u))
      if constexpr (kAccuracy == Accuracy::kNarrow) {
        each([](float x) {
          const float power = NarrowExp2(x * fmaf(x * x, kGeluCubic * kLog2E, kGeluLinear * kLog2E));
          return Divide<kAccuracy>(x, 1 + power);
        });
      } else {
        each(
            [](float x) { return Divide<kAccuracy>(x, 1 + Exp<kAccuracy>(x * fmaf(x * x, kGeluCubic, kGeluLinear))); });
      }
      break;
    case Activation::kGeluExact:  // z / 2 erfc(-z / sqrt(2))
      each([](float x) { return 0.5f * x * Erfc<kAccuracy>(x * -0.7071067811865476f); });
      break;
    default:  // silu
      each([](float x) { return Divide<kAccuracy>(x, 1 + Exp<kAccuracy>(-x)); });
  }
}

// dz[i] *= the activation's derivative at z[i].
template <Accuracy kAccuracy, int kCount>
__device__ void Differentiate(Activation activation, const float (&z)[kCount], float (&dz)[kCount]) {
  const auto each = [&](const auto& derivative) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) dz[i] *= derivative(z[i]);
  };
  const auto sigmoid = [](float x) { return Divide<kAccuracy>(1.0f, 1 + Exp<kAccuracy>(-x)); };
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) dz[i] = z[i] > 0 ? dz[i] : 0;
      break;
    case Activation::kGelu:  // s + z s (1 - s) 2 u', s = 1 / (1 + exp(-2 u))
      each([&](float x) {
        const float s = sigmoid(-x * fmaf(x * x, kGeluCubic, kGeluLinear));
        return fmaf(x * s * (1 - s), -fmaf(x * x, 3 * kGeluCubic, kGeluLinear), s);
      });
      break;
    case Activation::kGeluExact:  // erfc(-z / sqrt(2)) / 2 + z exp(-z^2 / 2) / sqrt(2 pi)
      each([](float x) {
        return fmaf(x * 0.3989422804014327f, Exp<kAccuracy>(-0.5f * x * x),
                    0.5f * Erfc<kAccuracy>(x * -0.7071067811865476f));
      });
      break;
    default:  // silu: s + z s (1 - s)
      each([&](float x) {
        const float s = sigmoid(x);
        return fmaf(x * s, 1 - s, s);
      });
  }
}

// Stores kCount adjacent elements in row `row` from column `column` on; skips elements outside the result.
template <class U, int kCount>
__device__ void StoreRow(const Problem& p, int64_t batch, const Offsets& offsets, int64_t row, int64_t column,
                         const float (&sums)[kCount]) {
  if (row >= p.m || column >= p.n) return;
  const float scale = p.scale ? static_cast<const float*>(p.scale)[offsets.scale] : 1;
  const float* const bias =
      p.bias ? static_cast<const float*>(p.bias) + offsets.bias + row * p.bias_row_stride : nullptr;
  float z[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool inside = column + i < p.n;
    z[i] = bias && inside ? fmaf(sums[i], scale, bias[(column + i) * p.bias_column_stride]) : sums[i] * scale;
  }
  const int64_t offset = (batch * p.m + row) * p.n + column;
  const auto store = [&](void* target, const Pack<U, kCount>& values) {
    U* const to = static_cast<U*>(target) + offset;
    if (p.n % kCount == 0) {  // then every row is aligned to a pack
      StoreVector(reinterpret_cast<Pack<U, kCount>*>(to), values);
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

// Block `block`'s tile. Tiles are visited in bands of 8 tile rows, so that concurrent blocks share operands.
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

inline int64_t CountTiles(const Problem& p, int tile_rows, int tile_columns) {
  return ((p.m + tile_rows - 1) / tile_rows) * ((p.n + tile_columns - 1) / tile_columns) * p.batches;
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_EPILOGUE_CUH_
