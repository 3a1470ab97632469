// ffi/core/vector_store.cuh, emulated.
#ifndef JAXOPS_CORE_VECTOR_STORE_CUH_
#define JAXOPS_CORE_VECTOR_STORE_CUH_

namespace jaxops {

template <class V>
void StoreVector(V* to, const V& value) {
  *to = value;
}

template <class V>
void StoreVectorOnce(V* to, const V& value) {
  *to = value;
}

}  // namespace jaxops

#endif  // JAXOPS_CORE_VECTOR_STORE_CUH_
