// Which blocks of queries and of keys have segments in common, found before the kernels that visit them.
#ifndef JAXOPS_OPS_ATTENTION_SEGMENTS_CUH_
#define JAXOPS_OPS_ATTENTION_SEGMENTS_CUH_

#include <cstdint>

#include "core/launch.cuh"
#include "ops/attention/masks.cuh"
#include "ops/attention/problem.h"

namespace jaxops::attention {

inline constexpr int kUnit = 16;  // positions whose segments are known by their least and their greatest number
struct SegmentRange {
  int32_t least, greatest;
};

// Spans of blocks of columns (of keys, for blocks of queries; or the other way round) for each batch and block of rows.
struct SegmentPlan {
  const SegmentRange *rows, *columns;  // of each unit
  int row_units, column_units;         // of a batch
  int row_size, column_size;           // units of a block
  int row_blocks;
  Span* out;  // [batches, row_blocks]
};

inline constexpr int kPlanThreads = 128;

// A thread a unit: first all of the queries', then the keys'.
static __global__ void __launch_bounds__(kPlanThreads)
    FindSegmentRanges(const __grid_constant__ Problem p, int query_units, int key_units, SegmentRange* ranges) {
  const int64_t index = int64_t{blockIdx.x} * kPlanThreads + threadIdx.x, of_queries = int64_t{p.batches} * query_units;
  if (index >= of_queries + int64_t{p.batches} * key_units) return;
  const bool is_query = index < of_queries;
  const int units = is_query ? query_units : key_units, positions = is_query ? p.queries : p.keys;
  const int64_t within = is_query ? index : index - of_queries, batch = within / units;
  const int first = static_cast<int>(within - batch * units) * kUnit;
  const int32_t* const segments = (is_query ? p.query_segments : p.key_segments) + batch * positions;
  SegmentRange range = {segments[first], segments[first]};
  for (int i = first + 1; i < min(first + kUnit, positions); ++i) {
    range.least = min(range.least, segments[i]);
    range.greatest = max(range.greatest, segments[i]);
  }
  ranges[index] = range;
}

// A warp a block of rows. The columns that it visits begin with the first whose greatest segment so far is not below
// what is still to come of the rows, and end with the last whose least from there on is not above what has come. Where
// segments ascend these are the blocks with one in common; always it is a relation of blocks, the same from both sides.
static __global__ void __launch_bounds__(kPlanThreads)
    PlanSegments(const __grid_constant__ SegmentPlan plan, int batches) {
  const int64_t index = int64_t{blockIdx.x} * (kPlanThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (index >= int64_t{batches} * plan.row_blocks) return;
  const int64_t batch = index / plan.row_blocks;
  const int first_row = static_cast<int>(index - batch * plan.row_blocks) * plan.row_size;
  const int end_row = min(first_row + plan.row_size, plan.row_units);
  const SegmentRange* const rows = plan.rows + batch * plan.row_units;
  const SegmentRange* const columns = plan.columns + batch * plan.column_units;
  constexpr int kLeast = std::numeric_limits<int32_t>::min(), kGreatest = std::numeric_limits<int32_t>::max();
  int come = kLeast, to_come = kGreatest, least = kGreatest, greatest = kLeast;
  for (int row = lane; row < plan.row_units; row += 32) {
    const SegmentRange range = rows[row];
    if (row < end_row) come = max(come, range.greatest);
    if (row >= first_row) to_come = min(to_come, range.least);
    if (row >= first_row && row < end_row) {
      least = min(least, range.least);
      greatest = max(greatest, range.greatest);
    }
  }
  come = __reduce_max_sync(~0u, come);
  to_come = __reduce_min_sync(~0u, to_come);
  least = __reduce_min_sync(~0u, least);
  greatest = __reduce_max_sync(~0u, greatest);
  int first = plan.column_units, last = -1;
  for (int column = lane; column < plan.column_units; column += 32) {
    const SegmentRange range = columns[column];
    if (range.greatest >= to_come) first = min(first, column);
    if (range.least <= come) last = column;
  }
  first = __reduce_min_sync(~0u, first);
  last = __reduce_max_sync(~0u, last);
  if (last < first) {
    first = last = 0;
  } else {
    first /= plan.column_size;
    last = last / plan.column_size + 1;
  }
  // The first run of blocks that are of the rows' only segment.
  int whole_first = last, whole_last = last;
  if (least == greatest) {
    for (int base = first; base < last && whole_last == last; base += 32) {
      bool same = base + lane < last;
      const int unit = (base + lane) * plan.column_size;
      for (int column = unit; same && column < min(unit + plan.column_size, plan.column_units); ++column)
        same = columns[column].least == least && columns[column].greatest == least;
      const unsigned found = __ballot_sync(~0u, same);
      if (whole_first == last && found) whole_first = base + __ffs(found) - 1;
      if (whole_first < last) {
        const unsigned others = ~found & (whole_first > base ? ~0u << (whole_first - base) : ~0u);
        if (others) whole_last = min(last, base + __ffs(others) - 1);
      }
    }
  }
  if (lane == 0) plan.out[index] = {first, last, whole_first, whole_last};
}

// The 32-bit words of the units' ranges.
inline int64_t RangeWords(const Problem& p) {
  return int64_t{p.batches} * ((p.queries + kUnit - 1) / kUnit + (p.keys + kUnit - 1) / kUnit) * 2;
}

inline cudaError_t LaunchSegmentRanges(cudaStream_t stream, const Problem& p, int32_t* ranges) {
  const int query_units = (p.queries + kUnit - 1) / kUnit, key_units = (p.keys + kUnit - 1) / kUnit;
  const int64_t units = int64_t{p.batches} * (query_units + key_units);
  const Grid grid = {.blocks = (units + kPlanThreads - 1) / kPlanThreads, .threads = kPlanThreads};
  return Launch(stream, FindSegmentRanges, grid, p, query_units, key_units, reinterpret_cast<SegmentRange*>(ranges));
}
// For blocks of row_size queries the blocks of column_size keys; or, if not by_query, for keys those of queries. `out`:
// a Span for each batch and block of rows.
inline cudaError_t LaunchSegmentPlan(cudaStream_t stream, const Problem& p, const int32_t* ranges, bool by_query,
                                     int row_size, int column_size, Span* out) {
  const int query_units = (p.queries + kUnit - 1) / kUnit, key_units = (p.keys + kUnit - 1) / kUnit;
  const SegmentRange* const of_queries = reinterpret_cast<const SegmentRange*>(ranges);
  const SegmentRange* const of_keys = of_queries + int64_t{p.batches} * query_units;
  const int rows = by_query ? p.queries : p.keys;
  const SegmentPlan plan = {.rows = by_query ? of_queries : of_keys,
                            .columns = by_query ? of_keys : of_queries,
                            .row_units = by_query ? query_units : key_units,
                            .column_units = by_query ? key_units : query_units,
                            .row_size = row_size / kUnit,
                            .column_size = column_size / kUnit,
                            .row_blocks = (rows + row_size - 1) / row_size,
                            .out = out};
  const int64_t warps = int64_t{p.batches} * plan.row_blocks;
  const Grid grid = {.blocks = (warps * 32 + kPlanThreads - 1) / kPlanThreads, .threads = kPlanThreads};
  return Launch(stream, PlanSegments, grid, plan, p.batches);
}

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_SEGMENTS_CUH_
