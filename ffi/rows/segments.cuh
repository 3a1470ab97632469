// Rows that are too long and too few are split into parts (segments), that is runs of columns, for blocks that do not
// wait for each other. In a first kernel each block joins the values in its part and writes the result to a workspace
// [parts, values, rows]. In a second kernel each block joins all parts of its rows, in an order that depends only on
// the number of parts, and stores its own part's results. The inputs are read once more than necessary, but both times
// as fast as the memory delivers them. The second kernel begins with the elements that the first one read last, while
// they are in the L2 cache.
#ifndef JAXOPS_ROWS_SEGMENTS_CUH_
#define JAXOPS_ROWS_SEGMENTS_CUH_

#include <array>

#include "rows/launch.cuh"

namespace jaxops::rows {

// If each row is alone in its group, these point to the results of the op's sums over rows, which then add nothing;
// else null.
template <class A>
using SumPointers = std::array<A*, 2>;

template <class A>
struct RowParts {
  int count;
  A* workspace;
  int columns;  // per part; the last part may have fewer, but at least one
  SumPointers<A> sums;
};

// Takes HeldSums' place if each row is alone in its group: stores the values that would be added.
template <class A, int kSlot>
struct StoredSums {
  const SumPointers<A>& results;

  template <class Row, class... Es>
  __device__ void AddPack(const Row& row, int pack, int column, const Es&... es) const {
    constexpr int kV = Row::kV;
    int k = 0;
    const auto store = [&](const auto& e) {
      A* const result = results[k++];
      if (!result) return;
      const int64_t offset = row.Offset(kSlot, pack, column), step = row.Step(kSlot);
      const Pack<A, kV> values = ToPack<A, kV>(e(pack, column));
      if (row.Whole(column) && step == 1 && offset % kV == 0) {
        StoreVector(reinterpret_cast<Pack<A, kV>*>(result + offset), values);
      } else {
#pragma unroll
        for (int i = 0; i < kV; ++i)
          if (row.Inside(column, i)) result[offset + i * step] = values.lane[i];
      }
    };
    (store(es), ...);
  }
};

// A part of rows. `block`: the block's place in the grid (part, the block's rows).
template <class P, int kV, Layout kLayout, class A, class Op>
class SplitRow : public Row<P, kV, kLayout, A, GeometryOf<Op::kSlots, kLayout>> {
  using Base = Row<P, kV, kLayout, A, GeometryOf<Op::kSlots, kLayout>>;
  using Base::kRows;

 public:
  __device__ SplitRow(const typename Base::Geometry& geometry, const RowParts<A>& parts, int64_t block)
      : Base(geometry), parts_(parts), rows_(geometry.rows.total) {
    const int64_t blocks = DivideUp(rows_, Base::BlockRows(geometry.team));
    const int part = static_cast<int>(block / blocks), columns = this->columns();
    const int begin = part * parts.columns;
    this->lane_ += begin / (P::kAcross ? 1 : kV);
    const int64_t first = (block - part * blocks) * Base::BlockRows(geometry.team);
    this->MoveToTeam(first, rows_, {});
    row_ = std::min<int64_t>(first + this->Team() * kRows, rows_ - kRows);
    part_ = part;
    const int shift = Base::kShifted ? this->shift_ : 0;  // by which packs begin earlier
    this->end_ = part == parts.count - 1 ? columns : begin + parts.columns - shift;
  }

  // Writes this part's joined values to the workspace.
  template <class Part>
  __device__ void WritePart(const Part& part) const {
    if (threadIdx.x >= P::kMaxTeams || !this->live()) return;
#pragma unroll
    for (int k = 0; k < Part::kCount; ++k)
      StoreVector(reinterpret_cast<Pack<A, kRows>*>(Place<Part>(part_, k)),
                  ToPack<A, kRows>([&](int r) { return part.values[r].v[k]; }));
  }

  // Joins all parts.
  template <class Part>
  __device__ Part JoinParts() {
    using J = typename Part::J;
    Part joined;
#pragma unroll
    for (auto& values : joined.values) values = J::template Identity<A, Part::kCount>();
#pragma unroll 4
    for (int part = threadIdx.x / P::kMaxTeams; part < parts_.count; part += P::kLanes) {
      Pack<A, kRows> found[Part::kCount];
#pragma unroll
      for (int k = 0; k < Part::kCount; ++k) found[k] = ReadPack<kRows>(Place<Part>(part, k));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        Values<A, Part::kCount> values;
#pragma unroll
        for (int k = 0; k < Part::kCount; ++k) values.v[k] = found[k].lane[r];
        joined.values[r] = J::Join(joined.values[r], values);
      }
    }
    if constexpr (Part::kOfWarp) this->template JoinWarp<J>(joined.values);
    return this->Join(joined);
  }

  // Parameters are read when they are used.
  template <int kNumber, class E>
  __device__ E KeepParameter(const E& expression) const {
    return expression;
  }

 private:
  template <class Part>
  __device__ A* Place(int part, int k) const {
    return parts_.workspace + (int64_t{part} * Part::kCount + k) * rows_ + row_;
  }

  const RowParts<A>& parts_;
  int64_t rows_, row_;
  int part_;
};

// Whether an op's first half adds to sums over rows.
template <class Op>
concept SumsColumns = requires { Op::kSums; };

