// Chooses a kernel and its numbers from the rows' shape and dtype and the device alone. It is host code without CUDA:
// tests enumerate it, jaxops.explain prints it, and Python takes workspace sizes from it.
//
// Read the library in this order: plan.h chooses a kernel (limits: tuning.h); launch.cuh turns the plan into template
// arguments; kernels.cuh, persistent.cuh, segments.cuh and column_sums.cuh hold the kernels; row.cuh is the row that an
// op's body sees (exchange.cuh joins its values over threads), and fetched_row.cuh the row of a persistent kernel;
// row_packs.cuh finds a thread's packs, by geometry.cuh, and pack_access.cuh reads and writes them. docs/adding.md
// explains the words.
#ifndef JAXOPS_ROWS_PLAN_H_
#define JAXOPS_ROWS_PLAN_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <string>

#include "rows/tuning.h"

namespace jaxops::rows {

// The dtype that a kernel is compiled for. kAny: tensors carry their dtype at run time.
enum class Elements { kBfloat16, kFloat16, kFloat32, kAny, kFloat64 };
enum class Options { kNone, kMasks, kAny };  // logits' options: none, all but a bias, any

// How a row's elements lie in memory.
enum class Layout {
  kPlain,    // packs are aligned, each in one run of adjacent elements; columns are one axis
  kShifted,  // columns are one axis, but a row may begin anywhere in a pack
  kGeneral   // several column axes, or a broadcast operand's elements for one pack lie apart
};

// Describes an op's rows to the planner.
struct RowProblem {
  int64_t rows = 1, columns = 1;
  Elements elements = Elements::kFloat32;
  bool across = false;          // elements are adjacent to the neighbouring rows' elements, not to their own row's
  bool packs = true;            // packs lie as Layout::kPlain says
  bool aligned_packs = true;    // x's packs are aligned
  bool single_elements = true;  // single elements lie as Layout::kPlain says
  bool one_axis = true;         // columns lie along one axis
  bool one_row_axis = true;     // rows lie along one axis; kernels with few packs take no more
  bool alike = true;            // blocks may stay: only x and the results depend on the row
  int inputs = 1;               // tensors that are held
  int parameters = 0;           // broadcast operands that all rows share
  Options options = Options::kNone;
  bool as_f32 = false;  // the body holds f32 copies of its packs
  int sums = 0;         // sums over rows that a thread keeps for each of its columns
};

// The kinds of kernels. docs/adding.md explains their words.
enum class Kernel {
  kWarpRows,        // a warp's lanes hold a row
  kBlockRows,       // a block holds a row
  kClusterRows,     // a cluster's blocks hold a row
  kStreamedRows,    // a block reads a row again in each pass
  kPersistentRows,  // blocks stay, and fetch rows ahead
  kStagedRows,      // the same, for unaligned rows
  kTileRows,        // rows across, held
  kStreamedTiles,   // rows across, read again in each pass
  kNone
};

struct RowPlan {
  Kernel kernel = Kernel::kNone;
  Layout layout = Layout::kPlain;
  bool elements = false;  // single elements, not packs
  int packs = 0;          // that a thread holds
  int lanes = 1;          // a row's threads, in one block
  int cluster = 1;        // blocks that share a row
  bool any = false;       // runs kernels whose tensors carry their dtypes
};

constexpr const char* NameOf(Kernel kernel) {
  switch (kernel) {
    case Kernel::kWarpRows:
      return "WarpRows";
    case Kernel::kBlockRows:
      return "BlockRows";
    case Kernel::kClusterRows:
      return "ClusterRows";
    case Kernel::kStreamedRows:
      return "StreamedRows";
    case Kernel::kPersistentRows:
      return "PersistentRows";
    case Kernel::kStagedRows:
      return "StagedRows";
    case Kernel::kTileRows:
      return "TileRows";
    case Kernel::kStreamedTiles:
      return "StreamedTiles";
    default:
      return "no kernel";
  }
}
// A plan that a developer tries instead of the chosen one, in the chosen layout (benchmarks/sweep.py); kNone: no plan.
inline RowPlan tried_plan;
inline RowPlan TriedOr(RowPlan plan) {
  if (tried_plan.kernel == Kernel::kNone || plan.kernel == Kernel::kNone) return plan;
  RowPlan tried = tried_plan;
  tried.layout = plan.layout;
  tried.elements = plan.elements;
  tried.any = plan.any;
  return tried;
}

// The plan as jaxops.explain prints it: "BlockRows, 64 lanes x 8 packs".
inline std::string Describe(const RowPlan& plan) {
  std::string text = NameOf(plan.kernel);
  text += ", " + std::to_string(plan.lanes) + (plan.lanes == 1 ? " lane" : " lanes");
  if (plan.packs) text += " x " + std::to_string(plan.packs) + (plan.elements ? " elements" : " packs");
  if (plan.cluster > 1) text += ", clusters of " + std::to_string(plan.cluster);
  return text;
}

// The numbers, other than the rows', that plans depend on.
struct RowDevice {
  int capability = 90;           // the compiled code's, as __CUDA_ARCH__ / 10
  int most_cluster = 16;         // the most blocks per cluster
  int shared_bytes = 211 << 10;  // the most per block
};

// Elements per pack: as many as fill 16 bytes. If tensors carry their dtypes, a pack has as many elements as 16-bit
// dtypes have. Packs across have at most four, because a thread keeps something for each of its rows.
constexpr int PackOf(Elements elements, bool across) {
  return elements == Elements::kFloat64 ? 1 : elements != Elements::kFloat32 && !across ? 8 : 4;
}

inline constexpr int kWarpThreads = 128;  // per block whose warps have their own rows
inline constexpr int kStreamedLanes = 512, kStreamedTileLanes = 64;

constexpr int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A block's threads for a row with `packs` packs, `each` packs per thread: a power of two within a warp, else whole
// warps.
constexpr int LanesFor(int64_t packs, int64_t each, bool may_be_warp = true) {
  const int64_t lanes = std::max<int64_t>(DivideUp(packs, each), 1);
  if (may_be_warp && lanes <= 32) return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(lanes)));
  return static_cast<int>(std::max<int64_t>(DivideUp(lanes, 32) * 32, 64));
}

