// The way of the tensor cores' sums to memory: bias, activation, rounding, and through shared memory to the copy
// engine.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_STORE_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_STORE_CUH_

#include <cstdint>
#include <type_traits>

#include "core/async_copy.cuh"
#include "core/types.cuh"
#include "hopper/barrier.cuh"
#include "hopper/tensor_copy.cuh"
#include "ops/matmul/epilogue.cuh"
#include "ops/matmul/wgmma_rows.cuh"
#include "ops/matmul/wgmma_work.cuh"

namespace jaxops::matmul {

// Group `index` of kSize sums, chosen at run time by halving: indices into registers must be constants.
template <int kFirst, int kCount, int kBlocks, int kSums, int kSize>
__device__ void SelectGroup(const float (&sums)[kBlocks][kSums], int index, float (&group)[kSize]) {
  if constexpr (kCount == 1) {
    constexpr int kGroups = kSums / kSize;  // of a block
#pragma unroll
    for (int i = 0; i < kSize; ++i) group[i] = sums[kFirst / kGroups][kFirst % kGroups * kSize + i];
  } else if (index < kFirst + kCount / 2) {
    SelectGroup<kFirst, kCount / 2>(sums, index, group);
  } else {
    SelectGroup<kFirst + kCount / 2, kCount - kCount / 2>(sums, index, group);
  }
}

// A warp's way from sums in registers to results in memory, 16 rows by 128 bytes at a time through shared memory.
template <class Tile, class P>
class ResultStore {
 public:
  using Result = typename P::Result;
  using Sums = float[Tile::kBlocks][Tile::kColumns / 2];  // as in hopper::MultiplyAdd, 64 rows a block

  // staging: the warpgroup's; bias: of all that multiply.
  __device__ ResultStore(const WgmmaArguments& arguments, uint32_t staging, uint32_t bias, int warpgroup)
      : arguments_(arguments),
        staging_(staging),
        bias_(bias + (Tile::kPingPong ? warpgroup * Tile::kColumns * 4 : 0)),
        warpgroup_(warpgroup) {}

  // Begins to fetch the bias of a tile's columns, if it is the same for all rows; before its sums are ready.
  __device__ void FetchBias(const WgmmaWork& work) const {
    const Problem& p = arguments_.problem;
    if (!HasColumnBias()) return;
    SyncTile();  // the last tile's has been used
    const float* const from = Bias(work);
    for (int i = Tile::kPingPong ? thread() : threadIdx.x - kWarpgroup; i < Tile::kColumns; i += kTileThreads) {
      const int64_t column = min(int64_t{work.column + i}, p.n - 1);
      CopyAsync<4>(bias_ + i * 4, from + column * p.bias_column_stride, 4);
    }
    CommitCopies();
  }
  // Until it is there; by all threads that fetched it.
  __device__ void AwaitBias() const {
    if (!HasColumnBias()) return;
    WaitCopies<0>();
    SyncTile();
  }

  // The rows from `row` on and the columns of the work's tile.
  __device__ void Store(const Sums& sums, int row, const WgmmaWork& work) {
    if (std::is_same_v<Result, float> || arguments_.wide_out) {
      StoreAs<float>(sums, row, work);
    } else {
      StoreAs<Result>(sums, row, work);
    }
  }

  __device__ void Finish() const {
    if (hopper::ElectLane()) hopper::WaitStoresRead<0>();  // what they write is there when the kernel is done
  }

 private:
  static constexpr bool kFreeScale = sizeof(typename P::T) == 1;  // scales belong to the short code too

  // Read anew at each use: as values that live on they would push sums out of the registers.
  static __device__ int thread() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % kWarpgroup;
  }
  static __device__ int warp() { return thread() / 32; }
  static __device__ int lane() { return thread() % 32; }

  // The threads that share a tile.
  static constexpr int kTileThreads = Tile::kPingPong ? kWarpgroup : Tile::kMultipliers * kWarpgroup;
  __device__ void SyncTile() const { hopper::NamedSync(Tile::kPingPong ? 1 + warpgroup_ : 1, kTileThreads); }

