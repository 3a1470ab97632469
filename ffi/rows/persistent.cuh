// Row kernels whose blocks stay and take one row after the other. While a thread works on the present rows, it copies
// its own packs of the next rows into shared memory, asynchronously. Parameters that all rows share are read once. The
// same pass over the tensors can also give each block's share of sums over the rows, column by column. They stay in
// registers until the block has done all its rows. docs/adding.md explains looped, team, group and chunk.
#ifndef JAXOPS_ROWS_PERSISTENT_CUH_
#define JAXOPS_ROWS_PERSISTENT_CUH_

#include "rows/column_sums.cuh"
#include "rows/fetched_row.cuh"
#include "rows/kernels.cuh"

namespace jaxops::rows {

// Runs op(row, op.Parameters(row), op.Scalars(row), sums...) for the rows begin, begin + step, ... below end; move(row,
// first) turns to a row. op.ForEachInput names the tensors that are fetched ahead. If P::kAhead, the op runs in two
// halves, op.Begin and op.End: while threads finish one row, the values that they send each other for the next are
// under way.
template <class RowType, class Op, class Move, class... Sums>
__device__ void LoopOverRows(RowType& row, const Op& op, int64_t begin, int64_t step, int64_t end, const Move& move,
                             Sums&... sums) {
  constexpr int kStages = RowType::P::kStages;
  const auto fetch = [&](RowType& ahead, int64_t first, int stage) {
    if (first < end) {
      move(ahead, first);
      ahead.SetStage(stage);
      op.ForEachInput([&]<int kInput>(const auto& tensor) { ahead.template Fetch<kInput>(tensor); });
    }
    CommitCopies();
  };
  RowType ahead = row;
#pragma unroll
  for (int k = 0; k < kStages - 1; ++k) fetch(ahead, begin + k * step, k);
  move(row, begin);
  const auto parameters = op.Parameters(row);
  if constexpr (RowType::P::kAhead) {
    if (begin >= end) return;
    const auto begin_row = [&](RowType& row, int stage, const auto& scalars) {
      row.SetStage(stage);
      return op.Begin(row, parameters, scalars, sums...);
    };
    // Scalars for the present row, the next, and the one after it; outside the rows, for the first row again.
    const auto scalars_of = [&](int64_t first) {
      RowType there = row;
      move(there, first < end ? first : begin);
      return op.Scalars(there);
    };
    auto scalars = op.Scalars(row), next_scalars = scalars_of(begin + step);
    WaitCopies<kStages - 2>();
    if constexpr (RowType::P::kStaged) row.Sync();
    auto part = begin_row(row, 0, scalars);
    row.Post(part);
    for (int stage = 0; begin < end; begin += step) {
      if constexpr (RowType::P::kStaged) {
        WaitCopies<kStages - 3>();
        row.Sync();
      }
      fetch(ahead, begin + (kStages - 1) * step, stage == 0 ? kStages - 1 : stage - 1);
      const bool more = begin + step < end;
      const auto later_scalars = scalars_of(begin + 2 * step);
      const int next_stage = stage == kStages - 1 ? 0 : stage + 1;
      RowType next = row;
      if (more) {
        move(next, begin + step);
        if constexpr (!RowType::P::kStaged) WaitCopies<kStages - 2>();
        part = begin_row(next, next_stage, next_scalars);
      }
      const auto joined = row.template Collect<decltype(part)>();
      if (more) row.Post(part);
      row.SetStage(stage);
      op.End(row, parameters, scalars, joined);
      row.Follow(next);
      scalars = next_scalars;
      next_scalars = later_scalars;
      stage = next_stage;
    }
  } else {
    auto scalars = op.Scalars(row);
    for (int stage = 0; begin < end; begin += step) {
      if constexpr (RowType::P::kStaged) {
        WaitCopies<kStages - 2>();
        row.Sync();
      }
      fetch(ahead, begin + (kStages - 1) * step, stage == 0 ? kStages - 1 : stage - 1);
      RowType next = row;
      auto upcoming = scalars;
      if (begin + step < end) {
        if constexpr (kStages == 2) {
          next.Follow(ahead);
        } else {
          move(next, begin + step);
        }
        upcoming = op.Scalars(next);
      }
      if constexpr (!RowType::P::kStaged) WaitCopies<kStages - 1>();
      row.SetStage(stage);
      op(row, parameters, scalars, sums...);
      row.Follow(next);
      scalars = upcoming;
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
  }
  WaitCopies<0>();
}

// A thread's sums over the rows it has seen, for its packs' columns.
template <class Row, int kCount>
struct HeldSums {
  using A = typename Row::A;
  A values[kCount][Row::kHeldPacks][Row::kV] = {};

  // Adds one pack from each expression, for the present rows.
  template <class... Es>
  __device__ void AddPack(const Row& row, int pack, int column, const Es&... es) {
    if (!Row::kPadded && !row.live()) return;
    int k = 0;
    const auto add = [&](const auto& value) {
#pragma unroll
      for (int i = 0; i < Row::kV; ++i) values[k][pack][i] += value(i);
      ++k;
    };
    (add(es(pack, column)), ...);
  }
};

// The shared memory in which a block's teams add their sums.
template <class Row, int kCount>
int TeamSumBytes(const Team& team) {
  using P = typename Row::P;
  return TeamsOf<P>(team) > 1
             ? static_cast<int>(sizeof(typename Row::A)) * kCount * P::kPacks * Row::kV * ThreadsOf<P>(team)
             : 0;
}

// Block (group, chunk) takes rows chunk * teams + k * chunks * teams in its group, k = 0, 1, ... If the teams are
// apart, each team takes all rows of its own group, and nothing is added through shared memory. That requires one chunk
// per group, and so many groups that they make more blocks than run at once, however many rows the groups have.
__host__ __device__ inline bool TeamsApart(int teams, int64_t chunks, int64_t groups, int64_t rows) {
  return chunks == 1 && groups >= kManyBlocks * std::min<int64_t>(rows, 4 * teams);
}
template <int kSlots, Layout kLayout>
using GroupsOf = Axes<kSlots, GeometryOf<kSlots, kLayout>::kRowAxes>;

// Rows with adjacent elements lie at even distances if they have no broadcast operands or share them all. Then finding
// a row's start costs one product.
template <Layout kLayout, class Op>
using LoopGeometry = std::conditional_t<kLayout == Layout::kGeneral, GeometryOf<Op::kSlots, kLayout>,
                                        Geometry<Op::kSlots, 1, 1, /*kCopied=*/Op::kInputs == 2>>;
template <class P, int kV, Layout kLayout, class A, class Op>
using LoopRow = std::conditional_t<
    P::kStaged, StagedRow<Row<P, kV, kLayout, A, LoopGeometry<kLayout, Op>, /*kPadded=*/true>, Op::kParameters>,
    FetchedRow<Row<P, kV, kLayout, A, LoopGeometry<kLayout, Op>, kLayout == Layout::kPlain && Op::kPadded && (kV > 1)>,
               Op::kParameters>>;

template <class P, int kV, Layout kLayout, class A, class Op>
__device__ __forceinline__ void SumRows(const Op& op, const LoopGeometry<kLayout, Op>& geometry,
                                        const GroupsOf<Op::kSlots, kLayout>& groups, const SumResults<A>& results) {
  using RowType = LoopRow<P, kV, kLayout, A, Op>;
  extern __shared__ __align__(16) char shared[];
  const int teams = TeamsOf<P>(geometry.team);
  const int64_t block = ClusterOfBlock<P>(geometry.team), end = geometry.rows.total;
  const bool apart = TeamsApart(teams, results.chunks, groups.total, end);
  RowType row(geometry, shared, op.Inputs());
  int64_t group = apart ? block * teams + row.Team() : block / results.chunks;
  const bool idle = group >= groups.total;  // it repeats the last group and keeps nothing
  if (idle) group = groups.total - 1;
  const int64_t chunk = apart ? 0 : block - group * results.chunks;
  const int64_t step = apart ? 1 : results.chunks * teams;
  const int64_t team = apart ? 0 : row.Team();
  int64_t group_offsets[Op::kSlots];
  groups.Offsets(group, group_offsets);

  HeldSums<RowType, Op::kSums> sums;
  const auto move = [&](RowType& row, int64_t begin) { row.MoveTo(begin + team, end, group_offsets); };
  LoopOverRows(row, op, chunk * teams, step, end, move, sums);

  // The sums lie at the first rows' columns. A team without rows adds zeros.
  row.MoveTo(chunk * teams + team, end, group_offsets);
  const auto for_each_sum = [&](const auto& visit) {
    row.ForEachPackInside([&](int pack, int column) {
#pragma unroll
      for (int i = 0; i < kV; ++i)
        if (row.Inside(column, i))
#pragma unroll
          for (int k = 0; k < Op::kSums; ++k) visit(k, column + i, sums.values[k][pack][i]);
    });
  };
  const bool linear = geometry.columns.count == 1;
  const auto write = [&](int k, int column, A value) {
    if (!results.results[k] || idle) return;
    if (results.chunks > 1) {
      results.workspace[k * results.plane + block * geometry.columns.total + column] = value;
    } else {
      const int64_t offset =
          linear ? column * geometry.columns.strides[0][Op::kSumSlot] : geometry.ColumnOffset(Op::kSumSlot, column);
      results.results[k][group_offsets[Op::kSumSlot] + offset] = value;
    }
  };
  if (apart || teams == 1) {
    for_each_sum(write);
  } else {
    A* const of_teams = reinterpret_cast<A*>(shared);  // [team][sum][column]
    const int columns = row.columns(), stride = Op::kSums * columns;
    __syncthreads();
    for_each_sum([&](int k, int column, A value) { of_teams[row.Team() * stride + k * columns + column] = value; });
    __syncthreads();
    for (int k = 0; k < Op::kSums; ++k)
      for (int column = threadIdx.x; column < columns; column += kWarpThreads) {
        A total = of_teams[k * columns + column];
        for (int team = 1; team < teams; ++team) total += of_teams[team * stride + k * columns + column];
        write(k, column, total);
      }
  }
}
template <class P, int kV, Layout kLayout, class A, class Op>
__global__ void __maxnreg__(P::kRegisters)
    RowSumsKernel(const __grid_constant__ Op op, const __grid_constant__ LoopGeometry<kLayout, Op> geometry,
                  const __grid_constant__ GroupsOf<Op::kSlots, kLayout> groups,
                  const __grid_constant__ SumResults<A> results) {
  if constexpr (kRunsHere<P>) SumRows<P, kV, kLayout, A>(op, geometry, groups, results);
}

// Launches the kernel; false if the device cannot run its cluster.
template <class P, int kV, Layout kLayout, class A, class Op>
bool LaunchSums(cudaStream_t stream, const Op& op, const Layouts<Op::kSlots>& layouts, const Team& team,
                const SumResults<A>& results, cudaError_t* status) {
  using RowType = LoopRow<P, kV, kLayout, A, Op>;
  const int teams = TeamsOf<P>(team);
  const int64_t groups = layouts.groups.total, rows = layouts.rows.total, blocks = (rows + teams - 1) / teams;
  // Takes at most so many chunks that every block has rows. If the rows make at most four blocks, it takes one chunk,
  // because the second kernel, which adds the chunks, would take as long.
  SumResults<A> chunked = results;
  chunked.chunks = blocks <= 4 ? 1 : std::min(results.chunks, blocks);
  const int shared = std::max(RowType::SharedBytes(team, op.Inputs()), TeamSumBytes<RowType, Op::kSums>(team));
  const int64_t clusters =
      TeamsApart(teams, chunked.chunks, groups, rows) ? (groups + teams - 1) / teams : groups * chunked.chunks;
  const int cluster = ClusterOf<P>(team);
  const Grid grid = {clusters * cluster, ThreadsOf<P>(team), cluster, static_cast<size_t>(shared)};
  const auto kernel = RowSumsKernel<P, kV, kLayout, A, Op>;
  if (!ClustersFit(kernel, grid)) return false;
  *status = Launch(stream, kernel, grid, op, layouts.template To<LoopGeometry<kLayout, Op>>(team),
                   GroupsOf<Op::kSlots, kLayout>(layouts.groups), chunked);
  if (*status == cudaSuccess && chunked.chunks > 1) *status = LaunchAddChunks(stream, layouts, Op::kSumSlot, chunked);
  return true;
}

// The kernel for blocks that stay while rows go by, in one group.
template <class P, int kV, Layout kLayout, class A, class Op>
__global__ void __maxnreg__(P::kRegisters)
    PersistentKernel(const __grid_constant__ Op op, const __grid_constant__ LoopGeometry<kLayout, Op> geometry) {
  if constexpr (kRunsHere<P>) {
    using RowType = LoopRow<P, kV, kLayout, A, Op>;
    extern __shared__ __align__(16) char shared[];
    const int64_t rows = geometry.rows.total, teams = TeamsOf<P>(geometry.team);
    RowType row(geometry, shared, op.Inputs());
    const auto move = [&](RowType& row, int64_t first) { row.MoveToTeam(first, rows, {}); };
    LoopOverRows(row, op, ClusterOfBlock<P>(geometry.team) * teams, gridDim.x / ClusterOf<P>(geometry.team) * teams,
                 rows, move);
  }
}

// Launches the kernel in one wave of blocks; false if the device runs no such block.
template <class P, int kV, Layout kLayout, class A, class Op>
bool LaunchPersistent(cudaStream_t stream, const Op& op, const Layouts<Op::kSlots>& layouts, const Team& team,
                      cudaError_t* status) {
  using RowType = LoopRow<P, kV, kLayout, A, Op>;
  const auto kernel = PersistentKernel<P, kV, kLayout, A, Op>;
  const int cluster = ClusterOf<P>(team);
  Grid grid = {0, ThreadsOf<P>(team), cluster, static_cast<size_t>(RowType::SharedBytes(team, op.Inputs()))};
  const int64_t most = ResidentClusters(kernel, grid), teams = TeamsOf<P>(team);
  if (most == 0) return false;
  grid.blocks = std::min(most, (layouts.rows.total + teams - 1) / teams) * cluster;
  *status = Launch(stream, kernel, grid, op, layouts.template To<LoopGeometry<kLayout, Op>>(team));
  return true;
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_PERSISTENT_CUH_
