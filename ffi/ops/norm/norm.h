// layer_norm's (centred) and rms_norm's (not centred) operands, checked; shared by the CPU and the CUDA handlers.
//   forward:  x, [residual], [scale], [bias], [where]          -> y, [sum], [mean], rstd, [parts]
//   backward: x, [scale], [where], [mean], rstd, dy, [dsum]    -> dx, [workspace, [dscale], [dbias]], [parts]
// Only layer_norm has mean. With a residual, x + residual is normalised and is the result `sum`; the backward pass
// takes this sum as x and adds its cotangent dsum to dx. Only positions where `where` is true count in the statistics.
// scale, bias, their gradients, mean and rstd have the accumulator's dtype. parts is a workspace that lets a GPU split
// rows without `where`; see CheckParts.
#ifndef JAXOPS_OPS_NORM_NORM_H_
#define JAXOPS_OPS_NORM_NORM_H_

#include <optional>
#include <utility>
#include <vector>

#include "core/handler.h"
#include "core/row_shape.h"

namespace jaxops {

struct NormCall {
  enum Slot { kFull, kRow, kScale, kBias, kWhere, kSum, kSlots };  // kSum: dscale and dbias

  RowShape<kSlots> shape, ungrouped;  // ungrouped: with all rows in one group
  std::optional<AnyBuffer> x, residual, scale, bias, where;
  std::optional<AnyBuffer> y, sum, mean, rstd;  // forward results; mean and rstd: backward operands
  std::optional<AnyBuffer> dy, dsum, dx;
  std::optional<AnyBuffer> parts;
  SummedResults sums;  // dscale and dbias if present, in this order
};

struct NormAttributes {
  ffi::Span<const int64_t> axes;
  bool has_residual = false, has_scale = false, has_bias = false, has_where = false, has_parts = false;
  bool has_dsum = false, has_dscale = false, has_dbias = false;  // backward pass
};

inline Error ParseNorm(const char* handler, bool backward, bool centred, const NormAttributes& has,
                       const ffi::RemainingArgs& args, const ffi::RemainingRets& results, NormCall* call) {
  using Call = NormCall;
  using Parser = RowShapeParser<Call::kSlots>;
  if (!centred && (has.has_bias || has.has_where || has.has_dbias))
    return Invalid(handler, "takes neither bias nor where");
  Parser parser(handler);
  BufferReader arg(handler, args);
  BufferReader result(handler, results);
  // The next operand or result, with dtype `type`: a full one, or one with its own layout, which `place` checks.
  const auto take_full = [&](auto& source, const char* name, bool present, DataType type, auto* out) {
    if (!present) return Error::Success();
    JAXOPS_RETURN_IF_ERROR(source.Take(out));
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, name, **out, type));
    return parser.Full(name, **out);
  };
  const auto take = [&](auto& source, const char* name, bool present, DataType type, auto place, int slot, auto* out) {
    if (!present) return Error::Success();
    JAXOPS_RETURN_IF_ERROR(source.Take(out));
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, name, **out, type));
    return (parser.*place)(slot, name, **out);
  };
  JAXOPS_RETURN_IF_ERROR(arg.Take(&call->x));
  JAXOPS_RETURN_IF_ERROR(parser.Start(*call->x, has.axes));
  const DataType type = call->x->element_type(), wide = AccumulatorType(type);
  constexpr auto kBroadcast = &Parser::Broadcast, kRow = &Parser::Row, kSummed = &Parser::Summed;
  JAXOPS_RETURN_IF_ERROR(take_full(arg, "residual", has.has_residual, type, &call->residual));
  JAXOPS_RETURN_IF_ERROR(take(arg, "scale", has.has_scale, wide, kBroadcast, Call::kScale, &call->scale));
  JAXOPS_RETURN_IF_ERROR(take(arg, "bias", has.has_bias, wide, kBroadcast, Call::kBias, &call->bias));
  JAXOPS_RETURN_IF_ERROR(take(arg, "where", has.has_where, DataType::PRED, kBroadcast, Call::kWhere, &call->where));
  std::optional<AnyBuffer> workspace;
  std::vector<std::optional<AnyBuffer>> gradients;
  if (backward) {
    JAXOPS_RETURN_IF_ERROR(take(arg, "mean", centred, wide, kRow, Call::kRow, &call->mean));
    JAXOPS_RETURN_IF_ERROR(take(arg, "rstd", true, wide, kRow, Call::kRow, &call->rstd));
    JAXOPS_RETURN_IF_ERROR(arg.Take(&call->dy));
    JAXOPS_RETURN_IF_ERROR(parser.Full("dy", *call->dy));
    JAXOPS_RETURN_IF_ERROR(take_full(arg, "dsum", has.has_dsum, type, &call->dsum));
    JAXOPS_RETURN_IF_ERROR(take_full(result, "dx", true, type, &call->dx));
    if (has.has_dscale || has.has_dbias) JAXOPS_RETURN_IF_ERROR(result.Take(&workspace));
    for (const auto& [name, present] : {std::pair{"dscale", has.has_dscale}, std::pair{"dbias", has.has_dbias}}) {
      if (!present) continue;
      auto& gradient = gradients.emplace_back();
      JAXOPS_RETURN_IF_ERROR(take(result, name, true, wide, kSummed, Call::kSum, &gradient));
      if (gradients[0]->dimensions() != gradient->dimensions())
        return Invalid(handler, "dscale and dbias must have the same shape");
    }
  } else {
    JAXOPS_RETURN_IF_ERROR(result.Take(&call->y));
    JAXOPS_RETURN_IF_ERROR(parser.Full("y", *call->y));
    JAXOPS_RETURN_IF_ERROR(take_full(result, "sum", has.has_residual, type, &call->sum));
    JAXOPS_RETURN_IF_ERROR(take(result, "mean", centred, wide, kRow, Call::kRow, &call->mean));
    JAXOPS_RETURN_IF_ERROR(take(result, "rstd", true, wide, kRow, Call::kRow, &call->rstd));
  }
  if (has.has_parts) JAXOPS_RETURN_IF_ERROR(result.Take(&call->parts));
  JAXOPS_RETURN_IF_ERROR(arg.End());
  JAXOPS_RETURN_IF_ERROR(result.End());
  JAXOPS_RETURN_IF_ERROR(parser.Finish(&call->shape));
  if (has.has_parts) {
    // Backward: sum(g) and sum(g x^). Forward: count, mean and squared deviations, or the sum of squares.
    const int values = backward ? 2 : centred ? 3 : 1;
    JAXOPS_RETURN_IF_ERROR(CheckParts(handler, call->shape, wide, values, *call->parts));
  }
  if (!backward) return Error::Success();
  JAXOPS_RETURN_IF_ERROR(parser.Finish(&call->ungrouped, false));
  return gradients.empty() ? Error::Success()
                           : ParseSums(handler, call->shape, wide, *workspace, gradients, &call->sums);
}