// The ladder's steps that one block takes alone.
constexpr Ladder OfBlocks(Ladder ladder) {
  return ladder.first(std::ranges::count_if(ladder, [](const Step& step) { return step.cluster == 1; }));
}

// An op's ladders.
constexpr Ladder HeldLadder(Elements elements, int inputs, int parameters, Options options, bool as_f32) {
  if (options == Options::kMasks) return elements == Elements::kBfloat16 ? Ladder(kMasks16) : Ladder(kMasks32);
  if (elements == Elements::kAny) return kHeldAny;
  if (elements == Elements::kFloat16)
    return OfBlocks(HeldLadder(Elements::kBfloat16, inputs, parameters, options, as_f32));
  if (as_f32 || options != Options::kNone) return kHeldAsF32;
  const bool wide = elements == Elements::kFloat32;
  if (inputs == 2) return wide ? Ladder(kTwoInputs32) : Ladder(kTwoInputs16);
  if (parameters == 0) return kOneInput;
  if (wide) return kWithParameters32;
  return parameters == 1 ? Ladder(kWithParameter16) : Ladder(kWithTwoParameters16);
}
constexpr Ladder ShiftedLadder(Elements elements, int inputs) {
  if (elements == Elements::kAny) return kShiftedAny;
  return inputs == 1 ? Ladder(kShiftedOneInput) : Ladder(kShiftedTwoInputs);
}
constexpr Ladder ElementsLadder(Elements elements, Options options, bool as_f32) {
  if (options != Options::kNone) return kSinglesWithOptions;
  return elements == Elements::kAny && !as_f32 ? Ladder(kShortestSingles) : Ladder(kSingles);
}
constexpr Ladder AcrossLadder(bool elements, Elements of, Options options, int inputs, int parameters) {
  if (elements) return kAcrossElements;
  if (of == Elements::kAny || options != Options::kNone) return kAcrossAny;
  if (inputs == 1 && parameters) return kAcrossWithParameters;
  if (inputs == 1) return of == Elements::kBfloat16 ? Ladder(kAcrossOneInput16) : Ladder(kAcrossOneInput32);
  return of == Elements::kBfloat16 ? Ladder(kAcrossTwoInputs16) : Ladder(kAcrossTwoInputs32);
}
constexpr Ladder SumsLadder(Elements elements, bool single) {
  if (single) return kSumsOfElements;
  if (elements == Elements::kFloat16) return OfBlocks(kSums16);
  return elements == Elements::kAny        ? Ladder(kSumsOfAny)
         : elements == Elements::kBfloat16 ? Ladder(kSums16)
                                           : Ladder(kSums32);
}
constexpr Ladder PersistentLadder(Elements elements, int parameters) {
  if (parameters == 0) return kPersistent;
  return elements == Elements::kBfloat16 ? Ladder(kPersistentWithParameters16) : Ladder(kPersistentWithParameters32);
}
constexpr Ladder StagedLadder(Elements elements, int parameters, bool sums) {
  if (sums && elements == Elements::kFloat32) return kStagedSums32;
  return sums || parameters ? Ladder(kStaged) : Ladder(kStagedAlone);
}

