// The kernels in which each thread has its rows once, and what registers they may have.
#ifndef JAXOPS_ROWS_KERNELS_CUH_
#define JAXOPS_ROWS_KERNELS_CUH_

#include <cstdint>
#include <limits>

#include "core/launch.cuh"
#include "rows/concepts.cuh"
#include "rows/row.cuh"

namespace jaxops::rows {

// Kernels are empty where they do not run: those of clusters before Hopper.
#ifdef __CUDA_ARCH__
template <class P>
inline constexpr bool kRunsHere = P::kAcross || !P::kClusters || __CUDA_ARCH__ >= 900;
#else
template <class P>
inline constexpr bool kRunsHere = true;
#endif

// Single elements of a forward pass that masks: those beyond a row's end are masked too, so that nothing between
// reading and storing asks where a row ends.
template <class P, int kV, Layout kLayout, class Op>
inline constexpr bool kPaddedSingles = kV == 1 && kLayout == Layout::kPlain && !P::kAcross && !P::kClusters &&
                                       P::kPacks > 0 && Op::kInputs == 1 && Op::kOptions != Options::kNone;

// Whether an op's tensors tell their dtypes.
template <class Op>
constexpr bool TellsDtypes() {
  if constexpr (Op::kInputs == 1) return std::is_same_v<decltype(Op::y), AnyTensor>;
  if constexpr (Op::kInputs == 2) return std::is_same_v<decltype(Op::dx), AnyTensor>;
}

// Where few rows are, a launch waits for what a kernel knows of them to be fetched: less is better. Norms' gradients
// have rows along several axes where their parameters change along some, and no kernels of more packs for short ones.
template <class P, int kV, Layout kLayout, class Op>
using RowGeometry = std::conditional_t<!P::kAcross && (P::kPacks == 1 || P::kPacks == 2) && kLayout == Layout::kPlain &&
                                           (kV > 1) && !TellsDtypes<Op>() && (Op::kInputs == 1 || Op::kParameters == 0),
                                       Geometry<Op::kSlots, 1, 1>, GeometryOf<Op::kSlots, kLayout>>;

template <class P, int kV, Layout kLayout, class A, RowOp Op>
__global__ void __maxnreg__(P::kRegisters)
    RowKernel(const __grid_constant__ Op op, const __grid_constant__ RowGeometry<P, kV, kLayout, Op> geometry) {
  if constexpr (kRunsHere<P>) {
    using RowType = Row<P, kV, kLayout, A, RowGeometry<P, kV, kLayout, Op>, kPaddedSingles<P, kV, kLayout, Op>>;
    RowType row(geometry);
    // Where a block has one row there is none beyond the last.
    const int64_t end = RowType::kOneRow ? std::numeric_limits<int64_t>::max() : geometry.rows.total;
    row.MoveToTeam(ClusterOfBlock<P>(geometry.team) * RowType::BlockRows(geometry.team), end, {});
    op(row);
  }
}

// Launches it; false if the device runs no such cluster.
template <class P, int kV, Layout kLayout, class A, class Op>
bool LaunchRowKernel(cudaStream_t stream, const Op& op, const Layouts<Op::kSlots>& layouts, const Team& team,
                     cudaError_t* status) {
  using G = RowGeometry<P, kV, kLayout, Op>;
  const int rows = Row<P, kV, kLayout, A, G>::BlockRows(team), cluster = ClusterOf<P>(team);
  const Grid grid = {DivideUp(layouts.rows.total, rows) * cluster, ThreadsOf<P>(team), cluster,
                     SpreadBytes<P, A>(team, rows)};
  const auto kernel = RowKernel<P, kV, kLayout, A, Op>;
  if (!ClustersFit(kernel, grid)) return false;
  *status = Launch(stream, kernel, grid, op, layouts.template To<G>(team));
  return true;
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_KERNELS_CUH_
