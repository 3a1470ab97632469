// Type lists, the dtypes' device types, and packs, that is elements that a thread takes at once.
#ifndef JAXOPS_CORE_TYPES_CUH_
#define JAXOPS_CORE_TYPES_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "core/handler.h"

namespace jaxops {

template <class... Ts>
struct Types {};

template <class... Lists>
struct JoinedLists;
template <class... Ts>
struct JoinedLists<Types<Ts...>> {
  using List = Types<Ts...>;
};
template <class... Ts, class... Us, class... More>
struct JoinedLists<Types<Ts...>, Types<Us...>, More...> : JoinedLists<Types<Ts..., Us...>, More...> {};
template <class... Lists>
using Joined = typename JoinedLists<Lists...>::List;

// Calls visit.operator()<T>() for the first T in the list that accept.operator()<T>() takes; calls `otherwise` if it
// takes none.
template <class Result, class... Ts, class Accept, class Visit>
Result First(Types<Ts...>, Result otherwise, const Accept& accept, const Visit& visit) {
  Result result = otherwise;
  (void)((accept.template operator()<Ts>() && (result = visit.template operator()<Ts>(), true)) || ...);
  return result;
}

template <class T, class... Ts>
inline constexpr bool kIsOneOf = (std::is_same_v<T, Ts> || ...);

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

// Stands for f32, f16 or bf16 in kernels whose tensors carry their dtypes at run time. Elements are held as floats.
struct AnyFloat {
  float value;
};

// A tensor that carries its dtype at run time.
struct AnyTensor {
  void* data = nullptr;  // null: absent
  DataType type = DataType::F32;

  __host__ __device__ explicit operator bool() const { return data; }
  __device__ bool IsWide() const { return type == DataType::F32; }
  __device__ AnyTensor operator+(int64_t elements) const {
    return {static_cast<char*>(data) + elements * (IsWide() ? 4 : 2), type};
  }
};

// The type with which an op holds a tensor: a pointer, unless the tensor carries its dtype.
template <class T>
using Tensor = std::conditional_t<std::is_same_v<std::remove_const_t<T>, AnyFloat>, AnyTensor, T*>;
// The type with which registers hold one of a tensor's elements.
template <class Tensor>
using ElementOf =
    std::conditional_t<std::is_same_v<Tensor, AnyTensor>, float, std::remove_const_t<std::remove_pointer_t<Tensor>>>;

// The type for sums and arithmetic on T.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// An op's input and result dtypes.
template <class T, class U>
struct Pair {
  using Input = T;
  using Output = U;
};

// Calls visit.operator()<T>() -> Error for an op's input and result dtypes. They are equal, or one is f32
// (jaxops/_rows.py reduces other pairs to these); if they differ, T is AnyFloat.
template <class Visit>
Error VisitDtype(const char* handler, DataType input, DataType output, const Visit& visit) {
  if (input == output) {
    if (input == DataType::BF16) return visit.template operator()<__nv_bfloat16>();
    if (input == DataType::F32) return visit.template operator()<float>();
    if (input == DataType::F64) return visit.template operator()<double>();
    if (input == DataType::F16) return visit.template operator()<__half>();
  } else if (input == DataType::F32 || output == DataType::F32) {
    const DataType other = input == DataType::F32 ? output : input;
    if (other == DataType::BF16 || other == DataType::F16) return visit.template operator()<AnyFloat>();
  }
  return Invalid(handler, "no kernel for these element types");
}

template <class T>
Tensor<T> Data(const AnyBuffer& buffer) {
  if constexpr (std::is_same_v<Tensor<T>, AnyTensor>) {
    return {buffer.untyped_data(), buffer.element_type()};
  } else {
    return static_cast<T*>(buffer.untyped_data());
  }
}
template <class T>
Tensor<T> DataOrNull(const std::optional<AnyBuffer>& buffer) {
  return buffer ? Data<T>(*buffer) : Tensor<T>{};
}

// N consecutive elements, accessed at most 16 bytes at a time.
template <class T, int N>
struct alignas(std::min<size_t>(16, sizeof(T) * N)) Pack {
  using Element = T;
  T lane[N];

