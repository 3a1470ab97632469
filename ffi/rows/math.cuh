// Scalar functions for row kernels, in float and double.
#ifndef JAXOPS_ROWS_MATH_CUH_
#define JAXOPS_ROWS_MATH_CUH_

#include <cmath>
#include <limits>

#include "rows/instructions.cuh"

namespace jaxops::rows {

inline constexpr float kLog2E = 1.4426950408889634f, kLog2ERest = 1.925963e-8f;  // their sum to 48 bits

// exp(x) = 2^(x log2 e): 2 ulp, plus |x| / 2 ulp from the argument. Arguments here are differences to a row's maximum,
// so the error relative to the row's largest exponential, 1, stays below 1 ulp.
__device__ inline float Exp(float x) { return Exp2(x * kLog2E); }
__device__ inline double Exp(double x) { return exp(x); }
// exp(x), x <= 0, to 2 ulp; 0 if the result is denormal: 2^whole 2^rest, |rest| <= 1/2. The addition that finds `whole`
// leaves it in the lowest bits, from which the exponent is made. From -88 on that exponent is 0's.
__device__ inline float PreciseExp(float x) {
  constexpr float kWhole = 3 << 22;
  x = MaxOrNaN(x, -88.0f);
  const float shifted = fmaf(x, kLog2E, kWhole), whole = shifted - kWhole;
  const float rest = fmaf(x, kLog2ERest, fmaf(x, kLog2E, -whole));
  return Exp2(rest) * __int_as_float((__float_as_int(shifted) << 23) + (127 << 23));
}
__device__ inline double PreciseExp(double x) { return exp(x); }
// exp(x) / 2^log2_divisor for 16-bit results: the argument is rounded to 2^-24 relative to its size, the logarithm to
// 2^-22.
__device__ inline float ExpOver(float x, float log2_divisor) { return Exp2(fmaf(x, kLog2E, -log2_divisor)); }
__device__ inline float Log2(float x) { return __log2f(x); }
__device__ inline float Log(float x) { return logf(x); }
__device__ inline double Log(double x) { return log(x); }
__device__ inline double Rsqrt(double x) { return rsqrt(x); }
__device__ inline float Rsqrt(float x) {  // the hardware's estimate and a Newton step, if that is defined
  const float r = rsqrtf(x), refined = fmaf(0.5f * r, fmaf(-x * r, r, 1.0f), r);
  return x > 0 && x < std::numeric_limits<float>::infinity() ? refined : r;
}

__device__ inline float Reciprocal(float x) { return __frcp_rn(x); }
__device__ inline double Reciprocal(double x) { return 1 / x; }

// A product that is rounded here, whatever the compiler does with the expression around it. If the product were
// contracted into x scale - max, logits beyond 2^31 would leave its rounding error, and that error's exponential is
// infinite.
__device__ inline float Product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double Product(double a, double b) { return __dmul_rn(a, b); }

// Divides finite numbers by one number: multiplies by its reciprocal, then brings the result to within an ulp by a
// Newton step.
template <class A>
struct Divisor {
  A divisor, reciprocal;

  Divisor() = default;
  explicit __device__ Divisor(A d) : divisor(d), reciprocal(Reciprocal(d)) {}
  friend __device__ A operator/(A value, const Divisor& d) {
    const A quotient = value * d.reciprocal;
    return fma(fma(-quotient, d.divisor, value), d.reciprocal, quotient);
  }
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_MATH_CUH_
