// Copies matmul's operands into the form that the tensor cores' kernel reads: rows aligned to 16 bytes; along k for
// operands that are not 16-bit; f32 split into parts for products in full precision.
#ifndef JAXOPS_OPS_MATMUL_OPERAND_COPY_CUH_
#define JAXOPS_OPS_MATMUL_OPERAND_COPY_CUH_

#include <algorithm>
#include <cstdint>

#include "core/launch.cuh"
#include "core/types.cuh"
#include "core/vector_store.cuh"
#include "ops/matmul/wgmma.h"

namespace jaxops::matmul {

// [slices, rows, columns] without gaps.
struct MatrixStack {
  const void* data;
  int64_t slices, rows, columns;
};

inline constexpr int kCopyThreads = 256;

// Copies rows with any length and alignment to rows `stride` bytes apart, a multiple of 16. A thread writes 16 bytes,
// from the two aligned pieces that hold them; the bytes after a row's end are undefined.
static __global__ void __launch_bounds__(kCopyThreads)
    PadRows(const uint8_t* from, int64_t rows, int64_t row_bytes, uint8_t* to, int64_t stride) {
  const int64_t pieces = (row_bytes + 15) / 16;  // per row
  const int64_t index = blockIdx.x * int64_t{kCopyThreads} + threadIdx.x, row = index / pieces;
  if (row >= rows) return;
  const int64_t piece = index - row * pieces;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(from);
  const uintptr_t last = (begin + rows * row_bytes - 1) & ~uintptr_t{15};  // the array's last piece
  const uintptr_t source = begin + row * row_bytes + piece * 16, aligned = source & ~uintptr_t{15};
  const uint4 low = *reinterpret_cast<const uint4*>(aligned);
  const uint4 high = *reinterpret_cast<const uint4*>(min(aligned + 16, last));
  const int shift = static_cast<int>(source - aligned), words = shift / 4, bits = shift % 4 * 8;
  uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = words & 2 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = words & 1 ? w[i + 1] : w[i];
  StoreVector(reinterpret_cast<uint4*>(to + row * stride + piece * 16),
              make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                         __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits)));
}

inline cudaError_t LaunchPadRows(cudaStream_t stream, const MatrixStack& from, int element_bytes, void* to,
                                 int64_t stride) {
  const int64_t row_bytes = from.columns * element_bytes, pieces = (row_bytes + 15) / 16;
  const Grid grid = {(from.slices * from.rows * pieces + kCopyThreads - 1) / kCopyThreads, kCopyThreads};
  return Launch(stream, PadRows, grid, static_cast<const uint8_t*>(from.data), from.slices * from.rows, row_bytes,
                static_cast<uint8_t*>(to), stride * element_bytes);
}

// Copies go through shared memory, one 64 x 64 tile at a time.
inline constexpr int kCopySize = 64;
template <class T>
using CopyTile = T[kCopySize][kCopySize + (sizeof(T) == 4 ? 1 : 4)];

// The result's rows are `stride` elements apart.
template <class T>
__global__ void __launch_bounds__(kCopyThreads) TransposeOperand(const MatrixStack from, T* to, int64_t stride) {
  constexpr int kLines = kCopyThreads / kCopySize;
  __shared__ CopyTile<T> tile;
  const int64_t across = (from.columns + kCopySize - 1) / kCopySize, down = (from.rows + kCopySize - 1) / kCopySize;
  const int64_t slice = blockIdx.x / (across * down), block = blockIdx.x - slice * across * down;
  const int64_t row0 = block / across * kCopySize, column0 = block % across * kCopySize;
  const T* const source = static_cast<const T*>(from.data) + slice * from.rows * from.columns;
  const int x = threadIdx.x % kCopySize, y = threadIdx.x / kCopySize;
  T values[kCopySize / kLines];  // all reads before the first write, which would wait for its own read
#pragma unroll
  for (int i = 0; i < kCopySize / kLines; ++i) {
    const int64_t row = row0 + y + i * kLines;
    values[i] = row < from.rows && column0 + x < from.columns ? source[row * from.columns + column0 + x] : T{};
  }
#pragma unroll
  for (int i = 0; i < kCopySize / kLines; ++i) tile[y + i * kLines][x] = values[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCopySize / kLines; ++i) {
    const int64_t line = column0 + y + i * kLines;
    if (line < from.columns && row0 + x < from.rows)
      to[(slice * from.columns + line) * stride + row0 + x] = tile[x][y + i * kLines];
  }
}