template <class P, int kV, Layout kLayout, class A, class Op>
__global__ void __maxnreg__(P::kRegisters)
    SplitRowsKernel(const __grid_constant__ Op op, const __grid_constant__ GeometryOf<Op::kSlots, kLayout> geometry,
                    const __grid_constant__ RowParts<A> parts) {
  if constexpr (kRunsHere<P>) {
    SplitRow<P, kV, kLayout, A, Op> row(geometry, parts, blockIdx.x);
    const auto parameters = op.Parameters(row);
    const auto scalars = op.Scalars(row);
    if constexpr (SumsColumns<Op>) {
      const StoredSums<A, Op::kSumSlot> sums{parts.sums};
      row.WritePart(row.Join(op.Begin(row, parameters, scalars, sums)));
    } else {
      row.WritePart(row.Join(op.Begin(row, parameters, scalars)));
    }
  }
}

template <class P, int kV, Layout kLayout, class A, class Op>
__global__ void __maxnreg__(P::kRegisters)
    FinishRowsKernel(const __grid_constant__ Op op, const __grid_constant__ GeometryOf<Op::kSlots, kLayout> geometry,
                     const __grid_constant__ RowParts<A> parts) {
  if constexpr (kRunsHere<P>) {
    SplitRow<P, kV, kLayout, A, Op> row(geometry, parts, gridDim.x - 1 - blockIdx.x);
    const auto parameters = op.Parameters(row);
    const auto scalars = op.Scalars(row);
    const auto joined = row.template JoinParts<decltype(op.Begin(row, parameters, scalars))>();
    op.End(row, parameters, scalars, joined);
  }
}

// Runs P's kernel, then F's, over rows that are split into parts; there are at most as many parts as the workspace has
// room for.
template <class P, class F, int kV, Layout kLayout, class A, class Op>
bool LaunchParts(cudaStream_t stream, const Op& op, const Layouts<Op::kSlots>& layouts, const AnyBuffer& workspace,
                 const SumPointers<A>& sums, cudaError_t* status) {
  using G = GeometryOf<Op::kSlots, kLayout>;
  if (!layouts.template Fit<G>()) return false;
  const SegmentShape shape = SegmentsOf(P::kAcross, kV == 1);
  const int64_t columns = layouts.columns.total;
  const int64_t each = DivideUp(DivideUp(columns, workspace.dimensions()[0]), shape.multiple) * shape.multiple;
  const int64_t count = DivideUp(columns, each);
  const RowParts<A> parts = {static_cast<int>(count), static_cast<A*>(workspace.untyped_data()), static_cast<int>(each),
                             sums};
  Team team = {.lanes = P::kLanes};
  team.warps = ThreadsOf<P>(team) / 32;
  const int rows = SplitRow<P, kV, kLayout, A, Op>::BlockRows(team);
  const Grid grid = {DivideUp(layouts.rows.total, rows) * count, ThreadsOf<P>(team), 1, SpreadBytes<P, A>(team, rows)};
  const G geometry = layouts.template To<G>(team);
  *status = Launch(stream, SplitRowsKernel<P, kV, kLayout, A, Op>, grid, op, geometry, parts);
  if (*status == cudaSuccess) {
    *status = Launch(stream, FinishRowsKernel<F, kV, kLayout, A, Op>, grid, op, geometry, parts);
  }
  return true;
}

// Runs op, or single (see LaunchRows), in two halves, op.Begin and op.End, over rows that are split into a workspace's
// parts (CheckParts). False if LaunchRows should run them instead. sums: see RowParts.
template <class T, class Op, class SingleOp, int kMore>
bool LaunchSplitRows(cudaStream_t stream, const Op& op, const SingleOp& single, const RowShape<kMore>& shape,
                     const AnyBuffer& workspace, const SumPointers<Accumulator<T>>& sums, cudaError_t* status) {
  using A = Accumulator<T>;
  if (shape.size() == 0) return false;
  if constexpr (std::is_same_v<A, float>) {
    const Layouts<SingleOp::kSlots> elements(shape, 1, SingleOp::kBroadcasts);
    if (shape.across) {
      if constexpr (kTuned<T>) {
        using P = SegmentAcross<16, 8, kSegmentRegisters, 16>;
        using F = SegmentAcross<16, 8, kSegmentRegisters, 16, /*kBackwards=*/true>;
        constexpr int kV = PackOf(kElementsOf<T>, true);
        const Layouts<Op::kSlots> layouts(shape, kV, Op::kBroadcasts);
        if (shape.aligned && layouts.plain &&
            LaunchParts<P, F, kV, Layout::kPlain, A>(stream, op, layouts, workspace, sums, status)) {
          return true;
        }
      }
      // Few threads lie side by side along adjacent elements, because there may be few such elements.
      using P = SegmentAcross<4, 8, kElementSegmentRegisters, 128>;
      using F = SegmentAcross<4, 8, kElementSegmentRegisters, 128, /*kBackwards=*/true>;
      return elements.plain &&
             LaunchParts<P, F, 1, Layout::kPlain, A>(stream, single, elements, workspace, sums, status);
    }
    if constexpr (kTuned<T>) {
      using P = SegmentAlong<4, kSegmentRegisters, 512>;
      using F = SegmentAlong<4, kSegmentRegisters, 512, /*kBackwards=*/true>;
      constexpr int kV = PackOf(kElementsOf<T>, false);
      const Layouts<Op::kSlots> layouts(shape, kV, Op::kBroadcasts);
      if (shape.aligned && shape.columns.count == 1 &&
          LaunchParts<P, F, kV, Layout::kShifted, A>(stream, op, layouts, workspace, sums, status)) {
        return true;
      }
    }
    using P = SegmentAlong<4, kElementSegmentRegisters, 512>;
    return LaunchParts<P, P, 1, Layout::kGeneral, A>(stream, single, elements, workspace, sums, status);
  }
  return false;
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_SEGMENTS_CUH_