// Whether a step in a ladder runs a kernel with `packs` packs in a warp, block or cluster. Only such kernels are
// compiled.
constexpr bool Names(Ladder ladder, Kernel kernel, int packs) {
  int64_t before = 0;
  for (const Step& step : ladder) {
    const bool warp = step.cluster == 1 && LanesFor(before + 1, step.packs) <= 32;
    const bool block = step.cluster == 1 && LanesFor(step.length, step.packs) > 32;
    if (step.packs == packs) {
      if (kernel == Kernel::kWarpRows && warp) return true;
      if (kernel == Kernel::kBlockRows && block) return true;
      if (kernel == Kernel::kClusterRows && step.cluster > 1) return true;
    }
    before = step.length;
  }
  return false;
}
constexpr bool HasPacks(Ladder ladder, int packs) {
  return std::ranges::any_of(ladder, [=](const Step& step) { return step.packs == packs && step.lanes == 0; });
}

// The first step that holds a row; null if that step needs a cluster which the device does not have.
constexpr const Step* StepFor(Ladder ladder, int64_t length, const RowDevice& device, int more_than = 0) {
  for (const Step& step : ladder)
    if (length <= step.length && step.cluster <= device.most_cluster && step.packs > more_than) return &step;
  return nullptr;
}

// Plans a row with `length` packs (or elements) by a ladder; kNone if no step holds it.
constexpr RowPlan PlanHeld(Ladder ladder, int64_t length, bool elements, const RowDevice& device, int more_than = 0) {
  const Step* const step = StepFor(ladder, length, device, more_than);
  if (!step) return {};
  const int lanes = LanesFor(DivideUp(length, step->cluster), step->packs, step->cluster == 1);
  const Kernel kernel = step->cluster > 1 ? Kernel::kClusterRows : lanes > 32 ? Kernel::kBlockRows : Kernel::kWarpRows;
  return {kernel, Layout::kPlain, elements, step->packs, lanes, step->cluster};
}
// Does the same for few rows: as many threads as packs, in kernels of kFewPacks (tuning.h).
constexpr RowPlan PlanFew(int64_t length, int packs, bool elements) {
  const int lanes = LanesFor(length, elements ? packs / 2 : 1);
  return {lanes > 32 ? Kernel::kBlockRows : Kernel::kWarpRows, Layout::kPlain, elements, packs, lanes, 1};
}
constexpr bool HasFewRows(Elements elements, Options options, bool as_f32) {
  return (elements == Elements::kBfloat16 || elements == Elements::kFloat32) && options == Options::kNone && !as_f32;
}

