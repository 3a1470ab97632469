// Logits with a soft cap; sums of exponentials over logits, and how they are joined.
#ifndef JAXOPS_OPS_CROSS_ENTROPY_SUMMARY_CUH_
#define JAXOPS_OPS_CROSS_ENTROPY_SUMMARY_CUH_

#include <cmath>
#include <limits>
#include <type_traits>

#include "rows/math.cuh"

namespace jaxops {

// Exponentials are taken as 2^(z factor - value) with value = origin factor, rounded: one fused operation per element.
// The rounding multiplies a whole row by one factor, which Correction() takes away; so differences between large logits
// are exact. factor = log2e. From 2^126 on, where that product would overflow, logits differ by 0 or by at least 2^103;
// then factor = 2^-64 makes their exponentials 1 and 0. origin: the row's maximum, 0 if that is not finite.
template <class A>
struct Level {
  A factor, value;

  Level() = default;
  explicit __device__ Level(A origin)
      : factor(std::is_same_v<A, double>    ? A{1}
               : fabs(origin) < A{0x1p126f} ? A{rows::kLog2E}
                                            : A{0x1p-64f}),
        value(origin * factor) {}
  __device__ A Exponential(A z) const {
    if constexpr (std::is_same_v<A, double>) return exp(z - value);
    return rows::Exp2(fmaf(z, factor, -value));
  }
  // The correction for sums of exponentials at this origin's level.
  __device__ A Correction(A origin) const {
    if constexpr (std::is_same_v<A, double>) return 1;
    return rows::Exp2(-fmaf(origin, factor, -value));
  }
  // The factor that takes sums from this level to another one.
  __device__ A Rescaling(const Level& to) const {
    if constexpr (std::is_same_v<A, double>) return exp(value - to.value);
    return factor == to.factor ? rows::Exp2(value - to.value) : 0;
  }
};

// (max, sum of exponentials at the maximum's level, sum of z) over some elements.
template <class A>
struct Summary {
  A max, total, sum;

  __device__ static Summary None() { return {-std::numeric_limits<A>::infinity(), 0, 0}; }
  __device__ static A Origin(A max) { return fabs(max) < std::numeric_limits<A>::infinity() ? max : A{0}; }
  __device__ A Origin() const { return Origin(max); }
  __device__ auto Level() const { return jaxops::Level<A>(Origin()); }
  // The total at another level. An empty set's total is 0 at any level.
  __device__ A TotalAt(const jaxops::Level<A>& level) const {
    return total == 0 ? A{0} : total * Level().Rescaling(level);
  }
  // Makes `larger` the maximum, if it is larger.
  __device__ void Raise(A larger) {
    if (!(larger > max)) return;
    total = TotalAt(jaxops::Level<A>(Origin(larger)));
    max = larger;
  }
  __device__ void Add(const Summary& other) {
    const A both = fmax(max, other.max);
    const jaxops::Level<A> level(Origin(both));
    total = TotalAt(level) + other.TotalAt(level);
    max = both;
    sum += other.sum;
  }
};

// cap tanh(x / cap). For 16-bit logits tanh(u) = 1 - 2 / (1 + exp(2u)), which is off by 2^-23 of the cap: less than
// their rounding.
template <class T, class A>
__device__ A Logit(A x, A cap, A reciprocal) {
  if (cap == 0) return x;
  if constexpr (sizeof(T) == 2) {
    return cap - 2 * cap * __frcp_rn(1 + rows::Exp(2 * x * reciprocal));
  } else {
    return cap * tanh(x * reciprocal);
  }
}
template <class A>
__device__ A Slope(A z, A reciprocal) {
  return 1 - (z * reciprocal) * (z * reciprocal);
}

}  // namespace jaxops

#endif  // JAXOPS_OPS_CROSS_ENTROPY_SUMMARY_CUH_
