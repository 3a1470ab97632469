// Joins values over the threads that share a row: in a warp by shuffles, between warps through shared memory, and
// between a cluster's blocks through each other's shared memory. A row's threads in one block are its team; a lane is a
// thread's place in the team.
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

// Several values; M joins each.
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

// (max, sum of exp(x - max)), joined as Milakov and Gimelshein do (2018). If all values in a set are -inf, its sum is
// 0.
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
  // The number that is subtracted before exp: -inf - -inf would be NaN.
  template <class A>
  static __device__ A FiniteOrZero(A max) {
    return max == -std::numeric_limits<A>::infinity() ? A{0} : max;
  }
};

// (count, mean, sum of squared deviations from the mean), joined as Chan, Golub and LeVeque do (1979).
struct CountMeanSquares {
  template <class A>
  static __device__ Values<A, 3> Join(const Values<A, 3>& a, const Values<A, 3>& b) {
    const A count = a.v[0] + b.v[0], distance = b.v[1] - a.v[1];
    const A share = count > 0 ? b.v[0] * Reciprocal(count) : A{0};
    // In this order the product is 0 if a side has no elements, even if the squared distance is infinite.
    return {count, a.v[1] + distance * share, a.v[2] + b.v[2] + distance * (distance * (a.v[0] * share))};
  }
  template <class A, int kCount = 3>
  static __device__ Values<A, kCount> Identity() {
    return {0, 0, 0};
  }
};

// Joins lanes whose numbers differ by `distance` * step, for one distance.
template <class J, class A, int kCount, int kRows>
__device__ void JoinLanes(Values<A, kCount> (&rows)[kRows], int distance) {
  Values<A, kCount> others[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int k = 0; k < kCount; ++k) others[r].v[k] = __shfl_xor_sync(0xffffffffu, rows[r].v[k], distance);
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = J::Join(rows[r], others[r]);
}
// Does the same for distances half, half / 2, ... 1; half is known at run time.
template <class J, class A, int kCount, int kRows>
__device__ void JoinHalves(Values<A, kCount> (&rows)[kRows], int half) {
#pragma unroll 1
  for (int distance = half; distance > 0; distance >>= 1) JoinLanes<J>(rows, distance);
}

// Joins several values in each lane of a warp. All lanes get the result.
template <class J, class A, int kCount, int kMany>
__device__ Values<A, kCount> JoinMany(const Values<A, kCount> (&many)[kMany]) {
  Values<A, kCount> all[1] = {many[0]};
#pragma unroll
  for (int k = 1; k < kMany; ++k) all[0] = J::Join(all[0], many[k]);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) JoinLanes<J>(all, distance);
  return all[0];
}
// This takes half as many instructions as joining two by two.
template <class J, class A, int kMany>
  requires(std::is_same_v<J, CountMeanSquares>)
__device__ Values<A, 3> JoinMany(const Values<A, 3> (&many)[kMany]) {
  Values<A, 2> totals[kMany];
#pragma unroll
  for (int k = 0; k < kMany; ++k) totals[k] = {many[k].v[0], many[k].v[0] * many[k].v[1]};
  const Values<A, 2> total = JoinMany<EachBy<Sum>>(totals);
  const A mean = total.v[1] * Reciprocal(total.v[0]);
  Values<A, 1> squares[kMany];
#pragma unroll
  for (int k = 0; k < kMany; ++k) {
    // In this order, because the distance's square may be infinite if the count is 0.
    const A distance = many[k].v[1] - mean;
    squares[k].v[0] = many[k].v[2] + distance * (distance * many[k].v[0]);
  }
  return {total.v[0], mean, JoinMany<EachBy<Sum>>(squares).v[0]};
}
// This takes two exponentials per value instead of two per join.
template <class J, class A, int kMany>
  requires(std::is_same_v<J, Exponentials>)
__device__ Values<A, 2> JoinMany(const Values<A, 2> (&many)[kMany]) {
  Values<A, 1> maxima[kMany], totals[kMany];
#pragma unroll
  for (int k = 0; k < kMany; ++k) maxima[k].v[0] = many[k].v[0];
  const A max = JoinMany<EachBy<Max>>(maxima).v[0], origin = Exponentials::FiniteOrZero(max);
#pragma unroll
  for (int k = 0; k < kMany; ++k) totals[k].v[0] = many[k].v[1] * Exp(many[k].v[0] - origin);
  return {max, JoinMany<EachBy<Sum>>(totals).v[0]};
}

