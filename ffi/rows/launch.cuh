// Turns a plan (rows/plan.h) into template arguments and launches that kernel. A ladder is a table in rows/tuning.h.
#ifndef JAXOPS_ROWS_LAUNCH_CUH_
#define JAXOPS_ROWS_LAUNCH_CUH_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "rows/persistent.cuh"

namespace jaxops::rows {

template <class T>
inline constexpr Elements kElementsOf = std::is_same_v<T, double>          ? Elements::kFloat64
                                        : std::is_same_v<T, float>         ? Elements::kFloat32
                                        : std::is_same_v<T, __nv_bfloat16> ? Elements::kBfloat16
                                        : std::is_same_v<T, __half>        ? Elements::kFloat16
                                                                           : Elements::kAny;
template <class T>
inline constexpr bool kTuned = kElementsOf<T> == Elements::kBfloat16 || kElementsOf<T> == Elements::kFloat32;

// The most registers for an op's kernels.
template <class T, class Op>
struct RegistersOf {
  static constexpr bool kWide = sizeof(T) > 2;
  static constexpr bool kF32 = Op::kAsF32 || kElementsOf<T> == Elements::kAny;
  static constexpr int Held(int packs, bool cluster) {
    if (kElementsOf<T> == Elements::kAny) return kAnyRegisters[Op::kInputs - 1];
    if (Op::kOptions == Options::kMasks && !kWide) return kMasks16Registers;
    if (Op::kInputs == 2 && Op::kOptions != Options::kNone && !kWide) return kTwoAsF32Registers;
    if (kF32 || Op::kOptions != Options::kNone) return kAsF32Registers;
    const Limits& limits = Op::kInputs == 2       ? kTwoInputRegisters[kWide]
                           : Op::kParameters == 0 ? kOneInputRegisters
                                                  : kParameterRegisters;
    if (Op::kInputs == 2 && cluster)
      return kTwoInputClusterRegisters[kWide] + (kWide && Op::kSlots > 1 ? kRowValueRegisters : 0);
    return packs <= 2 ? limits.two : packs <= 4 ? limits.four : limits.eight;
  }
  static constexpr int Shifted(int packs) {
    return kF32 ? kAnywhereRegisters : kShiftedRegisters[Op::kInputs == 2][packs > 4];
  }
  static constexpr int Singles(int) { return kElementRegisters; }
  static constexpr int Tiles(int packs) {
    return kElementsOf<T> == Elements::kAny ? 128 : kTileRegisters[kWide][packs > 8 || (Op::kInputs == 2 && packs > 4)];
  }
};

// The threads that share a row in a kernel.
template <Kernel kKernel>
inline constexpr Sharing kSharingOf = kKernel == Kernel::kWarpRows    ? Sharing::kWarp
                                      : kKernel == Kernel::kBlockRows ? Sharing::kBlock
                                                                      : Sharing::kCluster;

template <Sharing kSharing>
inline constexpr Kernel kKernelOf = kSharing == Sharing::kWarp    ? Kernel::kWarpRows
                                    : kSharing == Sharing::kBlock ? Kernel::kBlockRows
                                                                  : Kernel::kClusterRows;

// Describes the tensors and the op for the planner.
template <class T, class Op, class Packs, class SingleElements>
RowProblem ProblemOf([[maybe_unused]] const Op& op, const Packs& packs, const SingleElements& elements, bool across,
                     bool aligned) {
  constexpr int kAxes = GeometryOf<Op::kSlots, Layout::kPlain>::kRowAxes;
  const bool few_axes = packs.rows.count <= kAxes;
  bool stays = false;
  if constexpr (RowOpThatStays<Op>) stays = packs.rows_alike && packs.rows.count == 1 && op.MayStay();
  // Where a tensor begins within a vector, kernels for single elements in any layout read them all.
  return {.rows = packs.rows.total,
          .columns = packs.columns.total,
          .elements = kElementsOf<T>,
          .across = across,
          .packs = aligned && packs.plain && few_axes,
          .aligned_packs = aligned && packs.aligned,
          .single_elements = aligned && elements.plain && few_axes,
          .one_axis = aligned && packs.columns.count == 1 && few_axes,
          .one_row_axis = packs.rows.count == 1,
          .alike = stays,
          .inputs = Op::kInputs,
          .parameters = Op::kParameters,
          .options = Op::kOptions,
          .as_f32 = Op::kAsF32};
}

inline Team TeamOf(const RowPlan& plan, int width = 0) {
  const int threads = width ? width * plan.lanes : plan.lanes;
  return {.lanes = plan.lanes,
          .shift = static_cast<int>(std::bit_width(static_cast<unsigned>(plan.lanes)) - 1),
          .warps = std::max(threads / 32, 1),
          .cluster = plan.cluster};
}

// Runs op(row) for every row of T's tensors by kernels for the op's own dtype. False if the device cannot run the
// plan's cluster.
template <class T, class Op>
class Launcher {
 public:
  using A = Accumulator<T>;
  using Registers = RegistersOf<T, Op>;
  static constexpr int kPack = PackOf(kElementsOf<T>, false), kPackAcross = PackOf(kElementsOf<T>, true);
  static constexpr int kFew = kFewPacks[Op::kInputs - 1];
  // Whether these kernels take single elements in any layout; they serve all dtypes.
  static constexpr bool kAnywhere = std::is_same_v<T, AnyFloat> || std::is_same_v<T, double>;
  static constexpr Ladder kHeld = HeldLadder(kElementsOf<T>, Op::kInputs, Op::kParameters, Op::kOptions, Op::kAsF32);

