// Attention from few queries to many keys on Hopper, as in decoding with a cache: it reads keys and values once, at the
// memory's speed.
//
// The query heads that share a key head are packed, with all their queries, into the rows of one tile. The keys are
// split among blocks, each with a warp that loads and a warpgroup that multiplies; another kernel joins their results
// in key order.
#ifndef JAXOPS_OPS_ATTENTION_DECODE_CUH_
#define JAXOPS_OPS_ATTENTION_DECODE_CUH_

#include <cstdint>

#include "core/shared_memory.cuh"
#include "ops/attention/fragments.cuh"
#include "ops/attention/masks.cuh"
#include "ops/attention/problem.h"
#include "ops/attention/scores.cuh"

namespace jaxops::attention {

template <class T_, int kDepth_>
struct DecodeTile {
  using T = T_;
  static constexpr int kDepth = kDepth_, kKeys = kDepth > 128 ? 64 : 128, kStages = 3;
  // Blocks per multiprocessor: with two, one loads while the other begins or ends. On an H200, 32 sequences with 2048
  // keys, 32 heads and depth 64 take 141 us with two, and 167 us with one block and twice as many stages. At depth 128,
  // two blocks with 48 keys per stage take 2 to 5 % longer than one with 128.
  static constexpr int kResident = kDepth == 64 ? 2 : 1;
  static constexpr int kThreads = kWarpgroup + 32;
  static constexpr int kQueryBytes = 64 * kDepth * 2, kKeyBytes = kKeys * kDepth * 2;
  static constexpr int kSharedBytes = 1024 + kQueryBytes + 2 * kStages * kKeyBytes + 4 * kStages * 8;
  static_assert(kSharedBytes <= (kResident == 1 ? 232448 : 115712));
};

struct DecodeArguments {
  CUtensorMap k, v;
  Problem problem;
  int splits, row_tiles;  // row_tiles: 64 rows each, per key head
  float* partial;         // [splits, rows, depth], rows: [batches, key heads, queries, group]
  float2* statistics;     // [splits, rows]: maximum, in units of log 2, and sum
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    AttentionDecode(const __grid_constant__ DecodeArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = typename Tile::T;
  constexpr int kDepth = Tile::kDepth, kKeys = Tile::kKeys, kStages = Tile::kStages;
  extern __shared__ uint8_t dynamic[];
  const uint32_t queries = (SharedAddress(dynamic) + 1023) & ~1023u, ring = queries + Tile::kQueryBytes;
  const auto keys_at = [=](int stage) { return ring + stage * Tile::kKeyBytes; };
  const auto values_at = [=](int stage) { return ring + (kStages + stage) * Tile::kKeyBytes; };
  // Barriers: keys full, keys empty, values full, values empty.
  const auto barrier = [=](int which, int stage) {
    return Barrier{ring + 2 * kStages * Tile::kKeyBytes + (which * kStages + stage) * 8};
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage)
      for (int which = 0; which < 4; ++which) barrier(which, stage).Initialize(which % 2 ? 4 * kWarpArrivals : 1);
    hopper::FenceBarriers();
  }
  __syncthreads();
  const Problem& p = arguments.problem;
  const int group = p.group(), rows = p.queries * group;  // per key head
  int rest = static_cast<int>(blockIdx.x);
  const int split = rest % arguments.splits;
  rest /= arguments.splits;
  const int first_row = rest % arguments.row_tiles * 64;
  rest /= arguments.row_tiles;
  const int key_head = rest % p.key_heads, batch = rest / p.key_heads;
  const Band band(p, batch);
  const int first_query = first_row / group, last_query = (min(first_row + 64, rows) - 1) / group;
  const Span visited = band.KeyBlocks<kKeys>(first_query, last_query - first_query + 1).Ordered();
  const int each = (max(visited.last - visited.first, 0) + arguments.splits - 1) / arguments.splits;
  const int first = visited.first + split * each, last = min(first + each, visited.last);

