// Sums over the rows of each group, column by column, of up to two functions of the elements: parameter gradients. Each
// chunk of rows is summed by its own blocks into the workspace, and a second kernel adds the chunks in their order.
// Therefore every run gives the same result. If there are few rows, no chunks are needed. docs/adding.md explains
// group, chunk and pack.
#ifndef JAXOPS_ROWS_COLUMN_SUMS_CUH_
#define JAXOPS_ROWS_COLUMN_SUMS_CUH_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/launch.cuh"
#include "rows/geometry.cuh"

namespace jaxops::rows {

// Where the sums go. A pointer is null if its sum is not wanted. The workspace has one plane [groups, chunks, columns]
// for each wanted sum. plane: the distance from one sum to the next, so 0 if there is only one.
template <class A>
struct SumResults {
  int64_t chunks, plane;
  A *workspace, *results[2];

  template <int kSlots>
  SumResults(const SummedResults& sums, const RowShape<kSlots>& shape, bool first, bool second)
      : chunks(sums.chunks),
        plane(first && second ? shape.groups.total * sums.chunks * shape.columns.total : 0),
        workspace(static_cast<A*>(sums.workspace)),
        results{first ? static_cast<A*>(sums.results[0]) : nullptr,
                second ? static_cast<A*>(sums.results[first ? 1 : 0]) : nullptr} {}
};

// If x is empty, the sums are 0; this writes them, if any are wanted.
template <class A, int kSlots>
cudaError_t ClearSums(cudaStream_t stream, const SumResults<A>& results, const RowShape<kSlots>& shape) {
  const size_t bytes = sizeof(A) * shape.groups.total * shape.columns.total;
  cudaError_t status = cudaSuccess;
  for (A* const result : results.results)
    if (result && bytes > 0 && status == cudaSuccess) status = cudaMemsetAsync(result, 0, bytes, stream);
  return status;
}

// A block takes kTile columns. Its threads are divided into sets that are kTile wide, and the sets take the chunk's
// rows in turn. If a row's elements are adjacent, kTile is 32 or, if there are few rows, the block's thread count. If
// rows lie across, a block takes one column, and its threads walk along that column's rows.
inline constexpr int kSumThreads = 256;

template <int kTile, class A, class Op>
__global__ void __launch_bounds__(kSumThreads)
    SumChunkKernel(const __grid_constant__ Op op, const __grid_constant__ Layouts<Op::kSlots> layouts,
                   const SumResults<A> results) {
  const int64_t chunks = results.chunks, columns = layouts.columns.total;
  constexpr int kLines = kSumThreads / kTile;
  const int64_t tiles = (columns + kTile - 1) / kTile;
  const int64_t tile = blockIdx.x % tiles, chunk = blockIdx.x / tiles % chunks, group = blockIdx.x / tiles / chunks;
  const int64_t column = tile * kTile + threadIdx.x % kTile;
  const int64_t rows = layouts.rows.total, end = rows * (chunk + 1) / chunks;
  Pack<A, Op::kSums> sum = {};
  int64_t group_offsets[Op::kSlots], column_offsets[Op::kSlots];
  if (column < columns) {
    layouts.groups.Offsets(group, group_offsets);
    layouts.columns.Offsets(column, column_offsets);
    for (int64_t row = rows * chunk / chunks + threadIdx.x / kTile; row < end; row += kLines) {
      int64_t offsets[Op::kSlots];
      layouts.rows.Offsets(row, offsets);
#pragma unroll
      for (int slot = 0; slot < Op::kSlots; ++slot) offsets[slot] += group_offsets[slot] + column_offsets[slot];
      const Pack<A, Op::kSums> value = op(offsets);
#pragma unroll
      for (int k = 0; k < Op::kSums; ++k) sum.lane[k] += value.lane[k];
    }
  }
  // A column's threads lie kTile apart. Halving their number keeps the order in which they are added fixed.
  __shared__ A shared[Op::kSums][kSumThreads];
#pragma unroll
  for (int k = 0; k < Op::kSums; ++k) shared[k][threadIdx.x] = sum.lane[k];
  for (int half = kSumThreads / 2; half >= kTile; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) {
#pragma unroll
      for (int k = 0; k < Op::kSums; ++k) shared[k][threadIdx.x] += shared[k][threadIdx.x + half];
    }
  }
  if (threadIdx.x < kTile && column < columns) {
    const int64_t place = group_offsets[Op::kSumSlot] + column_offsets[Op::kSumSlot];
#pragma unroll
    for (int k = 0; k < Op::kSums; ++k) {
      if (!results.results[k]) continue;
      if (chunks == 1) {
        results.results[k][place] = shared[k][threadIdx.x];
      } else {
        results.workspace[k * results.plane + (group * chunks + chunk) * columns + column] = shared[k][threadIdx.x];
      }
    }
  }
}

