// Joins of values over the threads that share a row: in a warp by shuffles, between warps through shared memory,
// between the blocks of a cluster through each other's shared memory.
#ifndef JAXOPS_ROWS_EXCHANGE_CUH_
#define JAXOPS_ROWS_EXCHANGE_CUH_

#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <type_traits>

#include "rows/geometry.cuh"
#include "rows/instructions.cuh"
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
  template <class A, int kCount>
  static __device__ Values<A, kCount> Identity() {
    Values<A, kCount> out;
#pragma unroll
    for (A& value : out.v) value = M::template Identity<A>();
    return out;
  }
};

// (max, sum of exp(x - max)), joined as Milakov and Gimelshein do (2018). A set in which everything is -inf has sum 0.
struct Exponentials {
  template <class A>
  static __device__ Values<A, 2> Join(const Values<A, 2>& a, const Values<A, 2>& b) {
    const A max = Max::Join(a.v[0], b.v[0]), origin = FiniteOrZero(max);
    return {max, a.v[1] * Exp(a.v[0] - origin) + b.v[1] * Exp(b.v[0] - origin)};
  }
  template <class A, int kCount = 2>
  static __device__ Values<A, kCount> Identity() {
    return {Max::Identity<A>(), 0};
  }
  // What to subtract before exp: -inf - -inf would be NaN.
  template <class A>
  static __device__ A FiniteOrZero(A max) {
    return max == -std::numeric_limits<A>::infinity() ? A{0} : max;
  }
};

