// What the row library asks of an op.
#ifndef JAXOPS_ROWS_CONCEPTS_CUH_
#define JAXOPS_ROWS_CONCEPTS_CUH_

#include <concepts>

#include "rows/plan.h"

namespace jaxops::rows {

// An op that computes each row by itself: op(row) loads tensors, maps and reduces them, and stores results
// (rows/row.cuh). Its result is a member y, or of an op with two inputs dx; a kernel asks whether it tells its dtype.
template <class Op>
concept RowOp = requires {
  { Op::kInputs } -> std::convertible_to<int>;       // tensors of x's shape that are held at once
  { Op::kSlots } -> std::convertible_to<int>;        // layouts that its tensors have
  { Op::kBroadcasts } -> std::convertible_to<int>;   // the slots of operands that are read in packs, as bits
  { Op::kParameters } -> std::convertible_to<int>;   // broadcast operands that all rows share
  { Op::kOptions } -> std::convertible_to<Options>;  // of logits
  { Op::kAsF32 } -> std::convertible_to<bool>;       // the body holds f32 copies of its packs
  { Op::kPadded } -> std::convertible_to<bool>;      // zeros beyond a row's end leave its results alone
};

// An op in two halves, between which other rows, or other blocks, can be worked on. With parameters =
// op.Parameters(row) and scalars = op.Scalars(row), op.Begin(row, parameters, scalars, sums...) gives this thread's
// part of what is joined over a row, and op.End(row, parameters, scalars, joined) stores results; op(row, parameters,
// scalars, sums...) does both. op.ForEachInput(visit) names the tensors that are fetched ahead, op.Inputs() counts
// them.
template <class Op>
concept RowOpInHalves = RowOp<Op> && requires(const Op& op) {
  { op.Inputs() } -> std::convertible_to<int>;
};

// One whose rows may be fetched ahead by blocks that stay, where it says so.
template <class Op>
concept RowOpThatStays = RowOpInHalves<Op> && requires(const Op& op) {
  { op.MayStay() } -> std::convertible_to<bool>;
};

// One that also adds to Op::kSums sums over rows, at the columns of the slot Op::kSumSlot.
template <class Op>
concept SumsRows = RowOpInHalves<Op> && requires {
  { Op::kSums } -> std::convertible_to<int>;
  { Op::kSumSlot } -> std::convertible_to<int>;
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_CONCEPTS_CUH_