// The dynamic shared memory in which rows across are joined: two sets of slots for the values of a block's rows, warps
// and cluster blocks. If the memory were static and large enough for the largest blocks, the other blocks would have no
// cache left.
template <class P, class A>
size_t SpreadBytes(const Team& team, int rows) {
  if (!P::kAcross || rows == P::kMaxTeams) return 0;
  return 2 * (team.warps + (ClusterOf<P>(team) > 1 ? team.cluster : 0)) * rows * 3 * sizeof(A);
}

// Joins over all threads that share a row. Two sets of slots take turns, so that one barrier per join is enough: nobody
// can reach a set's next use before all threads have passed the other set's barrier.
template <class P>
class Exchange {
 public:
  // The row's lane in its warp, its warp among the row's warps, and its team.
  explicit __device__ Exchange(const Team& team)
      : numbers_(team),
        lane_(P::kInWarp ? LaneOfThread<P>(team) : static_cast<int>(threadIdx.x % 32) / P::kStep),
        warp_(threadIdx.x / 32),
        team_(P::kAcross ? TeamOfThread<P>(team) : 0) {
    if constexpr (P::kClusters) {
      if (ClusterOf<P>(team) == 1) return;
      if (threadIdx.x == 0)
        for (int k = 0; k < kBarriers; ++k) InitByteBarrier(Barriers() + k);
      ClusterArrive();  // this block runs, so others may write to its shared memory
    }
  }

  // Joins a row's lanes in each warp.
  template <class J, class A, int kCount, int kRows>
  __device__ void JoinWarp(Values<A, kCount> (&rows)[kRows]) const {
    if constexpr (P::kInWarp) {
      JoinHalves<J>(rows, numbers_.lanes >> 1);
    } else {
#pragma unroll
      for (int distance = P::kWarpLanes / 2; distance > 0; distance /= 2) JoinLanes<J>(rows, distance * P::kStep);
    }
  }

  template <class J, class A, int kCount, int kRows>
  __device__ void Join(Values<A, kCount> (&rows)[kRows]) {
    if constexpr (P::kAcross && kRows > 1) {
      JoinSpread<J>(rows);
    } else {
      JoinWarp<J>(rows);
      JoinWarps<J>(rows);
    }
  }

  // Joins values that each warp has already joined.
  template <class J, class A, int kCount, int kRows>
  __device__ void JoinWarps(Values<A, kCount> (&rows)[kRows]) {
    using Slot = Values<Values<A, kCount>, kRows>;
    turn_ ^= 1;
    if constexpr (!P::kInWarp) {
      __shared__ Slot shared[2][P::kMaxTeams][P::kMaxWarps];
      Slot* const slots = shared[turn_][team_];
      if (lane_ == 0) Copy(slots[warp_].v, rows);
      __syncthreads();
      JoinSlots<J>(slots, WarpsOf<P>(numbers_), rows);
    }
    if constexpr (P::kClusters) {
      if (ClusterOf<P>(numbers_) == 1) return;
      __shared__ Slot shared[2][P::kMaxTeams][kMostCluster];
      Slot* const slots = shared[turn_][team_];
      uint64_t* const barrier = Barriers() + turn_;
      if (first_) ClusterWait();
      first_ = false;
      const int cluster = ClusterOf<P>(numbers_);
      if (threadIdx.x == 0) ExpectBytes(barrier, P::kMaxTeams * cluster * static_cast<int>(sizeof(Slot)));
      if (warp_ == 0) {
        Slot mine;
        Copy(mine.v, rows);
        for (int block = lane_; block < cluster; block += P::kWarpLanes)
          SendToBlock(mine, &slots[ClusterRank()], barrier, block);
      }
      WaitForBytes(barrier, parities_ >> turn_ & 1);
      parities_ ^= 1u << turn_;
      JoinSlots<J>(slots, cluster, rows);
    }
  }