// (count, mean, sum of squared deviations from it), joined as Chan, Golub and LeVeque do (1979).
struct CountMeanSquares {
  template <class A>
  static __device__ Values<A, 3> Join(const Values<A, 3>& a, const Values<A, 3>& b) {
    const A count = a.v[0] + b.v[0], distance = b.v[1] - a.v[1];
    const A share = count > 0 ? b.v[0] * Reciprocal(count) : A{0};
    // In this order: 0 where a side has no elements, also if the square of the distance is infinite.
    return {count, a.v[1] + distance * share, a.v[2] + b.v[2] + distance * (distance * (a.v[0] * share))};
  }
  template <class A, int kCount = 3>
  static __device__ Values<A, kCount> Identity() {
    return {0, 0, 0};
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

// The join of several values in each of kLanes lanes of a warp, known to all of them.
template <class J, int kLanes, class A, int kCount, int kMany>
__device__ Values<A, kCount> JoinMany(const Values<A, kCount> (&many)[kMany]) {
  Values<A, kCount> all[1] = {many[0]};
#pragma unroll
  for (int k = 1; k < kMany; ++k) all[0] = J::Join(all[0], many[k]);
  JoinWarp<WarpLanes<kLanes, 1>, J>(all);
  return all[0];
}
// Half of the instructions that joins two by two would take.
template <class J, int kLanes, class A, int kMany>
  requires(std::is_same_v<J, CountMeanSquares>)
__device__ Values<A, 3> JoinMany(const Values<A, 3> (&many)[kMany]) {
  Values<A, 2> totals[kMany];
#pragma unroll
  for (int k = 0; k < kMany; ++k) totals[k] = {many[k].v[0], many[k].v[0] * many[k].v[1]};
  const Values<A, 2> total = JoinMany<EachBy<Sum>, kLanes>(totals);
  const A mean = total.v[1] * Reciprocal(total.v[0]);
  Values<A, 1> squares[kMany];
#pragma unroll
  for (int k = 0; k < kMany; ++k) {
    const A distance = many[k].v[1] - mean;
    squares[k].v[0] = many[k].v[2] + many[k].v[0] * distance * distance;
  }
  return {total.v[0], mean, JoinMany<EachBy<Sum>, kLanes>(squares).v[0]};
}

// Two exponentials a value instead of two a join.
template <class J, int kLanes, class A, int kMany>
  requires(std::is_same_v<J, Exponentials>)
__device__ Values<A, 2> JoinMany(const Values<A, 2> (&many)[kMany]) {
  Values<A, 1> maxima[kMany], totals[kMany];
#pragma unroll
  for (int k = 0; k < kMany; ++k) maxima[k].v[0] = many[k].v[0];
  const A max = JoinMany<EachBy<Max>, kLanes>(maxima).v[0], origin = Exponentials::FiniteOrZero(max);
#pragma unroll
  for (int k = 0; k < kMany; ++k) totals[k].v[0] = many[k].v[1] * Exp(many[k].v[0] - origin);
  return {max, JoinMany<EachBy<Sum>, kLanes>(totals).v[0]};
}

// Joins over all threads that share a row. Two sets of slots take turns, so that one barrier a join is enough: nobody
// can reach the set's next use before all have passed the barrier of the other set.
template <class P>
class Exchange {
 public:
  // The row's lane in its warp, its warp among the row's warps, and its team.
  __device__ Exchange()
      : lane_(static_cast<int>(threadIdx.x % 32) / P::kStep % P::kWarpLanes),
        warp_(P::kAcross ? threadIdx.x / 32 : LaneOfThread<P>() / 32),
        team_(TeamOfThread<P>()) {
    if constexpr (P::kCluster > 1) {
      static_assert(P::kWarps > 1);
      if (threadIdx.x == 0)
        for (int k = 0; k < kBarriers; ++k) InitByteBarrier(Barriers() + k);
      ClusterArrive();  // this block runs: its shared memory may be written
    }
  }

  template <class J, class A, int kCount, int kRows>
  __device__ void Join(Values<A, kCount> (&rows)[kRows]) {
    if constexpr (P::kAcross && P::kWarps > 1 && kRows > 1) {
      JoinSpread<J>(rows);
    } else {
      JoinWarp<P, J>(rows);
      JoinWarps<J>(rows);
    }
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
      uint64_t* const barrier = Barriers() + turn_;
      if (first_) ClusterWait();
      first_ = false;
      if (threadIdx.x == 0) ExpectBytes(barrier, sizeof(shared[0]));
      if (warp_ == 0) {
        Slot mine;
        Copy(mine.v, rows);
        for (int block = lane_; block < P::kCluster; block += P::kWarpLanes)
          SendToBlock(mine, &slots[ClusterRank()], barrier, block);
      }
      WaitForBytes(barrier, parities_ >> turn_ & 1);
      parities_ ^= 1u << turn_;
      JoinSlots<J>(slots, rows);
    }
  }

  // The join over the threads of one row in two steps, with other work between them. Post sends each warp's value to
  // all blocks of the cluster, or to its own block's first warp, which sends the block's on; Collect joins what all
  // have sent. A warp posts row r only after it has collected row r - 1; by then all warps have posted r - 1, and so
  // collected r - 2: two sets of slots are enough here too.
  template <class J, class V>
  __device__ void Post(V value) {
    if (first_) ClusterWait();
    first_ = false;
    turn_ ^= 1;
    uint64_t* const barrier = Barriers() + turn_;
    if constexpr (!kDirect<J>) {
      uint64_t* const own = barrier + 2;
      auto& slots = WarpMail<V>()[turn_];
      if (lane_ == 0) SendToBlock(Letter<V>{value}, &slots[warp_], own, ClusterRank());
      if (warp_ != 0) return;
      if (lane_ == 0) ExpectBytes(own, sizeof(slots));
      WaitForBytes(own, parities_ >> turn_ & 1);
      value = JoinMany<J, P::kWarps>({slots[lane_ % P::kWarps].value});
    }
    auto& slots = Mail<J, V>()[turn_];
    if (threadIdx.x == 0) ExpectBytes(barrier, sizeof(slots));
    Letter<V>* const slot = &slots[kDirect<J> ? ClusterRank() * P::kWarps + warp_ : ClusterRank()];
    if (lane_ < P::kCluster) SendToBlock(Letter<V>{value}, slot, barrier, lane_);
  }
  template <class J, class V>
  __device__ V Collect() {
    auto& slots = Mail<J, V>()[turn_];
    constexpr int kParts = sizeof(slots) / sizeof(slots[0]), kReaders = kParts < 32 ? kParts : 32;
    static_assert(P::kWarpLanes == 32 && P::kTeams == 1 && kParts % kReaders == 0);
    WaitForBytes(Barriers() + turn_, parities_ >> turn_ & 1);
    parities_ ^= 1u << turn_;
    V parts[kParts / kReaders];
#pragma unroll
    for (int k = 0; k < kParts / kReaders; ++k) parts[k] = slots[k * kReaders + lane_ % kReaders].value;
    return JoinMany<J, kReaders>(parts);
  }

 private:
  // Whether every warp sends to all blocks. Through the first warp there is less to send and to join; directly there is
  // one join less to wait for, and those that are not sums take longest.
  template <class J>
  static constexpr bool kDirect = std::is_same_v<J, CountMeanSquares> || std::is_same_v<J, Exponentials>;
  // Sent as one vector.
  template <class V>
  struct alignas(sizeof(V) > 8 ? 16 : sizeof(V)) Letter {
    V value;
  };
  template <class V>
  static __device__ auto& WarpMail() {
    __shared__ Letter<V> mail[2][P::kWarps];
    return mail;
  }
  template <class J, class V>
  static __device__ auto& Mail() {
    __shared__ Letter<V> mail[2][P::kCluster * (kDirect<J> ? P::kWarps : 1)];
    return mail;
  }

  template <class V, int kRows, int kMore>
  static __device__ void Copy(V (&to)[kRows], const V (&from)[kMore]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) to[r] = from[r];
  }

