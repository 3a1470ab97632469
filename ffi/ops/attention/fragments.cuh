// Tiles of 16-bit elements in shared memory, [depth / 64][rows][64] with the 128-byte swizzle, and their products.
#ifndef JAXOPS_OPS_ATTENTION_FRAGMENTS_CUH_
#define JAXOPS_OPS_ATTENTION_FRAGMENTS_CUH_

#include <cstdint>

#include "core/shared_memory.cuh"
#include "core/types.cuh"
#include "hopper/barrier.cuh"
#include "hopper/tensor_copy.cuh"
#include "hopper/wgmma.cuh"

namespace jaxops::attention {

using hopper::Barrier;
using hopper::kWarpArrivals;
using hopper::kWarpgroup;
using hopper::Major;

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Bytes from 64 columns in a tile to the next 64.
template <int kRows>
inline constexpr int kChunk = kRows * hopper::kBoxRowBytes;

// Loads kRows rows from `row`, and kDepth columns from `column`, into a tile.
template <int kRows, int kDepth>
__device__ void LoadTile(uint32_t target, const CUtensorMap& map, Barrier barrier, int row, int head, int batch,
                         int column = 0) {
#pragma unroll
  for (int chunk = 0; chunk < kDepth / 64; ++chunk)
    hopper::LoadHeadBox(target + chunk * kChunk<kRows>, map, barrier, column + chunk * 64, row, head, batch);
}
// Stores it, in a group that the caller closes.
template <int kRows, int kDepth>
__device__ void StoreTile(const CUtensorMap& map, uint32_t source, int row, int head, int batch,
                          int chunk_bytes = kChunk<kRows>) {
#pragma unroll
  for (int chunk = 0; chunk < kDepth / 64; ++chunk)
    hopper::StoreHeadBox(map, source + chunk * chunk_bytes, chunk * 64, row, head, batch);
}

// The part of a bias or a mask, [rows, keys], that the copy engine brings.
enum class Fetched { kNothing, kBias, kMask };

// Loads its kRows rows by kKeys keys: 64 bias keys, or 128 mask keys, follow each other in rows of 128 bytes.
template <int kRows, int kKeys>
__device__ void LoadExtra(uint32_t target, const CUtensorMap& map, Barrier barrier, Fetched fetched, int row, int key,
                          int head, int batch) {
  static_assert(kKeys == 128);
  hopper::LoadHeadBox(target, map, barrier, key, row, head, batch);
  if (fetched == Fetched::kBias) hopper::LoadHeadBox(target + kChunk<kRows>, map, barrier, key + 64, row, head, batch);
}
template <int kRows>
__device__ int ExtraBytes(Fetched fetched) {
  return fetched == Fetched::kBias ? 2 * kChunk<kRows> : kChunk<kRows>;
}

// Zeros a tile's rows from `row` on, by a warpgroup, which then synchronises so that the tensor cores may read them.
template <int kRows, int kDepth>
__device__ void ClearRows(uint32_t tile, int row) {
  constexpr int kPieces = kDepth / 8;  // per row, wherever the swizzle puts them
  for (int i = max(row, 0) * kPieces + threadIdx.x % kWarpgroup; i < kRows * kPieces; i += kWarpgroup) {
    const int piece = i % kPieces;
    StoreShared(tile + piece / 8 * kChunk<kRows> + i / kPieces * hopper::kBoxRowBytes + piece % 8 * 16, uint4{});
  }
  hopper::FenceSharedForCopies();
}

// d = lhs rhs^T, [64, kN] = [64, kDepth] [kN, kDepth]^T; rows have 128 bytes, in chunks lhs_chunk and rhs_chunk bytes
// apart.
template <class T, int kN, int kDepth>
__device__ __forceinline__ void MultiplyDepths(float (&d)[kN / 2], uint32_t lhs, int lhs_chunk, uint32_t rhs,
                                               int rhs_chunk) {
  const hopper::Descriptors of_lhs(lhs, lhs_chunk), of_rhs(rhs, rhs_chunk);
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    const int chunk = step / hopper::kSteps, within = step % hopper::kSteps * hopper::kStepBytes<Major::kDepth>;
    hopper::MultiplyAdd<T, T, kN, Major::kDepth, Major::kDepth>(d, of_lhs.At(chunk * lhs_chunk + within),
                                                                of_rhs.At(chunk * rhs_chunk + within), step > 0);
  }
}
// d (+)= lhs rhs, [64, kN] = [64, kK] [kK, kN]; lhs: a rounded product in registers, rhs in shared memory.
template <class T, int kN, int kK>
__device__ __forceinline__ void MultiplyRows(float (&d)[kN / 2], const uint32_t (&lhs)[kK / 4], uint32_t rhs,
                                             int rhs_chunk, int accumulate) {
  const hopper::Descriptors of_rhs(rhs, rhs_chunk);
#pragma unroll
  for (int step = 0; step < kK / 16; ++step)
    hopper::MultiplyAddFromRegisters<T, kN, Major::kSpace>(
        d, lhs + 4 * step, of_rhs.At(step * hopper::kStepBytes<Major::kSpace>), step > 0 || accumulate);
}
// d = lhs^T rhs, [64, kN] = [kK, 64]^T [kK, kN], both in shared memory.
template <class T, int kN, int kK>
__device__ __forceinline__ void MultiplyTransposed(float (&d)[kN / 2], uint32_t lhs, uint32_t rhs, int rhs_chunk) {
  const hopper::Descriptors of_lhs(lhs, rhs_chunk), of_rhs(rhs, rhs_chunk);
#pragma unroll
  for (int step = 0; step < kK / 16; ++step) {
    constexpr int kStep = hopper::kStepBytes<Major::kSpace>;
    hopper::MultiplyAdd<T, T, kN, Major::kSpace, Major::kSpace>(d, of_lhs.At(step * kStep), of_rhs.At(step * kStep),
                                                                step > 0);
  }
}