constexpr RowPlan PlanAcross(const RowProblem& p, const RowDevice& device) {
  const int pack = PackOf(p.elements, true);
  const bool packs = p.packs && pack > 1 && !p.as_f32;
  const auto tile = [&](bool elements, Layout layout) -> RowPlan {
    const Step* step =
        StepFor(AcrossLadder(elements, p.elements, p.options, p.inputs, p.parameters), p.columns, device);
    const int64_t tiles = DivideUp(p.rows, 8 * (elements ? 1 : pack));
    // If there are many rows, a cluster would leave few columns per thread.
    if (step && elements && step->cluster > 1 && tiles * step->cluster > 4 * kManyBlocks) step = nullptr;
    if (!step) {
      const bool few = tiles * kStreamedTileLanes * 8 <= kFewThreads && device.most_cluster >= 16 && p.columns >= 4096;
      return {Kernel::kStreamedTiles, layout, elements, 0, kStreamedTileLanes, few ? 16 : 1};
    }
    const int64_t lanes = DivideUp(DivideUp(p.columns, step->packs * step->cluster), 4) * 4;
    return {Kernel::kTileRows,
            layout,
            elements,
            step->packs,
            step->lanes ? step->lanes : static_cast<int>(std::max<int64_t>(lanes, 16)),
            step->cluster};
  };
  const bool tuned = p.elements == Elements::kBfloat16 || p.elements == Elements::kFloat32;
  if (packs && p.columns <= 16 && p.options == Options::kNone && tuned && p.parameters == 0)
    return {Kernel::kTileRows, Layout::kPlain, false, 4, static_cast<int>(DivideUp(p.columns, 4)), 1};
  if (packs) return tile(false, Layout::kPlain);
  if (p.elements == Elements::kFloat64)
    return {Kernel::kStreamedTiles, Layout::kGeneral, true, 0, kStreamedTileLanes, 1};
  const bool plain = p.single_elements;
  return tile(true, plain ? Layout::kPlain : Layout::kGeneral);
}

constexpr RowPlan PlanStaged(const RowProblem& p, const RowDevice& device, bool sums) {
  const Step* const step = StepFor(StagedLadder(p.elements, p.parameters, sums), p.columns, device);
  if (!step) return {};
  const int64_t share = step->cluster == 1 ? p.columns : DivideUp(p.columns, step->cluster * 32) * 32;  // per block
  const int lanes = std::max(LanesFor(share, step->packs, step->cluster == 1), 8);
  const int64_t bytes = int64_t{lanes} * step->packs * (p.elements == Elements::kBfloat16 ? 2 : 4) * 3 * p.inputs;
  if (bytes + 1024 > device.shared_bytes) return {};
  return {Kernel::kStagedRows, Layout::kPlain, true, step->packs, lanes, step->cluster};
}

// Plans f16's own kernels, which take aligned packs in rows that a warp or a block holds.
constexpr RowPlan PlanHalf(const RowProblem& p, const RowDevice& device) {
  if (p.across || !p.packs || p.options != Options::kNone || p.as_f32) return {};
  return PlanHeld(HeldLadder(p.elements, p.inputs, p.parameters, p.options, p.as_f32), DivideUp(p.columns, 8), false,
                  device, p.one_row_axis || (p.inputs == 2 && p.parameters) ? 0 : 2);
}