// Does the same for few rows with adjacent elements, all in one group. A block takes kFewSumWidth packs of columns, 64
// or 128 bytes. Its threads take all rows of these columns, kLines at a time. op.template AddPack<kV>(row, place, sums)
// adds a row's values for the pack that begins at `place` in the tensors.
template <int kV>
inline constexpr int kFewSumWidth = kV == 1 ? 32 : 8;

template <int kV, class A, class Op>
__global__ void __launch_bounds__(kSumThreads) SumFewRowsKernel(const __grid_constant__ Op op, const int rows,
                                                                const int64_t columns, const SumResults<A> results) {
  constexpr int kWidth = kFewSumWidth<kV>, kLines = kSumThreads / kWidth, kTile = kWidth * kV;
  constexpr int kWarps = kSumThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = blockIdx.x * int64_t{kTile}, column = first + lane % kWidth * kV;
  A sums[Op::kSums][kV] = {};
  if (column < columns) {
#pragma unroll 4
    for (int row = threadIdx.x / kWidth; row < rows; row += kLines)
      op.template AddPack<kV>(row, row * columns + column, sums);
  }
  __shared__ A shared[Op::kSums][kWarps][kTile];
#pragma unroll
  for (int k = 0; k < Op::kSums; ++k)
#pragma unroll
    for (int i = 0; i < kV; ++i) {
      A& sum = sums[k][i];
#pragma unroll
      for (int step = kWidth; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane < kWidth) shared[k][warp][lane * kV + i] = sum;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < Op::kSums * kTile; i += kSumThreads) {
    const int k = i / kTile, within = i % kTile;
    if (first + within >= columns || !results.results[k]) continue;
    A total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += shared[k][w][within];
    results.results[k][first + within] = total;
  }
}

// Whether there are so few rows that two kernels are faster than one kernel for both results. The first of the two
// writes the rows' own results, and the second sums over the rows. The one kernel takes a few rows per block and needs
// another kernel that adds the blocks' sums. False if the workspace has more chunks than _chunks in jaxops/_rows.py
// gives for so many rows; that happens with symbolic sizes, and in tests of the other kernels.
template <int kSlots>
bool HasFewRows(const RowShape<kSlots>& shape, int sum_slot, int64_t chunks) {
  const auto &groups = shape.groups, &rows = shape.rows, &columns = shape.columns;
  constexpr int64_t kMost = int64_t{1} << 22;  // elements; a second read finds so many in the L2 cache
  return !shape.across && groups.total == 1 && rows.count == 1 && columns.count == 1 &&
         columns.strides[0][sum_slot] == 1 && rows.total <= std::min<int64_t>(128 + columns.total / 16, 512) &&
         shape.size() <= kMost && chunks <= std::max<int64_t>(rows.total / 8, 1);
}

template <class T, class A, class Op, int kMore>
cudaError_t LaunchSumsOfFewRows(cudaStream_t stream, const Op& op, const RowShape<kMore>& shape,
                                const SumResults<A>& results) {
  const auto launch = [&]<int kV> {
    constexpr int kTile = kFewSumWidth<kV> * kV;
    const Grid grid = {(shape.columns.total + kTile - 1) / kTile, kSumThreads};
    return Launch(stream, SumFewRowsKernel<kV, A, Op>, grid, op, static_cast<int>(shape.rows.total),
                  shape.columns.total, results);
  };
  constexpr int kV = kPackOf<T>;
  return shape.aligned && shape.columns.total % kV == 0 ? launch.template operator()<kV>()
                                                        : launch.template operator()<1>();
}