  // Joins one row's threads in two steps, with other work between them. Post sends each warp's value either to all
  // blocks in the cluster, or to its own block's first warp, which sends the block's value on. Collect joins all values
  // that were sent. A warp posts row r only after it has collected row r - 1. By then all warps have posted r - 1, and
  // so have collected r - 2. Therefore two sets of slots are enough here too.
  template <class J, class V>
  __device__ void Post(V value) {
    if (first_) ClusterWait();
    first_ = false;
    turn_ ^= 1;
    uint64_t *const barrier = Barriers() + turn_, *const own = barrier + 2;
    const int cluster = numbers_.cluster, warps = numbers_.warps;
    const bool direct = IsDirect<J>();
    if (!direct) {
      Letter<V>* const letters = WarpMail<V>()[turn_];
      if (lane_ == 0) SendToBlock(Letter<V>{value}, &letters[warp_], own, ClusterRank());
      if (warp_ != 0) return;
      if (lane_ == 0) ExpectBytes(own, warps * static_cast<int>(sizeof(Letter<V>)));
      WaitForBytes(own, parities_ >> turn_ & 1);
      value = JoinLetters<J>(letters, warps);
    }
    Letter<V>* const slots = Mail<V>()[turn_];
    if (threadIdx.x == 0) ExpectBytes(barrier, Parts<J>() * static_cast<int>(sizeof(Letter<V>)));
    Letter<V>* const slot = slots + (direct ? ClusterRank() * warps + warp_ : ClusterRank());
    if (lane_ < cluster) SendToBlock(Letter<V>{value}, slot, barrier, lane_);
  }
  template <class J, class V>
  __device__ V Collect() {
    WaitForBytes(Barriers() + turn_, parities_ >> turn_ & 1);
    parities_ ^= 1u << turn_;
    const Letter<V>* const slots = Mail<V>()[turn_];
    if (!IsDirect<J>()) return JoinLetters<J>(slots, numbers_.cluster);
    const int parts = Parts<J>();
    V found[kMostParts / 32];
#pragma unroll
    for (int k = 0; k < kMostParts / 32; ++k) {
      const int part = k * 32 + lane_;
      found[k] = part < parts ? slots[part].value : Identity<J>(slots->value);
    }
    return JoinMany<J>(found);
  }

 private:
  // A value that is sent as one vector.
  template <class V>
  struct alignas(sizeof(V) > 8 ? 16 : sizeof(V)) Letter {
    V value;
  };
  template <class V>
  static __device__ auto& WarpMail() {
    __shared__ Letter<V> mail[2][P::kMaxWarps];
    return mail;
  }
  template <class V>
  static __device__ auto& Mail() {
    __shared__ Letter<V> mail[2][kMostParts];
    return mail;
  }
  // Whether every warp sends to all blocks. If values go through the first warp, fewer are sent and joined. If they are
  // sent directly, there is one join less to wait for; that pays for joins other than sums, which take longest.
  static constexpr int kMostParts = 128;
  template <class J>
  __device__ bool IsDirect() const {
    return (std::is_same_v<J, CountMeanSquares> || std::is_same_v<J, Exponentials>) &&
           numbers_.cluster * numbers_.warps <= kMostParts;
  }
  template <class J>
  __device__ int Parts() const {
    return numbers_.cluster * (IsDirect<J>() ? numbers_.warps : 1);
  }
  template <class J, class V>
  __device__ V JoinLetters(const Letter<V>* letters, int count) const {
    const int half = HalfOf(count), index = half ? lane_ & (2 * half - 1) : 0;
    V rows[1] = {Identity<J>(letters->value)};
    if (index < count) rows[0] = letters[index].value;
    JoinHalves<J>(rows, half);
    return rows[0];
  }

