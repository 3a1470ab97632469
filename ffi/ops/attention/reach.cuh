// The ranges that segments or a mask leave visible, found before the attention kernels run: each query's keys, each
// key's queries, and the same for blocks.
//
// Documents, padding, windows and most masks leave ranges without gaps: a kernel then compares a position with two
// numbers. If a range has gaps, the kernel for general scores reads the mask or the segments inside it.
#ifndef JAXOPS_OPS_ATTENTION_REACH_CUH_
#define JAXOPS_OPS_ATTENTION_REACH_CUH_

#include <cstdint>

#include "core/launch.cuh"
#include "ops/attention/masks.cuh"
#include "ops/attention/problem.h"

namespace jaxops::attention {

inline constexpr int kReachThreads = 1024;
inline constexpr int kMostRuns = 4096;  // runs of equal segments in a batch; more count as gaps

inline __device__ int2 NothingSeen() { return {kLongest, -1}; }

// Joins the ranges of a warp's lanes.
__device__ inline int2 Hull(int2 range) { return {__reduce_min_sync(~0u, range.x), __reduce_max_sync(~0u, range.y)}; }

// Runs of equal segments, in shared memory.
struct Runs {
  int32_t *segments, *starts;
  int32_t* partners;  // the other side's run with the same segment; -1: none
  int count, length;  // length: all positions
  bool ascending;

  // By all threads of a block; count: how many runs there are.
  __device__ void Find(const int32_t* given, int positions) {
    constexpr int kEach = 4, kWarps = kReachThreads / 32;
    __shared__ int of_warps[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto scan = [&](int value) {  // the sum over the lanes up to this one
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += before;
      }
      return value;
    };
    length = positions;
    count = 0;
    bool ascends = true;
    for (int base = 0; base < positions; base += kReachThreads * kEach) {
      const int first = base + static_cast<int>(threadIdx.x) * kEach;
      int segment[kEach + 1], found = 0;  // a bit for each position where a run begins
#pragma unroll
      for (int i = 0; i <= kEach; ++i) {
        const int at = first + i - 1;
        segment[i] = at >= 0 && at < positions ? given[at] : 0;
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = first + i;
        if (at >= positions) continue;
        if (at == 0 || segment[i] != segment[i + 1]) found |= 1 << i;
        ascends &= at == 0 || segment[i] <= segment[i + 1];
      }
      const int own = __popc(found), up_to = scan(own);
      if (lane == 31) of_warps[warp] = up_to;
      __syncthreads();
      const int in_warps = scan(of_warps[lane]);
      int index = count + up_to - own + (warp > 0 ? __shfl_sync(~0u, in_warps, max(warp - 1, 0)) : 0);
      count += __shfl_sync(~0u, in_warps, kWarps - 1);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (!(found >> i & 1)) continue;
        if (index < kMostRuns) segments[index] = segment[i + 1], starts[index] = first + i;
        ++index;
      }
      __syncthreads();
    }
    ascending = __syncthreads_and(ascends);
  }
  __device__ int End(int run) const { return run + 1 < count ? starts[run + 1] : length; }
  // Whether every run has a different segment.
  __device__ bool AreDistinct() const {
    bool distinct = count <= kMostRuns;
    if (distinct && !ascending) {
      for (int run = threadIdx.x; run < count; run += kReachThreads)
        for (int other = 0; other < run; ++other) distinct &= segments[other] != segments[run];
    }
    return __syncthreads_and(distinct);
  }
  __device__ void FindPartners(const Runs& others) const {
    for (int run = threadIdx.x; run < count; run += kReachThreads) {
      int partner = -1;
      if (run < others.count && others.segments[run] == segments[run]) {
        partner = run;
      } else {
        for (int other = 0; other < others.count && partner < 0; ++other)
          if (others.segments[other] == segments[run]) partner = other;
      }
      partners[run] = partner;
    }
  }
  // The range that each position sees on the other side.
  __device__ void WriteRanges(const Runs& others, bool exact, int2* ranges) const {
    for (int at = threadIdx.x; at < length; at += kReachThreads) {
      int2 range = {0, others.length - 1};
      if (exact) {
        int first = 0, last = count - 1;  // the run that holds it
        while (first < last) {
          const int middle = (first + last + 1) / 2;
          if (starts[middle] <= at) {
            first = middle;
          } else {
            last = middle - 1;
          }
        }
        const int partner = partners[first];
        range = partner < 0 ? NothingSeen() : int2{others.starts[partner], others.End(partner) - 1};
      }
      ranges[at] = range;
    }
  }
};

