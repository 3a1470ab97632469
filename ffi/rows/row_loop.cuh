// Row kernels that also sum over the rows, column by column: one pass over the tensors gives the row results and each
// block's share of the sums, kept in registers until the block has done all its rows. Each thread fetches its own packs
// of the next rows into shared memory by asynchronous copies while it works on the present ones.
#ifndef JAXOPS_ROWS_ROW_LOOP_CUH_
#define JAXOPS_ROWS_ROW_LOOP_CUH_

#include "rows/column_sums.cuh"
#include "rows/launch.cuh"

namespace jaxops::rows {

// Rows that a team holds while it keeps up to two sums for each of its columns.
using RowLoopPlacements = Types<Along<8, 1, 2>,          //     64
                                Along<16, 1, 2>,         //    128
                                Along<16, 2>,            //    256
                                Along<32, 2>,            //    512
                                Along<64, 2>,            //   1024
                                Along<64, 4>,            //   2048
                                Along<256, 2, 1, 1, 2>,  //  4096
                                Along<512, 2>,           //   8192
                                Along<512, 2, 1, 2>,     //  16384
                                Along<512, 2, 1, 4>,     //  32768
                                Along<512, 2, 1, 8>,     //  65536
                                Along<512, 2, 1, 16>>;   // 131072
// All rows of a thread must begin at the same place in a pack: one row at a time.
using ShiftedRowLoopPlacements = Types<Along<8, 3>, Along<32, 2>, Along<64, 3>, Along<256, 3>, Along<512, 3>,
                                       Along<512, 2, 1, 4>, Along<512, 2, 1, 16>>;
using ShortRowLoopPlacements =
    Types<Along<32, 1>, Along<64, 2>, Along<512, 2>, Along<512, 2, 1, 4>, Along<512, 2, 1, 16>>;
using ElementRowLoopPlacements = Types<Along<256, 8>, Along<512, 8, 1, 16>>;

template <int kBytes>
__device__ void CopyAsync(void* shared, const void* source, int bytes) {
  const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(target), "l"(source), "r"(bytes), "n"(kBytes)
                 : "memory");
  }
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A row whose packs have been fetched into shared memory: [input][pack][thread], 16 bytes each.
template <class Base>
class FetchedRow : public Base {
 public:
  static constexpr int kStages = 2;
  static constexpr bool kFetches = Base::kV > 1;
  static constexpr int kPackStride = Base::P::kThreads * 16;
  static constexpr int kInputStride = Base::kHeldPacks * kPackStride;

  template <int kInputs>
  static constexpr int kStageStride = kFetches ? kInputs * kInputStride : 0;

  using Base::Base;

  // Where the present rows' packs are.
  __device__ void SetStage(char* stage) { stage_ = stage + threadIdx.x * 16; }

  // Turns to the rows of another; what joins the threads stays.
  __device__ void Follow(const FetchedRow& other) {
    stage_ = other.stage_;
    this->limit_ = other.limit_;
#pragma unroll
    for (int s = 0; s < Base::kStarts; ++s) {
      this->live_[s] = other.live_[s];
      this->shift_[s] = other.shift_[s];
#pragma unroll
      for (int slot = 0; slot < Base::kSlots; ++slot) this->offsets_[s][slot] = other.offsets_[s][slot];
    }
  }

  // Begins to fetch the present rows' packs of an input. Rows of single elements are not fetched but read when wanted.
  template <int kInput, class T>
  __device__ void Fetch(const T* tensor) const {
    if constexpr (kFetches) {
      this->ForEachPack([&](int pack, int column) {
        constexpr int kBytes = sizeof(T) * Base::kV;
        const int64_t offset = this->Offset(0, pack, column);
        int bytes = kBytes;
        if constexpr (Base::kShifted) {  // the tensor may end within the last row's last pack
          const int64_t left = (this->geometry_.size - offset) * int64_t{sizeof(T)};
          bytes = left < kBytes ? static_cast<int>(left) : kBytes;
        }
        CopyAsync<kBytes>(stage_ + kInput * kInputStride + pack * kPackStride, tensor + offset, bytes);
      });
    }
  }

  template <int kInput, class T>
  __device__ auto Load(const T* tensor, T outside = T(0.0f)) const {
    if constexpr (kFetches) {
      typename Base::template Held<T> held = {};
      this->ForEachPack([&](int pack, int column) {
        held.packs[pack] =
            *reinterpret_cast<const Pack<T, Base::kV>*>(stage_ + kInput * kInputStride + pack * kPackStride);
        this->Clip(held.packs[pack], column, outside);
      });
      return held;
    } else {
      return Base::template Load<kInput>(tensor, outside);
    }
  }

