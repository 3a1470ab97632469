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
  // Of SumCluster: that the first part's ring takes the others' sums, and that they have come.
  __device__ Barrier Free() const { return Empty(Tile::kStages); }
  __device__ Barrier Sums() const { return Empty(Tile::kStages + 1); }
};

// Frees stages that a warp has multiplied, in both blocks of a pair. Without branches: they cost much of the time of a
// short k tile.
template <class Tile>
class StageRelease {
 public:
  __device__ StageRelease(const WgmmaArguments& arguments, const Ring<Tile>& ring)
      : ring_(ring),
        own_(threadIdx.x % 32 == 0),
        both_(own_ && arguments.paired()),
        other_(hopper::AddressIn(hopper::ClusterRank() ^ arguments.paired(), ring.Empty(0).address)) {}

  __device__ void operator()(int stage) const {
    ring_.Empty(stage).ArriveIf(own_);
    Barrier::ArriveInClusterIf(both_, other_ + stage * 8);
  }

 private:
  const Ring<Tile>& ring_;
  const bool own_, both_;
  const uint32_t other_;
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

// Adds the sums of a tile's other parts, in order, to those of the first; true in its block. The others send them into
// its ring, once that is free: each block has one work.
template <class Tile, int kBlocks, int kSums>
__device__ bool SumCluster(const WgmmaArguments& arguments, const Ring<Tile>& ring, int warpgroup,
                           float (&sums)[kBlocks][kSums]) {
  constexpr int kGroups = kSums / 4;  // of 4 sums
  const int own_part = static_cast<int>(hopper::ClusterRank());
  const auto place = [&](int part, int block, int group) {
    const int line = (warpgroup * kBlocks + block) * kGroups + group;
    return ring.stages + (part - 1) * Tile::kSumBytes + (line * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  };
  hopper::ClusterWait();  // the others run
  if (own_part > 0) {
    const uint32_t sums_arrived = hopper::AddressIn(0, ring.Sums().address);
    const uint32_t shift = hopper::AddressIn(0, ring.stages) - ring.stages;
    ring.Free().Wait(0);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const float* const own = &sums[block][group * 4];
        hopper::StoreInCluster(place(own_part, block, group) + shift, make_float4(own[0], own[1], own[2], own[3]),
                               sums_arrived);
      }
    return false;
  }
  const int lane = threadIdx.x % 32;
  const bool tells = lane > 0 && lane < arguments.parts;
  Barrier::ArriveInClusterIf(tells, hopper::AddressIn(tells ? lane : 0, ring.Free().address));
  ring.Sums().WaitForCluster(0);
  for (int other = 1; other < arguments.parts; ++other) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        float* const own = &sums[block][group * 4];
        const float4 v = LoadShared<float4>(place(other, block, group));
        own[0] += v.x, own[1] += v.y, own[2] += v.z, own[3] += v.w;
      }
  }
  return true;
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_RING_CUH_
