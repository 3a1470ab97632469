// Row kernels whose blocks stay and take one row after the other: each thread fetches its own packs of the next rows
// into shared memory by asynchronous copies while it works on the present ones. Parameters that all rows share are read
// once; and one pass over the tensors also gives each block's share of sums over the rows, column by column, kept in
// registers until the block has done all its rows.
#ifndef JAXOPS_ROWS_ROW_LOOP_CUH_
#define JAXOPS_ROWS_ROW_LOOP_CUH_

#include "rows/column_sums.cuh"
#include "rows/fetched_row.cuh"
#include "rows/launch.cuh"

namespace jaxops::rows {

// Rows that a team holds while it keeps up to two sums for each of its columns; the comments as in rows/launch.cuh. Few
// threads with many registers are faster than many with few.
template <int kSums>
using SumPlacements16 =
    Types<Looped<Along<8, 1, 2>, 2>,                //     64
          Looped<Along<16, 1, 2>, 2>,               //    128
          Looped<Along<32, 1, 2>, 2>,               //    256
          Looped<Along<32, 2>, 2>,                  //    512
          Looped<Along<32, 3, 1, 1, 3>, 2>,         //    768
          Looped<Along<64, 2>, 2>,                  //   1024
          Looped<Along<64, 4>, 2>,                  //   2048
          Looped<Along<256, 2, 1, 1, 2>, 3>,        //   4096
          Looped<Along<256, 3, 1, 1, 2>, 2, true>,  //   6144
          Looped<Along<512, 2>, 2>,                 //   8192
          Looped<Along<256, 4, 1, 2>, 4>,           //  16384
          Looped<Along<256, 4, 1, 4>, 4>,           //  32768
          Looped<Along<256, 4, 1, 8>, 4>,           //  65536
          Looped<Along<256, 4, 1, 16>, 4>,          // 131072
          // 262144: there are registers for one sum a column and the parameters
          std::conditional_t<kSums == 1, Looped<Along<256, 8, 1, 16>, 3>, Looped<Along<256, 8, 1, 16>, 2, true>>,
          // for devices without clusters, and where a third input leaves too little shared memory
          Looped<Along<512, 4>, 2, true>, Looped<Along<512, 2, 1, 16>, 2>>;
using SumPlacements32 = Types<Looped<Along<8, 1, 4>, 2>,                //     32
                              Looped<Along<16, 1, 4>, 2>,               //     64
                              Looped<Along<16, 2, 2>, 2>,               //    128
                              Looped<Along<32, 2>, 2>,                  //    256
                              Looped<Along<64, 2>, 2>,                  //    512
                              Looped<Along<64, 4>, 2>,                  //   1024
                              Looped<Along<256, 2, 1, 1, 2>, 2>,        //   2048
                              Looped<Along<256, 3, 1, 1, 2>, 2, true>,  //   3072
                              Looped<Along<512, 2>, 3>,                 //   4096
                              Looped<Along<512, 3>, 2>,                 //   6144
                              Looped<Along<512, 4>, 2, true>,           //   8192
                              Looped<Along<256, 8, 1, 2>, 3>,           //  16384
                              Looped<Along<256, 8, 1, 4>, 3>,           //  32768
                              Looped<Along<256, 8, 1, 8>, 3>,           //  65536
                              Looped<Along<256, 8, 1, 16>, 3>,          // 131072
                              Looped<Along<512, 2, 1, 4>, 2>, Looped<Along<512, 2, 1, 16>, 2>,
                              Looped<Along<256, 16, 1, 16>, 1, true>>;  // 262144
template <class T, int kSums>
using SumPlacements = std::conditional_t<sizeof(T) == 2, SumPlacements16<kSums>, SumPlacements32>;
// Unaligned rows. Few threads with many elements: what a thread does for a row, however many it has of it, is a quarter
// of the work.
template <int kBytes>
using MiddleStagedSums = Types<Staged<Along<32, 33, 1, 1, 2>, kBytes, 3, 16>,          //   1056
                               Staged<Along<64, 33, 1, 1, 2>, kBytes, 3, 16>,          //   2112
                               Staged<Along<128, 33, 1, 1, 2>, kBytes, 3, 16>,         //   4224
                               Staged<Along<256, 33>, kBytes, 3, 16>>;                 //   8448
using StagedSumPlacements16 = Joined<Types<Staged<Along<8, 16, 1, 1, 4>, 2, 3, 7>,     //    128
                                           Staged<Along<8, 32, 1, 1, 2>, 2, 3, 16>,    //    256
                                           Staged<Along<16, 33, 1, 1, 2>, 2, 3, 16>>,  //    528
                                     MiddleStagedSums<2>,
                                     Types<Staged<Along<128, 33, 1, 4, 2>, 2, 3, 15, false>,   //  16896
                                           Staged<Along<128, 40, 1, 4, 2>, 2, 3, 32, false>,   //  20480
                                           Staged<Along<128, 33, 1, 8, 2>, 2, 3, 18, false>,   //  33792
                                           Staged<Along<128, 50, 1, 8, 2>, 2, 3, 31, false>,   //  51200
                                           Staged<Along<128, 33, 1, 16, 2>, 2, 3, 21, false>,  //  67584
                                           Staged<Along<128, 50, 1, 16, 2>, 2, 3, 29, false>,  // 102400
                                           Staged<Along<256, 33, 1, 16>, 2, 3, 23, false>,     // 135168
                                           Staged<Along<256, 64, 1, 16>, 2, 3, 31, false>>>;   // 262144
using StagedSumPlacements32 = Joined<Types<Staged<Along<16, 8>, 4, 3, 4>,                      //    128
                                           Staged<Along<16, 16>, 4, 3, 8>,                     //    256
                                           Staged<Along<32, 16>, 4, 3, 8>>,                    //    512
                                     MiddleStagedSums<4>,
                                     Types<Staged<Along<128, 25, 1, 4, 3>, 4, 3, 15, false>,   //  12800
                                           Staged<Along<128, 20, 1, 8, 3>, 4, 3, 10, false>,   //  20480
                                           Staged<Along<128, 33, 1, 8, 2>, 4, 3, 18, false>,   //  33792
                                           Staged<Along<128, 25, 1, 16, 3>, 4, 3, 12, false>,  //  51200
                                           Staged<Along<128, 33, 1, 16, 2>, 4, 3, 21, false>,  //  67584
                                           Staged<Along<256, 25, 1, 16>, 4, 3, 14, false>,     // 102400
                                           Staged<Along<256, 33, 1, 16>, 4, 3, 23, false>>>;   // 135168
static_assert(WithoutGaps(StagedSumPlacements16()) && WithoutGaps(StagedSumPlacements32()));
template <class T>
using StagedSumPlacements = std::conditional_t<sizeof(T) == 2, StagedSumPlacements16, StagedSumPlacements32>;
// What these leave: short rows, and where a third input leaves too little shared memory. All rows of a thread must
// begin at the same place in a pack: one row at a time.
using ShiftedSumPlacements = Types<Looped<Along<8, 3>, 2>,                      //    185
                                   Looped<Along<32, 2>, 2>,                     //    505
                                   Looped<Along<128, 5>, 2, false, true>,       //   5113
                                   Looped<Along<512, 4, 1, 8>, 2, true, true>,  // 131065
                                   Looped<Along<512, 2, 1, 16>, 2>>;
using ShortSumPlacements =
    Types<Looped<Along<8, 2>, 2>, Looped<Along<64, 2>, 2>, Looped<Along<128, 2>, 2>, Looped<Along<512, 2>, 2>,
          Looped<Along<512, 4>, 2, true>, Looped<Along<512, 2, 1, 16>, 2>>;
using ElementSumPlacements =
    Types<Looped<Along<4, 8>, 2>, Looped<Along<32, 8>, 2>, Looped<Along<256, 8>, 2>, Looped<Along<512, 8, 1, 16>, 2>>;
template <class P, int kStages, bool kShared, bool kKept>
inline constexpr bool kPortable<Looped<P, kStages, kShared, kKept>> =
    kIsOneOf<Looped<P, kStages, kShared, kKept>, Looped<Along<16, 2, 2>, 2>, Looped<Along<64, 4>, 2>,
             Looped<Along<64, 2>, 2>, Looped<Along<128, 5>, 2, false, true>, Looped<Along<512, 4>, 2, true>,
             Looped<Along<512, 2, 1, 16>, 2>, Looped<Along<256, 8>, 2>, Looped<Along<512, 8, 1, 16>, 2>>;

// op(row, op.Parameters(row), op.Scalars(row), sums...) for the rows begin, begin + step, ... below end, which
// move(row, first) turns to. op.ForEachInput names what is fetched ahead. With P::kAhead in two halves, op.Begin and
// op.End: what threads send each other for a row travels while they finish the one before it.
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
  for (int k = 0; k < std::max(kStages - 1, 1); ++k) fetch(ahead, begin + k * step, k);
  if constexpr (kStages == 1) {
    op.ForEachInput([&]<int kInput>(const auto& tensor) { row.template SetInput<kInput>(tensor); });
  }
  move(row, begin);
  const auto parameters = op.Parameters(row);
  if constexpr (RowType::P::kAhead) {
    if (begin >= end) return;
    const auto begin_row = [&](RowType& row, int stage, const auto& scalars) {
      row.SetStage(stage);
      return op.Begin(row, parameters, scalars, sums...);
    };
    // Of the present row, the next, and the one behind it; outside the rows, of the first again.
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
      if constexpr (kStages > 1) fetch(ahead, begin + (kStages - 1) * step, stage == 0 ? kStages - 1 : stage - 1);
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
      if constexpr (kStages == 1) row.SetNext(next.Origin(0) - row.Origin(0));
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

// A thread's sums over the rows it has seen, for the columns of its packs.
template <class Row, int kCount>
struct HeldSums {
  using A = typename Row::A;
  A values[kCount][Row::kPerRow][Row::kV] = {};

  // Adds one pack of expressions of the present rows.
  template <class... Es>
  __device__ void AddPack(const Row& row, int pack, int column, const Es&... es) {
    if (!Row::kPadded && !row.live(pack)) return;
    int k = 0;
    const auto add = [&](const auto& value) {
#pragma unroll
      for (int i = 0; i < Row::kV; ++i) values[k][pack % Row::kPerRow][i] += value(i);
      ++k;
    };
    (add(es(pack, column)), ...);
  }
};

template <class Row, int kCount>
inline constexpr int kTeamSumBytes =
    Row::P::kTeams > 1
        ? static_cast<int>(sizeof(typename Row::A)) * kCount * Row::P::kPacks * Row::kV * Row::P::kThreads
        : 0;

// Block (group, chunk) takes the rows chunk * kBlockRows + k * chunks * kBlockRows of its group, k = 0, 1, ...: in
// unaligned rows a stride that is a multiple of a pack keeps every thread on the same columns. Where the teams are
// apart each takes all rows of a group of its own, and nothing is added through shared memory: with one chunk a group,
// and so many groups that they make more blocks than there are at once, however many rows those have.
template <class P>
__host__ __device__ bool TeamsApart(int64_t chunks, int64_t groups, int64_t rows) {
  return chunks == 1 && groups >= kManyBlocks * std::min<int64_t>(rows, 4 * P::kTeams);
}
template <int kSlots, Lay kLay>
using GroupsOf = Axes<kSlots, GeometryOf<kSlots, kLay>::kRowAxes>;

// Rows of adjacent elements, without broadcast operands or with the same for all of them, lie at even distances: where
// one begins costs a product.
template <class P, Lay kLay, class Op>
using LoopGeometry = std::conditional_t<kLay == Lay::kGeneral, GeometryOf<Op::kSlots, kLay>,
                                        Geometry<Op::kSlots, 1, 1, /*kCopied=*/Op::kInputs == 2>>;
template <class P, int kV, Lay kLay, class A, class Op>
using LoopRow = std::conditional_t<
    P::kStaged, StagedRow<Row<P, kV, kLay, A, LoopGeometry<P, kLay, Op>, /*kPadded=*/true>, Op::kParameters>,
    FetchedRow<Row<P, kV, kLay, A, LoopGeometry<P, kLay, Op>, kLay == Lay::kPlain && Op::kPadded && (P::kPacks > 0)>,
               Op::kParameters>>;

template <class P, int kV, Lay kLay, class A, class Op>
__device__ __forceinline__ void SumRows(const Op& op, const LoopGeometry<P, kLay, Op>& geometry,
                                        const GroupsOf<Op::kSlots, kLay>& groups, const SumResults<A>& results) {
  using RowType = LoopRow<P, kV, kLay, A, Op>;
  extern __shared__ __align__(16) char shared[];
  const int64_t block = blockIdx.x / P::kCluster, end = geometry.rows.total;
  const bool apart = TeamsApart<P>(results.chunks, groups.total, end);
  int64_t group = apart ? block * P::kTeams + RowType::Team() : block / results.chunks;
  const bool idle = group >= groups.total;  // it repeats the last group and keeps nothing
  if (idle) group = groups.total - 1;
  const int64_t chunk = apart ? 0 : block - group * results.chunks;
  const int64_t every = apart ? 1 : P::kTeams, step = apart ? P::kRows : results.chunks * RowType::kBlockRows;
  const int64_t team = apart ? 0 : RowType::Team();
  int64_t group_offsets[Op::kSlots];
  groups.Offsets(group, group_offsets);

  RowType row(geometry, shared, op.Inputs());
  HeldSums<RowType, Op::kSums> sums;
  const auto move = [&](RowType& row, int64_t begin) { row.MoveTo(begin + team, every, end, group_offsets); };
  LoopOverRows(row, op, chunk * RowType::kBlockRows, step, end, move, sums);

  // Where the sums lie: at the columns of the first rows. A team that has none adds zeros.
  row.MoveTo(chunk * RowType::kBlockRows + team, every, end, group_offsets);
  const auto for_each_sum = [&](const auto& visit) {
    row.ForEachPackInside([&](int pack, int column) {
      if (pack >= P::kPacks) return;  // a thread's rows have their sums together
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
  if (apart || P::kTeams == 1) {
    for_each_sum(write);
  } else {
    A* const of_teams = reinterpret_cast<A*>(shared);  // [team][sum][column]
    const int columns = row.columns(), stride = Op::kSums * columns;
    __syncthreads();
    for_each_sum(
        [&](int k, int column, A value) { of_teams[RowType::Team() * stride + k * columns + column] = value; });
    __syncthreads();
    for (int k = 0; k < Op::kSums; ++k)
      for (int column = threadIdx.x; column < columns; column += P::kThreads) {
        A total = of_teams[k * columns + column];
        for (int team = 1; team < P::kTeams; ++team) total += of_teams[team * stride + k * columns + column];
        write(k, column, total);
      }
  }
}
template <class P, int kV, Lay kLay, class A, class Op>
__global__ void __launch_bounds__(P::kThreads, kMinBlocksHere<P>)
    RowSumsKernel(const __grid_constant__ Op op, const __grid_constant__ LoopGeometry<P, kLay, Op> geometry,
                  const __grid_constant__ GroupsOf<Op::kSlots, kLay> groups,
                  const __grid_constant__ SumResults<A> results) {
  if constexpr (kRunsHere<P>) SumRows<P, kV, kLay, A>(op, geometry, groups, results);
}

template <class P, int kV, Lay kLay, class A, class Op>
bool LoopFits(const Op& op, const Layouts<Op::kSlots>& layouts, int capability) {
  return layouts.template Fit<LoopGeometry<P, kLay, Op>>() &&
         LoopRow<P, kV, kLay, A, Op>::SharedBytes(op.Inputs()) <= MostDynamicShared() &&
         Fits<P, kV, kLay>(layouts.columns.total, capability);
}

template <class Placements, int kV, Lay kLay, class A, class Op>
bool LaunchSumPlacement(cudaStream_t stream, const Op& op, const Layouts<Op::kSlots>& layouts,
                        const SumResults<A>& results, cudaError_t* status) {
  // Parameters are read once for all of a team's rows, which are of one group.
  if (layouts.groups.count > GroupsOf<Op::kSlots, kLay>::kMost || !layouts.GroupedRowsAlike(Op::kBroadcasts)) {
    return false;
  }
  const int capability = CompiledCapability();
  const int64_t groups = layouts.groups.total, rows = layouts.rows.total;
  // Whether the shift is the same in all rows of a thread.
  const auto constant = [&]<class P>(int64_t chunks) {
    const int64_t step = TeamsApart<P>(chunks, groups, rows) ? 1 : chunks * P::kTeams;
    return kLay != Lay::kShifted || rows <= step ||
           (layouts.rows.count == 1 && step * layouts.rows.strides[0][0] % kV == 0);
  };
  // At most as many chunks as leave every block rows; and one where there are at most four blocks of rows, as the
  // second kernel, which adds the chunks, would take as long.
  const auto chunks_of = [&]<class P> {
    constexpr int kBlockRows = LoopRow<P, kV, kLay, A, Op>::kBlockRows;
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
    return blocks <= 4 && constant.template operator()<P>(1) ? 1 : std::min(results.chunks, blocks);
  };
  return First(
      Placements{}, false,
      [&]<class P> {
        // However few the rows are: groups and chunks make the blocks.
        return constant.template operator()<P>(chunks_of.template operator()<P>()) &&
               LoopFits<P, kV, kLay, A>(op, layouts, capability);
      },
      [&]<class P> {
        using RowType = LoopRow<P, kV, kLay, A, Op>;
        const int shared = std::max(RowType::SharedBytes(op.Inputs()), kTeamSumBytes<RowType, Op::kSums>);
        SumResults<A> chunked = results;
        chunked.chunks = chunks_of.template operator()<P>();
        const bool apart = TeamsApart<P>(chunked.chunks, groups, rows);
        const int64_t blocks = apart ? (groups + P::kTeams - 1) / P::kTeams : groups * chunked.chunks;
        const Grid grid = {blocks * P::kCluster, P::kThreads, P::kCluster, static_cast<size_t>(shared)};
        *status = Launch(stream, RowSumsKernel<P, kV, kLay, A, Op>, grid, op,
                         layouts.template To<LoopGeometry<P, kLay, Op>>(), GroupsOf<Op::kSlots, kLay>(layouts.groups),
                         chunked);
        if (*status == cudaSuccess && chunked.chunks > 1) {
          *status = LaunchAddChunks(stream, layouts, Op::kSumSlot, chunked);
        }
        return true;
      });
}

// Runs op, or single (see LaunchRows), over the rows and puts the sums over each group's rows into the results. False
// if there is no placement for these tensors, or the op's parameters change along the rows of a group.
template <class T, class U, class Op, class SingleOp, int kMore>
bool LaunchRowSums(cudaStream_t stream, const Op& op, const SingleOp& single, const RowShape<kMore>& shape,
                   const SumResults<Accumulator<T>>& results, cudaError_t* status) {
  using A = Accumulator<T>;
  static_assert(Op::kSlots == SingleOp::kSlots && Op::kBroadcasts == SingleOp::kBroadcasts);
  const Layouts<Op::kSlots> elements(shape, 1, Op::kBroadcasts);
  if constexpr (!std::is_same_v<T, double>) {
    constexpr int kV = kPackOf<T, U>;
    using Packs = std::conditional_t<kTuned<T, U>, SumPlacements<T, Op::kSums>, ShortSumPlacements>;
    using ShiftedPacks = std::conditional_t<kTuned<T, U>, ShiftedSumPlacements, ShortSumPlacements>;
    const Layouts<Op::kSlots> layouts(shape, kV, Op::kBroadcasts);
    bool done = false;
    if (layouts.plain) {
      done = LaunchSumPlacement<Packs, kV, Lay::kPlain, A>(stream, op, layouts, results, status);
    } else if (shape.columns.count == 1) {
      if constexpr (kTuned<T, U>) {
        done = elements.plain &&
               LaunchSumPlacement<StagedSumPlacements<T>, 1, Lay::kPlain, A>(stream, op, elements, results, status);
      }
      // A multiple of a pack's elements keeps each thread on the same columns.
      SumResults<A> fewer = results;
      if (fewer.chunks > kV) fewer.chunks -= fewer.chunks % kV;
      done = done || LaunchSumPlacement<ShiftedPacks, kV, Lay::kShifted, A>(stream, op, layouts, fewer, status);
    }
    if (done) return true;
  }
  return LaunchSumPlacement<ElementSumPlacements, 1, Lay::kGeneral, A>(stream, single, elements, results, status);
}

// Blocks that stay while rows go by, in one group.
template <class P, int kV, Lay kLay, class A, class Op>
__global__ void __launch_bounds__(P::kThreads, kMinBlocksHere<P>)
    RowStreamKernel(const __grid_constant__ Op op, const __grid_constant__ LoopGeometry<P, kLay, Op> geometry) {
  if constexpr (kRunsHere<P>) {
    using RowType = LoopRow<P, kV, kLay, A, Op>;
    extern __shared__ __align__(16) char shared[];
    const int64_t rows = geometry.rows.total, cluster = blockIdx.x / P::kCluster, clusters = gridDim.x / P::kCluster;
    RowType row(geometry, shared, op.Inputs());
    const auto move = [&](RowType& row, int64_t first) { row.MoveToTeam(first, rows, {}); };
    LoopOverRows(row, op, cluster * RowType::kBlockRows, clusters * RowType::kBlockRows, rows, move);
  }
}

// False if no placement suits: none that holds the rows, or so few rows that nothing would be kept.
template <class Placements, int kV, Lay kLay, class A, class Op>
bool LaunchStreamPlacement(cudaStream_t stream, const Op& op, const Layouts<Op::kSlots>& layouts, cudaError_t* status) {
  const int64_t rows = layouts.rows.total;
  const int capability = CompiledCapability();
  return First(
      Placements{}, false,
      [&]<class P> {
        return SuitsRows<P>(rows, layouts.rows_alike) && LoopFits<P, kV, kLay, A>(op, layouts, capability);
      },
      [&]<class P> {
        using RowType = LoopRow<P, kV, kLay, A, Op>;
        const auto kernel = RowStreamKernel<P, kV, kLay, A, Op>;
        Grid grid = {0, P::kThreads, P::kCluster, static_cast<size_t>(RowType::SharedBytes(op.Inputs()))};
        static PerDevice resident[4];  // with so many inputs
        int64_t clusters = resident[op.Inputs()].Get([&] { return ResidentClusters(kernel, grid); });
        if (kLay == Lay::kShifted) {  // a thread's rows must begin at the same place in a pack
          int64_t alike = 1;
          while (alike * P::kTeams * layouts.rows.strides[0][0] % kV) ++alike;
          clusters -= clusters % alike;
        }
        if (clusters == 0 || rows < 2 * clusters * RowType::kBlockRows) return false;
        grid.blocks = clusters * P::kCluster;
        *status = Launch(stream, kernel, grid, op, layouts.template To<LoopGeometry<P, kLay, Op>>());
        return true;
      });
}

// The longest unaligned rows of a forward pass, from 67585 columns of kBytes each.
template <int kBytes>
using LongStaged = Types<Staged<Along<128, 50, 1, 16, 2>, kBytes, 3, 29>,  // 102400
                         Staged<Along<128, 66, 1, 16, 2>, kBytes, 3, 46>,  // 135168
                         Staged<Along<256, 64, 1, 16>, kBytes, 3, 31>>;    // 262144

// Runs op over rows of adjacent elements in one wave of blocks; false where LaunchRows should. Tables::kFewColumns:
// up to so many, a kernel that holds a row and ends is as fast.
template <class Tables, class T, class U, class Op, int kMore>
bool LaunchRowStream(cudaStream_t stream, const Op& op, const RowShape<kMore>& shape, cudaError_t* status) {
  if constexpr (kTuned<T, U>) {
    using A = Accumulator<T>;
    constexpr int kV = kPackOf<T, U>;
    if (shape.across) return false;
    const Layouts<Op::kSlots> layouts(shape, kV, Op::kBroadcasts);
    if (!layouts.rows_alike) return false;
    if (layouts.plain) {
      return shape.columns.total > Tables::kFewColumns &&
             LaunchStreamPlacement<typename Tables::Plain, kV, Lay::kPlain, A>(stream, op, layouts, status);
    }
    if (shape.columns.count > 1 || shape.columns.total <= kShortColumns) return false;
    static_assert(WithoutGaps(typename Tables::Staged()));
    const Layouts<Op::kSlots> elements(shape, 1, Op::kBroadcasts);
    return (elements.plain &&
            LaunchStreamPlacement<typename Tables::Staged, 1, Lay::kPlain, A>(stream, op, elements, status)) ||
           LaunchStreamPlacement<typename Tables::Shifted, kV, Lay::kShifted, A>(stream, op, layouts, status);
  }
  return false;
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_ROW_LOOP_CUH_