inline constexpr int kRunsBytes = 6 * kMostRuns * 4;

// Each block takes one batch.
static __global__ void __launch_bounds__(kReachThreads)
    FindReachOfSegments(const __grid_constant__ Problem p, const __grid_constant__ Reach reach) {
  extern __shared__ int32_t runs[];
  const int64_t batch = blockIdx.x;
  const auto part = [&](int i) { return runs + i * kMostRuns; };
  Runs queries = {part(0), part(1), part(2)}, keys = {part(3), part(4), part(5)};
  queries.Find(p.query_segments + batch * p.queries, p.queries);
  keys.Find(p.key_segments + batch * p.keys, p.keys);
  const bool exact = queries.AreDistinct() & keys.AreDistinct();
  if (exact) {
    queries.FindPartners(keys);
    keys.FindPartners(queries);
  } else if (threadIdx.x == 0) {
    *reach.gaps = 1;
  }
  __syncthreads();
  queries.WriteRanges(keys, exact, reach.of_queries + batch * p.queries);
  if (reach.of_keys) keys.WriteRanges(queries, exact, reach.of_keys + batch * p.keys);
}

inline constexpr int kMaskThreads = 256;

// The range that a mask lets each query see: one warp per mask row.
static __global__ void __launch_bounds__(kMaskThreads)
    FindReachOfMaskRows(const __grid_constant__ Problem p, const __grid_constant__ Reach reach, int64_t rows) {
  const int64_t row = int64_t{blockIdx.x} * (kMaskThreads / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32;
  const uint8_t* const from = static_cast<const uint8_t*>(p.mask.data) + row * p.keys;
  int2 range = NothingSeen();
  int count = 0;
  const auto see = [&](int first, uint32_t four) {  // four keys, the lowest bit in each byte
    if (!four) return;
    range.x = min(range.x, first + (__ffs(four) - 1) / 8);
    range.y = max(range.y, first + (31 - __clz(four)) / 8);
    count += __popc(four);
  };
  if (p.keys % 16 == 0 && reinterpret_cast<uintptr_t>(p.mask.data) % 16 == 0) {
#pragma unroll 4
    for (int key = lane * 16; key < p.keys; key += 512) {
      const uint4 bytes = *reinterpret_cast<const uint4*>(from + key);
      const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) see(key + 4 * i, words[i] & 0x01010101);
    }
  } else {
    for (int key = lane; key < p.keys; key += 32) see(key, from[key] & 1);
  }
  range = Hull(range);
  count = __reduce_add_sync(~0u, count);
  if (lane == 0 && count != max(range.y - range.x + 1, 0)) *reach.gaps = 1;
  if (p.mask.query_stride) {
    if (lane == 0) reach.of_queries[row] = range;
  } else {
    for (int query = lane; query < p.queries; query += 32) reach.of_queries[row * p.queries + query] = range;
  }
}

inline constexpr int kColumns = 128;  // in a block of the next kernel; a thread has four

// Which queries see each key.
static __global__ void __launch_bounds__(kReachThreads)
    FindReachOfMaskColumns(const __grid_constant__ Problem p, const __grid_constant__ Reach reach) {
  constexpr int kParts = kReachThreads / 32;
  const int blocks = (p.keys + kColumns - 1) / kColumns;
  const int64_t line = blockIdx.x / blocks;
  const int key = static_cast<int>(blockIdx.x % blocks) * kColumns + threadIdx.x % 32 * 4;
  const int rows = p.mask.query_stride ? p.queries : 1;
  const uint8_t* const from = static_cast<const uint8_t*>(p.mask.data) + line * rows * p.keys;
  const bool whole_words = p.keys % 4 == 0 && reinterpret_cast<uintptr_t>(p.mask.data) % 4 == 0;
  // Each warp has consecutive rows; work is needed only when a column's bit changes.
  int first[4], last[4], count[4], begin[4] = {};
  for (int i = 0; i < 4; ++i) first[i] = kLongest, last[i] = -1, count[i] = 0;
  const int share = (rows + kParts - 1) / kParts, first_row = threadIdx.x / 32 * share;
  const int end_row = min(first_row + share, rows);
  uint32_t before = 0;
  const auto change = [&](uint32_t four, int row) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is = four >> 8 * i & 1, was = before >> 8 * i & 1;
      if (is && !was) begin[i] = row, first[i] = min(first[i], row);
      if (was && !is) last[i] = row - 1, count[i] += row - begin[i];
    }
    before = four;
  };