  __device__ bool HasColumnBias() const { return arguments_.problem.bias && arguments_.problem.bias_row_stride == 0; }
  __device__ const float* Bias(const WgmmaWork& work) const {
    const Problem& p = arguments_.problem;
    return static_cast<const float*>(p.bias) + (p.batches > 1 ? p.batch.At(work.batch).bias : 0);
  }
  __device__ float Scale(const WgmmaWork& work) const {
    const Problem& p = arguments_.problem;
    return p.scale ? static_cast<const float*>(p.scale)[p.batches > 1 ? p.batch.At(work.batch).scale : 0] : 1;
  }

  // The buffer to fill next, of all warps, each of which has 16 of its rows; once the warp's part is free. Counted
  // across tiles: never the one that was handed out last. kAhead: buffers acquired before it and not yet handed out.
  template <int kAhead = 0>
  __device__ uint32_t Acquire() {
    const uint32_t buffer = staging_ + next_ * kBlockBytes;
    next_ = next_ + 1 == Tile::kStagingBuffers ? 0 : next_ + 1;
    if (arguments_.boxes_out && hopper::ElectLane()) hopper::WaitStoresRead<Tile::kStagingBuffers - 1 - kAhead>();
    __syncwarp();
    return buffer;
  }
  // The warp's part of a buffer, on its way to rows from `row` (the buffer's first) and columns from `column` on.
  __device__ void HandOutBox(const CUtensorMap& map, uint32_t buffer, int row, int column, int slice) const {
    hopper::FenceSharedForCopies();
    __syncwarp();
    const int line = warp() * 16;
    if (hopper::ElectLane()) hopper::StoreBox(map, buffer + line * hopper::kBoxRowBytes, column, row + line, slice);
  }
  template <class U>
  __device__ void StoreAs(const Sums& sums, int row, const WgmmaWork& work) {
    const Problem& p = arguments_.problem;
    if (p.bias || p.activation != Activation::kNone || p.preactivation || !arguments_.boxes_out ||
        (!kFreeScale && p.scale)) {
      StoreFinished<U>(sums, row, work);
    } else {
      StorePlain<U>(sums, row, work);
    }
  }