template <class T>
cudaError_t LaunchTranspose(cudaStream_t stream, const MatrixStack& from, void* to, int64_t stride) {
  const Grid grid = {(from.rows + 63) / 64 * ((from.columns + 63) / 64) * from.slices, kCopyThreads};
  return Launch(stream, TransposeOperand<T>, grid, from, static_cast<T*>(to), stride);
}

// An f32 operand for products in full precision, and where its parts go. x is high + low to within 2^-23 |x|, and each
// has 11 bits. f16 holds both exactly if their exponents fit, and then the tensor cores' products are exact too. So a
// 64 x 64 block is multiplied by the power of two that brings its largest element to [2^14, 2^15), and its low parts by
// 2^12 more. f16 holds the block if no nonzero element is then below 2^-14. If f16 does not hold some block in a k
// tile, the product's k tile is multiplied in TF32, which has f32's exponents and half the speed. Blocks that f16 does
// not hold are scaled only if this enlarges them, because subnormal parts would lose bits, or if they might overflow.
// If their smallest element would still lose bits, the kernel without tensor cores computes the product.
struct SplitOperand {
  MatrixStack from;
  bool transposed;  // rows (m or n) are `from`'s columns
  // [slices, 3, rows, stride], along k, the stride a multiple of 64: in f16 a row's high parts and then its low parts;
  // in TF32 the high parts; the low parts. Unneeded parts are not written.
  float* parts;
  int64_t stride;
  // [slices, rows / 64, stride / 64]: the factor for a block's products; negative if f16 does not hold the block.
  float* scales;

  __host__ __device__ int64_t rows() const { return transposed ? from.columns : from.rows; }
  __host__ __device__ uint32_t across() const { return static_cast<uint32_t>(stride / kCopySize); }
  __host__ __device__ uint32_t down() const { return static_cast<uint32_t>((rows() + kCopySize - 1) / kCopySize); }
};
inline constexpr int kSplitThreads = 512;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline constexpr int kSplitResident = 4;  // blocks per multiprocessor that registers must allow
#else
inline constexpr int kSplitResident = 1;  // it does not run there; some hold 1536 threads
#endif
static_assert(kSplitBlock == kCopySize);

// The nearest TF32.
__device__ inline float Round(float x) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return __uint_as_float(rounded);
}
__device__ inline float PowerOfTwo(int exponent) { return __int_as_float((exponent + 127) << 23); }

// The factor, as in SplitOperand::scales, for products with a block whose elements lie from `small` to `large` (bits
// without the sign, which sort as the numbers do; small: among nonzero elements).
__device__ inline float ScaleOfBlock(uint32_t large, uint32_t small) {
  if (large == 0) return 1;
  constexpr int kMost = 63;  // of the exponents: the product of two scales is a number
  const int top = static_cast<int>(large >> 23), shift = 127 + 14 - top;
  const bool fits = abs(shift) <= kMost && static_cast<int>(small >> 23) >= top - 28;
  if (fits) return PowerOfTwo(-shift);
  return -PowerOfTwo(-(shift > 0 ? min(shift, kMost) : max(min(shift + 42, 0), -kMost)));
}

// Whether a block's smallest element, divided by its scale, has all its bits, and its low part, 13 places below it,
// too.
__device__ inline bool KeepsBits(float scale, uint32_t small) {
  const int down = (__float_as_int(fabsf(scale)) >> 23) - 127;
  return down <= 0 || static_cast<int>(small >> 23) > down + 13;
}

