// The bias's gradient on Hopper: the scores' gradient, summed in a fixed order over every axis along which the bias was
// broadcast.
//
// A block owns 128 queries and 128 keys in the result, 64 queries for each of two warpgroups. It visits the batches,
// heads and, if the bias has one row for all queries, query blocks that these stand for. For each it recomputes S = Q
// K^T and dP = dO V^T, 64 depth columns at a time, and adds dS up in registers.
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
  CUtensorMap q, dout, k, v;  // in boxes with 64 rows
  Problem problem;
  BackwardSums sums;
  float* dbias;                    // [batches or 1, heads or 1, queries or 1, keys]
  int batches, heads, row_blocks;  // the result's; 1 along summed axes
};

struct BiasTile {
  static constexpr int kRows = 128, kKeys = 128, kStages = 3, kThreads = 3 * kWarpgroup;
  static constexpr int kTileBytes = kRows * hopper::kBoxRowBytes;
  static constexpr int kSharedBytes = 1024 + 4 * kStages * kTileBytes + 2 * kStages * 8;
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

template <class T>
__global__ void __launch_bounds__(BiasTile::kThreads, 1)
    AttentionBiasGradient(const __grid_constant__ BiasArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kStages = BiasTile::kStages, kBytes = BiasTile::kTileBytes;
  constexpr int kRows = BiasTile::kRows, kKeys = BiasTile::kKeys;
  extern __shared__ uint8_t dynamic[];
  const uint32_t base = (SharedAddress(dynamic) + 1023) & ~1023u;
  const auto tile_at = [=](int stage, int tensor) { return base + (stage * 4 + tensor) * kBytes; };
  const auto full = [=](int stage) { return Barrier{tile_at(kStages, 0) + stage * 8}; };
  const auto empty = [=](int stage) { return Barrier{tile_at(kStages, 0) + (kStages + stage) * 8}; };
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      full(stage).Initialize(1);
      empty(stage).Initialize(8 * kWarpArrivals);
    }
    hopper::FenceBarriers();
  }
  __syncthreads();
  const Problem& p = arguments.problem;
  const int key_blocks = (p.keys + kKeys - 1) / kKeys, chunks = (p.depth + 63) / 64;
  const int index = static_cast<int>(blockIdx.x) / key_blocks;
  const int key_block = static_cast<int>(blockIdx.x) - index * key_blocks;
  int steps = 0;
  if (warpgroup == 0) {
    hopper::ReleaseRegisters<24>();
    if (threadIdx.x != 0) return;
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
    return;
  }
  hopper::AcquireRegisters<240>();
  const int lane = threadIdx.x % 32, column = lane % 4 * 2, warp = threadIdx.x / 32 - 4;  // warp: one of eight
  const int within = warp * 16 + lane / 4;  // this thread's first row in a query block
  float sums[kKeys / 2], scores[kKeys / 2], dscores[kKeys / 2];
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) sums[i] = 0;
  ForEachBiasTerm(arguments, key_block, index, [&](int batch, int head, int block, const Band& band, bool masked) {
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
    const int row = block * kRows + within;
    const Rows rows = {row, row + 8};
    const GeneralScores<T, kKeys> general(p, band.RangeOf(rows, p, {}, 0), batch, {head, head}, rows, Compared(p));
    general.BiasGradient(scores, dscores, lse, delta, key_block * kKeys + column, masked || p.query_segments);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) sums[i] += dscores[i];
  });
  const int64_t lines = arguments.row_blocks == 1 && p.bias.query_stride == 0 ? 1 : p.queries;
  float* const result = arguments.dbias + int64_t{index / arguments.row_blocks} * lines * p.keys;
  const int key = key_block * kKeys + column;
  if (p.bias.query_stride != 0 || p.queries == 1) {
    const int row = index % arguments.row_blocks * kRows + within;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int query = row + i / 2 % 2 * 8, at = key + i / 4 * 8 + i % 2;
      if (query < p.queries && at < p.keys) result[int64_t{query} * p.keys + at] = sums[i];
    }
    return;
  }
  // One row for all queries: the rows' sum.
  __shared__ float of_warps[8][kKeys];
#pragma unroll
  for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = sums[4 * i + j] + sums[4 * i + 2 + j];
#pragma unroll
      for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if (lane < 4) of_warps[warp][8 * i + column + j] = sum;
    }
  hopper::NamedSync(1, 2 * kWarpgroup);
  if (const int at = threadIdx.x - kWarpgroup; at < kKeys && key_block * kKeys + at < p.keys) {
    float sum = 0;
    for (int other = 0; other < 8; ++other) sum += of_warps[other][at];
    result[key_block * kKeys + at] = sum;
  }
#endif
}

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_DBIAS_CUH_
