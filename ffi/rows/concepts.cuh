// The members that the row library requires from an op. docs/adding.md explains the words and shows an op.
#ifndef JAXOPS_ROWS_CONCEPTS_CUH_
#define JAXOPS_ROWS_CONCEPTS_CUH_

#include <concepts>

#include "rows/plan.h"

namespace jaxops::rows {

// An op that computes each row by itself: op(row) loads tensors, maps and reduces them, and stores results
// (rows/row.cuh). Its result is a member y, or dx if it has two inputs. A kernel asks that member whether its dtype is
// known only at run time.
template <class Op>
concept RowOp = requires {
  { Op::kInputs } -> std::convertible_to<int>;       // tensors in x's shape that are held at once
  { Op::kSlots } -> std::convertible_to<int>;        // layouts of its tensors
  { Op::kBroadcasts } -> std::convertible_to<int>;   // bits: the slots whose broadcast operands are read in packs
  { Op::kParameters } -> std::convertible_to<int>;   // broadcast operands that all rows share
  { Op::kOptions } -> std::convertible_to<Options>;  // options of logits
  { Op::kAsF32 } -> std::convertible_to<bool>;       // the body holds f32 copies of its packs
};

// An op in two halves. Between the halves, the kernel can work on other rows, or other blocks can run. Let parameters =
// op.Parameters(row) and scalars = op.Scalars(row). op.Begin(row, parameters, scalars, sums...) returns this thread's
// part of the values that are joined over a row. op.End(row, parameters, scalars, joined) stores results. op(row,
// parameters, scalars, sums...) does both. op.ForEachInput(visit) names the tensors that are fetched ahead, and
// op.Inputs() counts them.
template <class Op>
concept RowOpInHalves = RowOp<Op> && requires(const Op& op) {
  { op.Inputs() } -> std::convertible_to<int>;
  { Op::kPadded } -> std::convertible_to<bool>;  // zeros beyond a row's end do not change its results
};

// A RowOpInHalves. If op.MayStay(), blocks may stay and fetch its rows ahead.
template <class Op>
concept RowOpThatStays = RowOpInHalves<Op> && requires(const Op& op) {
  { op.MayStay() } -> std::convertible_to<bool>;
};

// A RowOpInHalves that also adds to Op::kSums sums over rows, at the columns of slot Op::kSumSlot.
template <class Op>
concept SumsRows = RowOpInHalves<Op> && requires {
  { Op::kSums } -> std::convertible_to<int>;
  { Op::kSumSlot } -> std::convertible_to<int>;
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_CONCEPTS_CUH_
