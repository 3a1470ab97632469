// Rows that are too long, for so few of them: split into parts, runs of their columns, for blocks that do not wait for
// each other. The blocks of a first kernel join what they find in their parts and put it into a workspace [parts,
// values, rows]; those of a second one join all parts of their rows, in an order that depends on the number of parts
// alone, and store the results of their own part. The inputs are read once more than they would have to be, but both
// times as fast as the memory gives them; what the first kernel has read last the second one reads first, while it is
// in the L2 cache.
#ifndef JAXOPS_ROWS_SPLIT_ROWS_CUH_
#define JAXOPS_ROWS_SPLIT_ROWS_CUH_

#include <array>

#include "rows/launch.cuh"

namespace jaxops::rows {

// All parts but the last have a multiple of this many columns: whole runs of packs for every thread.
inline constexpr int kPartColumns = 256;          // of packs of rows across
inline constexpr int kPartColumnsSingles = 1024;  // of single elements of such rows
inline constexpr int kPartColumnsAlong = 4096;

// Where each row is alone in its group: the results of the op's sums over rows, which are no sums then; else null.
template <class A>
using SumPointers = std::array<A*, 2>;

template <class A>
struct RowParts {
  int count;
  A* workspace;
  int columns;  // of each part; the last one may have fewer, but has some
  SumPointers<A> sums;
};

// Takes the place of HeldSums there: stores what would be added.
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

// A part of rows; `block`: of the grid (part, rows of a block).
template <class P, int kV, Lay kLay, class A, class Op>
class SplitRow : public Row<P, kV, kLay, A, GeometryOf<Op::kSlots, kLay>> {
  using Base = Row<P, kV, kLay, A, GeometryOf<Op::kSlots, kLay>>;
  using Base::kRows;

 public:
  __device__ SplitRow(const typename Base::Geometry& geometry, const RowParts<A>& parts, int64_t block)
      : Base(geometry), parts_(parts), rows_(geometry.rows.total) {
    const int64_t blocks = (rows_ + Base::kBlockRows - 1) / Base::kBlockRows;
    const int part = static_cast<int>(block / blocks), columns = this->columns();
    const int begin = part * parts.columns;
    this->lane_ += begin / (P::kAcross ? 1 : kV);
    const int64_t first = (block - part * blocks) * Base::kBlockRows;
    this->MoveToTeam(first, rows_, {});
    row_ = std::min<int64_t>(first + Base::Team() * kRows, rows_ - kRows);
    part_ = part;
    const int shift = Base::kShifted ? this->shift_[0] : 0;  // packs begin so much earlier
    this->end_ = part == parts.count - 1 ? columns : begin + parts.columns - shift;
  }

  // Puts the joined values of this part into the workspace.
  template <class Part>
  __device__ void WritePart(const Part& part) const {
    if (threadIdx.x >= P::kTeams || !this->live(0)) return;
#pragma unroll
    for (int k = 0; k < Part::kCount; ++k)
      StoreVector(reinterpret_cast<Pack<A, kRows>*>(Place<Part>(part_, k)),
                  ToPack<A, kRows>([&](int r) { return part.values[r].v[k]; }));
  }

