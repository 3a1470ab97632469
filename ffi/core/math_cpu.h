// Arithmetic that compilers vectorise: reductions, exp, and the 16-bit floats.
#ifndef JAXOPS_CORE_MATH_CPU_H_
#define JAXOPS_CORE_MATH_CPU_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

// One clone an instruction set, chosen when the module is loaded (by the set: an arch= of one processor's name would
// run on that processor alone). Whatever such a function calls must be inlined into it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define JAXOPS_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define JAXOPS_CLONES
#endif
#define JAXOPS_INLINE inline __attribute__((always_inline))

namespace jaxops {

// max over f(i); NaN is ignored, as the callers' later subtraction brings it back.
template <class A, class F>
JAXOPS_INLINE A MaxOf(int64_t n, F f) {
  A max = -std::numeric_limits<A>::infinity();
#pragma omp simd reduction(max : max)
  for (int64_t i = 0; i < n; ++i) {
    const A value = f(i);
    max = value > max ? value : max;
  }
  return max;
}

// The sum of f(i), taken in double: exact to the last place of a float however long it is. For doubles' own sake the
// sums of blocks are added up by Kahan's method.
template <class A, class F>
JAXOPS_INLINE A SumOf(int64_t n, F f) {
  constexpr int64_t kBlock = 256;
  double total = 0, excess = 0;  // excess: what the last addition rounded up by
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) sum += static_cast<double>(f(i));
    const double corrected = sum - excess, next = total + corrected;
    const double rounded = (next - total) - corrected;
    excess = rounded == rounded ? rounded : 0;  // infinity stays infinity
    total = next;
  }
  return static_cast<A>(total);
}

// exp(x) = 2^k exp(r), k = round(x / ln 2), |r| <= ln(2) / 2; exp(r) by its Taylor series: degree 7 leaves 5e-9 of
// relative error in float, degree 13 leaves 4e-18 in double. 2^k is applied in two halves, so that denormal results
// and overflow to infinity come out right. Branch-free; NaN gives NaN.
JAXOPS_INLINE float Exp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x) in the low mantissa bits
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float k = shifted - kRound;
  const float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  const int32_t half = exponent >> 1;
  const float low = std::bit_cast<float>((half + 127) << 23);
  const float high = std::bit_cast<float>((exponent - half + 127) << 23);
  return p * low * high;
}

JAXOPS_INLINE double Exp(double x) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  x = x < -746.0 ? -746.0 : x;
  x = x > 710.0 ? 710.0 : x;
  const double shifted = x * 1.4426950408889634 + kRound;
  const double k = shifted - kRound;
  const double r = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800;
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const int64_t exponent = std::bit_cast<int64_t>(shifted) - std::bit_cast<int64_t>(kRound);
  const int64_t half = exponent >> 1;
  const double low = std::bit_cast<double>((half + 1023) << 52);
  const double high = std::bit_cast<double>((exponent - half + 1023) << 52);
  return p * low * high;
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

JAXOPS_INLINE float ToFloat(float x) { return x; }
JAXOPS_INLINE double ToFloat(double x) { return x; }
JAXOPS_INLINE float ToFloat(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
JAXOPS_INLINE float ToFloat(Float16 x) {
  // XLA's threads flush denormal floats to zero, so the denormal halfs go through integers: mantissa times 2^-24.
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t denormal = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t normal = (magnitude << 13) + 0x38000000u;
  const uint32_t special = magnitude << 13 | 0x7f800000u;  // infinity and NaN keep their mantissa
  uint32_t bits = magnitude < 0x0400u ? denormal : normal;
  bits = magnitude >= 0x7c00u ? special : bits;
  return std::bit_cast<float>(bits | (x.bits & 0x8000u) << 16);
}

// Rounding to nearest, ties to even.
template <class T, class A>
JAXOPS_INLINE T FromFloat(A x) {
  return static_cast<T>(x);
}
template <>
JAXOPS_INLINE BFloat16 FromFloat<BFloat16, float>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const uint32_t quiet = bits >> 16 | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}
template <>
JAXOPS_INLINE Float16 FromFloat<Float16, float>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14: adding 0.5 puts the denormal's bits at the bottom of the mantissa, rounded by the addition itself.
  const uint32_t denormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
  const uint32_t overflow = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  uint32_t half = magnitude < 0x38800000u ? denormal : normal;
  half = magnitude >= 0x477ff000u ? overflow : half;
  return {static_cast<uint16_t>(half | (bits >> 16 & 0x8000u))};
}

}  // namespace jaxops

#endif  // JAXOPS_CORE_MATH_CPU_H_