constexpr RowPlan PlanAlong(const RowProblem& p, const RowDevice& device) {
  const int pack = PackOf(p.elements, false);
  const bool tuned = p.elements == Elements::kBfloat16 || p.elements == Elements::kFloat32;
  const int64_t packs = DivideUp(p.columns, pack);
  RowPlan plan;
  const auto streamed = [&](Layout layout, bool elements) -> RowPlan {
    return {Kernel::kStreamedRows, layout, elements, 0, kStreamedLanes, 1};
  };
  if (p.packs && pack > 1) {
    if (tuned && p.alike && p.options == Options::kNone && !p.as_f32) {
      const int64_t least = p.parameters ? kLeastPersistent[p.parameters == 1] : kLeastPersistentAlone;
      const int64_t bytes = p.elements == Elements::kFloat32 && p.parameters ? 2 : 1;
      if (packs > least * bytes) {
        if (const Step* const step = StepFor(PersistentLadder(p.elements, p.parameters), packs, device)) {
          const int lanes = LanesFor(DivideUp(packs, step->cluster), step->packs, false);
          // If there are fewer rows than one wave of blocks takes, no row would be fetched ahead.
          const bool fits = int64_t{lanes} * step->packs * 16 * 3 * p.inputs <= device.shared_bytes;
          if (fits && p.rows * step->cluster * lanes > 2 * kFewThreads)
            return {Kernel::kPersistentRows, Layout::kPlain, false, step->packs, lanes, step->cluster};
        }
      }
    }
    const bool few = p.one_row_axis && HasFewRows(p.elements, p.options, p.as_f32) && packs <= 1024 &&
                     p.rows * LanesFor(packs, 1) <= kFewThreads;
    if (few) return PlanFew(packs, kFewPacks[p.inputs - 1], false);
    plan = PlanHeld(HeldLadder(p.elements, p.inputs, p.parameters, p.options, p.as_f32), packs, false, device,
                    p.one_row_axis || !tuned || (p.inputs == 2 && p.parameters) ? 0 : 2);
    if (plan.kernel != Kernel::kNone) return plan;
    if (p.options == Options::kNone && !p.as_f32) return streamed(Layout::kShifted, false);
  }
  const bool alone = p.options == Options::kNone && !p.as_f32;
  if (p.single_elements && !(p.packs && pack > 1) && (p.elements != Elements::kFloat64 || alone)) {
    if (HasFewRows(p.elements, p.options, p.as_f32) && p.columns <= 2048 &&
        p.rows * LanesFor(p.columns, 4) <= kFewThreads) {
      return PlanFew(p.columns, 8, true);
    }
    const bool stays = tuned && p.alike && alone, packed = alone && pack > 1;
    if (packed && p.columns > kMostElements) {
      if (!(stays && p.parameters) && (stays || !tuned)) {
        plan = PlanHeld(ShiftedLadder(p.elements, p.inputs), DivideUp(p.columns + pack - 1, pack), false, device);
        plan.layout = Layout::kShifted;
        if (plan.kernel != Kernel::kNone) return plan;
      }
      if (stays) {
        plan = PlanStaged(p, device, false);
        if (plan.kernel != Kernel::kNone) return plan;
      }
    }
    if (!packed || tuned || p.columns <= kMostElements) {
      plan = PlanHeld(ElementsLadder(p.elements, p.options, p.as_f32), p.columns, true, device);
      if (plan.kernel != Kernel::kNone) return plan;
    }
    if (packed && p.one_axis) return streamed(Layout::kShifted, false);
  }
  if (tuned && p.aligned_packs && !p.packs && packs <= kSeveralAxes[0].length && alone)
    return {Kernel::kBlockRows,
            Layout::kGeneral,
            false,
            kSeveralAxes[0].packs,
            LanesFor(packs, kSeveralAxes[0].packs, false),
            1};
  if (p.columns <= kSingles[0].length && p.elements != Elements::kFloat64)
    return {Kernel::kBlockRows, Layout::kGeneral, true, 8, LanesFor(p.columns, 8, false), 1};
  return streamed(Layout::kGeneral, true);
}

// The most registers in a kernel for staged rows.
constexpr int StagedRegisters(bool sums, int inputs, int parameters, int packs) {
  return kStagedRegisters[sums ? 3 : parameters ? 2 : inputs - 1][packs < 33 ? 0 : packs == 33 ? 1 : 2];
}
// How many of a thread's elements lie in every row, in every block. They are its first ones, and they are read without
// a test. There are as few whole warps as hold a block's share, so at least half a thread's elements lie in the row. In
// a cluster, which has 96 threads and more, it is two thirds, less the 31 columns that each other block may have more
// than the last.
constexpr int SureElements(int packs, bool cluster) { return !cluster ? packs / 2 : packs == 33 ? 21 : 38; }

