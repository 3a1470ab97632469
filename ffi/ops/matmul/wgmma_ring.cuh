// The ring of stages in shared memory through which tiles of the operands pass, the products of a stage, and sums over
// a cluster.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_RING_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_RING_CUH_

#include <cstdint>

#include "core/shared_memory.cuh"
#include "hopper/barrier.cuh"
#include "hopper/wgmma.cuh"
#include "ops/matmul/wgmma_work.cuh"

namespace jaxops::matmul {

// The place in the ring: stages come round, and with each round the parity of their barriers' phase changes.
template <class Tile>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Advance() {
    if (++stage == Tile::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void Skip(int count) {
    const int next = stage + count;
    parity ^= next / Tile::kStages & 1;
    stage = next % Tile::kStages;
  }
};

template <class Tile>
struct Ring {
  uint32_t stages, barriers;

  __device__ uint32_t Lhs(int stage, int part = 0) const {
    return stages + stage * Tile::kStageBytes + part * Tile::kLhsBytes;
  }
  __device__ uint32_t Rhs(int stage, int part = 0) const { return Lhs(stage, Tile::kParts) + part * Tile::kRhsBytes; }
  __device__ Barrier Full(int stage) const { return {barriers + stage * 8}; }
  __device__ Barrier Empty(int stage) const { return {barriers + (Tile::kStages + stage) * 8}; }
};

// Begins the products of two tiles in shared memory, of the warpgroup's rows of lhs. A, B: what their 128-byte rows are
// of; add: to the sums.
template <class A, class B, class Tile, class P>
__device__ void BeginProducts(uint32_t lhs_tile, uint32_t rhs_tile, float (&sums)[Tile::kBlocks][Tile::kColumns / 2],
                              bool add) {
  const uint64_t lhs = hopper::Descriptor(lhs_tile), rhs = hopper::Descriptor(rhs_tile);
  hopper::FenceRegisters();
#pragma unroll
  for (int step = 0; step < hopper::kSteps; ++step)
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block)
      hopper::MultiplyAdd<A, B, Tile::kColumns, P::kLhs, P::kRhs>(
          sums[block], lhs + (block * kBlockBytes + step * hopper::kStepBytes<P::kLhs>) / 16,
          rhs + step * hopper::kStepBytes<P::kRhs> / 16, step || add);
  hopper::CommitProducts();
}

// Adds the sums of the cluster's other blocks, in the order of their ranks, to those of the first; true there. The ring
// is free: each block has one work.
template <class Tile>
__device__ bool SumCluster(const WgmmaArguments& arguments, uint32_t ring, int warpgroup,
                           float (&sums)[Tile::kBlocks][Tile::kColumns / 2]) {
  constexpr int kGroups = Tile::kColumns / 8;  // of 4 sums
  const auto place = [&](int block, int group) {
    return ring +
           (((warpgroup * Tile::kBlocks + block) * kGroups + group) * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  };
  const bool first = hopper::ClusterRank() == 0;
  if (!first) {
    hopper::NamedSync(3, Tile::kMultipliers * kWarpgroup);  // all have multiplied what was there
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block)
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const float* const own = &sums[block][group * 4];
        StoreShared(place(block, group), make_float4(own[0], own[1], own[2], own[3]));
      }
  }
  hopper::ClusterArrive();
  hopper::ClusterWait();
  if (first) {
    for (int rank = 1; rank < arguments.cluster; ++rank) {
      const uint32_t shift = hopper::AddressIn(rank, ring) - ring;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block)
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          float* const own = &sums[block][group * 4];
          const float4 other = hopper::LoadFromCluster(place(block, group) + shift);
          own[0] += other.x, own[1] += other.y, own[2] += other.z, own[3] += other.w;
        }
    }
  }
  hopper::ClusterArrive();  // see WgmmaMatmul for the wait
  return first;
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_RING_CUH_