  // Sums that are only rounded: short code, unrolled.
  template <class U>
  __device__ void StorePlain(const Sums& sums, int row, const WgmmaWork& work) {
    constexpr int kWidth = hopper::kBoxRowBytes / sizeof(U);
    const float scale = kFreeScale ? Scale(work) : 1;
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block)
#pragma unroll
      for (int chunk = 0; chunk < Tile::kColumns / kWidth; ++chunk) {
        const uint32_t buffer = Acquire();
#pragma unroll
        for (int group = 0; group < kWidth / 16; ++group) {
          float z[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) z[i] = sums[block][chunk * kWidth / 2 + group * 8 + i] * scale;
          Stage<U>(buffer, group, z);
        }
        HandOutBox(arguments_.out, buffer, row + block * 64, work.column + chunk * kWidth, work.slice);
      }
  }

  // Sums with scale, bias and activation, or to rows of any alignment: long code, once, in a loop. Unrolled, the
  // kernels were up to half slower (benchmarks/TUNING.md), probably for want of room in the instruction cache.
  template <class U>
  __device__ void StoreFinished(const Sums& sums, int first_row, const WgmmaWork& work) {
    // Columns of a buffer; of a group of sums, the more the better while there are registers.
    constexpr int kWidth = hopper::kBoxRowBytes / sizeof(U);
    constexpr int kGroup = Tile::kBlocks * Tile::kColumns <= 256 ? kWidth : 16;
    constexpr int kGroups = Tile::kColumns / kGroup, kCount = Tile::kBlocks * kGroups;
    const Problem& p = arguments_.problem;
    const bool boxes = !Tile::kStoresAnyRows || arguments_.boxes_out;
    const bool twice = p.preactivation && !boxes;  // there is room for one of them at a time
    const float scale = Scale(work);
    uint32_t buffer = 0, before = 0;  // of results and preactivations
    [[maybe_unused]] RowWindows<U> windows;
#pragma unroll 1
    for (int step = 0; step < kCount << twice; ++step) {
      const bool preactivations = twice && step < kCount;  // these alone
      const int index = step < kCount ? step : step - kCount;
      const int row = first_row + index / kGroups * 64, in_row = index % kGroups * kGroup, in_buffer = in_row % kWidth;
      if (boxes && in_buffer == 0) {
        buffer = Acquire();
        if (p.preactivation) before = Acquire<1>();
      }
      float z[kGroup / 2];
      SelectGroup<0, kCount>(sums, index, z);
      if (p.scale) {
#pragma unroll
        for (float& value : z) value *= scale;
      }
      if (HasColumnBias()) {
        AddColumnBias(z, bias_ + in_row * 4);
      } else if (p.bias) {
        AddBias(z, Bias(work), row, work.column + in_row);
      }
      if (boxes && p.preactivation) Stage<U>(before, in_buffer / 16, z);
      if (!preactivations) Activate<P::template kAccuracy<U>>(p.activation, z);
      if (boxes) {
        Stage<U>(buffer, in_buffer / 16, z);
        if (in_buffer + kGroup < kWidth) continue;
        const int column = work.column + in_row - in_buffer;
        HandOutBox(arguments_.out, buffer, row, column, work.slice);
        if (p.preactivation) HandOutBox(arguments_.preactivation, before, row, column, work.slice);
      } else if constexpr (Tile::kStoresAnyRows) {
        const int columns = static_cast<int>(min(p.n - work.column, int64_t{Tile::kColumns}));
        if (in_row == 0) {
          const int64_t first = row + warp() * RowWindows<U>::kRows;
          U* const out = static_cast<U*>(preactivations ? p.preactivation : p.out);
          windows = RowWindows<U>(staging_ + warp() * RowWindows<U>::kStagingBytes,
                                  out + (work.slice * p.m + first) * p.n + work.column, p.n,
                                  static_cast<int>(min(p.m - first, int64_t{RowWindows<U>::kRows})), columns, lane());
        }
        const bool last = in_row + kWidth >= columns;
        windows.Store(in_row / kWidth, z, last, lane());
        if (last) step += kGroups - 1 - index % kGroups;
      }
    }
  }

  // z: the thread's 8 of each 16 columns, in the order of MultiplyAdd; bias: these columns' in shared memory.
  template <int kCount>
  static __device__ void AddColumnBias(float (&z)[kCount], uint32_t bias) {
    const uint32_t own = bias + lane() % 4 * 8;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float first, second;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(own + i * 8) : "memory");
      z[i] += first;
      z[i + 1] += second;
      z[i + 2] += first;
      z[i + 3] += second;
    }
  }
  template <int kCount>
  __device__ void AddBias(float (&z)[kCount], const float* bias, int first_row, int first_column) const {
    const Problem& p = arguments_.problem;
    const int row = first_row + warp() * 16 + lane() / 4, column = first_column + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = row + (i & 2) * 4, c = column + i / 4 * 8 + i % 2;
      if (r < p.m && c < p.n) z[i] += bias[r * p.bias_row_stride + c * p.bias_column_stride];
    }
  }

  // Into rows with the swizzle that the copy engine expects, from columns 16 `group` of the buffer on.
  template <class U, int kCount>
  static __device__ void Stage(uint32_t buffer, int group, const float (&z)[kCount]) {
    const int lane = ResultStore::lane(), line = warp() * 16;
#pragma unroll
    for (int first = 0; first < kCount; first += 8, ++group) {
      if constexpr (sizeof(U) == 2) {
        const auto pair = [&](int i) { return ToPack<U, 2>([&](int j) { return z[first + i + j]; }).words[0]; };
        const uint32_t place = Place(buffer, line + lane % 16, group * 2 + lane / 16);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(pair(0)),
                     "r"(pair(2)), "r"(pair(4)), "r"(pair(6))
                     : "memory");
      } else {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const int at = group * 16 + lane % 4 * 2 + i / 4 * 8;
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(Place(buffer, line + lane / 4 + (i & 2) * 4, at / 4) +
                                                                at % 4 * 4),
                       "f"(z[first + i]), "f"(z[first + i + 1])
                       : "memory");
        }
      }
    }
  }
  static __device__ uint32_t Place(uint32_t buffer, int line, int piece) {
    return buffer + line * hopper::kBoxRowBytes + (piece ^ line % 8) * 16;
  }

  const WgmmaArguments& arguments_;
  const uint32_t staging_, bias_;
  const int warpgroup_;
  uint32_t next_ = 0;
};

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_STORE_CUH_