// A kernel with packs and sums over rows: its most registers, how many rows lie in shared memory (all but one are
// fetched ahead), and whether parameters lie there too, because they do not fit into registers beside the sums.
struct SumsKernel {
  int registers, stages;
  bool shared;
};
constexpr SumsKernel SumsKernelOf(Elements elements, Kernel kernel, int packs, int sums) {
  const bool tuned = elements != Elements::kAny;
  const bool wide = elements == Elements::kFloat32, cluster = kernel == Kernel::kClusterRows;
  const bool shared = packs == 16 || packs * PackOf(elements, false) * (sums + 1) > 128;
  const int registers = packs == 2 ? kSumRegisters[wide] : cluster ? kSumClusterRegisters : kSumWideRegisters[wide];
  const int stages = packs == 16 ? 1 : !tuned || shared || (packs > 2 && !cluster) ? 2 : cluster && packs <= 4 ? 4 : 3;
  return {registers, stages, shared};
}

// Plans f16 by its own kernels, if one fits, else by the kernels whose tensors carry their dtypes.
template <class Plan>
constexpr RowPlan OwnOrAny(RowProblem problem, const Plan& plan_for) {
  RowPlan plan = plan_for(problem);
  if (problem.elements != Elements::kFloat16 || plan.kernel != Kernel::kNone) return plan;
  problem.elements = Elements::kAny;
  plan = plan_for(problem);
  plan.any = true;
  return plan;
}

// Plans rows without sums over them.
constexpr RowPlan PlanRows(const RowProblem& problem, const RowDevice& device = {}) {
  return OwnOrAny(problem, [&](const RowProblem& p) {
    if (p.elements == Elements::kFloat16) return PlanHalf(p, device);
    return p.across ? PlanAcross(p, device) : PlanAlong(p, device);
  });
}

// The shared memory that kernels with sums over rows need: the fetched rows or, if that is more, the sums for the rows
// that a block has at once.
constexpr int64_t SharedBytesOf(const RowProblem& p, const RowPlan& plan) {
  const bool warp = plan.kernel == Kernel::kWarpRows || (plan.lanes <= 32 && plan.cluster == 1);
  const int64_t places = int64_t{warp ? kWarpThreads : plan.lanes} * plan.packs;  // per pack or element
  const int64_t element = p.elements == Elements::kBfloat16 ? 2 : 4;
  if (plan.kernel == Kernel::kStagedRows) return (places + 32) * element * 3 * p.inputs;
  const int64_t width = plan.elements ? 1 : PackOf(p.elements, false);
  const int64_t of_teams = warp ? places * width * 4 * p.sums : 0;
  if (plan.elements) return of_teams;
  const SumsKernel kernel = SumsKernelOf(p.elements, plan.kernel, plan.packs, p.sums);
  const int64_t vectors = p.elements == Elements::kAny ? 2 : 1;  // per pack: elements may have 32 bits
  const int64_t parameters = kernel.shared ? p.parameters * width / 4 : 0;
  return std::max(places * 16 * (p.inputs * kernel.stages * vectors + parameters), of_teams);
}

constexpr RowPlan PlanOwnSums(const RowProblem& p, const RowDevice& device) {
  const int pack = PackOf(p.elements, false);
  const bool tuned = p.elements == Elements::kBfloat16 || p.elements == Elements::kFloat32;
  if (p.elements == Elements::kFloat16 && !p.packs) return {};
  if (p.packs && pack > 1) {
    const int64_t packs = DivideUp(p.columns, pack);
    const Step* step = StepFor(SumsLadder(p.elements, false), packs, device);
    if (!step) return {};
    for (int cluster = step->cluster;; cluster *= 2) {
      const int lanes = LanesFor(DivideUp(packs, cluster), step->packs, cluster == 1);
      const Kernel kernel = cluster > 1 ? Kernel::kClusterRows : lanes > 32 ? Kernel::kBlockRows : Kernel::kWarpRows;
      const RowPlan plan = {kernel, Layout::kPlain, false, step->packs, lanes, cluster};
      if (SharedBytesOf(p, plan) <= device.shared_bytes) return plan;
      if (cluster == 1 || cluster * 2 > device.most_cluster) return {};
    }
  }
  if (tuned && p.single_elements && p.columns > 64) {
    const RowPlan plan = PlanStaged(p, device, true);
    if (plan.kernel != Kernel::kNone) return plan;
  }
  RowPlan plan = PlanHeld(kSumsOfElements, p.columns, true, device);
  plan.layout = p.single_elements && p.elements != Elements::kFloat64 ? Layout::kPlain : Layout::kGeneral;
  return plan;
}
// Plans rows with sums over them; kNone: they take another kernel.
constexpr RowPlan PlanSums(const RowProblem& problem, const RowDevice& device = {}) {
  return OwnOrAny(problem, [&](const RowProblem& p) { return PlanOwnSums(p, device); });
}

