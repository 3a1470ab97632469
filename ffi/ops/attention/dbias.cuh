// The bias's gradient on Hopper: the scores' gradient, summed in a fixed order over every axis along which the bias was
// broadcast.
//
// A tile of the result has 128 queries and 128 keys, 64 queries for each of two warpgroups. A block takes every
// gridDim.x-th tile, and visits the batches, heads and, if the bias has one row for all queries, query blocks that the
// tile stands for. For each it recomputes S = Q K^T and dP = dO V^T, 64 depth columns at a time, and adds dS up in
// registers. A 16-bit bias with a row for each query is brought once a tile by the copy engine; others are read from
// global memory.
#ifndef JAXOPS_OPS_ATTENTION_DBIAS_CUH_
#define JAXOPS_OPS_ATTENTION_DBIAS_CUH_

#include <cstdint>

#include "core/shared_memory.cuh"
#include "ops/attention/backward_sums.cuh"
#include "ops/attention/fragments.cuh"
#include "ops/attention/masks.cuh"
#include "ops/attention/problem.h"
#include "ops/attention/scores.cuh"

namespace jaxops::attention {

struct BiasArguments {
  CUtensorMap q, dout, k, v, extra;  // in boxes with 128 rows; extra: with 64
  Problem problem;
  BackwardSums sums;
  Fetched fetched;                 // as `extra`
  void* dbias;                     // [batches or 1, heads or 1, queries or 1, keys]
  bool rounded;                    // dbias has the operands' dtype, otherwise f32
  int batches, heads, row_blocks;  // the result's; 1 along summed axes
  int64_t tiles;
};

struct BiasTile {
  static constexpr int kRows = 128, kKeys = 128, kStages = 2, kBiases = 2, kThreads = 3 * kWarpgroup;
  static constexpr int kTileBytes = kRows * hopper::kBoxRowBytes;
  static constexpr int kBiasBytes = kRows * kKeys * 2, kBarriers = 2 * kStages + 2 * kBiases;
  static constexpr int kSharedBytes = 1024 + 4 * kStages * kTileBytes + kBiases * kBiasBytes + 8 * kBarriers;
  static_assert(kSharedBytes <= 232448);
};

// Calls visit(batch, head, query block) for each addend, if it sees anything.
template <class Visit>
__device__ void ForEachBiasTerm(const BiasArguments& arguments, int key_block, int index, const Visit& visit) {
  const Problem& p = arguments.problem;
  const int row_block = index % arguments.row_blocks, of_heads = index / arguments.row_blocks;
  const int head = of_heads % arguments.heads, batch = of_heads / arguments.heads;
  constexpr int kRows = BiasTile::kRows;
  const int query_blocks = (p.queries + kRows - 1) / kRows;
  for (int b = batch; b < (arguments.batches == 1 ? p.batches : batch + 1); ++b) {
    const Band band(p, b);
    for (int h = head; h < (arguments.heads == 1 ? p.heads : head + 1); ++h)
      for (int block = row_block; block < (arguments.row_blocks == 1 ? query_blocks : row_block + 1); ++block) {
        const Span seen = band.KeyBlocks<BiasTile::kKeys>(block * kRows, kRows);
        if (key_block >= seen.first && key_block < seen.last)
          visit(b, h, block, band, key_block < seen.whole_first || key_block >= seen.whole_last);
      }
  }
}

// Calls store(key, sum) for the sums over all rows of a tile. scratch: in shared memory, for each warp.
__device__ inline void StoreRowSum(const float (&sums)[BiasTile::kKeys / 2], float (*scratch)[BiasTile::kKeys],
                                   int keys, const auto& store) {
  constexpr int kKeys = BiasTile::kKeys;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
#pragma unroll
  for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = sums[4 * i + j] + sums[4 * i + 2 + j];
#pragma unroll
      for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if (lane < 4) scratch[warp][8 * i + 2 * lane + j] = sum;
    }
  hopper::NamedSync(1, 2 * kWarpgroup);
  if (const int at = threadIdx.x - kWarpgroup; at < min(kKeys, keys)) {
    float sum = 0;
    for (int other = 0; other < 8; ++other) sum += scratch[other][at];
    store(at, sum);
  }
  hopper::NamedSync(1, 2 * kWarpgroup);  // before the next tile's sums
}

