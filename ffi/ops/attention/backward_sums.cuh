// The backward pass's arrays in memory, O(queries): two numbers per query, known in advance, and the dQ sums.
#ifndef JAXOPS_OPS_ATTENTION_BACKWARD_SUMS_CUH_
#define JAXOPS_OPS_ATTENTION_BACKWARD_SUMS_CUH_

#include <cstdint>

#include "ops/attention/fragments.cuh"
#include "ops/attention/masks.cuh"
#include "ops/attention/problem.h"

namespace jaxops::attention {

// Queries per step.
constexpr int QueriesAtOnce(int tile_depth) { return tile_depth == 64 ? 128 : 64; }
inline constexpr int kPartFloats = 64 * 64;  // dQ elements per warpgroup

struct BackwardSums {
  // [batches, heads, blocks, 2, block size]: lse log2 e, or lse's first part, and inf if the query sees nothing; and
  // delta = <out, dout> - dlse.
  float* statistics;
  float* dq;               // [batches, heads, blocks, 2, kPartFloats], in the warpgroups' fragment order
  int32_t* turns;          // [batches, heads, blocks, 2]: how many key blocks have been added; 0 at first
  int32_t* tickets;        // [2]: the next one, and the reach's `gaps`
  int block_size, blocks;  // queries per block, and blocks per head
  bool descending;         // the blocks' order: from the last to the first
  Reach reach;

  // The key blocks that add to a query block. head: its key head (a reach covers a batch, or each head is a group).
  template <int kKeys, int kQueries>
  __device__ Span KeyBlocksOf(const Band& band, int batch, int head, int block) const {
    Span span = band.KeyBlocks<kKeys>(block * kQueries, kQueries);
    if (reach.query_blocks) {
      const int2 seen = reach.query_blocks[reach.Line(batch, head) * blocks + block];
      span.first = max(span.first, seen.x);
      span.last = min(span.last, seen.y);
    }
    return span;
  }
};

struct PreparationArguments {
  Problem problem;
  BackwardSums sums;
  const void *out, *dout;
  const float *lse, *dlse;  // dlse: null if absent
};

inline constexpr int kPreparationThreads = 256, kPreparationLanes = 8;  // lanes: per query

// Writes lse and delta, and zeros to turns and tickets.
template <class T>
__global__ void __launch_bounds__(kPreparationThreads)
    PrepareBackward(const __grid_constant__ PreparationArguments arguments) {
  const Problem& p = arguments.problem;
  const BackwardSums& sums = arguments.sums;
  const int64_t thread = int64_t{blockIdx.x} * kPreparationThreads + threadIdx.x;
  const int64_t heads = int64_t{p.batches} * p.heads, line = thread / kPreparationLanes,
                turns = heads * sums.blocks * 2;
  if (thread < turns) sums.turns[thread] = 0;
  if (thread == 0) sums.tickets[0] = sums.tickets[1] = 0;
  const int padded = sums.blocks * sums.block_size;  // a multiple of 64: whole warps leave
  if (line >= heads * padded) return;
  const int lane = threadIdx.x % kPreparationLanes, head_of_all = static_cast<int>(line / padded);
  const int query = static_cast<int>(line - int64_t{head_of_all} * padded);
  const int batch = head_of_all / p.heads, head = head_of_all - batch * p.heads;
  const int64_t row = int64_t{head_of_all} * p.queries + query;
  const bool inside = query < p.QueriesOf(batch);
  float sum = 0;
  if (inside) {
    const int64_t first = ((int64_t{batch} * p.queries + query) * p.heads + head) * p.depth;
    for (int at = lane * 8; at < p.depth; at += kPreparationLanes * 8) {
      const auto out = *reinterpret_cast<const Pack<T, 8>*>(static_cast<const T*>(arguments.out) + first + at);
      const auto dout = *reinterpret_cast<const Pack<T, 8>*>(static_cast<const T*>(arguments.dout) + first + at);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(out.template Widen<float>(i), dout.template Widen<float>(i), sum);
    }
  }
#pragma unroll
  for (int other = 1; other < kPreparationLanes; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (lane > 0) return;
  const float lse = inside ? arguments.lse[row] : -kInfinity;
  const bool seeing = lse != -kInfinity;
  const int within = query % sums.block_size;
  float* const to = sums.statistics + (line - within) * 2 + within;
  to[0] = !seeing ? kInfinity : p.maximum ? p.maximum[row] : lse * kLog2E;
  to[sums.block_size] = seeing ? sum - (arguments.dlse ? arguments.dlse[row] : 0) : 0;
}

inline constexpr int kFinishThreads = 512;

// Rounds the dQ sums, times the scale, to the result: each thread takes 8 columns in two rows of a block.
template <class T, int kDepth>
__global__ void __launch_bounds__(kFinishThreads)
    FinishQueries(const __grid_constant__ Problem p, const __grid_constant__ BackwardSums sums, T* dq) {
  constexpr int kKeys = 128, kQueries = QueriesAtOnce(kDepth);
  const int head_of_all = blockIdx.x / sums.blocks, block = blockIdx.x - head_of_all * sums.blocks;
  const int batch = head_of_all / p.heads, head = head_of_all - batch * p.heads;
  const bool seeing = !sums.KeyBlocksOf<kKeys, kQueries>(Band(p, batch), batch, head / p.group(), block).empty();
  const int eight = threadIdx.x % 8, quad = threadIdx.x / 8 % 32, part = threadIdx.x / 256;
  const int row = block * kQueries + (kDepth == 128 ? 0 : part * 64) + quad / 8 * 16 + quad % 8;
  const int column = (kDepth == 128 ? part * 64 : 0) + eight * 8;
  if (column >= p.depth) return;
  const float4* const from = reinterpret_cast<const float4*>(sums.dq) +
                             (int64_t{blockIdx.x} * 2 + part) * (kPartFloats / 4) + eight * kWarpgroup + quad * 4;
  float4 values[4] = {};
  if (seeing) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = from[i];
  }
  const int64_t stride = p.head_stride();
  T* const to = dq + ((int64_t{batch} * p.queries + row) * p.heads + head) * stride + column;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h >= p.queries) return;
    *reinterpret_cast<Pack<T, 8>*>(to + 8 * h * p.heads * stride) = ToPack<T, 8>([&](int i) {
      const float4& quad_of = values[i / 2];
      return p.scale * (h ? (i % 2 ? quad_of.w : quad_of.z) : (i % 2 ? quad_of.y : quad_of.x));
    });
  }
}

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_BACKWARD_SUMS_CUH_
