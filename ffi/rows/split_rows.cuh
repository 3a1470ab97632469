// Rows across that are too long for a cluster to hold: split into parts, runs of their columns, for blocks that do not
// wait for each other. The blocks of a first kernel join what they find in their parts and put it into a workspace
// [parts, values, rows]; those of a second one join all parts of their rows, in an order that depends on the number of
// parts alone, and store the results of their own part. The inputs are read once more than they would have to be, but
// both times as fast as the memory gives them; what the first kernel has read last the second one reads first, while
// it is in the L2 cache.
#ifndef JAXOPS_ROWS_SPLIT_ROWS_CUH_
#define JAXOPS_ROWS_SPLIT_ROWS_CUH_

#include "rows/launch.cuh"

namespace jaxops::rows {

// All parts but the last have a multiple of this many columns: whole runs of packs for every thread. jaxops/_rows.py
// makes as many parts as that gives.
inline constexpr int kPartColumns = 256;

template <class A>
struct RowParts {
  int count;
  A* workspace;
  int columns;  // of each part; the last ones may have fewer, or none
};

// A part of rows; `block`: of the grid (part, rows of a block).
template <class P, int kV, class A, class Op>
class SplitRow : public Row<P, kV, Lay::kPlain, A, GeometryOf<Op::kSlots, Lay::kPlain>> {
  using Base = Row<P, kV, Lay::kPlain, A, GeometryOf<Op::kSlots, Lay::kPlain>>;

 public:
  __device__ SplitRow(const typename Base::Geometry& geometry, const RowParts<A>& parts, int64_t block)
      : Base(geometry), parts_(parts), rows_(geometry.rows.total) {
    const int64_t blocks = (rows_ + Base::kBlockRows - 1) / Base::kBlockRows;
    part_ = static_cast<int>(block / blocks);
    const int begin = static_cast<int>(std::min<int64_t>(int64_t{part_} * parts.columns, this->columns()));
    this->lane_ += begin;
    this->end_ = begin + min(parts.columns, this->columns() - begin);
    const int64_t first = (block - part_ * blocks) * Base::kBlockRows;
    this->MoveToTeam(first, rows_, {});
    row_ = std::min<int64_t>(first + Base::Team() * kV, rows_ - kV);
  }

  // Puts the joined values of this part into the workspace.
  template <class Part>
  __device__ void WritePart(const Part& part) const {
    if (threadIdx.x >= P::kTeams || !this->live(0)) return;
#pragma unroll
    for (int k = 0; k < Part::kCount; ++k)
      StoreVector(reinterpret_cast<Pack<A, kV>*>(Place<Part>(part_, k)),
                  ToPack<A, kV>([&](int r) { return part.values[r].v[k]; }));
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
      Pack<A, kV> found[Part::kCount];
#pragma unroll
      for (int k = 0; k < Part::kCount; ++k) found[k] = ReadPack<kV>(Place<Part>(part, k));
#pragma unroll
      for (int r = 0; r < kV; ++r) {
        Values<A, Part::kCount> values;
#pragma unroll
        for (int k = 0; k < Part::kCount; ++k) values.v[k] = found[k].lane[r];
        joined.values[r] = J::Join(joined.values[r], values);
      }
    }
    return this->Join(joined);
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

template <class P, int kV, class A, class Op>
__global__ void __launch_bounds__(P::kThreads, kMinBlocksHere<P>)
    SplitRowsKernel(const __grid_constant__ Op op, const __grid_constant__ GeometryOf<Op::kSlots, Lay::kPlain> geometry,
                    const __grid_constant__ RowParts<A> parts) {
  if constexpr (kRunsHere<P>) {
    SplitRow<P, kV, A, Op> row(geometry, parts, blockIdx.x);
    row.WritePart(row.Join(op.Begin(row, op.Parameters(row), op.Scalars(row))));
  }
}

template <class P, int kV, class A, class Op>
__global__ void __launch_bounds__(P::kThreads, kMinBlocksHere<P>)
    FinishRowsKernel(const __grid_constant__ Op op,
                     const __grid_constant__ GeometryOf<Op::kSlots, Lay::kPlain> geometry,
                     const __grid_constant__ RowParts<A> parts) {
  if constexpr (kRunsHere<P>) {
    SplitRow<P, kV, A, Op> row(geometry, parts, gridDim.x - 1 - blockIdx.x);
    const auto parameters = op.Parameters(row);
    const auto scalars = op.Scalars(row);
    const auto joined = row.template JoinParts<decltype(op.Begin(row, parameters, scalars))>();
    op.End(row, parameters, scalars, joined);
  }
}

// Runs op in two halves, op.Begin and op.End, over rows that are split into so many parts; false where LaunchRows
// should. The workspace has room for them.
template <class T, class U, class Op, int kMore>
bool LaunchSplitRows(cudaStream_t stream, const Op& op, const RowShape<kMore>& shape, int64_t count, void* workspace,
                     cudaError_t* status) {
  if constexpr (std::is_same_v<T, U> && kIsOneOf<T, float, __nv_bfloat16, __half>) {
    using A = Accumulator<T>;
    using P = SplitAcross<16, 16, 8, 4>;
    using F = SplitAcross<16, 16, 8, 4, /*kBackwards=*/true>;
    using G = GeometryOf<Op::kSlots, Lay::kPlain>;
    constexpr int kV = kPackAcross<T>;
    if (count == 0 || !shape.across || shape.size() == 0 || !RunsOn<P>(CompiledCapability())) return false;
    const Layouts<Op::kSlots> layouts(shape, kV, Op::kBroadcasts);
    if (!layouts.plain || !layouts.template Fit<G>()) return false;
    const int64_t each = (layouts.columns.total + count - 1) / count;
    const RowParts<A> parts = {static_cast<int>(count), static_cast<A*>(workspace),
                               static_cast<int>((each + kPartColumns - 1) / kPartColumns * kPartColumns)};
    const auto grid = [&]<class Q>(Q) {
      constexpr int kBlockRows = SplitRow<Q, kV, A, Op>::kBlockRows;
      return Grid{(layouts.rows.total + kBlockRows - 1) / kBlockRows * count, Q::kThreads};
    };
    const G geometry = layouts.template To<G>();
    *status = Launch(stream, SplitRowsKernel<P, kV, A, Op>, grid(P()), op, geometry, parts);
    if (*status == cudaSuccess) {
      *status = Launch(stream, FinishRowsKernel<F, kV, A, Op>, grid(F()), op, geometry, parts);
    }
    return true;
  }
  return false;
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_SPLIT_ROWS_CUH_