  // Many rows a thread: its warp's lanes divide them among themselves, and each joins its own over the warps and the
  // blocks.
  template <class J, class A, int kCount, int kRows>
  __device__ void JoinSpread(Values<A, kCount> (&rows)[kRows]) {
    using V = Values<A, kCount>;
    constexpr int kLanes = P::kWarpLanes, kOwn = kRows > kLanes ? kRows / kLanes : 1;
    constexpr int kAlike = kRows > kLanes ? 1 : kLanes / kRows;  // lanes that have the same row
    static_assert(P::kWarps > 1 && kRows % kOwn == 0);
    // Half of the rows go to the other half of the lanes, then half of that half, ...
#pragma unroll
    for (int distance = kLanes / 2, count = kRows; distance > 0; distance /= 2, count = count > 1 ? count / 2 : 1) {
      const bool upper = lane_ & distance;
      const auto from = [&](const V& value) {
        V out;
#pragma unroll
        for (int k = 0; k < kCount; ++k) out.v[k] = __shfl_xor_sync(0xffffffffu, value.v[k], distance * P::kStep);
        return out;
      };
#pragma unroll
      for (int r = 0; r < (count > 1 ? count / 2 : 1); ++r) {
        if (count == 1) {
          rows[0] = J::Join(rows[0], from(rows[0]));
        } else {
          const V kept = upper ? rows[r + count / 2] : rows[r], sent = upper ? rows[r] : rows[r + count / 2];
          rows[r] = J::Join(kept, from(sent));
        }
      }
    }
    const int first = lane_ / kAlike * kOwn;
    turn_ ^= 1;
    const auto join = [&](const auto& parts) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        rows[j] = parts[0][team_][first + j];
#pragma unroll
        for (int part = 1; part < static_cast<int>(std::size(parts)); ++part)
          rows[j] = J::Join(rows[j], parts[part][team_][first + j]);
      }
    };
    __shared__ V shared[2][P::kWarps][P::kTeams][kRows];
    if (lane_ % kAlike == 0)
#pragma unroll
      for (int j = 0; j < kOwn; ++j) shared[turn_][warp_][team_][first + j] = rows[j];
    __syncthreads();
    join(shared[turn_]);
    if constexpr (P::kCluster > 1) {
      __shared__ V blocks[2][P::kCluster][P::kTeams][kRows];
      uint64_t* const barrier = Barriers() + turn_;
      if (first_) ClusterWait();
      first_ = false;
      if (threadIdx.x == 0) ExpectBytes(barrier, sizeof(blocks[0]));
      if (lane_ % kAlike == 0)
        for (int block = warp_; block < P::kCluster; block += P::kWarps)
#pragma unroll
          for (int j = 0; j < kOwn; ++j)
            SendToBlock(rows[j], &blocks[turn_][ClusterRank()][team_][first + j], barrier, block);
      WaitForBytes(barrier, parities_ >> turn_ & 1);
      parities_ ^= 1u << turn_;
      join(blocks[turn_]);
    }
    V own[kOwn];
    Copy(own, rows);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int k = 0; k < kCount; ++k)
        rows[r].v[k] = __shfl_sync(0xffffffffu, own[r % kOwn].v[k],
                                   r / kOwn * kAlike * P::kStep + static_cast<int>(threadIdx.x) % P::kStep);
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

  // They count bytes: those sent to each of two sets of slots by all blocks of the cluster, and by the block's own
  // warps.
  static constexpr int kBarriers = P::kAhead ? 4 : 2;
  static __device__ uint64_t* Barriers() {
    __shared__ uint64_t barriers[kBarriers];
    return barriers;
  }

  int lane_, warp_, team_, turn_ = 0;
  uint32_t parities_ = 0;  // of the barriers' phases, as bits
  bool first_ = true;
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_EXCHANGE_CUH_
