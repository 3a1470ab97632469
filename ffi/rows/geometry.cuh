// The facts that a row kernel knows about its tensors, and the placements: types that say which threads share a row.
// docs/adding.md explains along, across, pack, team, lane and slot.
#ifndef JAXOPS_ROWS_GEOMETRY_CUH_
#define JAXOPS_ROWS_GEOMETRY_CUH_

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <type_traits>

#include "core/row_shape.h"
#include "core/types.cuh"
#include "rows/plan.h"

namespace jaxops::rows {

// The threads that share a row with adjacent elements: lanes of a warp, a block with whole warps, or a cluster of such
// blocks.
enum class Sharing { kWarp, kBlock, kCluster };

// How many threads share a row, known at launch. The team is a row's threads in one block.
struct Team {
  int lanes = 1;    // a row's threads in a block: a power of two within a warp, else whole warps; across: any number
  int shift = 0;    // log2(lanes), if within a warp
  int warps = 1;    // warps in a block that share a row
  int cluster = 1;  // blocks that share a row: a power of two
};
inline constexpr int kMostCluster = 16;

// Rows with adjacent elements. Each thread holds kPacks packs in registers; if kPacks is 0, the row is streamed: each
// pass reads it again. kRegisters: the most registers per thread. kLanes: a row's threads in a block as a compile-time
// constant, or 0 if it is known at launch.
template <Sharing kSharing_, int kPacks_, int kRegisters_, int kLanes_ = 0>
struct Along {
  static constexpr int kLanes = kLanes_;
  static constexpr bool kAcross = false;
  static constexpr Sharing kSharing = kSharing_;
  static constexpr bool kClusters = kSharing == Sharing::kCluster;  // blocks may share a row
  static constexpr bool kInWarp = kSharing == Sharing::kWarp;       // a row lies within one warp
  static constexpr int kPacks = kPacks_, kRegisters = kRegisters_;
  static constexpr int kMaxWarps = kInWarp ? 1 : 32;           // that share a row, in one block
  static constexpr int kMaxTeams = 1;                          // teams whose values are joined through shared memory
  static constexpr int kStep = 1;                              // between a row's lanes in a warp
  static constexpr int kWarpLanes = 32;                        // at most
  static constexpr bool kAhead = false;                        // see Looped
  static constexpr bool kStaged = false;                       // see Staged
  static constexpr int kSure = 0;                              // so many packs, a thread's first ones, lie in every row
  static constexpr bool kSegment = false, kBackwards = false;  // see SegmentAlong
};

// Rows whose neighbours' elements are adjacent. A pack holds one column, with as many rows as the pack has elements.
// kWidth packs lie side by side. Each lane in a block, and in its cluster, takes a column of packs. kLanes, kCluster:
// their numbers as compile-time constants, or 0 if they are known at launch.
template <int kWidth_, int kPacks_, int kRegisters_, int kMaxThreads_ = 512, int kLanes_ = 0, int kCluster_ = 0>
struct Across {
  static constexpr int kLanes = kLanes_, kCluster = kCluster_;
  static constexpr bool kAcross = true;
  static constexpr int kWidth = kWidth_, kPacks = kPacks_, kRegisters = kRegisters_;
  static constexpr int kMaxWarps = kMaxThreads_ / 32, kMaxTeams = kWidth;
  static constexpr bool kInWarp = false;
  static constexpr bool kClusters = kCluster ? kCluster > 1 : kWidth* kMaxWarps >= 128;  // not for the shortest rows
  static constexpr int kStep = kWidth < 32 ? kWidth : 32;
  static constexpr int kWarpLanes = 32 / kStep;
  static constexpr int kFew = 8;  // streamed packs whose exponentials are summed at once
  static constexpr bool kAhead = false, kStaged = false, kSegment = false, kBackwards = false;
  static constexpr int kSure = 0;
};

// Along for rows that are split (rows/segments.cuh): each block has a run of columns, and a thread reads kFew packs at
// once. kBackwards: begins with the last packs, and asks the caches not to keep results.
template <int kFew_, int kRegisters_, int kLanes_, bool kBackwards_ = false>
struct SegmentAlong : Along<Sharing::kBlock, 0, kRegisters_, kLanes_> {
  static constexpr bool kSegment = true, kBackwards = kBackwards_;
  static constexpr int kFew = kFew_;
};
template <int kWidth_, int kFew_, int kRegisters_, int kLanes_, bool kBackwards_ = false>
struct SegmentAcross : Across<kWidth_, 0, kRegisters_, kWidth_ * kLanes_, kLanes_> {
  static constexpr bool kClusters = false;
  static constexpr bool kSegment = true, kBackwards = kBackwards_;
  static constexpr int kFew = kFew_;
};

// A thread's team in its block. The compiler does not know a block's size. If there is only one team, its number is a
// constant here, so that the compiler computes row values once for all threads in a warp.
template <class P>
__device__ inline int TeamOfThread(const Team& team) {
  if constexpr (P::kAcross) return threadIdx.x % P::kWidth;
  return P::kInWarp ? threadIdx.x >> team.shift : 0;
}
// A thread's place in its team.
template <class P>
__device__ inline int LaneOfThread(const Team& team) {
  if constexpr (P::kAcross) return threadIdx.x / P::kWidth;
  return P::kInWarp ? threadIdx.x & (team.lanes - 1) : threadIdx.x;
}
// How many teams a block has; each has its own rows.
template <class P>
__host__ __device__ inline int TeamsOf(const Team& team) {
  return P::kAcross ? P::kMaxTeams : P::kInWarp ? kWarpThreads >> team.shift : 1;
}
template <class P>
__host__ __device__ inline int ThreadsOf(const Team& team) {
  return P::kAcross ? P::kMaxTeams * team.lanes : P::kInWarp ? kWarpThreads : team.lanes;
}
template <class P>
__host__ __device__ inline int ClusterOf(const Team& team) {
  if constexpr (P::kAcross && P::kClusters) return P::kCluster ? P::kCluster : team.cluster;
  return P::kClusters ? team.cluster : 1;
}
template <class P>
__host__ __device__ inline int LanesOf(const Team& team) {
  return P::kLanes ? P::kLanes : team.lanes;
}
// How many warps in a block share a row.
template <class P>
__host__ __device__ inline int WarpsOf(const Team& team) {
  return P::kLanes ? P::kLanes * P::kMaxTeams / 32 : team.warps;
}
// Half the least power of two that is no less than `count`, or 0 if count is 1: a join over so many lanes begins there.
__device__ inline int HalfOf(int count) { return count > 1 ? 1 << (31 - __clz(count - 1)) : 0; }
// The number of this block's cluster, or of the block itself.
template <class P>
__device__ inline int64_t ClusterOfBlock(const Team& team) {
  return P::kClusters ? blockIdx.x >> (31 - __clz(ClusterOf<P>(team))) : blockIdx.x;
}

// How many columns each block of a cluster has in a staged row. The blocks' runs lie one behind the other, and the last
// block has the rest. Runs are whole vectors and warps.
__host__ __device__ constexpr int64_t StagedColumns(int64_t columns, int cluster) {
  return (columns + cluster * 32 - 1) / (cluster * 32) * 32;
}

// The first kSlots layouts as a kernel knows them, for at most kRowAxes and kColumnAxes axes. Most kernels have few
// axes, because a launch takes longer the more parameters it has. kCopied: rows have a copy. If they have a reference,
// some loops over rows read it from memory for each row; a copy takes registers.
template <int kSlots_, int kRowAxes_, int kColumnAxes_, bool kCopied_ = false>
struct Geometry {
  static constexpr bool kCopied = kCopied_;
  static constexpr int kSlots = kSlots_, kRowAxes = kRowAxes_, kColumnAxes = kColumnAxes_;
  Team team;
  Axes<kSlots, kRowAxes> rows;
  Axes<kSlots, kColumnAxes> columns;
  int64_t size;           // elements of x
  int64_t steps[kSlots];  // between a pack's elements

