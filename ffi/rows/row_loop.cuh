// Row kernels that also sum over the rows, column by column: one pass over the tensors gives the row results and each
// block's share of the sums, kept in registers until the block has done all its rows.
#ifndef JAXOPS_ROWS_ROW_LOOP_CUH_
#define JAXOPS_ROWS_ROW_LOOP_CUH_

#include "rows/column_sums.cuh"
#include "rows/launch.cuh"

namespace jaxops::rows {

// Rows that a team holds while it keeps two sums for each of its columns: half the packs of RowPlacements.
using RowLoopPlacements = Types<Held<8, 1>,     //    64
                                Held<32, 1>,    //   256
                                Held<64, 1>,    //   512
                                Held<64, 2>,    //  1024
                                Held<128, 2>,   //  2048
                                Held<256, 2>,   //  4096
                                Held<512, 2>,   //  8192
                                Held<512, 4>>;  // 16384

using MixedRowLoopPlacements = Types<Held<32, 1>, Held<128, 2>, Held<512, 4>>;

// A thread's sums over the rows it has seen, for the columns of its packs.
template <class Row, class A, int kPacks>
struct HeldSums {
  A values[2][kPacks][Row::kV] = {};

  template <class E, class F>
  __device__ void Add(const Row& row, const E& first, const F& second) {
    if (!row.live) return;
    row.ForEachPack([&](int pack, int column) {
      const auto a = first(pack, column);
      const auto b = second(pack, column);
#pragma unroll
      for (int i = 0; i < Row::kV; ++i) {
        values[0][pack][i] += a(i);
        values[1][pack][i] += b(i);
      }
    });
  }
};

// Block (group, chunk) takes the rows chunk * kRows + team + k * chunks * kRows of its group, k = 0, 1, ...: a stride
// that is a multiple of a pack keeps every thread on the same columns also where rows are not aligned. op(row,
// op.Parameters(row), sums).
template <class P, int kV, bool kAligned, class A, class Op>
__global__ void __launch_bounds__(P::kThreads)
    RowLoopKernel(const Op op, const Geometry shape, const SumResults<A> results) {
  using RowType = Row<P, kV, kAligned, A>;
  const int chunks = static_cast<int>(results.chunks);
  const int group = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const int64_t first = group * shape.rows_per_group, end = first + shape.rows_per_group;
  RowType row(shape);
  HeldSums<RowType, A, P::kPacks> sums;
  row.MoveTo(min(first + int64_t{chunk} * P::kRows + row.Team(), end - 1), end);
  const auto parameters = op.Parameters(row);  // the same for all these rows
  for (int64_t base = first + int64_t{chunk} * P::kRows; base < end; base += int64_t{chunks} * P::kRows) {
    row.MoveTo(base + row.Team(), end);
    op(row, parameters, sums);
  }
  // A team without a row of its own in this chunk still adds zeros, in the columns where its first row would lie.
  row.MoveTo(min(first + int64_t{chunk} * P::kRows + row.Team(), end - 1), end);
  const int64_t plane = int64_t{gridDim.x} * shape.columns;
  A* const out = results.workspace + int64_t{blockIdx.x} * shape.columns;
  for (int team = 0; team < P::kRows; ++team) {  // one after the other: a fixed order
    if (row.Team() == team) {
      row.ForEachPack([&](int pack, int column) {
#pragma unroll
        for (int i = 0; i < kV; ++i) {
          if (!row.Inside(column + i)) continue;
          A* target = out + column + i;
          if (results.first) {
            *target = sums.values[0][pack][i] + (team == 0 ? A{0} : *target);
            target += plane;
          }
          if (results.second) *target = sums.values[1][pack][i] + (team == 0 ? A{0} : *target);
        }
      });
    }
    __syncthreads();
  }
}

// Whether LaunchRowLoop takes these tensors; it never takes f64, whose sums would not fit into registers.
template <class T, class U>
bool RowLoopFits(const RowShape& shape, int64_t chunks) {
  constexpr int kV = kPack<T, U>;
  if (std::is_same_v<T, double> || shape.inner > 1) return false;
  if (shape.groups * chunks > std::numeric_limits<int>::max()) return false;
  const bool aligned = shape.columns % kV == 0;
  const int64_t packs = (shape.columns + (aligned ? 0 : kV - 1) + kV - 1) / kV;
  return packs <= 512 * 4 && (aligned || chunks * shape.columns % kV == 0);
}

// Runs op(row, op.Parameters(row), sums) over the rows and puts the sums over each group's rows into the results.
template <class T, class U, class A, class Op>
cudaError_t LaunchRowLoop(cudaStream_t stream, const Op& op, const RowShape& shape, const SumResults<A>& results) {
  using Placements = std::conditional_t<std::is_same_v<T, U>, RowLoopPlacements, MixedRowLoopPlacements>;
  constexpr int kV = kPack<T, U>;
  const auto launch = [&]<bool kAligned> {
    const int64_t packs = (shape.columns + (kAligned ? 0 : kV - 1) + kV - 1) / kV;
    return First(
        Placements{}, cudaErrorInvalidValue, [=]<class P> { return packs <= int64_t{P::kLanes} * P::kPacks; },
        [&]<class P> {
          cudaLaunchConfig_t config = {};
          config.gridDim = dim3(static_cast<unsigned>(shape.groups * results.chunks));
          config.blockDim = dim3(P::kThreads);
          config.stream = stream;
          return cudaLaunchKernelEx(&config, RowLoopKernel<P, kV, kAligned, A, Op>, op, Geometry(shape), results);
        });
  };
  const bool aligned = shape.columns % kV == 0;
  const cudaError_t status = aligned ? launch.template operator()<true>() : launch.template operator()<false>();
  return status != cudaSuccess ? status : LaunchAddChunks(stream, shape, results);
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_ROW_LOOP_CUH_
