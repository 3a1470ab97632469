// The way of the tensor cores' sums to memory: bias, activation, rounding, and through shared memory to the copy
// engine.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_STORE_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_STORE_CUH_

#include <cstdint>

#include "core/types.cuh"
#include "hopper/barrier.cuh"
#include "hopper/tensor_copy.cuh"
#include "ops/matmul/epilogue.cuh"
#include "ops/matmul/wgmma_work.cuh"

namespace jaxops::matmul {

// Group kIndex of 8 sums, chosen at run time by halving: indices into registers must be constants.
template <int kFirst, int kCount, int kBlocks, int kSums>
__device__ void SelectGroup(const float (&sums)[kBlocks][kSums], int index, float (&group)[8]) {
  if constexpr (kCount == 1) {
#pragma unroll
    for (int i = 0; i < 8; ++i) group[i] = sums[kFirst / (kSums / 8)][kFirst % (kSums / 8) * 8 + i];
  } else if (index < kFirst + kCount / 2) {
    SelectGroup<kFirst, kCount / 2>(sums, index, group);
  } else {
    SelectGroup<kFirst + kCount / 2, kCount - kCount / 2>(sums, index, group);
  }
}

// A warpgroup's way from sums in registers to results in memory, 64 rows by 128 bytes at a time through shared memory.
template <class Tile, class Narrow>
class ResultStore {
 public:
  using Sums = float[Tile::kBlocks][Tile::kColumns / 2];  // as in hopper::MultiplyAdd, 64 rows a block

  __device__ ResultStore(const WgmmaArguments& arguments, uint32_t staging, int warpgroup)
      : arguments_(arguments), staging_(staging), warpgroup_(warpgroup) {}

  // The rows from `row` on and the columns of the work's tile.
  __device__ void Store(const Sums& sums, int row, const WgmmaWork& work) {
    const Problem& p = arguments_.problem;
    if (arguments_.wide_out) {
      if (p.preactivation) StoreFinished<float>(sums, row, work, true);
      StoreFinished<float>(sums, row, work, false);
    } else if (p.bias || p.activation != Activation::kNone || p.preactivation || !arguments_.boxes_out) {
      if (p.preactivation) StoreFinished<Narrow>(sums, row, work, true);
      StoreFinished<Narrow>(sums, row, work, false);
    } else {
      StorePlain(sums, row, work);
    }
  }

  __device__ void Finish() const {
    if (thread() == 0) hopper::WaitStores();
  }

 private:
  // Read anew at each use: as values that live on they would push sums out of the registers.
  static __device__ int thread() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % kWarpgroup;
  }
  static __device__ int warp() { return thread() / 32; }
  static __device__ int lane() { return thread() % 32; }

  // The buffer to fill next, once it is free. Counted across tiles: never the one that was handed out last.
  __device__ uint32_t Acquire() {
    const uint32_t buffer = staging_ + (count_++ % 2) * kBlockBytes;
    if (arguments_.boxes_out) {
      if (thread() == 0) hopper::WaitStoresRead<1>();
      hopper::NamedSync(1 + warpgroup_, kWarpgroup);
    } else {
      __syncwarp();
    }
    return buffer;
  }
  __device__ void HandOut(const CUtensorMap& map, uint32_t buffer, int row, int column, int slice) const {
    hopper::FenceSharedForCopies();
    hopper::NamedSync(1 + warpgroup_, kWarpgroup);
    if (thread() == 0) hopper::StoreBox(map, buffer, column, row, slice);
  }

