// Which queries see which keys: by element, and by blocks, so that blocks that nothing sees are never loaded and blocks
// that are seen whole are never masked.
#ifndef JAXOPS_OPS_ATTENTION_MASKS_CUH_
#define JAXOPS_OPS_ATTENTION_MASKS_CUH_

#include <cstdint>
#include <limits>

#include "ops/attention/problem.h"

namespace jaxops::attention {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Something of each of the two rows of a fragment that a thread has.
struct Rows {
  int of[2];
  __device__ int operator[](int h) const { return of[h]; }
};

// Blocks [first, last), of which [whole_first, whole_last) are seen whole; those before and after are masked.
struct Span {
  int first, last, whole_first, whole_last;

  __device__ bool empty() const { return last <= first; }
  // What both see.
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

// The band of one batch: query i < queries sees the keys j < keys with i - left <= j <= i + right. Queries and keys
// beyond those may hold anything if they are not beyond the tensor, where the copy engine reads zeros.
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

  // The blocks of kKeys keys for queries first, ..., first + count - 1. Rows from `queries` on count for none.
  template <int kKeys>
  __device__ Span KeyBlocks(int first, int count) const {
    if (first >= queries) return {0, 0, 0, 0};
    const int end = min(first + count, queries);
    return {max(first - left, 0) / kKeys, (max(min(keys, end + right), 0) + kKeys - 1) / kKeys,
            (max(end - 1 - left, 0) + kKeys - 1) / kKeys, max(min(keys, first + right + 1), 0) / kKeys};
  }
  // The blocks of kQueries queries for keys first, ..., first + count - 1: a pair of blocks is in this span exactly if
  // it is in the other one. Queries beyond the tensor need no mask, as their probabilities are 0.
  template <int kQueries>
  __device__ Span QueryBlocks(int first, int count) const {
    const int end = first + count, blocks = (queries + kQueries - 1) / kQueries;
    if (first >= keys || first - right >= queries) return {0, 0, 0, 0};
    const int seen_to = first + left + 1;  // by all of the keys
    return {max(first - right, 0) / kQueries, min(blocks, (max(end + left, 0) + kQueries - 1) / kQueries),
            end > keys ? blocks : (max(end - 1 - right, 0) + kQueries - 1) / kQueries,
            seen_to < queries ? max(seen_to, 0) / kQueries
            : padded_queries  ? queries / kQueries
                              : blocks};
  }

  // Masks the scores of this thread's two queries and kKeys keys, of which `key` is its first.
  template <int kKeys>
  __device__ __forceinline__ void MaskKeys(float (&scores)[kKeys / 2], Rows queries_of, int key) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int last = min(queries_of[h] + right, keys - 1) - key;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (8 * i + j > last) scores[4 * i + 2 * h + j] = -kInfinity;
    }
    if (left == kLongest) return;  // bounds nothing
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first = queries_of[h] - left - key;
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
};

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_MASKS_CUH_
