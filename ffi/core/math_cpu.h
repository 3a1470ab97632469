// Arithmetic that compilers vectorise (selection, exp, 16-bit floats), and the macro for functions that use it.
#ifndef JAXOPS_CORE_MATH_CPU_H_
#define JAXOPS_CORE_MATH_CPU_H_

#include <bit>
#include <cstdint>

// One clone for each instruction set, chosen when the module is loaded. Clones are named by instruction set, because an
// arch= clone runs only on that processor. Functions called by a clone are inlined. Sanitizer builds have one clone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define JAXOPS_CLONES __attribute__((flatten, target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define JAXOPS_CLONES __attribute__((flatten))
#endif
#define JAXOPS_INLINE inline __attribute__((always_inline))

namespace jaxops {

// keep ? value : other, with both evaluated: compilers do not vectorise a loop whose loads depend on a condition.
template <class A>
JAXOPS_INLINE A Select(bool keep, A value, A other) {
  return keep ? value : other;
}

// exp(x) for x <= 0: 2^k exp(r), k = round(x / ln 2), |r| <= ln(2) / 2; exp(r) by its Taylor series: degree 7 leaves a
// relative error of 5e-9 in float, degree 13 leaves 4e-18 in double. Denormal results are 0, as in XLA. NaN gives NaN.
// The last selection masks the result; a mask on x would make compilers duplicate the whole computation.
JAXOPS_INLINE float Exp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x) in the low mantissa bits
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
  const float scale = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + (127u << 23));
  const float result = p * scale;
  return x < -87.3f ? 0.0f : result;
}

JAXOPS_INLINE double Exp(double x) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
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
  const double scale = std::bit_cast<double>((std::bit_cast<uint64_t>(shifted) << 52) + (uint64_t{1023} << 52));
  const double result = p * scale;
  return x < -708.0 ? 0.0 : result;
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Boolean {
  uint8_t bits;  // the lowest is its value, as for XLA; in a mask from elsewhere others may be set
};

JAXOPS_INLINE float ToFloat(Boolean x) { return static_cast<float>(x.bits & 1); }
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
  const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u), quiet = bits | 0x400000u;
  return {static_cast<uint16_t>((x == x ? rounded : quiet) >> 16)};
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