 private:
  char* stage_ = nullptr;
};

// A thread's sums over the rows it has seen, for the columns of its packs.
template <class Row, int kCount>
struct HeldSums {
  using A = typename Row::A;
  A values[kCount][Row::kPerRow][Row::kV] = {};

  // Adds expressions of the present rows.
  template <class... Es>
  __device__ void Add(const Row& row, const Es&... es) {
    row.ForEachPack([&](int pack, int column) {
      if (!row.live(pack)) return;
      int k = 0;
      const auto add = [&](const auto& value) {
#pragma unroll
        for (int i = 0; i < Row::kV; ++i) values[k][pack % Row::kPerRow][i] += value(i);
        ++k;
      };
      (add(es(pack, column)), ...);
    });
  }
};

template <class P, class A, int kV, int kCount>
inline constexpr int kTeamSumBytes =
    P::kTeams > 1 ? static_cast<int>(sizeof(A)) * kCount * P::kPacks * kV * P::kLanes : 0;

// Block (group, chunk) takes the rows chunk * kBlockRows + k * chunks * kBlockRows of its group, k = 0, 1, ...: in
// unaligned rows a stride that is a multiple of a pack keeps every thread on the same columns. With one chunk a group
// each team takes all rows of a group of its own.
// op(row, op.Parameters(row), op.Scalars(row), sums), where op.ForEachInput names what is fetched ahead.
template <class P, int kV, Lay kLay, class A, class Op>
__global__ void __launch_bounds__(P::kThreads, P::kMinBlocks)
    RowLoopKernel(const __grid_constant__ Op op, const __grid_constant__ Geometry<Op::kSlots> geometry,
                  const SumResults<A> results) {
  using RowType = FetchedRow<Row<P, kV, kLay, A, Geometry<Op::kSlots>>>;
  constexpr int kStride = RowType::template kStageStride<Op::kInputs>;
  extern __shared__ __align__(16) char shared[];
  const int64_t block = blockIdx.x / P::kCluster, end = geometry.rows.total;
  const bool one_chunk = results.chunks == 1;
  int64_t group = one_chunk ? block * P::kTeams + RowType::Team() : block / results.chunks;
  const bool idle = group >= geometry.groups.total;  // it repeats the last group and keeps nothing
  if (idle) group = geometry.groups.total - 1;
  const int64_t chunk = one_chunk ? 0 : block - group * results.chunks;
  const int64_t every = one_chunk ? 1 : P::kTeams, step = one_chunk ? P::kRows : results.chunks * RowType::kBlockRows;
  const int64_t team = one_chunk ? 0 : RowType::Team();
  const int64_t limit = idle ? 0 : end;
  int64_t group_offsets[Op::kSlots];
  geometry.groups.Offsets(group, group_offsets);

  RowType row(geometry);
  HeldSums<RowType, Op::kSums> sums;
  const auto move = [&](RowType& row, int64_t begin, int stage) {
    row.MoveTo(begin + team, every, end, group_offsets);
    row.SetStage(shared + stage * kStride);
    op.Narrow(row);
    op.ForEachInput([&]<int kInput>(const auto* tensor) { row.template Fetch<kInput>(tensor); });
  };
  int stage = 0;
  int64_t begin = chunk * RowType::kBlockRows;
  move(row, begin, stage);
  CommitCopies();
  const auto parameters = op.Parameters(row);  // the same for all these rows
  auto scalars = op.Scalars(row);
  for (; begin < end; begin += step) {
    RowType next = row;
    auto upcoming = scalars;
    if (begin + step < end) {
      move(next, begin + step, stage ^= 1);
      upcoming = op.Scalars(next);
    }
    CommitCopies();
    WaitForCopies<1>();
    op(row, parameters, scalars, sums);
    row.Follow(next);
    scalars = upcoming;
  }
  WaitForCopies<0>();

  // Where the sums lie: at the columns of the first rows. A team that has none adds zeros.
  row.MoveTo(chunk * RowType::kBlockRows + team, every, end, group_offsets);
  const auto for_each_sum = [&](const auto& visit) {
    row.ForEachPack([&](int pack, int column) {
      if (pack >= P::kPacks) return;  // a thread's rows have their sums together
#pragma unroll
      for (int i = 0; i < kV; ++i)
        if (row.Inside(column, i))
#pragma unroll
          for (int k = 0; k < Op::kSums; ++k) visit(k, column + i, sums.values[k][pack][i]);
    });
  };
  const bool linear = geometry.columns.count == 1;
  const auto write_result = [&](int k, int column, A value) {
    const int64_t offset =
        linear ? column * geometry.columns.strides[0][Op::kSumSlot] : geometry.ColumnOffset(Op::kSumSlot, column);
    if (results.results[k] && limit) results.results[k][group_offsets[Op::kSumSlot] + offset] = value;
  };
  const auto write_chunk = [&](int k, int column, A value) {
    if (results.results[k]) results.workspace[k * results.plane + block * geometry.columns.total + column] = value;
  };
  if (one_chunk) {
    for_each_sum(write_result);
  } else if constexpr (P::kTeams == 1) {
    for_each_sum(write_chunk);
  } else {
    A* const total = reinterpret_cast<A*>(shared);
    const int columns = row.columns();
    for (int turn = 0; turn < P::kTeams; ++turn) {  // one after the other: a fixed order
      __syncthreads();
      if (RowType::Team() != turn) continue;
      for_each_sum([&](int k, int column, A value) {
        A& target = total[k * columns + column];
        target = turn == 0 ? value : target + value;
      });
    }
    __syncthreads();
    for (int k = 0; k < Op::kSums; ++k)
      for (int column = threadIdx.x; column < columns; column += P::kThreads)
        write_chunk(k, column, total[k * columns + column]);
  }
}