template <class T>
__device__ uint32_t RoundPair(float low, float high) {
  const auto pair = ToPack<T, 2>([&](int i) { return i ? high : low; });
  return pair.words[0];
}
// A product's sums (hopper::MultiplyAdd), rounded: the lhs for the next product.
template <class T, int kCount>
__device__ __forceinline__ void Round(uint32_t (&rounded)[kCount / 2], const float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) rounded[i] = RoundPair<T>(sums[2 * i], sums[2 * i + 1]);
}
// Writes them to 64 rows in a tile, from `row` on, by a warpgroup.
template <int kCount>
__device__ __forceinline__ void StoreRounded(uint32_t tile, int chunk_bytes, int row,
                                             const uint32_t (&rounded)[kCount]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  row += warp * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kCount / 4; ++step) {
    const int piece = 2 * step + lane / 16;  // 16 bytes each
    const uint32_t place = tile + step / 4 * chunk_bytes + row * hopper::kBoxRowBytes + ((piece % 8) ^ (row % 8)) * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place),
                 "r"(rounded[4 * step]), "r"(rounded[4 * step + 1]), "r"(rounded[4 * step + 2]),
                 "r"(rounded[4 * step + 3])
                 : "memory");
  }
}

// Four 8 x 8 blocks, transposed; row: the address of this lane's 16-byte row, one of 32.
__device__ __forceinline__ void LoadTransposed(uint32_t (&blocks)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
               : "r"(row)
               : "memory");
}
// One of a word's two elements, as a float.
template <class T>
__device__ __forceinline__ float Element(uint32_t word, int index) {
  Pack<T, 2> pair;
  pair.words[0] = word;
  return pair.template Widen<float>(index);
}

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Over the four lanes that share a fragment's rows.
template <class F>
__device__ float OverRow(float value, const F& join) {
  value = join(value, __shfl_xor_sync(~0u, value, 1));
  return join(value, __shfl_xor_sync(~0u, value, 2));
}

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_FRAGMENTS_CUH_
