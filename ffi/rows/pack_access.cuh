// How packs and single elements are read and written, both for a compile-time dtype and for tensors that carry their
// dtype at run time (AnyTensor). A pack is the elements that a thread takes at once.
#ifndef JAXOPS_ROWS_PACK_ACCESS_CUH_
#define JAXOPS_ROWS_PACK_ACCESS_CUH_

#include <algorithm>
#include <cstdint>

#include "core/async_copy.cuh"
#include "core/shared_memory.cuh"
#include "core/types.cuh"
#include "core/vector_store.cuh"

namespace jaxops::rows {

// Reads through the cache for data that does not change; every kernel operand is such data.
template <int N, class T>
__device__ Pack<T, N> ReadPack(const T* source) {
  Pack<T, N> out;
  constexpr int kBytes = sizeof(out);
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      reinterpret_cast<uint4*>(&out)[i] = __ldg(reinterpret_cast<const uint4*>(source) + i);
  } else if constexpr (kBytes == 8) {
    reinterpret_cast<uint2&>(out) = __ldg(reinterpret_cast<const uint2*>(source));
  } else if constexpr (kBytes == 4) {
    reinterpret_cast<uint32_t&>(out) = __ldg(reinterpret_cast<const uint32_t*>(source));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out.Set(i, source[i]);
  }
  return out;
}

template <class T>
__device__ T ReadElement(const T* source) {
  return *source;
}
// kVector: see core/vector_store.cuh.
template <bool kVector, class T, int N>
__device__ void WritePack(T* target, const Pack<T, N>& values) {
  auto* const to = reinterpret_cast<Pack<T, N>*>(target);
  if constexpr (kVector) {
    StoreVector(to, values);
  } else {
    *to = values;
  }
}
template <class T>
__device__ void WriteElement(T* target, T value) {
  *target = value;
}
// Rounds value(0), value(1), ... to a tensor's dtype.
template <int N, class T, class F>
__device__ Pack<T, N> RoundTo(const T*, const F& value) {
  return ToPack<T, N>(value);
}
// Begins to copy a pack's first `inside` elements, and zeros behind them, to shared memory. stride: from the first
// 16-byte vector to the second, if a pack takes two.
template <int N, class T>
__device__ void CopyPackAsync(uint32_t target, int, const T* source, int inside) {
  constexpr int kBytes = sizeof(T) * N;
  CopyAsync<kBytes>(target, source, inside * static_cast<int>(sizeof(T)));
}
// Reads a pack from shared memory; its elements have the tensor's dtype.
template <int N, class T>
__device__ Pack<T, N> LoadSharedPack(const T*, uint32_t address, int) {
  return LoadShared<Pack<T, N>>(address);
}

// N elements from a tensor that carries its dtype, as bits. If elements have 16 bits, they take the first half of the
// words.
template <int N>
struct alignas(std::min(16, 4 * N)) AnyPack {
  uint32_t words[N];

  template <class T>
  __device__ const Pack<T, N>& As() const {
    return reinterpret_cast<const Pack<T, N>&>(words);
  }
  template <class T>
  __device__ Pack<T, N>& As() {
    return reinterpret_cast<Pack<T, N>&>(words);
  }
  // Has no branches, because later reads would wait for the result of a branch here.
  __device__ Pack<float, N> Widen(DataType type) const {
    return ToPack<float, N>([&](int i) {
      const float bfloat = As<__nv_bfloat16>().template Widen<float>(i), half = As<__half>().template Widen<float>(i);
      return type == DataType::F32 ? As<float>().Get(i) : type == DataType::BF16 ? bfloat : half;
    });
  }
};
// visit(pointer), with a pointer to the dtype that the tensor carries.
template <class Visit>
__device__ auto VisitPointer(const AnyTensor& tensor, const Visit& visit) {
  if (tensor.IsWide()) return visit(static_cast<float*>(tensor.data));
  if (tensor.type == DataType::BF16) return visit(static_cast<__nv_bfloat16*>(tensor.data));
  return visit(static_cast<__half*>(tensor.data));
}