  template <class J, class A, int kCount>
  static __device__ Values<A, kCount> Identity(const Values<A, kCount>&) {
    return J::template Identity<A, kCount>();
  }
  template <class V, int kRows, int kMore>
  static __device__ void Copy(V (&to)[kRows], const V (&from)[kMore]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) to[r] = from[r];
  }

  // For threads with many rows: the lanes in a warp divide the rows among themselves, and each lane joins its own rows
  // over the warps and the blocks.
  template <class J, class A, int kCount, int kRows>
  __device__ void JoinSpread(Values<A, kCount> (&rows)[kRows]) {
    using V = Values<A, kCount>;
    if (P::kWarpLanes == 1 && WarpsOf<P>(numbers_) == 1) return;
    constexpr int kLanes = P::kWarpLanes, kOwn = kRows > kLanes ? kRows / kLanes : 1;
    constexpr int kAlike = kRows > kLanes ? 1 : kLanes / kRows;  // lanes with the same row
    static_assert(kRows % kOwn == 0);
    // Half the rows go to the other half of the lanes, then half of these again, ...
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
    extern __shared__ __align__(16) char shared[];
    constexpr int kBlock = P::kMaxTeams * kRows;  // values per warp, or per block
    const int warps = WarpsOf<P>(numbers_), cluster = ClusterOf<P>(numbers_),
              sets = warps + (cluster > 1 ? cluster : 0);
    V* const of_warps = reinterpret_cast<V*>(shared) + turn_ * sets * kBlock + team_ * kRows + first;
    const auto join = [&](const V* from, int count) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) rows[j] = Identity<J>(rows[j]);
      constexpr int kFew = 8;  // slots that are read before the first is joined
#pragma unroll 2
      for (int begin = 0; begin < count; begin += kFew) {
        V found[kFew][kOwn];
#pragma unroll
        for (int k = 0; k < kFew; ++k)
#pragma unroll
          for (int j = 0; j < kOwn; ++j)
            found[k][j] = begin + k < count ? from[(begin + k) * kBlock + j] : Identity<J>(rows[j]);
#pragma unroll
        for (int k = 0; k < kFew; ++k)
#pragma unroll
          for (int j = 0; j < kOwn; ++j) rows[j] = J::Join(rows[j], found[k][j]);
      }
    };
    if (lane_ % kAlike == 0)
#pragma unroll
      for (int j = 0; j < kOwn; ++j) of_warps[warp_ * kBlock + j] = rows[j];
    __syncthreads();
    join(of_warps, warps);
    if constexpr (P::kClusters) {
      if (cluster > 1) {
        V* const of_blocks = of_warps + warps * kBlock;
        uint64_t* const barrier = Barriers() + turn_;
        if (first_) ClusterWait();
        first_ = false;
        if (threadIdx.x == 0) ExpectBytes(barrier, cluster * kBlock * static_cast<int>(sizeof(V)));
        if (lane_ % kAlike == 0)
          for (int block = warp_; block < cluster; block += warps)
#pragma unroll
            for (int j = 0; j < kOwn; ++j) SendToBlock(rows[j], of_blocks + ClusterRank() * kBlock + j, barrier, block);
        WaitForBytes(barrier, parities_ >> turn_ & 1);
        parities_ ^= 1u << turn_;
        join(of_blocks, cluster);
      }
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

  // Each lane joins one or more slots; then the lanes join their results.
  template <class J, class Slot, class V, int kRows>
  __device__ void JoinSlots(const Slot* slots, int count, V (&rows)[kRows]) const {
    if constexpr (P::kAcross) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) rows[r] = Identity<J>(rows[r]);
      for (int k = lane_; k < count; k += P::kWarpLanes)
#pragma unroll
        for (int r = 0; r < kRows; ++r) rows[r] = J::Join(rows[r], slots[k].v[r]);
      JoinWarp<J>(rows);
    } else {
      const int half = HalfOf(count), index = half ? lane_ & (2 * half - 1) : 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) rows[r] = Identity<J>(rows[r]);
      if (index < count) Copy(rows, slots[index].v);
      JoinHalves<J>(rows, half);
    }
  }

  // These barriers count bytes for each of two sets of slots: the bytes sent by all blocks in the cluster, and the
  // bytes sent by the block's own warps.
  static constexpr int kBarriers = P::kAhead ? 4 : 2;
  static __device__ uint64_t* Barriers() {
    __shared__ uint64_t barriers[kBarriers];
    return barriers;
  }

  const Team& numbers_;
  int lane_, warp_, team_, turn_ = 0;
  uint32_t parities_ = 0;  // bits: the parities of the barriers' phases
  bool first_ = true;
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_EXCHANGE_CUH_