  Launcher(cudaStream_t stream, const Op& op, cudaError_t* status) : stream_(stream), op_(op), status_(status) {}

  // Runs packs, and single elements if T's own kernels read them.
  bool Along(const RowPlan& plan, const Layouts<Op::kSlots>& layouts) const {
    if constexpr (Op::kOptions == Options::kMasks) return Ladders<kPack, false, 4, 8>(plan, layouts);
    if (plan.elements) {
      if (plan.layout == Layout::kGeneral) {
        if constexpr (kAnywhere) return General<1, 8>(plan, layouts);
        return false;
      }
      if constexpr (std::is_same_v<T, AnyFloat> || (Op::kOptions == Options::kNone && !Op::kAsF32))
        return Ladders<1, true, 8, 16>(plan, layouts);
      return false;
    }
    if constexpr (kPack > 1) {
      if (plan.layout == Layout::kShifted) {
        bool done = false;
        if constexpr (Op::kOptions == Options::kNone && !Op::kAsF32 && (!kTuned<T> || Op::kParameters == 0)) {
          VisitLadder<2, 3, 4, 5, 8>(ShiftedTable(), plan, [&]<Sharing kSharing, int kCount> {
            done =
                Run<rows::Along<kSharing, kCount, Registers::Shifted(kCount)>, kPack, Layout::kShifted>(plan, layouts);
          });
        }
        return done;
      }
      if (plan.layout == Layout::kGeneral) {
        if constexpr (kTuned<T> && Op::kOptions == Options::kNone)
          return General<kPack, kSeveralAxes[0].packs>(plan, layouts);
        return false;
      }
      return Held(plan, layouts);
    }
    return false;
  }
  // Runs packs in rows that are held.
  bool Held(const RowPlan& plan, const Layouts<Op::kSlots>& layouts) const {
    return Ladders<kPack, false, 2, 3, 4, 8>(plan, layouts);
  }

  bool Streamed(const RowPlan& plan, const Layouts<Op::kSlots>& layouts) const {
    using P = rows::Along<Sharing::kBlock, 0, kStreamedRegisters, kStreamedLanes>;
    if (plan.elements) {
      if constexpr (kAnywhere) return Run<P, 1, Layout::kGeneral>(plan, layouts);
      return false;
    }
    if constexpr (kPack > 1 && Op::kOptions == Options::kNone && !Op::kAsF32) {
      return Run<P, kPack, Layout::kShifted>(plan, layouts);
    }
    return false;
  }

  bool Across(const RowPlan& plan, const Layouts<Op::kSlots>& layouts) const {
    if (plan.elements) {
      if constexpr (kAnywhere) {
        if constexpr (std::is_same_v<T, double>) {
          return Tiles<1, Layout::kGeneral>(plan, layouts);
        } else {
          return plan.layout == Layout::kGeneral ? Tiles<1, Layout::kGeneral, 8>(plan, layouts)
                                                 : Tiles<1, Layout::kPlain, 8>(plan, layouts);
        }
      }
      return false;
    }
    if constexpr (kPackAcross > 1 && !Op::kAsF32 && (Op::kOptions == Options::kNone || !kTuned<T>)) {
      if constexpr (Op::kOptions == Options::kNone && Op::kParameters == 0 && kTuned<T>) {
        if (plan.lanes <= 4) return RunTiles<32, 4, kPackAcross, Layout::kPlain, 128>(plan, layouts);
      }
      return Tiles<kPackAcross, Layout::kPlain, 4, 8, 16>(plan, layouts);
    }
    return false;
  }

