// Flash attention's backward pass on Hopper for depths above 128. dK and dV for 64 keys fill two warpgroups' registers,
// so there is no room for dQ sums. Two kernels therefore run, and each recomputes the probabilities. Nothing is added
// up in memory, so every run gives the same bits.
#ifndef JAXOPS_OPS_ATTENTION_BACKWARD_WIDE_CUH_
#define JAXOPS_OPS_ATTENTION_BACKWARD_WIDE_CUH_

#include <cstdint>

#include "core/shared_memory.cuh"
#include "ops/attention/backward_sums.cuh"
#include "ops/attention/fragments.cuh"
#include "ops/attention/masks.cuh"
#include "ops/attention/problem.h"
#include "ops/attention/scores.cuh"

namespace jaxops::attention {

template <class T_, bool kGeneral_>
struct WideTile {
  using T = T_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kDepth = 256, kStages = 2, kThreads = 3 * kWarpgroup;
  static constexpr int kLoaderRegisters = 24, kConsumerRegisters = 240;
  // The key kernel: 64 keys, 64 queries per step, and two probability buffers.
  static constexpr int kKeys = 64, kQueries = 64;
  static constexpr int kBlockOf64 = 64 * kDepth * 2, kProbabilityBytes = kKeys * kQueries * 4;
  static constexpr int kKeysShared = 1024 + (2 + 2 * kStages) * kBlockOf64 + 2 * kProbabilityBytes +
                                     kStages * kQueries * 8 + (2 + 4 * kStages + 4) * 8;
  // The query kernel: 64 queries per warpgroup, 48 keys per step.
  static constexpr int kStepKeys = 48, kStepBytes = kStepKeys * kDepth * 2;
  static constexpr int kQueriesShared = 1024 + 4 * kBlockOf64 + 2 * kStages * kStepBytes + (2 + 4 * kStages) * 8;
  static_assert(kKeysShared <= 232448 && kQueriesShared <= 232448);
};

struct WideArguments {
  CUtensorMap q, dout, k, v;   // in boxes with 64 rows
  CUtensorMap step_k, step_v;  // in boxes with kStepKeys rows
  CUtensorMap dq, dk, dv;
  Problem problem;
  Reach reach;
  const float* statistics;       // as in BackwardSums
  int query_blocks, key_blocks;  // blocks of 64, per head
};

// A ring of stages, each with two tensors; each tensor has a barrier for full and one for empty.
template <int kStages>
struct WideRing {
  uint32_t barriers;

  __device__ Barrier Full(int tensor, int stage) const { return {barriers + (2 * tensor * kStages + stage) * 8}; }
  __device__ Barrier Empty(int tensor, int stage) const {
    return {barriers + ((2 * tensor + 1) * kStages + stage) * 8};
  }
  __device__ void Initialize(int releases) const {
    for (int tensor = 0; tensor < 2; ++tensor)
      for (int stage = 0; stage < kStages; ++stage) {
        Full(tensor, stage).Initialize(1);
        Empty(tensor, stage).Initialize(releases);
      }
  }
};

// The block order: heads fastest, blocks with the most work first.
struct WidePlace {
  int batch, head, block;