// Splits a 64 x 64 block in f16, and writes its scale; or (kWide) in TF32, by the scale that is there. Sets flags as
// SplitOperands says; largest: the operand's.
template <bool kWide>
__device__ void SplitBlock(const SplitOperand& to, uint32_t block, int32_t* flags, int32_t* largest,
                           CopyTile<float>& tile) {
  constexpr int kWarps = kSplitThreads / 32, kLines = kSplitThreads / 16, kEach = kCopySize / kLines;
  __shared__ uint32_t most[kWarps], least[kWarps];
  const uint32_t across = to.across(), down = to.down();
  const uint32_t line = block / across, slice = line / down, k_tile = block - line * across;
  const int64_t rows = to.rows(), row0 = int64_t{line - slice * down} * kCopySize, k0 = int64_t{k_tile} * kCopySize;
  {
    const int64_t first_row = to.transposed ? k0 : row0, first_column = to.transposed ? row0 : k0;
    const float* const source =
        static_cast<const float*>(to.from.data) + (slice * to.from.rows + first_row) * to.from.columns + first_column;
    constexpr int kStep = kSplitThreads / kCopySize, kFetched = kCopySize / kStep;
    const int x = threadIdx.x % kCopySize, y = threadIdx.x / kCopySize;
    float fetched[kFetched];  // all are read before the first is written
#pragma unroll
    for (int i = 0; i < kFetched; ++i) {
      const int line = y + i * kStep;
      const bool inside = first_row + line < to.from.rows && first_column + x < to.from.columns;
      fetched[i] = inside ? source[line * to.from.columns + x] : 0;
    }
#pragma unroll
    for (int i = 0; i < kFetched; ++i) tile[y + i * kStep][x] = fetched[i];
  }
  __syncthreads();
  // A thread has 4 adjacent elements along k in every kLines-th row.
  constexpr int kPitch = sizeof(tile[0]) / sizeof(float);
  const int own_k = threadIdx.x % 16 * 4, own_row = threadIdx.x / 16;
  const float* const own = &tile[0][0] + (to.transposed ? own_k * kPitch + own_row : own_row * kPitch + own_k);
  const int row_step = kLines * (to.transposed ? 1 : kPitch), k_step = to.transposed ? kPitch : 1;
  float values[kEach][4];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) values[i][j] = own[i * row_step + j * k_step];
  float scale;
  if constexpr (kWide) {
    scale = to.scales[block];
  } else {
    uint32_t large = 0, small = ~0u;
#pragma unroll
    for (const auto& row : values)
#pragma unroll
      for (const float value : row) {
        const uint32_t bits = __float_as_uint(value) & 0x7fffffffu;
        large = max(large, bits);
        small = min(small, bits - 1);  // zeros come last
      }
    large = __reduce_max_sync(~0u, large);
    small = __reduce_min_sync(~0u, small);
    if (threadIdx.x % 32 == 0) {
      most[threadIdx.x / 32] = large;
      least[threadIdx.x / 32] = small;
    }
    __syncthreads();
    large = __reduce_max_sync(~0u, most[threadIdx.x % kWarps]);
    small = __reduce_min_sync(~0u, least[threadIdx.x % kWarps]);
    ++small;
    scale = ScaleOfBlock(large, small);
    if (threadIdx.x == 0) {
      const int exponent = static_cast<int>(large >> 23);
      to.scales[block] = scale;
      if (exponent == 255 || !KeepsBits(scale, small)) flags[0] = 1;  // every writer writes the same
      if (scale < 0) flags[1 + k_tile] = 1;
      if (exponent > *largest) atomicMax(largest, exponent);  // it only grows: the value that was read may be too small
    }
    if (scale < 0) return;
  }
  scale = 1 / fabsf(scale);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t row = row0 + own_row + i * kLines;
    if (row >= rows) continue;
    float high[4], low[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = values[i][j] * scale;
      high[j] = Round(x);
      low[j] = (x - high[j]) * (1 / kLowScale);
    }
    const int64_t part = rows * to.stride;
    float* const out = to.parts + slice * kSplitSlices * part + row * to.stride;
    if constexpr (kWide) {
      StoreVector(reinterpret_cast<float4*>(out + part + k0 + own_k), make_float4(high[0], high[1], high[2], high[3]));
      StoreVector(reinterpret_cast<float4*>(out + 2 * part + k0 + own_k),
                  make_float4(Round(low[0]), Round(low[1]), Round(low[2]), Round(low[3])));
    } else {
      __half* const halves = reinterpret_cast<__half*>(out) + k0 + own_k;
      StoreVector(reinterpret_cast<Pack<__half, 4>*>(halves), ToPack<__half, 4>([&](int j) { return high[j]; }));
      StoreVector(reinterpret_cast<Pack<__half, 4>*>(halves + to.stride),
                  ToPack<__half, 4>([&](int j) { return low[j]; }));
    }
  }
}

