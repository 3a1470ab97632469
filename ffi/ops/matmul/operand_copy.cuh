// Copies of matmul's operands in the form that the tensor cores' kernel reads: rows aligned to 16 bytes; along k for
// operands that are not 16-bit; f32 rounded to TF32, or split in two parts for products in full precision.
#ifndef JAXOPS_OPS_MATMUL_OPERAND_COPY_CUH_
#define JAXOPS_OPS_MATMUL_OPERAND_COPY_CUH_

#include <cstdint>

#include "core/launch.cuh"
#include "core/vector_store.cuh"

namespace jaxops::matmul {

// [slices, rows, columns] without gaps.
struct MatrixStack {
  const void* data;
  int64_t slices, rows, columns;
};

inline constexpr int kCopyThreads = 256;

// Rows of any length and alignment to rows `stride` bytes apart, a multiple of 16. A thread writes 16 bytes, from the
// two aligned pieces that hold them; what follows a row's end is not defined.
static __global__ void __launch_bounds__(kCopyThreads)
    PadRows(const uint8_t* from, int64_t rows, int64_t row_bytes, uint8_t* to, int64_t stride) {
  const int64_t pieces = (row_bytes + 15) / 16;  // of a row
  const int64_t index = blockIdx.x * int64_t{kCopyThreads} + threadIdx.x, row = index / pieces;
  if (row >= rows) return;
  const int64_t piece = index - row * pieces;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(from);
  const uintptr_t last = (begin + rows * row_bytes - 1) & ~uintptr_t{15};  // the last piece of the array
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

// The nearest TF32: the tensor cores themselves would cut the low bits off.
__device__ inline float Round(float x) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return __uint_as_float(rounded);
}
__device__ inline uint8_t Round(uint8_t x) { return x; }

// The two parts of an f32 as TF32 numbers: high + low is x to within 2^-24 |x|. `unfit` is set to 1 if x is infinite or
// no number: the products of its parts would not be IEEE's.
__device__ inline void Split(float x, float* high, float* low, int32_t* unfit) {
  if (!isfinite(x)) *unfit = 1;  // every writer writes the same
  *high = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
  *low = Round(x - *high);
}

// A tile of 64 x 64 elements through shared memory, transposed on the way if kTransposed; in two parts, the high one
// first, if kSplit, else rounded to TF32 if f32. Rows of the result are `stride` elements apart.
template <class T, bool kTransposed, bool kSplit>
__global__ void __launch_bounds__(kCopyThreads)
    RearrangeOperand(const MatrixStack from, T* to, int64_t stride, int32_t* unfit) {
  constexpr int kSize = 64, kLines = kCopyThreads / kSize;
  __shared__ T tile[kSize][kSize + (sizeof(T) == 4 ? 1 : 4)];
  const int64_t across = (from.columns + kSize - 1) / kSize, down = (from.rows + kSize - 1) / kSize;
  const int64_t slice = blockIdx.x / (across * down), block = blockIdx.x - slice * across * down;
  const int64_t row0 = block / across * kSize, column0 = block % across * kSize;
  const int64_t out_rows = kTransposed ? from.columns : from.rows;
  const T* const source = static_cast<const T*>(from.data) + slice * from.rows * from.columns;
  const int x = threadIdx.x % kSize, y = threadIdx.x / kSize;
#pragma unroll
  for (int line = y; line < kSize; line += kLines)
    if (row0 + line < from.rows && column0 + x < from.columns)
      tile[line][x] = source[(row0 + line) * from.columns + column0 + x];
  __syncthreads();
#pragma unroll
  for (int line = y; line < kSize; line += kLines) {
    const int64_t row = (kTransposed ? column0 : row0) + line, column = (kTransposed ? row0 : column0) + x;
    if (row >= out_rows || column >= (kTransposed ? from.rows : from.columns)) continue;
    const T value = kTransposed ? tile[x][line] : tile[line][x];
    if constexpr (kSplit) {
      T* const target = to + (slice * 2 * out_rows + row) * stride + column;
      Split(value, target, target + out_rows * stride, unfit);
    } else {
      to[(slice * out_rows + row) * stride + column] = Round(value);
    }
  }
}

template <class T, bool kTransposed, bool kSplit>
cudaError_t LaunchRearrange(cudaStream_t stream, const MatrixStack& from, void* to, int64_t stride, int32_t* unfit) {
  const Grid grid = {(from.rows + 63) / 64 * ((from.columns + 63) / 64) * from.slices, kCopyThreads};
  return Launch(stream, RearrangeOperand<T, kTransposed, kSplit>, grid, from, static_cast<T*>(to), stride, unfit);
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_OPERAND_COPY_CUH_