  // Only two axes, the commonest number, are inlined, because the code stands for every pack and operand.
  __device__ int64_t ColumnOffset(int slot, int64_t column) const {
    if (columns.count != 2 || columns.total > std::numeric_limits<int32_t>::max()) return FarColumnOffset(slot, column);
    const uint32_t n = static_cast<uint32_t>(column), outer = columns.divisors[1].Divide(n);
    return outer * columns.strides[0][slot] + (n - outer * columns.divisors[1].divisor) * columns.strides[1][slot];
  }

 private:
  __device__ __noinline__ int64_t FarColumnOffset(int slot, int64_t column) const {
    return columns.Offset(slot, column);
  }
};
template <int kSlots, Layout kLayout>
using GeometryOf =
    std::conditional_t<kLayout == Layout::kGeneral, Geometry<kSlots, kMaxAxes, kMaxAxes>, Geometry<kSlots, 4, 1>>;

// The same on the host, in packs of `pack` elements: enough to choose a kernel.
template <int kSlots_>
struct Layouts {
  static constexpr int kSlots = kSlots_;
  Axes<kSlots> groups, rows, columns;
  int64_t size;
  int64_t steps[kSlots];
  bool aligned = true;  // x's packs are aligned
  bool plain = true;  // and so are every broadcast operand's packs, or rows lie across and it has one element per pack
  bool rows_alike = true;  // the broadcast operands do not depend on the row