  // Sums that are only rounded: short code, unrolled.
  __device__ void StorePlain(const Sums& sums, int row, const WgmmaWork& work) {
    constexpr int kWidth = hopper::kBoxRowBytes / sizeof(Narrow);
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block)
#pragma unroll
      for (int chunk = 0; chunk < Tile::kColumns / kWidth; ++chunk) {
        const uint32_t buffer = Acquire();
#pragma unroll
        for (int group = 0; group < kWidth / 16; ++group) {
          float z[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) z[i] = sums[block][chunk * kWidth / 2 + group * 8 + i];
          Stage<Narrow>(buffer, group, z);
        }
        HandOut(arguments_.out, buffer, row + block * 64, work.column + chunk * kWidth, work.slice);
      }
  }

  // Sums with bias and activation, or to rows of any alignment: long code, once, in a loop. Unrolled, the
  // kernels were up to half slower (benchmarks/TUNING.md), probably for want of room in the instruction cache.
  template <class U>
  __device__ void StoreFinished(const Sums& sums, int first_row, const WgmmaWork& work, bool preactivation) {
    constexpr int kWidth = hopper::kBoxRowBytes / sizeof(U), kGroups = kWidth / 16;  // a buffer's
    const Problem& p = arguments_.problem;
    const float* const bias =
        static_cast<const float*>(p.bias) + (p.bias && p.batches > 1 ? p.batch.At(work.batch).bias : 0);
    uint32_t buffer = 0;
    ColumnBias ahead = LoadBias(bias, work.column);  // a group ahead: the load takes longer than one
#pragma unroll 1
    for (int index = 0; index < Tile::kBlocks * Tile::kColumns / 16; ++index) {
      const int row = first_row + index / (Tile::kColumns / 16) * 64, in_row = index % (Tile::kColumns / 16);
      const int group = in_row % kGroups, column = work.column + in_row * 16;
      if (group == 0) buffer = Acquire();
      float z[8];
      SelectGroup<0, Tile::kBlocks * Tile::kColumns / 16>(sums, index, z);
      const ColumnBias columns = ahead;
      ahead = LoadBias(bias, work.column + (index + 1) % (Tile::kColumns / 16) * 16);
      if (p.bias) AddBias(z, columns, bias, row, column);
      if (!preactivation) Activate(p.activation, z);
      Stage<U>(buffer, group, z);
      if (group + 1 < kGroups) continue;
      const int first = column - group * 16;
      if (arguments_.boxes_out) {
        HandOut(preactivation ? arguments_.preactivation : arguments_.out, buffer, row, first, work.slice);
      } else if constexpr (Tile::kStoresAnyRows) {
        __syncwarp();
        StoreRows(static_cast<U*>(preactivation ? p.preactivation : p.out), buffer, row, first, work.slice);
      }
    }
  }

  // A thread's part of 16 columns of a bias that is the same for all rows.
  struct ColumnBias {
    float values[4];
  };
  __device__ ColumnBias LoadBias(const float* bias, int column) const {
    const Problem& p = arguments_.problem;
    ColumnBias loaded = {};
    if (!p.bias || p.bias_row_stride != 0) return loaded;
    const int first = column + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = first + i / 2 * 8 + i % 2;
      if (c < p.n) loaded.values[i] = bias[c * p.bias_column_stride];
    }
    return loaded;
  }
  // z: the thread's 8 of 16 columns, in the order of MultiplyAdd.
  __device__ void AddBias(float (&z)[8], const ColumnBias& columns, const float* bias, int row, int column) const {
    const Problem& p = arguments_.problem;
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i] += columns.values[i / 4 * 2 + i % 2];
    if (p.bias_row_stride == 0) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = row + warp() * 16 + lane() / 4 + (i & 2) * 4, c = column + lane() % 4 * 2 + i / 4 * 8 + i % 2;
      if (r < p.m && c < p.n) z[i] += bias[r * p.bias_row_stride + c * p.bias_column_stride];
    }
  }

  // Into rows with the swizzle that the copy engine expects.
  template <class U>
  static __device__ void Stage(uint32_t buffer, int group, const float (&z)[8]) {
    if constexpr (sizeof(U) == 2) {
      const auto pair = [&](int i) { return ToPack<U, 2>([&](int j) { return z[i + j]; }).words[0]; };
      const int line = warp() * 16 + lane() % 16, piece = group * 2 + lane() / 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(Place(buffer, line, piece)),
                   "r"(pair(0)), "r"(pair(2)), "r"(pair(4)), "r"(pair(6))
                   : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int line = warp() * 16 + lane() / 4 + (i & 2) * 4, at = group * 16 + lane() % 4 * 2 + i / 4 * 8;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(Place(buffer, line, at / 4) + at % 4 * 4), "f"(z[i]),
                     "f"(z[i + 1])
                     : "memory");
      }
    }
  }
  static __device__ uint32_t Place(uint32_t buffer, int line, int piece) {
    return buffer + line * hopper::kBoxRowBytes + (piece ^ line % 8) * 16;
  }

  // The warp's 16 rows of a buffer, where rows in memory are not aligned to 16 bytes: 4 bytes a lane.
  template <class U>
  __device__ void StoreRows(U* out, uint32_t buffer, int first_row, int column, int slice) const {
    const Problem& p = arguments_.problem;
    const int lane = this->lane(), left = static_cast<int>(min(p.n - column, int64_t{64}));
    const int rows = static_cast<int>(min(p.m - first_row - warp() * 16, int64_t{16}));
    U* to = out + (slice * p.m + first_row + warp() * 16) * p.n + column;
#pragma unroll 4
    for (int row = 0; row < rows; ++row, to += p.n) {
      uint32_t word;
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(word)
                   : "r"(Place(buffer, warp() * 16 + row, lane / 4) + lane % 4 * 4)
                   : "memory");
      if constexpr (sizeof(U) == 4) {
        if (lane < left) to[lane] = __uint_as_float(word);
      } else {
        const uint32_t next = __shfl_down_sync(~0u, word, 1);
        const int odd = reinterpret_cast<uintptr_t>(to) / 2 % 2;  // then aligned pairs begin with a word's upper half
        const int at = lane * 2 + odd;
        if (odd && lane == 0 && left > 0) to[0] = reinterpret_cast<const U&>(word);
        if (odd) word = word >> 16 | next << 16;
        if (at + 1 < left && at < 63) {
          *reinterpret_cast<uint32_t*>(to + at) = word;
        } else if (at < left) {
          to[at] = reinterpret_cast<const U&>(word);
        }
      }
    }
  }

  const WgmmaArguments& arguments_;
  const uint32_t staging_;
  const int warpgroup_;
  uint32_t count_ = 0;
};

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_STORE_CUH_