  bool Persistent(const RowPlan& plan, const Layouts<Op::kSlots>& layouts) const {
    bool done = false;
    ForPacks<4, 8, 16>([&]<int kPacks> {
      if constexpr (HasPacks(PersistentLadder(kElementsOf<T>, Op::kParameters), kPacks)) {
        constexpr int kLimit = kPacks > 4 && Op::kParameters ? kPersistentParameterRegisters : kPersistentRegisters;
        using P = Looped<rows::Along<Sharing::kCluster, kPacks, kLimit>, 3, false, Op::kParameters == 0>;
        if (plan.packs == kPacks)
          done = LaunchPersistent<P, kPack, Layout::kPlain, A>(stream_, op_, layouts, TeamOf(plan), status_);
      }
    });
    return done;
  }

  bool StagedRows(const RowPlan& plan, const Layouts<Op::kSlots>& layouts) const {
    bool done = false;
    VisitStaged<false>(plan, [&]<class P> {
      done =
          LaunchPersistent<Staged<P, sizeof(T), 3>, 1, Layout::kPlain, A>(stream_, op_, layouts, TeamOf(plan), status_);
    });
    return done;
  }

  // Runs kernels with sums over the rows.
  bool Sums(const RowPlan& plan, const Layouts<Op::kSlots>& layouts, const SumResults<A>& results) const {
    bool done = false;
    const auto launch = [&]<class P, int kV, Layout kLayout> {
      done = LaunchSums<P, kV, kLayout, A>(stream_, op_, layouts, TeamOf(plan), results, status_);
    };
    if (plan.kernel == Kernel::kStagedRows) {
      if constexpr (kTuned<T>) {
        VisitStaged<true>(plan, [&]<class P> {
          launch.template operator()<Staged<P, sizeof(T), 3, !P::kClusters>, 1, Layout::kPlain>();
        });
      }
    } else if (plan.elements) {
      if constexpr (kAnywhere) {
        VisitLadder<8>(SumsOf<true>(), plan, [&]<Sharing kSharing, int kPacks> {
          using P = Looped<rows::Along<kSharing, kPacks, kSumElementRegisters>, 2>;
          if (plan.layout == Layout::kGeneral) {
            launch.template operator()<P, 1, Layout::kGeneral>();
          } else if constexpr (!std::is_same_v<T, double>) {
            launch.template operator()<P, 1, Layout::kPlain>();
          }
        });
      }
    } else if constexpr (kPack > 1) {
      VisitLadder<2, 4, 8, 16>(SumsOf<false>(), plan, [&]<Sharing kSharing, int kPacks> {
        constexpr SumsKernel kSums = SumsKernelOf(kElementsOf<T>, kKernelOf<kSharing>, kPacks, Op::kSums);
        constexpr bool kKept = !kSums.shared && kPacks <= 4;
        constexpr int kVectors = kElementsOf<T> == Elements::kAny ? 2 : 1;
        using P = Looped<rows::Along<kSharing, kPacks, kSums.registers>, kSums.stages, kSums.shared, kKept, kVectors>;
        launch.template operator()<P, kPack, Layout::kPlain>();
      });
    }
    return done;
  }