  __device__ WidePlace(int heads, int blocks, int batches, bool last_first) {
    const int all = heads * batches, index = static_cast<int>(blockIdx.x) / all;
    const int head_of_all = static_cast<int>(blockIdx.x) - index * all;
    batch = head_of_all / heads;
    head = head_of_all - batch * heads;
    block = last_first ? blocks - 1 - index : index;
  }
};

// dK and dV for 64 keys. The first warpgroup computes S^T = K Q^T, P^T, and dV += P^T dO; the second computes dP^T = V
// dO^T, dS^T with the first's P from shared memory, and dK += dS^T Q.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) WideBackwardKeys(const __grid_constant__ WideArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (!arguments.reach.IsFor(Tile::kGeneral)) return;
  using T = typename Tile::T;
  constexpr int kDepth = Tile::kDepth, kStages = Tile::kStages, kQueries = Tile::kQueries, kBytes = Tile::kBlockOf64;
  constexpr int kQuery = 0, kCotangent = 1;  // the ring's tensors
  extern __shared__ uint8_t dynamic[];
  const uint32_t keys = (SharedAddress(dynamic) + 1023) & ~1023u, values = keys + kBytes;
  const auto at_stage = [=](int tensor, int stage) { return keys + (2 + tensor * kStages + stage) * kBytes; };
  const uint32_t probabilities = keys + (2 + 2 * kStages) * kBytes;
  const uint32_t statistics = probabilities + 2 * Tile::kProbabilityBytes,
                 barriers = statistics + kStages * kQueries * 8;
  const WideRing<kStages> ring = {barriers};
  const auto known = [=](int tensor) { return Barrier{barriers + (4 * kStages + tensor) * 8}; };  // keys, values
  const auto passed = [=](int buffer) { return Barrier{barriers + (4 * kStages + 2 + buffer) * 8}; };
  const auto taken = [=](int buffer) { return Barrier{barriers + (4 * kStages + 4 + buffer) * 8}; };
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    ring.Initialize(8 * kWarpArrivals);
    for (int i = 0; i < 2; ++i) {
      known(i).Initialize(1);
      passed(i).Initialize(4 * kWarpArrivals);
      taken(i).Initialize(4 * kWarpArrivals);
    }
    hopper::FenceBarriers();
  }
  __syncthreads();
  const Problem& p = arguments.problem;
  const WidePlace at(p.key_heads, arguments.key_blocks, p.batches, false);
  const int first_key = at.block * Tile::kKeys;
  const Band band(p, at.batch);
  Span span = band.QueryBlocks<kQueries>(first_key, Tile::kKeys);
  const Reach& reach = arguments.reach;
  const int64_t line = reach.Line(at.batch, at.head);
  if (reach.of_keys)
    span = span.And(reach.key_spans[line * arguments.key_blocks + at.block].template Blocks<kQueries>());
  span = span.Ordered();
  if (span.last < span.first) span.last = span.first;

  if (warpgroup == 0) {
    hopper::ReleaseRegisters<Tile::kLoaderRegisters>();
    if (threadIdx.x != 0) return;
    known(0).ArriveAndExpect(kBytes);
    LoadTile<64, kDepth>(keys, arguments.k, known(0), first_key, at.head, at.batch);
    known(1).ArriveAndExpect(kBytes);
    LoadTile<64, kDepth>(values, arguments.v, known(1), first_key, at.head, at.batch);
    int steps = 0;
    for (int member = 0; member < p.group(); ++member) {
      const int head = at.head * p.group() + member;
      const int64_t line = (int64_t{at.batch} * p.heads + head) * arguments.query_blocks;
      for (int block = span.first; block < span.last; ++block, ++steps) {
        const int stage = steps % kStages;
        const uint32_t parity = (steps / kStages & 1) ^ 1;
        Barrier full = ring.Full(kQuery, stage);
        ring.Empty(kQuery, stage).Wait(parity);
        full.ArriveAndExpect(kBytes + kQueries * 8);
        LoadTile<64, kDepth>(at_stage(kQuery, stage), arguments.q, full, block * kQueries, head, at.batch);
        hopper::LoadBytes(statistics + stage * kQueries * 8, arguments.statistics + (line + block) * (2 * kQueries),
                          kQueries * 8, full);
        full = ring.Full(kCotangent, stage);
        ring.Empty(kCotangent, stage).Wait(parity);
        full.ArriveAndExpect(kBytes);
        LoadTile<64, kDepth>(at_stage(kCotangent, stage), arguments.dout, full, block * kQueries, head, at.batch);
      }
    }
    return;
  }
  hopper::AcquireRegisters<Tile::kConsumerRegisters>();
  const bool second = warpgroup == 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, column = lane % 4 * 2;
  const int key = first_key + warp * 16 + lane / 4;
  const bool lead = lane == 0;
  const int own_sync = warpgroup;  // named barrier
  const uint32_t operand = second ? values : keys;
  const uint32_t mailbox = probabilities + threadIdx.x % kWarpgroup * 16;
  float sums[kDepth / 2], scores[kQueries / 2];  // dV or dK; S or dP
  uint32_t rounded[kQueries / 4];
  int accumulate = 0, steps = 0;
  known(second).Wait(0);
  if (const int seen = band.keys - first_key; band.padded_keys && seen < Tile::kKeys) {
    ClearRows<64, kDepth>(operand, seen);
    hopper::NamedSync(own_sync, kWarpgroup);
  }
  const auto step = [&](int member, int block) {
    const int stage = steps % kStages, buffer = steps & 1;
    const uint32_t parity = steps / kStages & 1, lse = statistics + stage * kQueries * 8 + column * 4;
    const uint32_t queries = at_stage(kQuery, stage), cotangents = at_stage(kCotangent, stage);
    ring.Full(second ? kCotangent : kQuery, stage).Wait(parity);
    if (const int seeing = band.queries - block * kQueries; band.padded_queries && seeing < kQueries) {
      ring.Full(second ? kQuery : kCotangent, stage).Wait(parity);
      ClearRows<64, kDepth>(queries, seeing);
      ClearRows<64, kDepth>(cotangents, seeing);
      hopper::NamedSync(own_sync, kWarpgroup);
    }
    hopper::FenceRegisters();
    MultiplyDepths<T, kQueries, kDepth>(scores, operand, kChunk<64>, second ? cotangents : queries, kChunk<64>);
    hopper::CommitProducts();
    hopper::WaitProducts<0>();
    hopper::Settle(scores);
    ring.Full(second ? kQuery : kCotangent, stage).Wait(parity);
    const uint32_t box = mailbox + buffer * Tile::kProbabilityBytes;
    if (!second) {
      const bool masked = block < span.whole_first || block >= span.whole_last;
      if constexpr (Tile::kGeneral) {
        const GeneralGradients<T, kQueries> general(p, reach, band, at.batch, at.head * p.group() + member, key);
        general.Probabilities(scores, rounded, block * kQueries + column, lse, masked);
      } else {
        const float factor = p.scale * kLog2E;
#pragma unroll
        for (int i = 0; i < kQueries / 8; ++i) {
          const float2 two = LoadShared<float2>(lse + 32 * i);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            scores[4 * i + e] = Exp2(fmaf(scores[4 * i + e], factor, e % 2 ? -two.y : -two.x));
        }
        if (masked) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int query = block * kQueries + column;
            int first, last;
            band.RangeSeeing(key + 8 * h, query, p, reach, line, &first, &last);
#pragma unroll
            for (int i = 0; i < kQueries / 8; ++i)
#pragma unroll
              for (int j = 0; j < 2; ++j)
                if (8 * i + j < first || 8 * i + j > last) scores[4 * i + 2 * h + j] = 0;
          }
        }
        Round<T>(rounded, scores);
      }
      taken(buffer).Wait((steps / 2 & 1) ^ 1);
