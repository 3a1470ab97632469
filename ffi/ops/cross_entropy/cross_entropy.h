// The cross entropy's operands, checked; shared by the CPU and the CUDA handlers.
//   fwd:     x, [labels], [where]                                         -> origin, total, [picked], [sum]
//   bwd:     x, [labels], [where], origin, dtotal, [dpicked], [dsum]      -> dx
//   fwd_bwd: x, [labels], [where], dlog, [dpicked], [dsum]                -> dx, origin, total, [picked], [sum]
// The logits are z = x, or cap tanh(x / cap) if cap > 0. They take part if `where` is true. Each row has
//   origin = max(z), 0 if that is not finite;  total = sum(exp(z - origin));  sum = sum(z)
//   picked = z[label]
// so that logsumexp(z) = origin + log(total). picked does not depend on `where`. Labels from -columns to -1 count from
// the end. For other labels no entry is read: picked is NaN.
//
// The backward pass gives the gradient at z, given the cotangents of total, picked and sum, times dz/dx. origin's
// cotangent is 0, because it cancels in all functions of origin and total. The pass that does both takes logsumexp(z)'s
// cotangent instead of total's, and adds 2 z_loss logsumexp(z) to it:
//   dtotal = dlog (1 + 2 z_loss logsumexp(z)) / total
// If a row's cotangents are all 0, its gradient is 0, whatever the row holds. Labels are int32. All row values have the
// accumulator's dtype.
#ifndef JAXOPS_OPS_CROSS_ENTROPY_CROSS_ENTROPY_H_
#define JAXOPS_OPS_CROSS_ENTROPY_CROSS_ENTROPY_H_

#include <cmath>

#include "core/handler.h"
#include "core/row_shape.h"

namespace jaxops {

enum class CrossEntropyPass { kForward, kBackward, kBoth };

struct CrossEntropyCall {
  enum Slot { kFull, kRow, kWhere, kSlots };

  RowShape<kSlots> shape;
  std::optional<AnyBuffer> x, labels, where, dx;
  std::optional<AnyBuffer> origin, total, picked, sum;  // results, or (origin) an operand in the backward pass
  std::optional<AnyBuffer> dtotal, dpicked, dsum;       // operands; dtotal: dlog in the pass that does both
  double cap = 0, z_loss = 0;
};

inline Error ParseCrossEntropy(const char* handler, CrossEntropyPass pass, ffi::Span<const int64_t> axes, double cap,
                               double z_loss, bool has_labels, bool has_where, bool has_sum,
                               const ffi::RemainingArgs& args, const ffi::RemainingRets& results,
                               CrossEntropyCall* call) {
  using Call = CrossEntropyCall;
  RowShapeParser<Call::kSlots> parser(handler);
  BufferReader arg(handler, args);
  BufferReader result(handler, results);
  JAXOPS_RETURN_IF_ERROR(arg.Take(&call->x));
  JAXOPS_RETURN_IF_ERROR(parser.Start(*call->x, axes));
  const DataType accumulator = AccumulatorType(call->x->element_type());
  const auto row = [&](const char* name, const std::optional<AnyBuffer>& buffer, DataType type) {
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, name, *buffer, type));
    return parser.Row(Call::kRow, name, *buffer);
  };
  if (has_labels) {
    JAXOPS_RETURN_IF_ERROR(arg.Take(&call->labels));
    JAXOPS_RETURN_IF_ERROR(row("labels", call->labels, DataType::S32));
  }
  if (has_where) {
    JAXOPS_RETURN_IF_ERROR(arg.Take(&call->where));
    JAXOPS_RETURN_IF_ERROR(parser.Broadcast(Call::kWhere, "where", *call->where));
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, "where", *call->where, DataType::PRED));
  }
  if (pass != CrossEntropyPass::kForward) {
    if (pass == CrossEntropyPass::kBackward) {
      JAXOPS_RETURN_IF_ERROR(arg.Take(&call->origin));
      JAXOPS_RETURN_IF_ERROR(row("origin", call->origin, accumulator));
    }
    JAXOPS_RETURN_IF_ERROR(arg.Take(&call->dtotal));
    JAXOPS_RETURN_IF_ERROR(row("dtotal", call->dtotal, accumulator));
    if (has_labels) {
      JAXOPS_RETURN_IF_ERROR(arg.Take(&call->dpicked));
      JAXOPS_RETURN_IF_ERROR(row("dpicked", call->dpicked, accumulator));
    }
    if (has_sum) {
      JAXOPS_RETURN_IF_ERROR(arg.Take(&call->dsum));
      JAXOPS_RETURN_IF_ERROR(row("dsum", call->dsum, accumulator));
    }
    JAXOPS_RETURN_IF_ERROR(result.Take(&call->dx));
    JAXOPS_RETURN_IF_ERROR(parser.Full("dx", *call->dx));
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, "dx", *call->dx, call->x->element_type()));
  }
  if (pass != CrossEntropyPass::kBackward) {
    JAXOPS_RETURN_IF_ERROR(result.Take(&call->origin));
    JAXOPS_RETURN_IF_ERROR(row("origin", call->origin, accumulator));
    JAXOPS_RETURN_IF_ERROR(result.Take(&call->total));
    JAXOPS_RETURN_IF_ERROR(row("total", call->total, accumulator));
    if (has_labels) {
      JAXOPS_RETURN_IF_ERROR(result.Take(&call->picked));
      JAXOPS_RETURN_IF_ERROR(row("picked", call->picked, accumulator));
    }
    if (has_sum) {
      JAXOPS_RETURN_IF_ERROR(result.Take(&call->sum));
      JAXOPS_RETURN_IF_ERROR(row("sum", call->sum, accumulator));
    }
  }
  JAXOPS_RETURN_IF_ERROR(arg.End());
  JAXOPS_RETURN_IF_ERROR(result.End());
  if (!std::isfinite(cap) || cap < 0) return Invalid(handler, "cap must be finite and at least 0");
  call->cap = cap;
  call->z_loss = z_loss;
  return parser.Finish(&call->shape);
}

// A label's column, -1 if it has none.
JAXOPS_HOST_DEVICE inline int64_t ColumnOfLabel(int64_t label, int64_t columns) {
  label += label < 0 ? columns : 0;
  return label >= 0 && label < columns ? label : -1;
}

#define JAXOPS_CROSS_ENTROPY_ATTRIBUTES              \
  RemainingArgs()                                    \
      .RemainingRets()                               \
      .Attr<::xla::ffi::Span<const int64_t>>("axes") \
      .Attr<double>("cap")                           \
      .Attr<bool>("has_labels")                      \
      .Attr<bool>("has_where")
#define JAXOPS_CROSS_ENTROPY_HANDLERS                                                                          \
  JAXOPS_HANDLER(cross_entropy_fwd, jaxops::Forward, JAXOPS_CROSS_ENTROPY_ATTRIBUTES.Attr<bool>("has_sum"));   \
  JAXOPS_HANDLER(cross_entropy_bwd, jaxops::Backward, JAXOPS_CROSS_ENTROPY_ATTRIBUTES.Attr<bool>("has_dsum")); \
  JAXOPS_HANDLER(cross_entropy_fwd_bwd, jaxops::ForwardBackward,                                               \
                 JAXOPS_CROSS_ENTROPY_ATTRIBUTES.Attr<bool>("has_dsum").Attr<double>("z_loss"))

}  // namespace jaxops

#endif  // JAXOPS_OPS_CROSS_ENTROPY_CROSS_ENTROPY_H_