 private:
  template <int... kPacks, class Visit>
  static void ForPacks(const Visit& visit) {
    (visit.template operator()<kPacks>(), ...);
  }
  template <bool kSingle>
  struct SumsOf {
    static constexpr Ladder kLadder = SumsLadder(kElementsOf<T>, kSingle);
  };
  // visit.operator()<sharing, packs>() for the plan's kernel, if the ladder names it.
  template <int... kPacks, class Table, class Visit>
  static void VisitLadder(Table, const RowPlan& plan, const Visit& visit) {
    const auto each = [&]<int kCount, Kernel kKernel> {
      if constexpr (Names(Table::kLadder, kKernel, kCount)) {
        if (plan.kernel == kKernel && plan.packs == kCount) visit.template operator()<kSharingOf<kKernel>, kCount>();
      }
    };
    ForPacks<kPacks...>([&]<int kCount> {
      each.template operator()<kCount, Kernel::kWarpRows>();
      each.template operator()<kCount, Kernel::kBlockRows>();
      each.template operator()<kCount, Kernel::kClusterRows>();
    });
  }
  template <bool kSums>
  struct StagedTable {
    static constexpr Ladder kLadder = StagedLadder(kElementsOf<T>, Op::kParameters, kSums);
  };
  // visit.operator()<placement>() for the plan's staged-row kernel, if the ladder names it.
  template <bool kSums, class Visit>
  static void VisitStaged(const RowPlan& plan, const Visit& visit) {
    const Sharing sharing = plan.cluster > 1 ? Sharing::kCluster : plan.lanes <= 32 ? Sharing::kWarp : Sharing::kBlock;
    const auto each = [&]<Sharing kSharing, int kPacks> {
      if constexpr (Names(StagedTable<kSums>::kLadder, kKernelOf<kSharing>, kPacks)) {
        constexpr int kLimit = StagedRegisters(kSums, Op::kInputs, Op::kParameters, kPacks);
        if (plan.packs == kPacks && sharing == kSharing)
          visit.template operator()<rows::Along<kSharing, kPacks, kLimit>>();
      }
    };
    each.template operator()<Sharing::kWarp, 8>();
    each.template operator()<Sharing::kWarp, 16>();
    each.template operator()<Sharing::kWarp, 33>();
    each.template operator()<Sharing::kBlock, 33>();
    each.template operator()<Sharing::kCluster, 33>();
    each.template operator()<Sharing::kCluster, 64>();
  }

  template <class P, int kV, Layout kLayout>
  bool Run(const RowPlan& plan, const Layouts<Op::kSlots>& layouts) const {
    return LaunchRowKernel<P, kV, kLayout, A>(stream_, op_, layouts, TeamOf(plan), status_);
  }
  struct HeldTable {
    static constexpr Ladder kLadder = kHeld;
  };
  struct ShiftedTable {
    static constexpr Ladder kLadder = ShiftedLadder(kElementsOf<T>, Op::kInputs);
  };
  struct ElementsTable {
    static constexpr Ladder kLadder = ElementsLadder(kElementsOf<T>, Op::kOptions, Op::kAsF32);
  };
  template <int kV, bool kElements, int... kPacks>
  bool Ladders(const RowPlan& plan, const Layouts<Op::kSlots>& layouts) const {
    using Table = std::conditional_t<kElements, ElementsTable, HeldTable>;
    bool done = false;
    const auto run = [&]<Sharing kSharing, int kCount> {
      constexpr int kLimit =
          kElements ? Registers::Singles(kCount) : Registers::Held(kCount, kSharing == Sharing::kCluster);
      done = Run<rows::Along<kSharing, kCount, kLimit>, kV, Layout::kPlain>(plan, layouts);
    };
    VisitLadder<kPacks...>(Table(), plan, run);
    if constexpr (!kElements && HasFewRows(kElementsOf<T>, Op::kOptions, Op::kAsF32)) {
      // Few rows take kernels with kFew packs, whether or not the ladder names them.
      if constexpr (!Names(kHeld, Kernel::kBlockRows, kFew)) {
        if (!done && plan.kernel == Kernel::kBlockRows && plan.packs == kFew)
          run.template operator()<Sharing::kBlock, kFew>();
      }
      if constexpr (!Names(kHeld, Kernel::kWarpRows, kFew)) {
        if (!done && plan.kernel == Kernel::kWarpRows && plan.packs == kFew)
          run.template operator()<Sharing::kWarp, kFew>();
      }
    }
    return done;
  }
  template <int kV, int kPacks>
  bool General(const RowPlan& plan, const Layouts<Op::kSlots>& layouts) const {
    if constexpr (std::is_same_v<T, double>) {
      return false;
    } else {
      return Run<rows::Along<Sharing::kBlock, kPacks, kV == 1 ? kAnywhereRegisters : kSeveralAxesRegisters>, kV,
                 Layout::kGeneral>(plan, layouts);
    }
  }