#pragma unroll
      for (int i = 0; i < kQueries / 8; ++i)
        StoreShared(box + i * kWarpgroup * 16,
                    float4{scores[4 * i], scores[4 * i + 1], scores[4 * i + 2], scores[4 * i + 3]});
      __syncwarp();
      passed(buffer).ArriveForWarp(lead);
    } else {
      passed(buffer).Wait(steps / 2 & 1);
#pragma unroll
      for (int i = 0; i < kQueries / 8; ++i) {
        const float2 delta = LoadShared<float2>(lse + kQueries * 4 + 32 * i);
        const float4 four = LoadShared<float4>(box + i * kWarpgroup * 16);
        const float probability[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& score = scores[4 * i + e];  // hidden elements stay 0, whatever the values are
          score = probability[e] == 0 ? 0 : probability[e] * (score - (e % 2 ? delta.y : delta.x));
        }
      }
      __syncwarp();
      taken(buffer).ArriveForWarp(lead);
      Round<T>(rounded, scores);
    }
    hopper::FenceRegisters();
    MultiplyRows<T, kDepth, kQueries>(sums, rounded, second ? queries : cotangents, kChunk<64>, accumulate);
    hopper::CommitProducts();
    hopper::FenceSharedForCopies();  // orders the reads of the statistics before their refill
    hopper::WaitProducts<0>();
    hopper::Settle(sums);
    hopper::Settle(rounded);
    __syncwarp();  // all lanes have read the statistics
    ring.Empty(kQuery, stage).ArriveForWarp(lead);
    ring.Empty(kCotangent, stage).ArriveForWarp(lead);
    accumulate = 1;
    ++steps;
  };
  for (int member = 0; member < p.group(); ++member)
    for (int block = span.first; block < span.last; ++block) step(member, block);
  uint32_t result[kDepth / 4];