#pragma unroll 8
  for (int row = first_row; row < end_row; ++row) {
    uint32_t four = 0;
    if (whole_words) {
      if (key < p.keys) four = *reinterpret_cast<const uint32_t*>(from + int64_t{row} * p.keys + key) & 0x01010101;
    } else {
      for (int i = 0; i < 4; ++i)
        if (key + i < p.keys) four |= uint32_t{from[int64_t{row} * p.keys + key + i] & 1u} << 8 * i;
    }
    if (four != before) change(four, row);
  }
  if (before) change(0, end_row);
  __shared__ int firsts[kColumns], lasts[kColumns], counts[kColumns];
  if (threadIdx.x < kColumns) firsts[threadIdx.x] = kLongest, lasts[threadIdx.x] = -1, counts[threadIdx.x] = 0;
  __syncthreads();
  for (int i = 0; i < 4; ++i) {
    const int column = threadIdx.x % 32 * 4 + i;
    if (count[i] == 0) continue;
    atomicMin(firsts + column, first[i]);
    atomicMax(lasts + column, last[i]);
    atomicAdd(counts + column, count[i]);
  }
  __syncthreads();
  const int own = static_cast<int>(blockIdx.x % blocks) * kColumns + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= kColumns || own >= p.keys) return;
  int2 range = {firsts[threadIdx.x], lasts[threadIdx.x]};
  if (rows > 1 && counts[threadIdx.x] != max(range.y - range.x + 1, 0)) *reach.gaps = 1;
  if (rows == 1 && counts[threadIdx.x] > 0) range = {0, p.queries - 1};
  reach.of_keys[line * p.keys + own] = range;
}

// The range that 64 positions see, from the range that each sees; whole: the range that they all see.
__device__ inline Span SpanOf(const int2* ranges, int first, int length, bool gaps) {
  int2 seen = NothingSeen(), whole = {0, kLongest};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = first + i * 32 + static_cast<int>(threadIdx.x % 32);
    if (at >= length) continue;
    const int2 range = ranges[at];
    seen = {min(seen.x, range.x), max(seen.y, range.y)};
    whole = {max(whole.x, range.x), min(whole.y, range.y)};
  }
  seen = Hull(seen);
  whole = {__reduce_max_sync(~0u, whole.x), __reduce_min_sync(~0u, whole.y)};
  if (gaps) whole = NothingSeen();
  return {seen.x, seen.y + 1, whole.x, whole.y + 1};
}

// Block ranges: one block per line. key_block, query_block: positions in the backward pass's blocks; 0: these ranges
// are not wanted.
static __global__ void __launch_bounds__(kReachThreads)
    FindReachOfBlocks(const __grid_constant__ Problem p, const __grid_constant__ Reach reach, int key_block,
                      int query_block) {
  const int64_t line = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = kReachThreads / 32;
  const int queries64 = (p.queries + 63) / 64, keys64 = (p.keys + 63) / 64;
  const bool gaps = *reach.gaps;
  Span* const query_spans = reach.query_spans + line * queries64;
  for (int block = warp; block < queries64; block += warps) {
    const Span span = SpanOf(reach.of_queries + line * p.queries, block * 64, p.queries, gaps);
    if (lane == 0) query_spans[block] = span;
  }
  if (!reach.of_keys) return;
  for (int block = warp; block < keys64; block += warps) {
    const Span span = SpanOf(reach.of_keys + line * p.keys, block * 64, p.keys, gaps);
    if (lane == 0) reach.key_spans[line * keys64 + block] = span;
  }
  if (key_block == 0) return;
  // Which blocks see each other: the ends of ranges, made to ascend. Each thread has several consecutive blocks.
  __shared__ int firsts[kReachThreads], lasts[kReachThreads];
  __syncthreads();
  const int each = query_block / 64, blocks = (p.queries + query_block - 1) / query_block;
  const int share = (blocks + kReachThreads - 1) / kReachThreads, own = static_cast<int>(threadIdx.x);
  const auto blocks_of = [&](int block) {
    int2 found = {kLongest, 0};
    for (int i = block * each; i < min((block + 1) * each, queries64); ++i) {
      const Span span = query_spans[i];
      if (span.empty()) continue;
      found = {min(found.x, span.first / key_block), max(found.y, (span.last + key_block - 1) / key_block)};
    }
    return found;
  };
  int first = kLongest, last = 0;
  for (int block = own * share; block < min((own + 1) * share, blocks); ++block) {
    const int2 found = blocks_of(block);
    first = min(first, found.x);
    last = max(last, found.y);
  }
  firsts[own] = first;
  lasts[own] = last;
  __syncthreads();
  for (int step = 1; step < kReachThreads; step *= 2) {
    const int after = own + step < kReachThreads ? firsts[own + step] : kLongest;
    const int before = own >= step ? lasts[own - step] : 0;
    __syncthreads();
    firsts[own] = min(firsts[own], after);
    lasts[own] = max(lasts[own], before);
    __syncthreads();
  }
  int2* const query_blocks = reach.query_blocks + line * blocks;
  last = own > 0 ? lasts[own - 1] : 0;
  for (int block = own * share; block < min((own + 1) * share, blocks); ++block) {
    last = max(last, blocks_of(block).y);
    query_blocks[block].y = last;
  }
  first = own + 1 < kReachThreads ? firsts[own + 1] : kLongest;
  for (int block = min((own + 1) * share, blocks) - 1; block >= own * share; --block) {
    first = min(first, blocks_of(block).x);
    query_blocks[block].x = first;
  }
  __syncthreads();
  const int key_blocks = (p.keys + key_block - 1) / key_block;
  const auto first_block = [&](const auto& is_there) {
    int low = 0, high = blocks;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (is_there(query_blocks[middle])) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  };
  for (int block = own; block < key_blocks; block += kReachThreads) {
    const int begin = first_block([&](int2 range) { return range.y > block; });
    const int end = first_block([&](int2 range) { return range.x > block; });
    reach.key_blocks[line * key_blocks + block] = {begin, end};
  }
}