template <class Placements, int kV, Lay kLay, class A, class Op>
bool LaunchRowLoopPlacement(cudaStream_t stream, const Op& op, const Geometry<Op::kSlots>& geometry,
                            const SumResults<A>& results, cudaError_t* status) {
  return First(
      Placements{}, false,
      [&]<class P> {
        // A shift that is the same in all rows of a thread.
        constexpr bool kShifted = kLay == Lay::kShifted;
        const int64_t step = results.chunks == 1 ? 1 : results.chunks * P::kTeams;
        bool constant = !kShifted || geometry.rows.total <= step;
        if (kShifted && geometry.rows.count == 1) constant = constant || step * geometry.rows.strides[0][0] % kV == 0;
        return constant && Fits<P, kV, kLay>(geometry.columns.total, true);
      },
      [&]<class P> {
        using RowType = FetchedRow<Row<P, kV, kLay, A, Geometry<Op::kSlots>>>;
        const int shared = std::max(RowType::kStages * RowType::template kStageStride<Op::kInputs>,
                                    kTeamSumBytes<P, A, kV, Op::kSums>);
        const int64_t groups = geometry.groups.total;
        const int64_t blocks = results.chunks == 1 ? (groups + P::kTeams - 1) / P::kTeams : groups * results.chunks;
        const Grid grid = {blocks * P::kCluster, P::kThreads, P::kCluster, static_cast<size_t>(shared)};
        *status = Launch(stream, RowLoopKernel<P, kV, kLay, A, Op>, grid, op, geometry, results);
        if (*status == cudaSuccess && results.chunks > 1)
          *status = LaunchAddChunks<Op::kSumSlot>(stream, geometry, results);
        return true;
      });
}

// Runs op(row, op.Parameters(row), sums) over the rows and puts the sums over each group's rows into the results. False
// if there is no placement for these tensors.
template <class T, class U, class Op, int kMore>
bool LaunchRowLoop(cudaStream_t stream, const Op& op, const RowShape<kMore>& shape,
                   const SumResults<Accumulator<T>>& results, cudaError_t* status) {
  using A = Accumulator<T>;
  if constexpr (!std::is_same_v<A, double>) {
    constexpr int kV = kPackOf<T, U>;
    constexpr bool kFull = std::is_same_v<T, U> && !std::is_same_v<T, __half>;
    using Packs = std::conditional_t<kFull, RowLoopPlacements, ShortRowLoopPlacements>;
    using ShiftedPacks = std::conditional_t<kFull, ShiftedRowLoopPlacements, ShortRowLoopPlacements>;
    const Geometry<Op::kSlots> geometry(shape, kV, Op::kBroadcasts);
    bool done = false;
    if (!shape.across && geometry.plain) {
      done = LaunchRowLoopPlacement<Packs, kV, Lay::kPlain, A>(stream, op, geometry, results, status);
    } else if (!shape.across && shape.columns.count == 1) {
      done = LaunchRowLoopPlacement<ShiftedPacks, kV, Lay::kShifted, A>(stream, op, geometry, results, status);
    }
    if (done) return true;
  }
  const Geometry<Op::kSlots> elements(shape, 1, Op::kBroadcasts);
  return LaunchRowLoopPlacement<ElementRowLoopPlacements, 1, Lay::kGeneral, A>(stream, op, elements, results, status);
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_ROW_LOOP_CUH_