#pragma unroll
  for (int i = 0; i < kDepth / 4; ++i) {
    const float scale = second ? p.scale : 1;
    result[i] = accumulate ? RoundPair<T>(sums[2 * i] * scale, sums[2 * i + 1] * scale) : 0;
  }
  hopper::NamedSync(own_sync, kWarpgroup);  // the results replace the operand, which all four warps' products have read
  StoreRounded(operand, kChunk<64>, 0, result);
  hopper::FenceSharedForCopies();
  hopper::NamedSync(own_sync, kWarpgroup);
  if (threadIdx.x % kWarpgroup == 0) {
    StoreTile<64, kDepth>(second ? arguments.dk : arguments.dv, operand, first_key, at.head, at.batch);
    hopper::CommitStores();
    hopper::WaitStoresRead<0>();
  }
#endif
}

// dQ for 128 queries, 64 per warpgroup: S = Q K^T, dP = dO V^T, and dQ += dS K with dS from registers. The next keys' S
// is computed before these keys' dQ, so that exponentials run under a product.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    WideBackwardQueries(const __grid_constant__ WideArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (!arguments.reach.IsFor(Tile::kGeneral)) return;
  using T = typename Tile::T;
  constexpr int kDepth = Tile::kDepth, kStages = Tile::kStages, kKeys = Tile::kStepKeys, kBytes = Tile::kBlockOf64;
  constexpr int kKey = 0, kValue = 1;  // the ring's tensors
  extern __shared__ uint8_t dynamic[];
  const uint32_t base = (SharedAddress(dynamic) + 1023) & ~1023u;
  const auto at_stage = [=](int tensor, int stage) {
    return base + 4 * kBytes + (tensor * kStages + stage) * Tile::kStepBytes;
  };
  const WideRing<kStages> ring = {at_stage(2, 0)};
  const auto known = [=](int group) { return Barrier{at_stage(2, 0) + (4 * kStages + group) * 8}; };
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    ring.Initialize(8 * kWarpArrivals);
    known(0).Initialize(1);
    known(1).Initialize(1);
    hopper::FenceBarriers();
  }
  __syncthreads();
  const Problem& p = arguments.problem;
  const int tiles = (arguments.query_blocks + 1) / 2;
  const WidePlace at(p.heads, tiles, p.batches, p.right < kLongest);
  const Band band(p, at.batch);
  const Reach& reach = arguments.reach;
  const int64_t line = reach.Line(at.batch, at.head);
  const auto visited_by = [&](int block) {
    Span span = band.KeyBlocks<kKeys>(block * 64, 64);
    if (reach.of_queries && block < arguments.query_blocks)
      span = span.And(reach.query_spans[line * arguments.query_blocks + block].template Blocks<kKeys>());
    return span;
  };
  const Span upper = visited_by(at.block * 2), lower = visited_by(at.block * 2 + 1);
  int first = upper.empty() ? lower.first : lower.empty() ? upper.first : min(upper.first, lower.first);
  int last = upper.empty() ? lower.last : lower.empty() ? upper.last : max(upper.last, lower.last);
  if (upper.empty() && lower.empty()) first = 0, last = 1;  // so that there is a result

  if (warpgroup == 0) {
    hopper::ReleaseRegisters<Tile::kLoaderRegisters>();
    if (threadIdx.x != 0) return;
    for (int group = 0; group < 2; ++group) {
      const int row = (at.block * 2 + group) * 64;
      known(group).ArriveAndExpect(2 * kBytes);
      LoadTile<64, kDepth>(base + 2 * group * kBytes, arguments.q, known(group), row, at.head, at.batch);
      LoadTile<64, kDepth>(base + (2 * group + 1) * kBytes, arguments.dout, known(group), row, at.head, at.batch);
    }
    int steps = 0;
    for (int block = last - 1; block >= first; --block, ++steps) {
      const int stage = steps % kStages;
      const auto load = [&](int tensor, const CUtensorMap& map) {
        ring.Empty(tensor, stage).Wait((steps / kStages & 1) ^ 1);
        ring.Full(tensor, stage).ArriveAndExpect(Tile::kStepBytes);
        LoadTile<kKeys, kDepth>(at_stage(tensor, stage), map, ring.Full(tensor, stage), block * kKeys,
                                at.head / p.group(), at.batch);
      };
      load(kKey, arguments.step_k);
      load(kValue, arguments.step_v);
    }
    return;
  }
  hopper::AcquireRegisters<Tile::kConsumerRegisters>();
  const int group = warpgroup - 1, own = at.block * 2 + group;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, column = lane % 4 * 2;
  const int row = own * 64 + warp * 16 + lane / 4;
  const bool lead = lane == 0;
  const uint32_t queries = base + 2 * group * kBytes, cotangents = queries + kBytes;
  Span span = group ? lower : upper;
  span.first = first, span.last = last;
  span = span.Ordered();
  const KeyRange range = band.RangeOf({row, row + 8}, p, reach, line);
  float dq[kDepth / 2], scores[kKeys / 2], dscores[kKeys / 2];
  uint32_t drounded[kKeys / 4];
  float lse[2], delta[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool inside = own < arguments.query_blocks;
    const int64_t line = (int64_t{at.batch} * p.heads + at.head) * arguments.query_blocks + own;
    const float* const from = arguments.statistics + line * 128 + row % 64 + 8 * h;
    lse[h] = inside ? from[0] : kInfinity;
    delta[h] = inside ? from[64] : 0;
  }
  const int own_sync = warpgroup;  // named barrier
  known(group).Wait(0);
  if (const int seeing = band.queries - own * 64; band.padded_queries && seeing < 64) {
    ClearRows<64, kDepth>(queries, seeing);
    ClearRows<64, kDepth>(cotangents, seeing);
    hopper::NamedSync(own_sync, kWarpgroup);
  }