// Rows that are too long, and too few, are split into segments (parts in docs/adding.md): runs of columns for blocks
// that do not wait for each other (rows/segments.cuh). `multiple`: every segment except the last has a multiple of so
// many columns, which gives every thread whole runs of packs. `rows`: how many rows a block has.
struct SegmentShape {
  int64_t multiple, rows;
};
constexpr SegmentShape SegmentsOf(bool across, bool elements) {
  return !across ? SegmentShape{4096, 1} : elements ? SegmentShape{1024, 4} : SegmentShape{256, 64};
}

// The most segments into which rows are split. 0: they are not split, because a second reading would cost more than
// splitting gains. The number makes about two waves of blocks on an H200, whose 132 multiprocessors hold 2 or 4 such
// blocks each. several_axes: columns lie along several axes; mixed: x and the result differ in dtype. The operands
// alone decide, so that results do not depend on the device.
constexpr int64_t PlanSegments(int64_t rows, int64_t columns, bool across, bool adjacent_packs, bool several_axes,
                               int itemsize, bool mixed, bool backward) {
  if (rows == 0) return 0;
  const bool elements = mixed || !adjacent_packs;
  const SegmentShape shape = SegmentsOf(across, elements);
  int64_t wanted = 528 / rows;
  if (across) {
    const int64_t tiles = DivideUp(rows, shape.rows);
    wanted = std::min(std::max<int64_t>(1056 / tiles, 1), std::max<int64_t>(64, 192 / tiles));
    const int64_t longest = elements ? kLongestElements : kLongestAcross[itemsize > 2][backward];
    if (columns <= longest || wanted < (elements ? 2 : 1)) return 0;
  } else {
    const int64_t longest = several_axes ? kLongestAxes : mixed ? kLongestMixed : kLongestBytes[backward] / itemsize;
    if (columns <= longest || wanted < 4) return 0;
  }
  return DivideUp(columns, DivideUp(columns, wanted * shape.multiple) * shape.multiple);
}

// How many clusters an H200 holds at once. Clusters with 4 or more blocks leave some multiprocessors without any.
constexpr int64_t ClustersAtOnce(int threads, int registers, int64_t shared_bytes, int cluster) {
  constexpr int64_t kRegisters = 65536, kThreads = 2048, kShared = 228 << 10, kOwnShared = 5 << 10;  // per block
  const int64_t blocks = std::min({kRegisters / (int64_t{threads} * DivideUp(registers, 8) * 8), kThreads / threads,
                                   kShared / (shared_bytes + kOwnShared)});
  const int64_t multiprocessors = cluster <= 2 ? 132 : cluster <= 8 ? 120 : 112;
  return std::max<int64_t>(multiprocessors * blocks / cluster, 1);
}

// The best number of chunks for sums over a call's rows. Each chunk belongs to a block or a cluster, and all chunks are
// worked on at once.
inline int64_t PlanChunks(RowProblem p) {
  const RowPlan plan = p.across ? RowPlan{} : TriedOr(PlanSums(p));
  if (plan.any) p.elements = Elements::kAny;
  if (plan.kernel == Kernel::kNone) return std::clamp<int64_t>((1 << 20) / std::max<int64_t>(p.columns, 1), 7, 264);
  const bool warp = plan.cluster == 1 && plan.lanes <= 32;
  const int registers = plan.kernel == Kernel::kStagedRows ? StagedRegisters(true, p.inputs, p.parameters, plan.packs)
                        : plan.elements ? kSumElementRegisters
                                        : SumsKernelOf(p.elements, plan.kernel, plan.packs, p.sums).registers;
  return ClustersAtOnce(warp ? kWarpThreads : plan.lanes, registers, SharedBytesOf(p, plan), plan.cluster);
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_PLAN_H_
