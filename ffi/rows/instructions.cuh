// The row kernels' PTX: the exponential, the maximum, and the instructions with which a cluster's blocks send each
// other values.
#ifndef JAXOPS_ROWS_INSTRUCTIONS_CUH_
#define JAXOPS_ROWS_INSTRUCTIONS_CUH_

#include <cstdint>

#include "core/shared_memory.cuh"

namespace jaxops::rows {

// 2^x to 2 ulp; a denormal result becomes 0.
__device__ inline float Exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The larger number; NaN if one is NaN.
__device__ inline float MaxOrNaN(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Spreads four booleans, one per byte, to ones in the halves of two words.
__device__ inline void SpreadBooleans(uint32_t four, uint32_t* words) {
  four <<= 7;  // moves them to the bytes' signs, which a selector of 8 or more repeats
  asm("prmt.b32 %0, %1, 0, 0x9988;" : "=r"(words[0]) : "r"(four));
  asm("prmt.b32 %0, %1, 0, 0xbbaa;" : "=r"(words[1]) : "r"(four));
}

__device__ inline uint32_t ClusterRank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ inline void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// A cluster's blocks send values into each other's shared memory, and a barrier there counts their bytes. A thread that
// waits for it waits for these bytes alone; a cluster barrier would also wait for all earlier writes to global memory.
__device__ inline void InitByteBarrier(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ inline void ExpectBytes(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
#endif
}
__device__ inline void WaitForBytes(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
#endif
}
// Copies a value to the same place in block `rank`'s shared memory; that block's barrier counts it.
template <class V>
__device__ void SendToBlock(const V& value, V* target, uint64_t* barrier, uint32_t rank) {
  static_assert(sizeof(V) % 4 == 0);
#if __CUDA_ARCH__ >= 900
  uint32_t to, counter;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(SharedAddress(target)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(SharedAddress(barrier)), "r"(rank));
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(&value);
  if constexpr (sizeof(V) == 16 && alignof(V) == 16) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(counter)
                 : "memory");
  } else if constexpr (sizeof(V) == 8 && alignof(V) == 8) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "r"(words[0]), "r"(words[1]), "r"(counter)
                 : "memory");
  } else {
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(V) / 4); ++w)
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to + 4 * w),
                   "r"(words[w]), "r"(counter)
                   : "memory");
  }
#endif
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_INSTRUCTIONS_CUH_
