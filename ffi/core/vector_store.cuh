// Stores whole vectors. nvcc may split an assignment of aligned words into single-word stores, as it did in many row
// kernels; each store then writes part of every sector.
#ifndef JAXOPS_CORE_VECTOR_STORE_CUH_
#define JAXOPS_CORE_VECTOR_STORE_CUH_

#include <cstdint>
#include <type_traits>

namespace jaxops {

// Stores `value` in vectors of 16 or 8 bytes; `to`, in global memory, must be aligned to them. Smaller values are
// assigned. A kernel must not read values that it stored this way. nvcc does not move later reads before such a store,
// so an assignment costs less in loops that keep reading.
template <class V>
__device__ void StoreVector(V* to, const V& value) {
  [[maybe_unused]] const uint32_t* const words = reinterpret_cast<const uint32_t*>(&value);
  [[maybe_unused]] const size_t address = __cvta_generic_to_global(to);
  if constexpr (sizeof(V) % 16 == 0) {
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(V) / 4); w += 4)
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address + 4 * w), "r"(words[w]), "r"(words[w + 1]),
                   "r"(words[w + 2]), "r"(words[w + 3]));
  } else if constexpr (sizeof(V) == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(words[0]), "r"(words[1]));
  } else {
    *to = value;
  }
}

// Also stores a vector that nothing will read soon, so that caches keep other data longer.
template <class V>
__device__ void StoreVectorOnce(V* to, const V& value) {
  static_assert(sizeof(V) == 16 || sizeof(V) == 8);
  using Vector = std::conditional_t<sizeof(V) == 16, uint4, uint2>;
  __stcs(reinterpret_cast<Vector*>(to), reinterpret_cast<const Vector&>(value));
}

}  // namespace jaxops

#endif  // JAXOPS_CORE_VECTOR_STORE_CUH_