  // broadcasts: the slots whose broadcast operands are read in packs, as bits.
  template <int kMore>
  Layouts(const RowShape<kMore>& shape, int pack, uint32_t broadcasts)
      : groups(shape.groups), rows(shape.rows), columns(shape.columns), size(shape.size()) {
    if (!shape.across) LetRowsShare(broadcasts & shape.present);
    const Axes<kSlots>& inner = shape.across ? rows : columns;
    const bool whole = inner.sizes[inner.count - 1] % pack == 0;
    for (int slot = 0; slot < kSlots; ++slot) {
      steps[slot] = inner.strides[inner.count - 1][slot];
      if (slot > 0 && !((broadcasts & shape.present) >> slot & 1)) continue;
      bool vectors = whole && steps[slot] == 1;
      for (const Axes<kSlots>* axes : {&groups, &rows, &columns})
        for (int a = 0; a < axes->count; ++a) {
          const int64_t stride = axes->strides[a][slot];
          const bool innermost = axes == &inner && a == axes->count - 1;
          vectors = vectors && (innermost || stride % pack == 0);
          if (slot > 0 && axes != &columns) rows_alike = rows_alike && stride == 0;
        }
      if (slot == 0) aligned = vectors || pack == 1;
      plain = plain && (vectors || (shape.across && whole && steps[slot] == 0));
    }
    plain = plain && columns.count == 1;
  }

  // Whether no broadcast operand depends on the row within a group.
  bool GroupedRowsAlike(uint32_t broadcasts) const {
    for (int slot = 1; slot < kSlots; ++slot)
      for (int a = 0; a < rows.count; ++a)
        if ((broadcasts >> slot & 1) && rows.strides[a][slot] != 0) return false;
    return true;
  }

  // Whether a kernel's geometry has room for the axes. The second function returns that geometry.
  template <class G>
  bool Fit() const {
    return rows.count <= G::kRowAxes && columns.count <= G::kColumnAxes;
  }
  template <class G>
  G To(const Team& team) const {
    G out = {.team = team,
             .rows = decltype(G::rows)(rows),
             .columns = decltype(G::columns)(columns),
             .size = size,
             .steps = {}};
    std::copy(std::begin(steps), std::end(steps), out.steps);
    return out;
  }

 private:
  // Orders the rows' axes so that rows which share the largest broadcast operand follow each other, and find it in a
  // cache.
  void LetRowsShare(uint32_t broadcasts) {
    int64_t most = 1;
    Axes<kSlots> ordered = rows;
    for (int slot = 1; slot < kSlots; ++slot) {
      if (!(broadcasts >> slot & 1)) continue;
      int64_t distinct = 1;
      for (int a = 0; a < rows.count; ++a) distinct *= rows.strides[a][slot] ? rows.sizes[a] : 1;
      if (distinct <= most) continue;
      most = distinct;
      ordered.count = 0;
      ordered.total = 1;
      for (const bool shared : {false, true})
        for (int a = 0; a < rows.count; ++a)
          if ((rows.strides[a][slot] == 0) == shared) ordered.Append(rows.sizes[a], std::to_array(rows.strides[a]));
    }
    rows = ordered;
  }
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_GEOMETRY_CUH_