// Splits both operands. First in f16: flags[0] is set to 1 if there are infinities or NaN, because their parts'
// products would not be IEEE's, or elements that no part holds. flags[1 + i] is set if f16 does not hold some block in
// k tile i. After these come the largest biased exponents in lhs and rhs. Then (kWide) it splits those k tiles in TF32;
// few blocks do so, because usually there are none. flags[0] is also set if sums might overflow: sums over some parts
// alone might, with another sign than the whole.
template <bool kWide>
__global__ void __launch_bounds__(kSplitThreads, kSplitResident)
    SplitOperands(const __grid_constant__ SplitOperand lhs, const __grid_constant__ SplitOperand rhs,
                  uint32_t lhs_blocks, uint32_t blocks, int32_t* flags) {
  __shared__ CopyTile<float> tile;
  const uint32_t depth = lhs.across();
  int32_t* const largest = flags + 1 + depth;
  const auto split = [&](uint32_t index) {
    const bool second = index >= lhs_blocks;
    SplitBlock<kWide>(second ? rhs : lhs, index - (second ? lhs_blocks : 0), flags, largest + second, tile);
  };
  if constexpr (!kWide) {
    split(blockIdx.x);
  } else {
    // A sum over k products is below 2^(x + y - 252) k for exponents x and y; parts' sums are below four times this.
    const int log2_k = 32 - __clz(static_cast<int>(depth * kCopySize - 1));
    if (blockIdx.x == 0 && threadIdx.x == 0 && largest[0] + largest[1] - 252 + log2_k + 2 > 127) flags[0] = 1;
    bool any = false;
    for (uint32_t i = threadIdx.x; i < depth; i += kSplitThreads) any |= flags[1 + i] != 0;
    if (!__syncthreads_or(any)) return;
    for (uint32_t index = blockIdx.x; index < blocks; index += gridDim.x) {
      if (!flags[1 + (index >= lhs_blocks ? index - lhs_blocks : index) % depth]) continue;
      split(index);
      __syncthreads();  // the tile has been read
    }
  }
}

// flags: [3 + k tiles].
inline cudaError_t LaunchSplit(cudaStream_t stream, const SplitOperand& lhs, const SplitOperand& rhs, int32_t* flags) {
  const auto blocks_of = [](const SplitOperand& to) { return to.from.slices * to.down() * to.across(); };
  const auto lhs_blocks = static_cast<uint32_t>(blocks_of(lhs)),
             blocks = lhs_blocks + static_cast<uint32_t>(blocks_of(rhs));
  cudaError_t status = cudaMemsetAsync(flags, 0, (3 + lhs.across()) * sizeof(*flags), stream);
  if (status == cudaSuccess)
    status = Launch(stream, SplitOperands<false>, {blocks, kSplitThreads}, lhs, rhs, lhs_blocks, blocks, flags);
  const Grid few = {std::min<int64_t>(blocks, kFewBlocks), kSplitThreads};
  if (status == cudaSuccess) status = Launch(stream, SplitOperands<true>, few, lhs, rhs, lhs_blocks, blocks, flags);
  return status;
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_OPERAND_COPY_CUH_