#pragma unroll
  for (int i = 0; i < kDepth / 2; ++i) dq[i] = 0;
  const float factor = Tile::kGeneral ? 1 : p.scale * kLog2E;
  [[maybe_unused]] const Compared compared(p, reach);
  int steps = 0;
  for (int block = last - 1; block >= first; --block, ++steps) {
    const int stage = steps % kStages;
    const uint32_t parity = steps / kStages & 1;
    ring.Full(kKey, stage).Wait(parity);
    ring.Full(kValue, stage).Wait(parity);
    if (const int seen = band.keys - block * kKeys; band.padded_keys && seen < kKeys) {
      ClearRows<kKeys, kDepth>(at_stage(kKey, stage), seen);
      ClearRows<kKeys, kDepth>(at_stage(kValue, stage), seen);
      hopper::NamedSync(own_sync, kWarpgroup);
    }
    hopper::FenceRegisters();
    MultiplyDepths<T, kKeys, kDepth>(scores, queries, kChunk<64>, at_stage(kKey, stage), kChunk<kKeys>);
    hopper::CommitProducts();
    MultiplyDepths<T, kKeys, kDepth>(dscores, cotangents, kChunk<64>, at_stage(kValue, stage), kChunk<kKeys>);
    hopper::CommitProducts();
    hopper::WaitProducts<0>();
    hopper::Settle(scores);
    hopper::Settle(dscores);
    ring.Empty(kValue, stage).ArriveForWarp(lead);
    const bool masked = block < span.whole_first || block >= span.whole_last;
    if constexpr (Tile::kGeneral) {
      const GeneralScores<T, kKeys> general(p, range, at.batch, {at.head, at.head}, {row, row + 8}, compared);
      general.Differentiate(scores, dscores, lse, delta, block * kKeys + column, masked);
    } else {
      if (masked) band.template MaskKeys<kKeys>(scores, range, block * kKeys + column);
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const float probability = Exp2(fmaf(scores[i], factor, -lse[i / 2 % 2]));
        dscores[i] = probability == 0 ? 0 : probability * (dscores[i] - delta[i / 2 % 2]);
      }
    }
    Round<T>(drounded, dscores);
    hopper::FenceRegisters();
    MultiplyRows<T, kDepth, kKeys>(dq, drounded, at_stage(kKey, stage), kChunk<kKeys>, 1);
    hopper::CommitProducts();
    hopper::WaitProducts<0>();
    hopper::Settle(dq);
    hopper::Settle(drounded);
    ring.Empty(kKey, stage).ArriveForWarp(lead);
  }
  uint32_t result[kDepth / 4];
#pragma unroll
  for (int i = 0; i < kDepth / 4; ++i) result[i] = RoundPair<T>(dq[2 * i] * p.scale, dq[2 * i + 1] * p.scale);
  hopper::NamedSync(own_sync, kWarpgroup);  // the results replace the queries, which all four warps' products have read
  StoreRounded(queries, kChunk<64>, 0, result);
  hopper::FenceSharedForCopies();
  hopper::NamedSync(own_sync, kWarpgroup);
  if (threadIdx.x % kWarpgroup == 0) {
    StoreTile<64, kDepth>(arguments.dq, queries, own * 64, at.head, at.batch);
    hopper::CommitStores();
    hopper::WaitStoresRead<0>();
  }
#endif
}

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_BACKWARD_WIDE_CUH_