  template <int kWidth, int kPacks, int kV, Layout kLayout, int kMaxThreads = 512, int kLanes = 0, int kCluster = 0>
  bool RunTiles(const RowPlan& plan, const Layouts<Op::kSlots>& layouts) const {
    constexpr int kLimit = kPacks == 0 ? 128 : Registers::Tiles(kPacks);
    using P = rows::Across<kWidth, kPacks, kLimit, kMaxThreads, kLanes, kCluster>;
    return LaunchRowKernel<P, kV, kLayout, A>(stream_, op_, layouts, TeamOf(plan, kWidth), status_);
  }
  template <bool kSingle>
  struct TilesTable {
    static constexpr Ladder kLadder = AcrossLadder(kSingle, kElementsOf<T>, Op::kOptions, Op::kInputs, Op::kParameters);
  };
  // The ladder's kernels, and the streamed one.
  template <int kV, Layout kLayout, int... kPacks>
  bool Tiles(const RowPlan& plan, const Layouts<Op::kSlots>& layouts) const {
    using Table = TilesTable<kV == 1>;
    bool done = false;
    [&]<size_t... k>(std::index_sequence<k...>) {
      const auto fixed = [&]<size_t kNumber> {
        constexpr Step kStep = Table::kLadder[kNumber];
        if constexpr (kStep.lanes > 0) {
          if (plan.packs == kStep.packs && plan.cluster == kStep.cluster && plan.lanes == kStep.lanes)
            done = RunTiles<8, kStep.packs, kV, kLayout, 512, kStep.lanes, kStep.cluster>(plan, layouts);
        }
      };
      (fixed.template operator()<k>(), ...);
    }(std::make_index_sequence<Table::kLadder.size()>());
    ForPacks<kPacks..., 0>([&]<int kCount> {
      if constexpr (kCount == 0 || HasPacks(Table::kLadder, kCount)) {
        constexpr int kLanes = kCount == 0 ? kStreamedTileLanes : 0;
        if (plan.packs == kCount) done = done || RunTiles<8, kCount, kV, kLayout, 512, kLanes>(plan, layouts);
      }
    });
    return done;
  }

