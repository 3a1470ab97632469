// What a row kernel knows of its tensors, and how threads share its rows.
#ifndef JAXOPS_ROWS_GEOMETRY_CUH_
#define JAXOPS_ROWS_GEOMETRY_CUH_

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <type_traits>

#include "core/row_shape.h"
#include "core/types.cuh"

namespace jaxops::rows {

// Who shares a row of adjacent elements, and where it lives between passes: kLanes threads of each of kCluster blocks,
// kPacks packs a thread in registers (0: streamed, read again by each pass); a thread works on kRows rows at once.
template <int kLanes_, int kPacks_, int kRows_ = 1, int kCluster_ = 1, int kBlocks_ = 1>
struct Along {
  static constexpr bool kAcross = false;
  static constexpr int kLanes = kLanes_, kPacks = kPacks_, kRows = kRows_, kCluster = kCluster_;
  static constexpr int kThreads = kLanes > 128 ? kLanes : 128;
  static constexpr int kMinBlocks = kBlocks_;       // resident blocks that registers must allow
  static constexpr int kTeams = kThreads / kLanes;  // teams of a block, each with rows of its own
  static constexpr int kStep = 1;                   // between a row's lanes in a warp
  static constexpr bool kAhead = false;             // see Looped
  static constexpr bool kStaged = false;            // see Staged
  static constexpr int kSure = 0;                   // of a thread's packs, the first that lie in every row
  static constexpr int kWarpLanes = kLanes < 32 ? kLanes : 32;
  static constexpr int kWarps = kLanes > 32 ? kLanes / 32 : 1;  // that share a row, in a block
  // See SplitAcross.
  static constexpr bool kSplit = false, kBackwards = false;
  static_assert(kCluster == 1 || kTeams == 1);
};

// The same for few rows, whose kernels' time is that of one row: many threads for it, and hardly any code.
template <int kLanes_, int kPacks_ = 1>
struct FewAlong : Along<kLanes_, kPacks_> {};

// Rows whose neighbours' elements are adjacent: a pack holds one column of as many rows as it has elements; kWidth
// packs lie side by side, and kLanes threads of each of kCluster blocks take a column of packs each.
template <int kWidth_, int kLanes_, int kPacks_, int kCluster_ = 1, int kBlocks_ = 1>
struct Across {
  static constexpr bool kAcross = true;
  static constexpr int kWidth = kWidth_, kLanes = kLanes_, kPacks = kPacks_, kRows = 1, kCluster = kCluster_;
  static constexpr int kThreads = kWidth * kLanes;
  static constexpr int kMinBlocks = kBlocks_;
  static constexpr int kTeams = kWidth;
  static constexpr int kStep = kWidth < 32 ? kWidth : 32;
  static constexpr bool kAhead = false, kStaged = false;
  static constexpr bool kSplit = false, kBackwards = false;
  static constexpr int kFew = 8;  // packs of a streamed row whose exponentials are summed at once
  static constexpr int kSure = 0;
  static constexpr int kWarpLanes = 32 / kStep;
  static constexpr int kWarps = kLanes > 1 ? kThreads / 32 : 1;
};

// The same for few rows: few of them a block, so that there are more blocks.
template <int kWidth_, int kLanes_, int kPacks_, int kCluster_ = 1>
struct FewAcross : Across<kWidth_, kLanes_, kPacks_, kCluster_> {};

template <class P>
inline constexpr bool kForFewRows = false;
template <int kLanes, int kPacks>
inline constexpr bool kForFewRows<FewAlong<kLanes, kPacks>> = true;
template <int kWidth, int kLanes, int kPacks, int kCluster>
inline constexpr bool kForFewRows<FewAcross<kWidth, kLanes, kPacks, kCluster>> = true;

// The same of rows that are split (rows/split_rows.cuh): each block has a run of their columns, and a thread reads kFew
// packs at once. kBackwards: the last ones first, and results are not to stay in the caches.
template <int kLanes_, int kFew_, int kBlocks_ = 1, bool kBackwards_ = false>
struct SplitAlong : Along<kLanes_, 0, 1, 1, kBlocks_> {
  static constexpr bool kSplit = true, kBackwards = kBackwards_;
  static constexpr int kFew = kFew_;
};
template <int kWidth_, int kLanes_, int kFew_, int kBlocks_ = 1, bool kBackwards_ = false>
struct SplitAcross : Across<kWidth_, kLanes_, 0, 1, kBlocks_> {
  static constexpr bool kSplit = true, kBackwards = kBackwards_;
  static constexpr int kFew = kFew_;
};

// A thread's team in its block. Of a single one the compiler, which knows no block's size, computes what concerns the
// row once for all threads of a warp.
template <class P>
__device__ inline int TeamOfThread() {
  if constexpr (P::kTeams == 1) return 0;
  return P::kAcross ? threadIdx.x % P::kTeams : threadIdx.x / P::kLanes;
}
// And its place in the team.
template <class P>
__device__ inline int LaneOfThread() {
  if constexpr (P::kTeams == 1) return threadIdx.x;
  return P::kAcross ? threadIdx.x / P::kTeams : threadIdx.x % P::kLanes;
}

// Staged rows lie in a cluster's blocks one run behind the other: how many columns a block has, the last one the rest.
// Whole vectors and warps.
template <class P>
__host__ __device__ constexpr int64_t StagedColumns(int64_t columns) {
  return (columns + P::kCluster * 32 - 1) / (P::kCluster * 32) * 32;
}

// Whether a staged placement is for rows of so many columns, and whether each of a table takes those that are too long
// for the one before it.
template <class P>
__host__ __device__ constexpr bool StagedFits(int64_t columns) {
  const int64_t last = columns - (P::kCluster - 1) * StagedColumns<P>(columns);
  return last >= P::kSure * P::kLanes && columns <= int64_t{P::kLanes} * P::kPacks * P::kCluster;
}
template <class... Ps>
constexpr bool WithoutGaps(Types<Ps...>) {
  int64_t next = 0;
  bool all = true;
  ((all = all && (next == 0 || StagedFits<Ps>(next)), next = int64_t{Ps::kLanes} * Ps::kPacks * Ps::kCluster + 1), ...);
  return all;
}

// How the elements of rows lie.
enum class Lay {
  kPlain,    // packs are aligned and each lies in one run of adjacent elements; columns are one axis
  kShifted,  // columns are one axis, but a row may begin anywhere in a pack
  kGeneral   // several column axes, or broadcast operands whose elements for a pack lie apart
};

// What a kernel knows of the first kSlots layouts of its rows, for at most kRowAxes and kColumnAxes axes: few in most
// kernels, because a launch takes longer the more parameters it has. kCopied: rows have it by value. Behind a reference
// some loops over rows read it from memory for each row; by value it takes registers. TUNING.md has which is faster.
template <int kSlots_, int kRowAxes_, int kColumnAxes_, bool kCopied_ = false>
struct Geometry {
  static constexpr bool kCopied = kCopied_;
  static constexpr int kSlots = kSlots_, kRowAxes = kRowAxes_, kColumnAxes = kColumnAxes_;
  Axes<kSlots, kRowAxes> rows;
  Axes<kSlots, kColumnAxes> columns;
  int64_t size;           // elements of x
  int64_t steps[kSlots];  // between the elements of a pack

