// f32 matmul without tensor cores, for products that the tensor cores' kernel cannot compute: infinities or NaN in full
// precision, and operands that are not aligned to 16 bytes.
//
// 256 threads compute a 128 x 128 tile. Each thread has four kQuad x kQuad squares half a tile apart, so that a warp
// reads whole shared-memory vectors without bank conflicts. Operand tiles are double-buffered: while one is used, the
// next comes from global memory through registers.
#ifndef JAXOPS_OPS_MATMUL_SIMT_CUH_
#define JAXOPS_OPS_MATMUL_SIMT_CUH_

#include "ops/matmul/epilogue.cuh"

namespace jaxops::matmul {

struct SimtTile {
  static constexpr int kThreads = 256, kDepth = 8;
  static constexpr int kQuad = 16 / sizeof(float);  // one 16-byte access
  static constexpr int kSize = 16 * 2 * kQuad;      // 128
  static constexpr int kPitch = kSize + kQuad;      // lanes that store along k hit different banks
  static constexpr int kLoads = kSize * kDepth / kThreads;
};

// One operand's tile: kSize rows (m or n) by kDepth k, kept in shared memory as [k][row].
template <bool kAlongK>
struct SimtOperand {
  using Tile = SimtTile;
  const float* source;
  int64_t stride, rows, depth, first;
  float values[Tile::kLoads];

  __device__ int RowOf(int load) const {
    const int element = threadIdx.x + load * Tile::kThreads;
    return kAlongK ? element / Tile::kDepth : element % Tile::kSize;
  }
  __device__ int DepthOf(int load) const {
    const int element = threadIdx.x + load * Tile::kThreads;
    return kAlongK ? element % Tile::kDepth : element / Tile::kSize;
  }

  __device__ void Fetch(int64_t k) {
#pragma unroll
    for (int load = 0; load < Tile::kLoads; ++load) {
      const int64_t row = first + RowOf(load), d = k + DepthOf(load);
      const bool inside = row < rows && d < depth;
      values[load] = inside ? source[kAlongK ? row * stride + d : d * stride + row] : 0;
    }
  }
  __device__ void Put(float (*tile)[Tile::kPitch]) const {
#pragma unroll
    for (int load = 0; load < Tile::kLoads; ++load) tile[DepthOf(load)][RowOf(load)] = values[load];
  }
};

template <bool kLhsTransposed, bool kRhsTransposed>
__global__ void __launch_bounds__(SimtTile::kThreads) SimtMatmul(const Problem p, int64_t tiles) {
  using Shape = SimtTile;
  constexpr int kQuad = Shape::kQuad;
  if (p.only_if && !*p.only_if) return;
  __shared__ alignas(16) float lhs_tiles[2][Shape::kDepth][Shape::kPitch], rhs_tiles[2][Shape::kDepth][Shape::kPitch];
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Tile tile = TileOf(p, index, Shape::kSize, Shape::kSize);
    const Offsets offsets = p.batch.At(tile.batch);
    SimtOperand<!kLhsTransposed> lhs = {
        static_cast<const float*>(p.lhs) + offsets.lhs, kLhsTransposed ? p.m : p.k, p.m, p.k, tile.row, {}};
    SimtOperand<kRhsTransposed> rhs = {
        static_cast<const float*>(p.rhs) + offsets.rhs, kRhsTransposed ? p.k : p.n, p.n, p.k, tile.column, {}};
    const int y = threadIdx.x / 16 * kQuad, x = threadIdx.x % 16 * kQuad;
    float sums[2 * kQuad][2 * kQuad] = {};

    lhs.Fetch(0);
    rhs.Fetch(0);
    lhs.Put(lhs_tiles[0]);
    rhs.Put(rhs_tiles[0]);
    __syncthreads();
    int current = 0;
    for (int64_t k = 0; k < p.k; k += Shape::kDepth, current ^= 1) {
      const bool more = k + Shape::kDepth < p.k;
      if (more) {
        lhs.Fetch(k + Shape::kDepth);
        rhs.Fetch(k + Shape::kDepth);
      }
#pragma unroll
      for (int d = 0; d < Shape::kDepth; ++d) {
        Pack<float, kQuad> a[2], b[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          a[half] = *reinterpret_cast<const Pack<float, kQuad>*>(&lhs_tiles[current][d][y + half * Shape::kSize / 2]);
          b[half] = *reinterpret_cast<const Pack<float, kQuad>*>(&rhs_tiles[current][d][x + half * Shape::kSize / 2]);
        }
#pragma unroll
        for (int i = 0; i < 2 * kQuad; ++i)
#pragma unroll
          for (int j = 0; j < 2 * kQuad; ++j)
            sums[i][j] = fma(a[i / kQuad].lane[i % kQuad], b[j / kQuad].lane[j % kQuad], sums[i][j]);
      }
      if (more) {
        lhs.Put(lhs_tiles[current ^ 1]);
        rhs.Put(rhs_tiles[current ^ 1]);
      }
      __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < 2 * kQuad; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[kQuad];
#pragma unroll
        for (int j = 0; j < kQuad; ++j) values[j] = sums[i][half * kQuad + j];
        StoreRow<float, kQuad>(p, tile.batch, offsets, tile.row + y + i / kQuad * (Shape::kSize / 2) + i % kQuad,
                               tile.column + x + half * (Shape::kSize / 2), values);
      }
    }
  }
}

inline cudaError_t LaunchSimt(cudaStream_t stream, const Problem& p) {
  const auto kernel = p.lhs_transposed ? (p.rhs_transposed ? SimtMatmul<true, true> : SimtMatmul<true, false>)
                                       : (p.rhs_transposed ? SimtMatmul<false, true> : SimtMatmul<false, false>);
  const int64_t tiles = CountTiles(p, SimtTile::kSize, SimtTile::kSize);
  return Launch(stream, kernel, {p.only_if ? std::min(tiles, kFewBlocks) : tiles, SimtTile::kThreads}, p, tiles);
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_SIMT_CUH_