  if (threadIdx.x >= kWarpgroup) {  // the warp that loads
    if (threadIdx.x > kWarpgroup) return;
    int stage = 0;
    uint32_t parity = 1;
    for (int block = first; block < last; ++block) {
      barrier(1, stage).Wait(parity);
      barrier(0, stage).ArriveAndExpect(Tile::kKeyBytes);
      LoadTile<kKeys, kDepth>(keys_at(stage), arguments.k, barrier(0, stage), block * kKeys, key_head, batch);
      barrier(3, stage).Wait(parity);
      barrier(2, stage).ArriveAndExpect(Tile::kKeyBytes);
      LoadTile<kKeys, kDepth>(values_at(stage), arguments.v, barrier(2, stage), block * kKeys, key_head, batch);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    return;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % 4 * 2;
  const bool lead = lane == 0;
  constexpr int kPieces = kDepth / 8;  // 16 bytes each, per row
  for (int i = threadIdx.x; i < 64 * kPieces; i += kWarpgroup) {
    const int row = i / kPieces, piece = i % kPieces, at = first_row + row;
    uint4 value = {};
    if (at < rows && piece * 8 < p.depth) {
      const int64_t line = (int64_t{batch} * p.queries + at / group) * p.heads + key_head * group + at % group;
      value = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.q) + line * p.head_stride() + piece * 8);
    }
    StoreShared(queries + piece / 8 * kChunk<64> + row * hopper::kBoxRowBytes + ((piece % 8) ^ (row % 8)) * 16, value);
  }
  hopper::FenceSharedForCopies();
  constexpr int kOwn = 1;  // named barrier
  hopper::NamedSync(kOwn, kWarpgroup);
  const int row = first_row + warp * 16 + lane / 4;  // and row + 8
  const auto head_of = [=](int row) { return key_head * group + min(row, rows - 1) % group; };
  const Rows queries_of = {min(row, rows - 1) / group, min(row + 8, rows - 1) / group};
  const GeneralScores<T, kKeys> general(p, band.RangeOf(queries_of, p, {}, 0), batch, {head_of(row), head_of(row + 8)},
                                        queries_of, Compared(p));
  float out[kDepth / 2], scores[kKeys / 2];
  uint32_t probabilities[kKeys / 4];
  RowState state;
#pragma unroll
  for (int i = 0; i < kDepth / 2; ++i) out[i] = 0;
  state.Clear();
  int stage = 0;
  uint32_t parity = 0;
  for (int block = first; block < last; ++block) {
    barrier(0, stage).Wait(parity);
    hopper::FenceRegisters();
    MultiplyDepths<T, kKeys, kDepth>(scores, queries, kChunk<64>, keys_at(stage), kChunk<kKeys>);
    hopper::CommitProducts();
    hopper::WaitProducts<0>();
    hopper::Settle(scores);
    barrier(1, stage).ArriveForWarp(lead);
    general.Finish(scores, block * kKeys + column,
                   p.query_segments || block < visited.whole_first || block >= visited.whole_last);
    state.Update<false>(scores, 1);
    Round<T>(probabilities, scores);
#pragma unroll
    for (int i = 0; i < kDepth / 2; ++i) out[i] *= state.rescale[i / 2 % 2];
    barrier(2, stage).Wait(parity);
    if (band.padded_keys && (block + 1) * kKeys > band.keys) {
      ClearRows<kKeys, kDepth>(values_at(stage), band.keys - block * kKeys);
      hopper::NamedSync(kOwn, kWarpgroup);
    }
    hopper::FenceRegisters();
    MultiplyRows<T, kDepth, kKeys>(out, probabilities, values_at(stage), kChunk<kKeys>, 1);
    hopper::CommitProducts();
    hopper::WaitProducts<0>();
    hopper::Settle(out);
    hopper::Settle(probabilities);
    barrier(3, stage).ArriveForWarp(lead);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = OverRow(state.sum[h], [](float a, float b) { return a + b; });
    const int at = row + 8 * h;
    if (at >= rows) continue;
    const int64_t all = int64_t{p.batches} * p.key_heads * rows;
    const int64_t line = split * all + (int64_t{batch} * p.key_heads + key_head) * rows + at;
    if (lane % 4 == 0) arguments.statistics[line] = {state.maximum[h], sum};
#pragma unroll
    for (int i = 0; i < kDepth / 8; ++i)
      if (8 * i + column < p.depth)
        *reinterpret_cast<float2*>(arguments.partial + line * p.depth + 8 * i + column) = {out[4 * i + 2 * h],
                                                                                           out[4 * i + 2 * h + 1]};
  }
#endif
}

inline constexpr int kJoinThreads = 128;

// Each warp joins one row.
template <class T>
__global__ void __launch_bounds__(kJoinThreads) JoinDecoded(const __grid_constant__ DecodeArguments arguments) {
  const Problem& p = arguments.problem;
  const int group = p.group(), lane = threadIdx.x % 32;
  const int64_t all = int64_t{p.batches} * p.queries * p.heads;
  const int64_t line = int64_t{blockIdx.x} * (kJoinThreads / 32) + threadIdx.x / 32;
  if (line >= all) return;
  const int64_t key_head_of_all = line / (int64_t{p.queries} * group);
  const int within = static_cast<int>(line - key_head_of_all * p.queries * group), query = within / group;
  const int batch = static_cast<int>(key_head_of_all / p.key_heads);
  const int head = static_cast<int>(key_head_of_all - int64_t{batch} * p.key_heads) * group + within % group;
  float maximum = -kInfinity;
  for (int split = 0; split < arguments.splits; ++split)
    maximum = fmaxf(maximum, arguments.statistics[split * all + line].x);
  const float offset = maximum == -kInfinity ? 0 : maximum;
  float sum = 0, out[kDeepest / 64][2] = {};
  for (int split = 0; split < arguments.splits; ++split) {
    const float2 found = arguments.statistics[split * all + line];
    if (found.y == 0) continue;  // it has seen nothing
    const float share = Exp2(found.x - offset);
    sum = fmaf(found.y, share, sum);
    const float* const from = arguments.partial + (split * all + line) * p.depth;
#pragma unroll
    for (int i = 0; i < kDeepest / 64; ++i) {
      const int column = i * 64 + lane * 2;
      if (column >= p.depth) break;
      const float2 two = *reinterpret_cast<const float2*>(from + column);
      out[i][0] = fmaf(two.x, share, out[i][0]);
      out[i][1] = fmaf(two.y, share, out[i][1]);
    }
  }
  const float sink = p.sinks ? p.sinks[batch * p.sinks_stride + head] * kLog2E : -kInfinity;
  const RowResult result(maximum, sum, sink);
  const bool seeing = query < p.QueriesOf(batch);
  const float inverse = seeing ? result.inverse : 0;
  if (lane == 0) result.Store(p, (int64_t{batch} * p.heads + head) * p.queries + query, seeing);
  T* const to = static_cast<T*>(p.out) + ((int64_t{batch} * p.queries + query) * p.heads + head) * p.depth;
#pragma unroll
  for (int i = 0; i < kDeepest / 64; ++i) {
    const int column = i * 64 + lane * 2;
    if (column >= p.depth) break;
    *reinterpret_cast<uint32_t*>(to + column) =
        inverse == 0 ? 0 : RoundPair<T>(out[i][0] * inverse, out[i][1] * inverse);
  }
}

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_DECODE_CUH_