// Widens several packs that have been read from a tensor, and asks for its dtype once.
template <int N, int kCount>
__device__ void WidenAll(const AnyTensor& tensor, const AnyPack<N> (&packs)[kCount], Pack<float, N> (&wide)[kCount]) {
  VisitPointer(tensor, [&]<class T>(T*) {
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      wide[k] = ToPack<float, N>([&](int i) { return packs[k].template As<T>().template Widen<float>(i); });
  });
}

// inside: how many elements exist; the others are 0.
template <int N>
__device__ AnyPack<N> ReadAnyPack(const AnyTensor& source, int inside = N) {
  AnyPack<N> pack = {};
  if constexpr (N == 1) {
    // Writes the whole word: half a word would be joined with the other half before the next read began.
    if (inside > 0 && source.IsWide()) pack.words[0] = __ldg(static_cast<const uint32_t*>(source.data));
    if (inside > 0 && !source.IsWide()) pack.words[0] = __ldg(static_cast<const uint16_t*>(source.data));
    return pack;
  }
  const auto read = [&]<class T>(const T* data) {
    if (inside == N) {
      pack.template As<T>() = ReadPack<N>(data);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (i < inside) pack.template As<T>().Set(i, data[i]);
    }
  };
  if (source.IsWide()) {
    read(static_cast<const float*>(source.data));
  } else {
    read(static_cast<const __half*>(source.data));
  }
  return pack;
}
template <int N>
__device__ Pack<float, N> ReadPack(const AnyTensor& source) {
  return ReadAnyPack<N>(source).Widen(source.type);
}
__device__ inline float ReadElement(const AnyTensor& source) { return ReadPack<1>(source).lane[0]; }
template <bool kVector, int N>
__device__ void WritePack(const AnyTensor& target, const Pack<float, N>& values) {
  VisitPointer(
      target, [&]<class T>(T* data) { WritePack<kVector>(data, ToPack<T, N>([&](int i) { return values.lane[i]; })); });
}
__device__ inline void WriteElement(const AnyTensor& target, float value) {
  WritePack<false>(target, Pack<float, 1>{value});
}
template <int N, class F>
__device__ Pack<float, N> RoundTo(const AnyTensor& like, const F& value) {
  const Pack<float, N> wide = ToPack<float, N>(value);
  Pack<float, N> rounded;
  VisitPointer(like, [&]<class T>(T*) {
    rounded = ToPack<float, N>([&](int i) { return static_cast<float>(static_cast<T>(wide.lane[i])); });
  });
  return rounded;
}
template <int N>
__device__ void CopyPackAsync(uint32_t target, int stride, const AnyTensor& source, int inside) {
  static_assert(N == 8);
  if (source.IsWide()) {
    const auto* const data = static_cast<const float*>(source.data);
    CopyPackAsync<4>(target, 0, data, min(inside, 4));
    CopyPackAsync<4>(target + stride, 0, data + 4, max(inside - 4, 0));
  } else {
    CopyPackAsync<N>(target, 0, static_cast<const __half*>(source.data), inside);
  }
}
template <int N>
__device__ AnyPack<N> LoadSharedAny(const AnyTensor& like, uint32_t address, int stride) {
  AnyPack<N> pack = {};
  auto* const vectors = reinterpret_cast<uint4*>(pack.words);
  vectors[0] = LoadShared<uint4>(address);
  if (like.IsWide()) vectors[1] = LoadShared<uint4>(address + stride);
  return pack;
}
template <int N>
__device__ Pack<float, N> LoadSharedPack(const AnyTensor& like, uint32_t address, int stride) {
  return LoadSharedAny<N>(like, address, stride).Widen(like.type);
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_PACK_ACCESS_CUH_
