// Which queries see which keys: by element, and by blocks. Blocks that nothing sees are never loaded, and fully visible
// blocks are never masked.
#ifndef JAXOPS_OPS_ATTENTION_MASKS_CUH_
#define JAXOPS_OPS_ATTENTION_MASKS_CUH_

#include <cstdint>
#include <limits>

#include "ops/attention/problem.h"

namespace jaxops::attention {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A value for each of the two rows that a thread has in a fragment.
struct Rows {
  int of[2];
  __device__ int operator[](int h) const { return of[h]; }
};

// Positions or blocks [first, last). [whole_first, whole_last) is fully visible; the rest needs masks.
struct Span {
  int first, last, whole_first, whole_last;

  __device__ bool empty() const { return last <= first; }
  // The blocks that hold a span of positions.
  template <int kPositions>
  __device__ Span Blocks() const {
    return {first / kPositions, (last + kPositions - 1) / kPositions, (whole_first + kPositions - 1) / kPositions,
            whole_last / kPositions};
  }
  // The common part of two spans.
  __device__ Span And(const Span& other) const {
    return {max(first, other.first), min(last, other.last), max(whole_first, other.whole_first),
            min(whole_last, other.whole_last)};
  }
  // Puts the whole part within the span; an empty one at its beginning.
  __device__ Span Ordered() const {
    Span s = {first, last, max(whole_first, first), min(whole_last, last)};
    if (s.whole_last <= s.whole_first) s.whole_first = s.whole_last = first;
    return s;
  }
};

// The ranges that segments or a mask leave visible, as the kernels in reach.cuh find them: nothing outside them is
// visible. A line is a batch, or a batch and head.
struct Reach {
  int2 *of_queries,
      *of_keys;  // [lines, queries or keys]: the first and last position that each sees; null: no reach
  Span *query_spans, *key_spans;  // [lines, blocks of 64 positions]
  // [lines, blocks in the backward pass]: blocks that see each other, the same from both sides. Both ends ascend with
  // the blocks.
  int2 *query_blocks, *key_blocks;
  int* gaps;  // [1]: whether something within a range is not seen
  int batch_lines, head_lines;
  bool decides;  // two kernels are launched, and one returns at once, as `gaps` says

  __device__ int64_t Line(int batch, int head) const { return int64_t{batch} * batch_lines + head * head_lines; }
  // Whether this kernel computes the call: the one for general scores if there are gaps, otherwise the other one.
  __device__ bool IsFor(bool general_kernel) const { return !decides || (*gaps != 0) == general_kernel; }
};

// Which masks must be compared inside the ranges: if there is a reach, only when it has gaps.
struct Compared {
  bool mask, segments;

  // Without a reach.
  explicit __device__ Compared(const Problem& p) : mask(p.mask.data), segments(p.query_segments) {}
  __device__ Compared(const Problem& p, const Reach& reach) : Compared(p) {
    if (reach.of_queries && (mask || segments)) (segments ? segments : mask) = *reach.gaps;
  }
};

// The first and the last key that each of a thread's two queries sees.
struct KeyRange {
  int first[2], last[2];
  bool bounds_left;
};

// One batch's band: query i < queries sees the keys j < keys with i - left <= j <= i + right. Queries and keys past
// these counts may hold anything inside the tensor; past the tensor the copy engine reads zeros.
struct Band {
  int queries, keys, left, right;
  bool padded_queries, padded_keys;

  __device__ Band(const Problem& p, int queries, int keys, int left, int right)
      : queries(queries),
        keys(keys),
        left(left),
        right(right),
        padded_queries(queries < p.queries),
        padded_keys(keys < p.keys) {}
  __device__ Band(const Problem& p, int batch)
      : queries(p.QueriesOf(batch)),
        keys(p.KeysOf(batch)),
        left(p.left),
        right(p.right),
        padded_queries(queries < p.queries),
        padded_keys(keys < p.keys) {
    if (!p.query_offset) return;
    const int offset = min(max(*p.query_offset, -kLongest), kLongest);
    if (left < kLongest) left -= offset;
    if (right < kLongest) right += offset;
  }

  // The blocks of kKeys keys for queries first, ..., first + count - 1. Rows from `queries` on do not count.
  template <int kKeys>
  __device__ Span KeyBlocks(int first, int count) const {
    if (first >= queries) return {0, 0, 0, 0};
    const int end = min(first + count, queries);
    return {max(first - left, 0) / kKeys, (max(min(keys, end + right), 0) + kKeys - 1) / kKeys,
            (max(end - 1 - left, 0) + kKeys - 1) / kKeys, max(min(keys, first + right + 1), 0) / kKeys};
  }
  // The blocks of kQueries queries for keys first, ..., first + count - 1: a pair of blocks is in this span exactly if
  // it is in the other one. Queries beyond the tensor need no mask: their probabilities are 0.
  template <int kQueries>
  __device__ Span QueryBlocks(int first, int count) const {
    const int end = first + count, blocks = (queries + kQueries - 1) / kQueries;
    if (first >= keys || first - right >= queries) return {0, 0, 0, 0};
    const int seen_to = first + left + 1;  // by all the keys
    return {max(first - right, 0) / kQueries, min(blocks, (max(end + left, 0) + kQueries - 1) / kQueries),
            end > keys ? blocks : (max(end - 1 - right, 0) + kQueries - 1) / kQueries,
            seen_to < queries ? max(seen_to, 0) / kQueries
            : padded_queries  ? queries / kQueries
                              : blocks};
  }

  // The keys that two queries see, also by the reach.
  __device__ KeyRange RangeOf(Rows rows, const Problem& p, const Reach& reach, int64_t line) const {
    KeyRange range;
    range.bounds_left = left < kLongest || reach.of_queries;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      range.first[h] = rows[h] - left;
      range.last[h] = min(rows[h] + right, keys - 1);
      if (reach.of_queries) {
        const int2 seen = reach.of_queries[line * p.queries + min(rows[h], p.queries - 1)];
        range.first[h] = max(range.first[h], seen.x);
        range.last[h] = min(range.last[h], seen.y);
      }
    }
    return range;
  }
  // Masks the scores for this thread's two queries and kKeys keys that begin at `key`.
  template <int kKeys>
  static __device__ __forceinline__ void MaskKeys(float (&scores)[kKeys / 2], const KeyRange& range, int key) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int last = range.last[h] - key;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (8 * i + j > last) scores[4 * i + 2 * h + j] = -kInfinity;
    }
    if (!range.bounds_left) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first = range.first[h] - key;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (8 * i + j < first) scores[4 * i + 2 * h + j] = -kInfinity;
    }
  }
  // The first and the last query that see `key`, counted from `query`.
  __device__ int FirstSeeing(int key, int query) const { return key < keys ? key - right - query : kLongest; }
  __device__ int LastSeeing(int key, int query) const { return key + left - query; }
  // The same, narrowed by the reach's line `line`.
  __device__ void RangeSeeing(int key, int query, const Problem& p, const Reach& reach, int64_t line, int* first,
                              int* last) const {
    *first = FirstSeeing(key, query);
    *last = LastSeeing(key, query);
    if (!reach.of_keys) return;
    const int2 seeing = reach.of_keys[line * p.keys + min(key, p.keys - 1)];
    *first = max(*first, seeing.x - query);
    *last = min(*last, seeing.y - query);
  }
};

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_MASKS_CUH_