  // Inlined for two axes alone, the commonest: it stands for every pack of every operand.
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
template <int kSlots, Lay kLay>
using GeometryOf =
    std::conditional_t<kLay == Lay::kGeneral, Geometry<kSlots, kMaxAxes, kMaxAxes>, Geometry<kSlots, 4, 1>>;

// The same on the host, in packs of `pack` elements: what it takes to choose a kernel.
template <int kSlots_>
struct Layouts {
  static constexpr int kSlots = kSlots_;
  Axes<kSlots> groups, rows, columns;
  int64_t size;
  int64_t steps[kSlots];
  bool aligned = true;     // x's packs are aligned
  bool plain = true;       // and every broadcast operand's are, or rows lie across and it has one element for a pack
  bool rows_alike = true;  // the broadcast operands do not depend on the row

  // broadcasts: the slots of broadcast operands that are read in packs, as bits.
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

  // Whether the broadcast operands do not depend on the row within a group.
  bool GroupedRowsAlike(uint32_t broadcasts) const {
    for (int slot = 1; slot < kSlots; ++slot)
      for (int a = 0; a < rows.count; ++a)
        if ((broadcasts >> slot & 1) && rows.strides[a][slot] != 0) return false;
    return true;
  }

  // Whether a kernel's geometry has room for the axes, and that geometry.
  template <class G>
  bool Fit() const {
    return rows.count <= G::kRowAxes && columns.count <= G::kColumnAxes;
  }
  template <class G>
  G To() const {
    G out = {.rows = decltype(G::rows)(rows), .columns = decltype(G::columns)(columns), .size = size, .steps = {}};
    std::copy(std::begin(steps), std::end(steps), out.steps);
    return out;
  }

 private:
  // Orders the rows' axes so that rows that share the largest broadcast operand follow each other, and find it in a
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
