// Asynchronous copies of a thread from global to shared memory (cp.async, since sm_80).
#ifndef JAXOPS_CORE_ASYNC_COPY_CUH_
#define JAXOPS_CORE_ASYNC_COPY_CUH_

#include <cstdint>

namespace jaxops {

// kBytes (4, 8 or 16; both sides aligned to them): the first `inside` from global memory, then zeros.
template <int kBytes>
__device__ void CopyAsync(uint32_t target, const void* source, int inside) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(inside) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(kBytes), "r"(inside)
                 : "memory");
  }
}
// An L2 cache policy, as createpolicy encodes it, for data that nothing will read again: it is evicted first.
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000;
// Copies 16 bytes that nothing will read again.
__device__ inline void CopyAsyncOnce(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "l"(kEvictFirst)
               : "memory");
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all of this thread's copies are done, except the last kPending groups.
template <int kPending>
__device__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jaxops

#endif  // JAXOPS_CORE_ASYNC_COPY_CUH_
