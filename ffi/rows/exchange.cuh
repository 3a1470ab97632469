// Joins of values over the threads that share a row: in a warp by shuffles, between warps through shared memory,
// between the blocks of a cluster through each other's shared memory.
#ifndef JAXOPS_ROWS_EXCHANGE_CUH_
#define JAXOPS_ROWS_EXCHANGE_CUH_

#include <cmath>
#include <cstdint>
#include <limits>

#include "rows/math.cuh"

namespace jaxops::rows {

template <class A, int kCount>
struct Values {
  A v[kCount];
};

struct Max {
  template <class A>
  static __device__ A Identity() {
    return -std::numeric_limits<A>::infinity();
  }
  static __device__ float Join(float a, float b) { return fmaxf(a, b); }
  static __device__ double Join(double a, double b) { return fmax(a, b); }
};

struct Sum {
  template <class A>
  static __device__ A Identity() {
    return 0;
  }
  template <class A>
  static __device__ A Join(A a, A b) {
    return a + b;
  }
};

// Several values, each joined by M.
template <class M>
struct EachBy {
  template <class V>
  static __device__ V Join(const V& a, const V& b) {
    V out;
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(V) / sizeof(a.v[0])); ++k) out.v[k] = M::Join(a.v[k], b.v[k]);
    return out;
  }
};

// (max, sum of exp(x - max), any sum): the first two joined as Milakov and Gimelshein do (2018). A set in which
// everything is -inf has sum 0.
struct Exponentials {
  template <class A>
  static __device__ Values<A, 3> Join(const Values<A, 3>& a, const Values<A, 3>& b) {
    const A max = Max::Join(a.v[0], b.v[0]), origin = FiniteOrZero(max);
    return {max, a.v[1] * Exp(a.v[0] - origin) + b.v[1] * Exp(b.v[0] - origin), a.v[2] + b.v[2]};
  }
  // What to subtract before exp: -inf - -inf would be NaN.
  template <class A>
  static __device__ A FiniteOrZero(A max) {
    return max == -std::numeric_limits<A>::infinity() ? A{0} : max;
  }
};

// Lanes of a warp that share something: `step` apart.
template <int kLanes, int step>
struct WarpLanes {
  static constexpr int kWarpLanes = kLanes, kStep = step;
};

// The join over a row's lanes in each warp.
template <class P, class J, class A, int kCount, int kRows>
__device__ void JoinWarp(Values<A, kCount> (&rows)[kRows]) {
#pragma unroll
  for (int distance = P::kWarpLanes / 2; distance > 0; distance /= 2) {
    Values<A, kCount> others[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int k = 0; k < kCount; ++k) others[r].v[k] = __shfl_xor_sync(0xffffffffu, rows[r].v[k], distance * P::kStep);
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = J::Join(rows[r], others[r]);
  }
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
// The same variable in the shared memory of another block of the cluster.
template <class T>
__device__ T* InBlock(T* shared, uint32_t rank) {
  uint64_t address = reinterpret_cast<uint64_t>(shared);
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(address), "r"(rank));
#endif
  return reinterpret_cast<T*>(address);
}

// Joins over all threads that share a row. Two sets of slots take turns, so that one barrier a join is enough: nobody
// can reach the set's next use before all have passed the barrier of the other set.
template <class P>
class Exchange {
 public:
  // The row's lane in its warp, its warp among the row's warps, and its team.
  __device__ Exchange()
      : lane_(static_cast<int>(threadIdx.x % 32) / P::kStep % P::kWarpLanes),
        warp_(P::kAcross ? threadIdx.x / 32 : threadIdx.x % P::kLanes / 32),
        team_(P::kAcross ? threadIdx.x % P::kTeams : threadIdx.x / P::kLanes) {
    if constexpr (P::kCluster > 1) ClusterArrive();  // this block runs: its shared memory may be written
  }

  // Of values already joined in each warp.
  template <class J, class A, int kCount, int kRows>
  __device__ void JoinWarps(Values<A, kCount> (&rows)[kRows]) {
    using Slot = Values<Values<A, kCount>, kRows>;
    turn_ ^= 1;
    if constexpr (P::kWarps > 1) {
      __shared__ Slot shared[2][P::kTeams][P::kWarps];
      auto& slots = shared[turn_][team_];
      if (lane_ == 0) Copy(slots[warp_].v, rows);
      __syncthreads();
      JoinSlots<J>(slots, rows);
    }
    if constexpr (P::kCluster > 1) {
      __shared__ Slot shared[2][P::kTeams][P::kCluster];
      auto& slots = shared[turn_][team_];
      if (first_) ClusterWait();
      first_ = false;
      if (warp_ == 0) {
        Slot* const mine = &slots[ClusterRank()];
        for (int block = lane_; block < P::kCluster; block += P::kWarpLanes) Copy(InBlock(mine, block)->v, rows);
      }
      ClusterArrive();
      ClusterWait();
      JoinSlots<J>(slots, rows);
    }
  }

 private:
  template <class V, int kRows>
  static __device__ void Copy(V (&to)[kRows], const V (&from)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) to[r] = from[r];
  }

  // Lane l joins the slots l, l + kReaders, ...; then the lanes join theirs.
  template <class J, class Slot, int kParts, class V, int kRows>
  __device__ void JoinSlots(const Slot (&slots)[kParts], V (&rows)[kRows]) const {
    constexpr int kReaders = kParts < P::kWarpLanes ? kParts : P::kWarpLanes;
    const int begin = lane_ % kReaders;
    Copy(rows, slots[begin].v);
#pragma unroll
    for (int part = kReaders; part < kParts; part += kReaders)
#pragma unroll
      for (int r = 0; r < kRows; ++r) rows[r] = J::Join(rows[r], slots[part + begin].v[r]);
    JoinWarp<WarpLanes<kReaders, P::kStep>, J>(rows);
  }

  int lane_, warp_, team_, turn_ = 0;
  bool first_ = true;
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_EXCHANGE_CUH_