// How many lines a reach has; 0 without a reach.
inline int ReachLines(const Problem& p) {
  if (p.query_segments) return p.batches;
  if (!p.mask_has_reach()) return 0;
  return (p.mask.batch_stride ? p.batches : 1) * (p.mask.head_stride ? p.heads : 1);
}

// Takes its parts from a workspace: take(words) -> their address. The backward pass's blocks have query_block and
// key_block positions; 0: the forward pass, 64: without the blocks that see each other.
template <class Take>
Reach TakeReach(const Problem& p, const Take& take, int* gaps, int query_block, int key_block) {
  Reach reach = {};
  const int64_t lines = ReachLines(p);
  if (lines == 0) return reach;
  const auto blocks = [&](int64_t positions, int64_t size) { return lines * ((positions + size - 1) / size); };
  reach.of_queries = reinterpret_cast<int2*>(take(2 * lines * p.queries));
  reach.query_spans = reinterpret_cast<Span*>(take(4 * blocks(p.queries, 64)));
  if (query_block > 0) {
    reach.of_keys = reinterpret_cast<int2*>(take(2 * lines * p.keys));
    reach.key_spans = reinterpret_cast<Span*>(take(4 * blocks(p.keys, 64)));
  }
  if (key_block > 64) {
    reach.query_blocks = reinterpret_cast<int2*>(take(2 * blocks(p.queries, query_block)));
    reach.key_blocks = reinterpret_cast<int2*>(take(2 * blocks(p.keys, key_block)));
  }
  reach.gaps = gaps;
  const bool by_batch = p.query_segments || p.mask.batch_stride, by_head = !p.query_segments && p.mask.head_stride;
  reach.batch_lines = !by_batch ? 0 : by_head ? p.heads : 1;
  reach.head_lines = by_head;
  reach.decides = !p.is_general();
  return reach;
}

// Fills the reach; the caller has set *gaps to 0.
inline cudaError_t LaunchReach(cudaStream_t stream, const Problem& p, const Reach& reach, int query_block,
                               int key_block) {
  if (!reach.of_queries) return cudaSuccess;
  const int64_t lines = ReachLines(p);
  cudaError_t status;
  if (p.query_segments) {
    const Grid grid = {.blocks = p.batches, .threads = kReachThreads, .shared_bytes = kRunsBytes};
    status = Launch(stream, FindReachOfSegments, grid, p, reach);
  } else {
    const int64_t rows = lines * (p.mask.query_stride ? p.queries : 1);
    const Grid grid = {.blocks = (rows + kMaskThreads / 32 - 1) / (kMaskThreads / 32), .threads = kMaskThreads};
    status = Launch(stream, FindReachOfMaskRows, grid, p, reach, rows);
    const Grid columns = {.blocks = lines * ((p.keys + kColumns - 1) / kColumns), .threads = kReachThreads};
    if (status == cudaSuccess && reach.of_keys) status = Launch(stream, FindReachOfMaskColumns, columns, p, reach);
  }
  if (status != cudaSuccess) return status;
  const Grid grid = {.blocks = lines, .threads = kReachThreads};
  return Launch(stream, FindReachOfBlocks, grid, p, reach, key_block > 64 ? key_block : 0, query_block);
}

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_REACH_CUH_
