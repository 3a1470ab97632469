// bf16 and f16 matmul on the tensor cores in every GPU since sm_80: mma.sync, f32 sums, and operands in a ring of
// shared-memory stages filled by cp.async. Any shape and layout; rows that are not 16-byte aligned are loaded by
// element.
#ifndef JAXOPS_OPS_MATMUL_MMA_CUH_
#define JAXOPS_OPS_MATMUL_MMA_CUH_

#include <cstdint>

#include "core/async_copy.cuh"
#include "core/shared_memory.cuh"
#include "ops/matmul/epilogue.cuh"

namespace jaxops::matmul {

// A block's tile is 128 x 128 x 32; its 8 warps, 2 x 4, take 64 x 32 each.
struct MmaTile {
  static constexpr int kThreads = 256, kRows = 128, kColumns = 128, kDepth = 32, kStages = 4;
  static constexpr int kOperandBytes = kRows * kDepth * 2;
  static constexpr int kStageBytes = 2 * kOperandBytes;
  static constexpr int kOutPitch = kColumns + 4;  // floats; the finished tile reuses the stages' memory
  static constexpr int kSharedBytes =
      kStages * kStageBytes > kRows * kOutPitch * 4 ? kStages * kStageBytes : kRows * kOutPitch * 4;
};

// Four 8 x 8 matrices with 16-bit elements; lane l gives the address for matrix l / 8's row l % 8.
template <bool kTransposed>
__device__ void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}
#define JAXOPS_MMA(type)                                                              \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
// d += a b for a 16 x 16 and b 16 x 8.
template <class T>
__device__ void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    JAXOPS_MMA("f16");
  } else {
    JAXOPS_MMA("bf16");
  }
}
#undef JAXOPS_MMA

// One operand's tile: 128 rows (of m or n) by 32 k, in 16-byte chunks with 8 elements each. Adjacent chunks lie along k
// (4 in a 64-byte row) or along the rows (16 in a 256-byte k); the chunk index is XORed with the line's number, so that
// an 8 x 8 matrix's 8 addresses fall into different banks.
template <class T, bool kAlongK, bool kAligned>
struct MmaOperand {
  const T* source;
  int64_t stride, rows, depth, first;

  static __device__ uint32_t Place(int row, int k) {
    if constexpr (kAlongK) return row * 64 + (((k / 8) ^ (row / 2 % 4)) * 16);
    return k * 256 + (((row / 8) ^ (k % 8)) * 16);
  }

  __device__ void Load(uint32_t stage, int64_t k0) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int chunk = threadIdx.x + i * MmaTile::kThreads;
      const int row = kAlongK ? chunk / 4 : chunk % 16 * 8, k = kAlongK ? chunk % 4 * 8 : chunk / 16;
      const int64_t r = first + row, d = k0 + k;
      const bool inside = r < rows && d < depth;
      const uint32_t target = stage + Place(row, k);
      const T* const from = source + (kAlongK ? r * stride + d : d * stride + r);
      if constexpr (kAligned) {
        CopyAsync<16>(target, inside ? from : source, inside ? 16 : 0);
      } else {
        Pack<T, 8> values = {};
        const int64_t count = inside ? (kAlongK ? depth - d : rows - r) : 0;
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (j < count) values.Set(j, from[j]);
        const uint4 bits = *reinterpret_cast<const uint4*>(&values);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                     "r"(bits.w)
                     : "memory");
      }
    }
  }

  // The 16 x 16 fragment at (row, k). Its quarters come in the (row, k) order (0, 0), (8, 0), (0, 8), (8, 8), as mma
  // wants a left operand; or, with the middle ones exchanged, as two 16 x 8 right operands.
  template <bool kLeft>
  static __device__ void Fragment(uint32_t (&r)[4], uint32_t stage, int row, int k) {
    const int lane = threadIdx.x % 32, second = lane / 8 % 2, fourth = lane / 16;
    const int down = (kLeft ? second : fourth) * 8, along = (kLeft ? fourth : second) * 8;
    if constexpr (kAlongK) {
      LoadMatrices<false>(r, stage + Place(row + down + lane % 8, k + along));
    } else {
      LoadMatrices<true>(r, stage + Place(row + down, k + along + lane % 8));
    }
  }
};