// Both ops' handlers, from Forward<centred> and Backward<centred>.
#define JAXOPS_NORM_FORWARD(op, centred)                            \
  JAXOPS_HANDLER(op##_fwd, (jaxops::Forward<centred>),              \
                 RemainingArgs()                                    \
                     .RemainingRets()                               \
                     .Attr<::xla::ffi::Span<const int64_t>>("axes") \
                     .Attr<bool>("has_residual")                    \
                     .Attr<bool>("has_scale")                       \
                     .Attr<bool>("has_bias")                        \
                     .Attr<bool>("has_where")                       \
                     .Attr<bool>("has_parts")                       \
                     .Attr<double>("epsilon"))
#define JAXOPS_NORM_BACKWARD(op, centred)                           \
  JAXOPS_HANDLER(op##_bwd, (jaxops::Backward<centred>),             \
                 RemainingArgs()                                    \
                     .RemainingRets()                               \
                     .Attr<::xla::ffi::Span<const int64_t>>("axes") \
                     .Attr<bool>("has_scale")                       \
                     .Attr<bool>("has_where")                       \
                     .Attr<bool>("has_parts")                       \
                     .Attr<bool>("has_dsum")                        \
                     .Attr<bool>("has_dscale")                      \
                     .Attr<bool>("has_dbias"))

}  // namespace jaxops

#endif  // JAXOPS_OPS_NORM_NORM_H_