// Adds up the chunks in the workspace, in double. A block takes 32 sums, and each of its warps takes every eighth
// chunk.
template <class Axes, class A>
__global__ void __launch_bounds__(kSumThreads)
    AddChunksKernel(const __grid_constant__ Axes groups, const __grid_constant__ Axes columns,
                    const SumResults<A> results) {
  constexpr int kWarps = kSumThreads / 32;
  const int64_t sums = groups.total * columns.total;
  const int warp = threadIdx.x / 32;
  const int64_t k = blockIdx.x * int64_t{32} + threadIdx.x % 32;
  const bool second = k >= sums || !results.results[0];
  const int64_t index = k % sums, group = index / columns.total, column = index % columns.total;
  const bool inside = k < sums * (results.plane ? 2 : 1);
  __shared__ double shared[kWarps][32];
  double total = 0;
  if (inside) {
    const A* const parts =
        results.workspace + (second ? results.plane : 0) + group * results.chunks * columns.total + column;
    for (int64_t chunk = warp; chunk < results.chunks; chunk += kWarps) total += parts[chunk * columns.total];
  }
  shared[warp][threadIdx.x % 32] = total;
  __syncthreads();
  if (warp > 0 || !inside) return;
  for (int w = 1; w < kWarps; ++w) total += shared[w][threadIdx.x];
  int64_t group_offset[1], column_offset[1];
  groups.Offsets(group, group_offset);
  columns.Offsets(column, column_offset);
  results.results[second][group_offset[0] + column_offset[0]] = static_cast<A>(total);
}

// slot: the results' layout.
template <int kSlots, class A>
cudaError_t LaunchAddChunks(cudaStream_t stream, const Layouts<kSlots>& layouts, int slot,
                            const SumResults<A>& results) {
  const int64_t sums = layouts.groups.total * layouts.columns.total * (results.plane ? 2 : 1);
  return Launch(stream, AddChunksKernel<Axes<1>, A>, {(sums + 31) / 32, kSumThreads}, layouts.groups.Only(slot),
                layouts.columns.Only(slot), results);
}

// op(offsets of the element in each layout) -> Pack<A, Op::kSums>
template <class A, class Op, int kMore>
cudaError_t LaunchColumnSums(cudaStream_t stream, const Op& op, const RowShape<kMore>& shape,
                             const SumResults<A>& results) {
  const Layouts<Op::kSlots> layouts(shape, 1, 0);
  const int64_t rows = shape.rows.total, columns = shape.columns.total, groups = shape.groups.total;
  // One block per column, unless the grid has too few blocks for them; the other kernels take any layout. In that
  // kernel, chunks with one row per thread are enough.
  const int64_t fewer = std::max<int64_t>(std::min(results.chunks, rows / kSumThreads), 1);
  const bool across = shape.across && groups * fewer * columns <= std::numeric_limits<int>::max();
  SumResults<A> chunked = results;
  if (across) chunked.chunks = fewer;
  const bool few = rows < 2 * chunked.chunks * (kSumThreads / 32);
  const int64_t tile = across ? 1 : few ? kSumThreads : 32;
  const Grid grid = {groups * chunked.chunks * ((columns + tile - 1) / tile), kSumThreads};
  const auto kernel = across ? SumChunkKernel<1, A, Op>
                      : few  ? SumChunkKernel<kSumThreads, A, Op>
                             : SumChunkKernel<32, A, Op>;
  const cudaError_t status = Launch(stream, kernel, grid, op, layouts, chunked);
  return status != cudaSuccess || chunked.chunks == 1 ? status
                                                      : LaunchAddChunks(stream, layouts, Op::kSumSlot, chunked);
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_COLUMN_SUMS_CUH_