  cudaStream_t stream_;
  const Op& op_;
  cudaError_t* status_;
};

// The dtype for single-element kernels on T's tensors, which gain nothing from knowing it at compile time.
template <class T>
using Single = std::conditional_t<std::is_same_v<T, double>, double, AnyFloat>;

inline RowDevice ThisDevice() {
  RowDevice device;
  device.capability = CompiledCapability();
  device.most_cluster = MostClusterBlocks();
  device.shared_bytes = MostDynamicShared();
  return device;
}

// Calls run(plan) with the rows' plan. If it returns false, the device runs no such cluster; then it plans again for a
// device with smaller clusters.
template <class Plan, class Run>
bool RunPlan(const Plan& plan_for, const Run& run) {
  RowDevice device = ThisDevice();
  for (;;) {
    const RowPlan plan = TriedOr(plan_for(device));
    if (run(plan)) return true;
    if (plan.cluster == 1 || tried_plan.kernel != Kernel::kNone) return false;
    device.most_cluster = plan.cluster / 2;
  }
}

// Runs op(row), or single(row), for every row of T's tensors. `single` is the same op for tensors of Single<T>.
template <class T, class Op, class SingleOp, int kMore>
cudaError_t LaunchRows(cudaStream_t stream, const Op& op, const SingleOp& single, const RowShape<kMore>& shape) {
  static_assert(Op::kSlots == SingleOp::kSlots && Op::kBroadcasts == SingleOp::kBroadcasts);
  if (shape.size() == 0) return cudaSuccess;
  const Layouts<Op::kSlots> elements(shape, 1, Op::kBroadcasts);
  const Layouts<Op::kSlots> packs(shape, PackOf(kElementsOf<T>, shape.across), Op::kBroadcasts);
  const RowProblem problem = ProblemOf<T>(op, packs, elements, shape.across, shape.aligned);
  cudaError_t status = cudaErrorInvalidConfiguration;
  const Launcher<T, Op> own(stream, op, &status);
  if constexpr (std::is_same_v<T, __half>) {
    if constexpr (Op::kOptions == Options::kNone && !Op::kAsF32) {
      if (own.Held(TriedOr(PlanHalf(problem, ThisDevice())), packs)) return status;
    }
    return LaunchRows<AnyFloat>(stream, single, single, shape);
  } else {
    const Launcher<Single<T>, SingleOp> any(stream, single, &status);
    RunPlan([&](const RowDevice& device) { return PlanRows(problem, device); },
            [&](const RowPlan& plan) {
              const Layouts<Op::kSlots>& layouts = plan.elements ? elements : packs;
              switch (plan.kernel) {
                case Kernel::kWarpRows:
                case Kernel::kBlockRows:
                case Kernel::kClusterRows:
                  return plan.elements && (plan.layout == Layout::kGeneral || Op::kOptions != Options::kNone)
                             ? any.Along(plan, layouts)
                             : own.Along(plan, layouts);
                case Kernel::kStreamedRows:
                  return plan.elements ? any.Streamed(plan, layouts) : own.Streamed(plan, layouts);
                case Kernel::kTileRows:
                case Kernel::kStreamedTiles:
                  // Options are rare for rows across, so kernels whose tensors carry their dtypes serve them.
                  return plan.elements || Op::kOptions != Options::kNone ? any.Across(plan, layouts)
                                                                         : own.Across(plan, layouts);
                case Kernel::kPersistentRows:
                  if constexpr (kTuned<T> && Op::kOptions == Options::kNone && !Op::kAsF32 && RowOpThatStays<Op>)
                    return own.Persistent(plan, layouts);
                  return false;
                case Kernel::kStagedRows:
                  if constexpr (kTuned<T> && Op::kOptions == Options::kNone && !Op::kAsF32 && RowOpThatStays<Op>)
                    return own.StagedRows(plan, layouts);
                  return false;
                default:
                  return false;
              }
            });
    return status;
  }
}

// Does the same for the commonest rows alone, in kernels that do less. It returns false unless the rows are adjacent
// packs, the op's ladder holds them, and the dtype is tuned.
template <class T, class Op, int kMore>
bool LaunchPlainRows(cudaStream_t stream, const Op& op, const RowShape<kMore>& shape, cudaError_t* status) {
  if constexpr (kTuned<T>) {
    if (shape.across || shape.size() == 0) return false;
    const Launcher<T, Op> own(stream, op, status);
    const Layouts<Op::kSlots> packs(shape, own.kPack, Op::kBroadcasts);
    if (!ProblemOf<T>(op, packs, packs, false, shape.aligned).packs) return false;
    const int64_t length = DivideUp(packs.columns.total, own.kPack);
    return RunPlan([&](const RowDevice& device) { return PlanHeld(own.kHeld, length, false, device); },
                   [&](const RowPlan& plan) { return plan.kernel != Kernel::kNone && own.Along(plan, packs); });
  }
  return false;
}

// Runs op, or single (see LaunchRows), over the rows and writes the sums over each group's rows to the results. False
// if no kernel takes these tensors, or if the op's parameters change along the rows in a group.
template <class T, class Op, class SingleOp, int kMore>
bool LaunchRowSums(cudaStream_t stream, const Op& op, const SingleOp& single, const RowShape<kMore>& shape,
                   const SumResults<Accumulator<T>>& results, cudaError_t* status) {
  const Layouts<Op::kSlots> elements(shape, 1, Op::kBroadcasts);
  const Layouts<Op::kSlots> packs(shape, PackOf(kElementsOf<T>, false), Op::kBroadcasts);
  // Parameters are read once for all rows that a team takes; these belong to one group.
  using Plain = LoopGeometry<Layout::kPlain, Op>;
  constexpr int kGroupAxes = GroupsOf<Op::kSlots, Layout::kPlain>::kMost;
  if (!packs.GroupedRowsAlike(Op::kBroadcasts)) return false;
  const bool even = packs.template Fit<Plain>() && packs.groups.count <= kGroupAxes;
  RowProblem problem = ProblemOf<T>(op, packs, elements, false, shape.aligned);
  problem.inputs = op.Inputs();
  problem.sums = Op::kSums;
  problem.packs &= even;
  problem.single_elements &= even;
  const Launcher<T, Op> own(stream, op, status);
  if constexpr (std::is_same_v<T, __half>) {
    const RowPlan plan = TriedOr(PlanSums(problem, ThisDevice()));
    if (plan.any) return LaunchRowSums<AnyFloat>(stream, single, single, shape, results, status);
    return own.Sums(plan, packs, results);
  } else {
    const Launcher<Single<T>, SingleOp> any(stream, single, status);
    return RunPlan([&](const RowDevice& device) { return PlanSums(problem, device); },
                   [&](const RowPlan& plan) {
                     if (plan.kernel == Kernel::kNone) return false;
                     if (plan.elements && plan.kernel != Kernel::kStagedRows) return any.Sums(plan, elements, results);
                     return own.Sums(plan, plan.elements ? elements : packs, results);
                   });
  }
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_LAUNCH_CUH_