template <class T, class U, bool kLhsTransposed, bool kRhsTransposed, bool kAligned>
__global__ void __launch_bounds__(MmaTile::kThreads, 2) MmaMatmul(const Problem p) {
  using Shape = MmaTile;
  using Lhs = MmaOperand<T, !kLhsTransposed, kAligned>;
  using Rhs = MmaOperand<T, kRhsTransposed, kAligned>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t stages = SharedAddress(shared);
  const Tile tile = TileOf(p, blockIdx.x, Shape::kRows, Shape::kColumns);
  const Offsets offsets = p.batch.At(tile.batch);
  const Lhs lhs = {static_cast<const T*>(p.lhs) + offsets.lhs, kLhsTransposed ? p.m : p.k, p.m, p.k, tile.row};
  const Rhs rhs = {static_cast<const T*>(p.rhs) + offsets.rhs, kRhsTransposed ? p.k : p.n, p.n, p.k, tile.column};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
  const int64_t steps = (p.k + Shape::kDepth - 1) / Shape::kDepth;
  float sums[4][4][4] = {};

  const auto load = [&](int64_t step) {
    if (step < steps) {
      const uint32_t stage = stages + step % Shape::kStages * Shape::kStageBytes;
      lhs.Load(stage, step * Shape::kDepth);
      rhs.Load(stage + Shape::kOperandBytes, step * Shape::kDepth);
    }
    CommitCopies();  // an empty group keeps the number of pending groups the same
  };
  for (int step = 0; step < Shape::kStages - 1; ++step) load(step);
  for (int64_t step = 0; step < steps; ++step) {
    WaitCopies<Shape::kStages - 2>();
    __syncthreads();  // the stage has arrived, and no thread reads the stage that is filled next
    load(step + Shape::kStages - 1);
    const uint32_t stage = stages + step % Shape::kStages * Shape::kStageBytes;
#pragma unroll
    for (int k = 0; k < Shape::kDepth; k += 16) {
      uint32_t a[4][4], b[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) Lhs::template Fragment<true>(a[i], stage, warp_row + i * 16, k);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        Rhs::template Fragment<false>(b[j], stage + Shape::kOperandBytes, warp_column + j * 16, k);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) Mma<T>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
  WaitCopies<0>();
  __syncthreads();

  // Goes through shared memory, so that global stores are whole 16- or 32-byte pieces.
  float* const out = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + i * 16 + half * 8 + lane / 4, column = warp_column + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(&out[row * Shape::kOutPitch + column]) =
            make_float2(sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
      }
  __syncthreads();
  constexpr int kRun = 16 / sizeof(U), kRuns = Shape::kColumns / kRun;
  for (int run = threadIdx.x; run < Shape::kRows * kRuns; run += Shape::kThreads) {
    const int row = run / kRuns, column = run % kRuns * kRun;
    float values[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = out[row * Shape::kOutPitch + column + i];
    StoreRow<U, kRun>(p, tile.batch, offsets, tile.row + row, tile.column + column, values);
  }
}

template <class T, class U, bool kAligned>
cudaError_t LaunchMmaAligned(cudaStream_t stream, const Problem& p) {
  const auto kernel =
      p.lhs_transposed
          ? (p.rhs_transposed ? MmaMatmul<T, U, true, true, kAligned> : MmaMatmul<T, U, true, false, kAligned>)
          : (p.rhs_transposed ? MmaMatmul<T, U, false, true, kAligned> : MmaMatmul<T, U, false, false, kAligned>);
  const Grid grid = {CountTiles(p, MmaTile::kRows, MmaTile::kColumns), MmaTile::kThreads, 1, MmaTile::kSharedBytes};
  return Launch(stream, kernel, grid, p);
}

template <class T, class U>
cudaError_t LaunchMma(cudaStream_t stream, const Problem& p) {
  // If rows are a multiple of 8 elements apart, every matrix in a batch is aligned too.
  const bool chunks = p.lhs_stride() % 8 == 0 && p.rhs_stride() % 8 == 0 && IsAligned(p.lhs) && IsAligned(p.rhs);
  return chunks ? LaunchMmaAligned<T, U, true>(stream, p) : LaunchMmaAligned<T, U, false>(stream, p);
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_MMA_CUH_