  // The join of all parts.
  template <class Part>
  __device__ Part JoinParts() {
    using J = typename Part::J;
    Part joined;
#pragma unroll
    for (auto& values : joined.values) values = J::template Identity<A, Part::kCount>();
#pragma unroll 4
    for (int part = threadIdx.x / P::kTeams; part < parts_.count; part += P::kLanes) {
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
    if constexpr (Part::kOfWarp) JoinWarp<P, J>(joined.values);
    return this->Join(joined);
  }

  // Parameters are read where they are used.
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

template <class P, int kV, Lay kLay, class A, class Op>
__global__ void __launch_bounds__(P::kThreads, kMinBlocksHere<P>)
    SplitRowsKernel(const __grid_constant__ Op op, const __grid_constant__ GeometryOf<Op::kSlots, kLay> geometry,
                    const __grid_constant__ RowParts<A> parts) {
  if constexpr (kRunsHere<P>) {
    SplitRow<P, kV, kLay, A, Op> row(geometry, parts, blockIdx.x);
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

template <class P, int kV, Lay kLay, class A, class Op>
__global__ void __launch_bounds__(P::kThreads, kMinBlocksHere<P>)
    FinishRowsKernel(const __grid_constant__ Op op, const __grid_constant__ GeometryOf<Op::kSlots, kLay> geometry,
                     const __grid_constant__ RowParts<A> parts) {
  if constexpr (kRunsHere<P>) {
    SplitRow<P, kV, kLay, A, Op> row(geometry, parts, gridDim.x - 1 - blockIdx.x);
    const auto parameters = op.Parameters(row);
    const auto scalars = op.Scalars(row);
    const auto joined = row.template JoinParts<decltype(op.Begin(row, parameters, scalars))>();
    op.End(row, parameters, scalars, joined);
  }
}

// Runs the kernels of the placements P, then F, over rows that are split into parts, at most as many as the workspace
// has room for; false if they do not fit.
template <class P, class F, int kV, Lay kLay, class A, class Op>
bool LaunchParts(cudaStream_t stream, const Op& op, const Layouts<Op::kSlots>& layouts, const AnyBuffer& workspace,
                 const SumPointers<A>& sums, cudaError_t* status) {
  using G = GeometryOf<Op::kSlots, kLay>;
  if (!layouts.template Fit<G>() || !RunsOn<P>(CompiledCapability())) return false;
  constexpr int kMultiple = !P::kAcross ? kPartColumnsAlong : kV == 1 ? kPartColumnsSingles : kPartColumns;
  const auto divide = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t columns = layouts.columns.total;
  const int64_t each = divide(divide(columns, workspace.dimensions()[0]), kMultiple) * kMultiple;
  const int64_t count = divide(columns, each);
  const RowParts<A> parts = {static_cast<int>(count), static_cast<A*>(workspace.untyped_data()), static_cast<int>(each),
                             sums};
  constexpr int kBlockRows = SplitRow<P, kV, kLay, A, Op>::kBlockRows;
  static_assert(kBlockRows == SplitRow<F, kV, kLay, A, Op>::kBlockRows && P::kThreads == F::kThreads);
  const Grid grid = {divide(layouts.rows.total, kBlockRows) * count, P::kThreads};
  const G geometry = layouts.template To<G>();
  *status = Launch(stream, SplitRowsKernel<P, kV, kLay, A, Op>, grid, op, geometry, parts);
  if (*status == cudaSuccess) {
    *status = Launch(stream, FinishRowsKernel<F, kV, kLay, A, Op>, grid, op, geometry, parts);
  }
  return true;
}

// Runs op, or single (see LaunchRows), in two halves, op.Begin and op.End, over rows that are split into the parts of
// a workspace (CheckParts); false where LaunchRows should. sums: see RowParts.
template <class T, class U, class Op, class SingleOp, int kMore>
bool LaunchSplitRows(cudaStream_t stream, const Op& op, const SingleOp& single, const RowShape<kMore>& shape,
                     const AnyBuffer& workspace, const SumPointers<Accumulator<T>>& sums, cudaError_t* status) {
  using A = Accumulator<T>;
  if (shape.size() == 0) return false;
  if constexpr (std::is_same_v<A, float>) {
    const Layouts<SingleOp::kSlots> elements(shape, 1, SingleOp::kBroadcasts);
    if (shape.across) {
      if constexpr (kPacksAcross<T, U>) {
        using P = SplitAcross<16, 16, 8, 4>;
        using F = SplitAcross<16, 16, 8, 4, /*kBackwards=*/true>;
        constexpr int kV = kPackAcross<T>;
        const Layouts<Op::kSlots> layouts(shape, kV, Op::kBroadcasts);
        if (layouts.plain && LaunchParts<P, F, kV, Lay::kPlain, A>(stream, op, layouts, workspace, sums, status)) {
          return true;
        }
      }
      // Few threads for adjacent elements, of which there may be few.
      using P = SplitAcross<4, 128, 8>;
      using F = SplitAcross<4, 128, 8, 1, /*kBackwards=*/true>;
      return elements.plain && LaunchParts<P, F, 1, Lay::kPlain, A>(stream, single, elements, workspace, sums, status);
    }
    if constexpr (kTuned<T, U>) {
      using P = SplitAlong<512, 4, 2>;
      using F = SplitAlong<512, 4, 2, /*kBackwards=*/true>;
      constexpr int kV = kPackOf<T>;
      const Layouts<Op::kSlots> layouts(shape, kV, Op::kBroadcasts);
      bool done = false;
      if (shape.columns.count == 1) {
        done = LaunchParts<P, F, kV, Lay::kShifted, A>(stream, op, layouts, workspace, sums, status);
      } else {
        done = layouts.aligned && LaunchParts<P, F, kV, Lay::kGeneral, A>(stream, op, layouts, workspace, sums, status);
      }
      if (done) return true;
    }
    using P = SplitAlong<512, 4>;
    return LaunchParts<P, P, 1, Lay::kGeneral, A>(stream, single, elements, workspace, sums, status);
  }
  return false;
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_SPLIT_ROWS_CUH_