  __device__ T Get(int i) const { return lane[i]; }
  __device__ void Set(int i, T value) { lane[i] = value; }
  // The element as a float or a double.
  template <class A>
  __device__ A Widen(int i) const {
    return static_cast<A>(lane[i]);
  }
};

// 16-bit elements stay paired in a register: separately, each would take one.
template <class T, int N>
  requires(sizeof(T) == 2 && N % 2 == 0)
struct alignas(std::min<size_t>(16, sizeof(T) * N)) Pack<T, N> {
  using Element = T;
  using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  uint32_t words[N / 2];

  __device__ T Get(int i) const {
    const uint16_t bits = static_cast<uint16_t>(i % 2 ? words[i / 2] >> 16 : words[i / 2]);
    return reinterpret_cast<const T&>(bits);
  }
  // Each element times a number, rounded.
  __device__ Pack Times(T factor) const {
    const Two both = {factor, factor};
    Pack out;
#pragma unroll
    for (int w = 0; w < N / 2; ++w) {
      const Two product = __hmul2(reinterpret_cast<const Two&>(words[w]), both);
      out.words[w] = reinterpret_cast<const uint32_t&>(product);
    }
    return out;
  }
  __device__ void Set(int i, T value) {
    const uint32_t bits = reinterpret_cast<const uint16_t&>(value);
    words[i / 2] = i % 2 ? (words[i / 2] & 0xffffu) | bits << 16 : (words[i / 2] & 0xffff0000u) | bits;
  }
  template <class A>
  __device__ A Widen(int i) const {
    const uint32_t word = words[i / 2];
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    } else {
      const __half2 both = reinterpret_cast<const __half2&>(word);
      return i % 2 ? __high2float(both) : __low2float(both);
    }
  }
};

// A mask for N 16-bit elements: ones or zeros for each.
template <int N>
struct HalfMasks {
  uint32_t words[N / 2];

  // The pack's elements where the mask has ones, `other` elsewhere.
  template <class T>
  __device__ Pack<T, N> Choose(const Pack<T, N>& pack, T other) const {
    Pack<T, N> out;
    if constexpr (sizeof(T) == 2) {
      const uint32_t both = reinterpret_cast<const uint16_t&>(other) * 0x10001u;
#pragma unroll
      for (int w = 0; w < N / 2; ++w) out.words[w] = (pack.words[w] & words[w]) | (both & ~words[w]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) out.Set(i, words[i / 2] & (i % 2 ? 0x10000u : 1u) ? pack.Get(i) : other);
    }
    return out;
  }
};

// For each element, the larger one in the two packs; if one is NaN, the other.
template <class T, int N>
  requires(sizeof(T) == 2 && N % 2 == 0)
__device__ Pack<T, N> Larger(const Pack<T, N>& a, const Pack<T, N>& b) {
  using Two = typename Pack<T, N>::Two;
  Pack<T, N> out;
#pragma unroll
  for (int w = 0; w < N / 2; ++w) {
    const Two larger = __hmax2(reinterpret_cast<const Two&>(a.words[w]), reinterpret_cast<const Two&>(b.words[w]));
    out.words[w] = reinterpret_cast<const uint32_t&>(larger);
  }
  return out;
}

// Elements per pack: 16 bytes.
template <class T>
inline constexpr int kPackOf = 16 / sizeof(T);

// Rounds value(0), value(1), ... to a pack; 16-bit elements two at a time.
template <class T, int N, class F>
__device__ Pack<T, N> ToPack(const F& value) {
  Pack<T, N> out;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      typename Pack<T, N>::Two both;
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        both = __floats2bfloat162_rn(value(i), value(i + 1));
      } else {
        both = __floats2half2_rn(value(i), value(i + 1));
      }
      out.words[i / 2] = reinterpret_cast<const uint32_t&>(both);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out.Set(i, static_cast<T>(value(i)));
  }
  return out;
}

}  // namespace jaxops

#endif  // JAXOPS_CORE_TYPES_CUH_
