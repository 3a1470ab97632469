// The kernels in which each thread takes its rows once and ends, and their register limits.
#ifndef JAXOPS_ROWS_KERNELS_CUH_
#define JAXOPS_ROWS_KERNELS_CUH_

#include <cstdint>
#include <limits>

#include "core/launch.cuh"
#include "rows/concepts.cuh"
#include "rows/row.cuh"

namespace jaxops::rows {

// A kernel is empty where it cannot run: cluster kernels before Hopper.
#ifdef __CUDA_ARCH__
template <class P>
inline constexpr bool kRunsHere = P::kAcross || !P::kClusters || __CUDA_ARCH__ >= 900;
#else
template <class P>
inline constexpr bool kRunsHere = true;
#endif

// Single elements in a forward pass that masks. Elements beyond a row's end are masked too, so that no code between
// reading and storing asks where a row ends.
template <class P, int kV, Layout kLayout, class Op>
inline constexpr bool kPaddedSingles = kV == 1 && kLayout == Layout::kPlain && !P::kAcross && !P::kClusters &&
                                       P::kPacks > 0 && Op::kInputs == 1 && Op::kOptions != Options::kNone;

// Whether an op's tensors carry their dtypes at run time.
template <class Op>
constexpr bool TellsDtypes() {
  if constexpr (Op::kInputs == 1) return std::is_same_v<decltype(Op::y), AnyTensor>;
  if constexpr (Op::kInputs == 2) return std::is_same_v<decltype(Op::dx), AnyTensor>;
}

// With few rows, the launch waits until the kernel's parameters are fetched, so fewer are better. Gradients of norms
// have rows along several axes if their parameters change along some axes, and they have no kernels with more packs for
// short rows.
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
    // If a block has one row, no row lies beyond the last.
    const int64_t end = RowType::kOneRow ? std::numeric_limits<int64_t>::max() : geometry.rows.total;
    row.MoveToTeam(ClusterOfBlock<P>(geometry.team) * RowType::BlockRows(geometry.team), end, {});
    op(row);
  }
}

// Launches the kernel; false if the device cannot run its cluster.
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
