// Hopper's asynchronous barriers: mbarriers in shared memory, named barriers, register reallocation.
#ifndef JAXOPS_HOPPER_BARRIER_CUH_
#define JAXOPS_HOPPER_BARRIER_CUH_

#include <cstdint>

namespace jaxops::hopper {

inline constexpr int kWarpgroup = 128;  // threads

// True in one lane per warp; all lanes call it. The compiler knows that only one lane continues, so it does not wrap
// copies by the copy engine in a loop over lanes.
__device__ inline bool ElectLane() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected;
}

// How often a warp arrives at an mbarrier: its first lane arrives for all lanes, which have met before. racecheck does
// not follow the other lanes to that arrival; for its sake, the build option JAXOPS_RACECHECK makes each lane arrive.
#ifdef JAXOPS_RACECHECK
inline constexpr int kWarpArrivals = 32;
#else
inline constexpr int kWarpArrivals = 1;
#endif

// An mbarrier, by its address. A phase ends when all arrivals and all expected bytes are in. On a fresh barrier,
// waiting for parity 1 returns at once.
struct Barrier {
  uint32_t address;

  __device__ void Initialize(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
  }
  __device__ void Arrive() const { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory"); }
  // Called by all lanes of a warp. lead: true in one of them.
  __device__ void ArriveForWarp(bool lead) const {
    if (kWarpArrivals > 1 || lead) Arrive();
  }
  // Arrives if `arrives` is true, without a branch: here, or at another block's barrier, whose `address` is from
  // AddressIn.
  __device__ void ArriveIf(bool arrives) const {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(address),
        "r"(static_cast<uint32_t>(arrives))
        : "memory");
  }
  static __device__ void ArriveInClusterIf(bool arrives, uint32_t address) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}" ::"r"(address),
        "r"(static_cast<uint32_t>(arrives))
        : "memory");
  }
  __device__ void ArriveAndExpect(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
  }
  // Arrives once all copies (CopyAsync) that this thread has issued are done.
  __device__ void ArriveWhenCopied() const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address) : "memory");
  }
  // Waits, and acquires the stores by other blocks in the cluster.
  __device__ void WaitForCluster(uint32_t parity) const {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n}" ::"r"(address),
        "r"(parity)
        : "memory");
  }
  __device__ void Wait(uint32_t parity) const {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n}" ::"r"(address),
        "r"(parity)
        : "memory");
  }
};

// Makes initialised barriers visible to the copy engine.
__device__ inline void FenceBarriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Orders this thread's shared-memory accesses before later accesses by the copy engine.
__device__ inline void FenceSharedForCopies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers among some of a block's threads; __syncthreads uses number 0.
__device__ inline void NamedSync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void NamedArrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Clusters of blocks; without clusters each block is a cluster.
__device__ inline uint32_t ClusterIndex() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
__device__ inline uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Signals that this block runs, and publishes initialised barriers (FenceBarriers) to waiting blocks. It orders nothing
// else: a releasing barrier would wait for all earlier writes to global memory, which takes 0.5 us or more.
__device__ inline void ClusterArrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void ClusterWait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// The address in the cluster's block `rank` that corresponds to `address` in this block's shared memory.
__device__ inline uint32_t AddressIn(uint32_t rank, uint32_t address) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Stores 16 bytes into another block's shared memory; they count towards a barrier there. Both addresses are from
// AddressIn.
__device__ inline void StoreInCluster(uint32_t target, float4 v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}

// Returns or takes registers, so that this warpgroup has kCount a thread.
template <int kCount>
__device__ void ReleaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ void AcquireRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace jaxops::hopper

#endif  // JAXOPS_HOPPER_BARRIER_CUH_
