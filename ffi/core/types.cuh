// Type lists, and the device types of the dtypes.
#ifndef JAXOPS_CORE_TYPES_CUH_
#define JAXOPS_CORE_TYPES_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/handler.h"

namespace jaxops {

template <class... Ts>
struct Types {};

// Calls visit.operator()<T>() for the first T of the list that accept.operator()<T>() takes; `otherwise` if there is
// none.
template <class Result, class... Ts, class Accept, class Visit>
Result First(Types<Ts...>, Result otherwise, const Accept& accept, const Visit& visit) {
  Result result = otherwise;
  (void)((accept.template operator()<Ts>() && (result = visit.template operator()<Ts>(), true)) || ...);
  return result;
}

template <class T>
inline constexpr DataType kDataType = DataType::INVALID;
template <>
inline constexpr DataType kDataType<double> = DataType::F64;
template <>
inline constexpr DataType kDataType<float> = DataType::F32;
template <>
inline constexpr DataType kDataType<__half> = DataType::F16;
template <>
inline constexpr DataType kDataType<__nv_bfloat16> = DataType::BF16;

// The type in which T is summed and computed with.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The dtypes of an op's input and its result: equal, or one of them f32. jaxops/_rows.py reduces other pairs to these.
template <class T, class U>
struct Pair {
  using Input = T;
  using Output = U;
};
using Pairs = Types<Pair<__nv_bfloat16, __nv_bfloat16>, Pair<float, float>, Pair<__half, __half>, Pair<double, double>,
                    Pair<__nv_bfloat16, float>, Pair<float, __nv_bfloat16>, Pair<__half, float>, Pair<float, __half>>;

// Calls visit.operator()<Input, Output>() -> Error for the pair of dtypes.
template <class Visit>
Error VisitPair(const char* handler, DataType input, DataType output, const Visit& visit) {
  return First(
      Pairs{}, Invalid(handler, "no kernel for these element types"),
      [=]<class P> { return input == kDataType<typename P::Input> && output == kDataType<typename P::Output>; },
      [&]<class P> { return visit.template operator()<typename P::Input, typename P::Output>(); });
}

template <class T>
T* Data(const AnyBuffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

// N consecutive elements, read and written in accesses of at most 16 bytes.
template <class T, int N>
struct alignas(std::min<size_t>(16, sizeof(T) * N)) Pack {
  T lane[N];
};

}  // namespace jaxops

#endif  // JAXOPS_CORE_TYPES_CUH_