template <class T>
__global__ void __launch_bounds__(BiasTile::kThreads, 1)
    AttentionBiasGradient(const __grid_constant__ BiasArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kStages = BiasTile::kStages, kBiases = BiasTile::kBiases, kBytes = BiasTile::kTileBytes;
  constexpr int kRows = BiasTile::kRows, kKeys = BiasTile::kKeys;
  extern __shared__ uint8_t dynamic[];
  const uint32_t base = (SharedAddress(dynamic) + 1023) & ~1023u, biases = base + 4 * kStages * kBytes;
  const auto tile_at = [=](int stage, int tensor) { return base + (stage * 4 + tensor) * kBytes; };
  const auto bias_at = [=](int buffer) { return biases + buffer * BiasTile::kBiasBytes; };
  const auto barrier = [=](int i) { return Barrier{bias_at(kBiases) + i * 8}; };
  const auto full = [=](int stage) { return barrier(stage); };
  const auto empty = [=](int stage) { return barrier(kStages + stage); };
  const auto bias_full = [=](int buffer) { return barrier(2 * kStages + buffer); };
  const auto bias_empty = [=](int buffer) { return barrier(2 * kStages + kBiases + buffer); };
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      full(stage).Initialize(1);
      empty(stage).Initialize(8 * kWarpArrivals);
    }
    for (int buffer = 0; buffer < kBiases; ++buffer) {
      bias_full(buffer).Initialize(1);
      bias_empty(buffer).Initialize(8 * kWarpArrivals);
    }
    hopper::FenceBarriers();
  }
  __syncthreads();
  const Problem& p = arguments.problem;
  const bool fetched = arguments.fetched == Fetched::kBias;
  const int key_blocks = (p.keys + kKeys - 1) / kKeys, chunks = (p.depth + 63) / 64;
  int steps = 0;
  int buffer = 0, parity = 0;  // of the bias
  // Calls use(index, key block) for this block's tiles.
  const auto for_each_tile = [&](const auto& use) {
    for (int64_t tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
      const int64_t index = tile / key_blocks;
      use(static_cast<int>(index), static_cast<int>(tile - index * key_blocks));
      if (++buffer == kBiases) buffer = 0, parity ^= 1;
    }
  };
  if (warpgroup == 0) {
    hopper::ReleaseRegisters<24>();
    if (threadIdx.x != 0) return;
    for_each_tile([&](int index, int key_block) {
      if (fetched) {
        const int row_block = index % arguments.row_blocks, of_heads = index / arguments.row_blocks;
        bias_empty(buffer).Wait(parity ^ 1);
        bias_full(buffer).ArriveAndExpect(2 * ExtraBytes<64>(Fetched::kBias));
        for (int group = 0; group < 2; ++group)
          LoadExtra<64, kKeys>(bias_at(buffer) + group * ExtraBytes<64>(Fetched::kBias), arguments.extra,
                               bias_full(buffer), Fetched::kBias, row_block * kRows + 64 * group, key_block * kKeys,
                               of_heads % arguments.heads, of_heads / arguments.heads);
      }
      ForEachBiasTerm(arguments, key_block, index, [&](int batch, int head, int block, const Band&, bool) {
        for (int chunk = 0; chunk < chunks; ++chunk, ++steps) {
          const int stage = steps % kStages, key_head = head / p.group();
          empty(stage).Wait((steps / kStages & 1) ^ 1);
          full(stage).ArriveAndExpect(4 * kBytes);
          const auto load = [&](int tensor, const CUtensorMap& map, int row, int of_head) {
            hopper::LoadHeadBox(tile_at(stage, tensor), map, full(stage), chunk * 64, row, of_head, batch);
          };
          load(0, arguments.q, block * kRows, head);
          load(1, arguments.dout, block * kRows, head);
          load(2, arguments.k, key_block * kKeys, key_head);
          load(3, arguments.v, key_block * kKeys, key_head);
        }
      });
    });
    return;
  }
  hopper::AcquireRegisters<240>();
  const int lane = threadIdx.x % 32, column = lane % 4 * 2, warp = threadIdx.x / 32 - 4;  // warp: one of eight
  const int within = warp * 16 + lane / 4;                        // this thread's first row in a query block
  const bool is_row = p.bias.query_stride == 0 && p.queries > 1;  // one for all queries
  float sums[kKeys / 2], scores[kKeys / 2], dscores[kKeys / 2];
  for_each_tile([&](int index, int key_block) {
    const int key = key_block * kKeys + column;
    const ExtraTile extra(arguments.fetched, bias_at(buffer) + warp / 4 * ExtraBytes<64>(Fetched::kBias));
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) sums[i] = 0;
    if (fetched) bias_full(buffer).Wait(parity);
    ForEachBiasTerm(arguments, key_block, index, [&](int batch, int head, int block, const Band& band, bool masked) {
      float lse[2], delta[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int query = block * kRows + within + 8 * h, size = arguments.sums.block_size;
        const bool inside = query < p.queries;
        const int64_t line = (int64_t{batch} * p.heads + head) * arguments.sums.blocks + query / size;
        const float* const from = arguments.sums.statistics + line * (2 * size) + query % size;
        lse[h] = inside ? from[0] : kInfinity;
        delta[h] = inside ? from[size] : 0;
      }
      for (int chunk = 0; chunk < chunks; ++chunk, ++steps) {
        const int stage = steps % kStages;
        full(stage).Wait(steps / kStages & 1);
        hopper::FenceRegisters();
        const auto multiply = [&](float (&d)[kKeys / 2], int lhs, int rhs) {
          const hopper::Descriptors of_lhs(tile_at(stage, lhs) + warp / 4 * 64 * hopper::kBoxRowBytes, kBytes);
          const hopper::Descriptors of_rhs(tile_at(stage, rhs), kBytes);
#pragma unroll
          for (int step = 0; step < hopper::kSteps; ++step)
            hopper::MultiplyAdd<T, T, kKeys, Major::kDepth, Major::kDepth>(
                d, of_lhs.At(step * hopper::kStepBytes<Major::kDepth>),
                of_rhs.At(step * hopper::kStepBytes<Major::kDepth>), chunk > 0 || step > 0);
        };
        multiply(scores, 0, 2);
        multiply(dscores, 1, 3);
        hopper::CommitProducts();
        hopper::WaitProducts<0>();
        hopper::Settle(scores);
        hopper::Settle(dscores);
        empty(stage).ArriveForWarp(lane == 0);
      }
      const int row = block * kRows + within;
      const Rows rows = {row, row + 8};
      const GeneralScores<T, kKeys> general(p, band.RangeOf(rows, p, {}, 0), batch, {head, head}, rows, Compared(p));
      general.BiasGradient(scores, dscores, lse, delta, key, masked || p.query_segments, extra);
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) sums[i] += dscores[i];
    });
    if (fetched) {
      hopper::FenceSharedForCopies();  // the reads are before the refill
      __syncwarp();
      bias_empty(buffer).ArriveForWarp(lane == 0);
    }
    const int64_t first = int64_t{index / arguments.row_blocks} * (is_row ? 1 : p.queries) * p.keys;
    const auto store = [&](int64_t at, float sum) {
      if (arguments.rounded) {
        static_cast<T*>(arguments.dbias)[at] = static_cast<T>(sum);
      } else {
        static_cast<float*>(arguments.dbias)[at] = sum;
      }
    };
    if (is_row) {
      StoreRowSum(sums, reinterpret_cast<float (*)[kKeys]>(dynamic + (biases - SharedAddress(dynamic))),
                  p.keys - key_block * kKeys, [&](int at, float sum) { store(first + key_block * kKeys + at, sum); });
      return;
    }
    const int row = index % arguments.row_blocks * kRows + within;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      const int query = row + i % 2 * 8, at = key + i / 2 * 8;
      if (query >= p.queries || at >= p.keys) continue;
      const int64_t place = first + int64_t{query} * p.keys + at;
      if (p.keys % 2 == 0) {
        if (arguments.rounded) {
          const Pack<T, 2> two = ToPack<T, 2>([&](int j) { return sums[2 * i + j]; });
          *reinterpret_cast<Pack<T, 2>*>(static_cast<T*>(arguments.dbias) + place) = two;
        } else {
          *reinterpret_cast<float2*>(static_cast<float*>(arguments.dbias) + place) = {sums[2 * i], sums[2 * i + 1]};
        }
      } else {
        store(place, sums[2 * i]);
        if (at + 1 < p.keys) store(place + 1, sums[2 * i + 1]);
      }
    }
  });
#endif
}

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_DBIAS_CUH_
