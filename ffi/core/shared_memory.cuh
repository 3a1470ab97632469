// Places in a block's shared memory, by their addresses in it.
#ifndef JAXOPS_CORE_SHARED_MEMORY_CUH_
#define JAXOPS_CORE_SHARED_MEMORY_CUH_

#include <cstdint>

namespace jaxops {

__device__ inline uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
template <class V>
__device__ V LoadShared(uint32_t address) {
  return *static_cast<const V*>(__cvta_shared_to_generic(address));
}
template <class V>
__device__ void StoreShared(uint32_t address, const V& value) {
  *static_cast<V*>(__cvta_shared_to_generic(address)) = value;
}

}  // namespace jaxops

#endif  // JAXOPS_CORE_SHARED_MEMORY_CUH_
