// softmax's and log_softmax's operands, checked; shared by the CPU and the CUDA handlers.
//   forward:  x, [scale], [bias], [where]                            -> y, [max, total], [parts]
//   backward: x or y, [scale], [bias], [where], [max, total], dy     -> dx, [parts]
// The logits are z = x scale + bias. An entry is masked (z = -inf, result 0 or -inf, gradient 0) if `where` is false
// or, with query_axis >= 0, if key > query. scale has the accumulator's dtype, bias any floating dtype; where is
// boolean.
//
// softmax's backward pass starts from y and needs neither bias nor where. `masked` says that zeros in y may be masked
// entries, which have gradient 0 whatever dy is. log_softmax's backward pass starts from x and from each row's max =
// max(z) and total = sum(exp(z - max)), optional forward results in the accumulator's dtype. parts is a workspace that
// lets a GPU split rows if there are no options; see CheckParts.
#ifndef JAXOPS_OPS_LOGITS_LOGITS_H_
#define JAXOPS_OPS_LOGITS_LOGITS_H_

#include "core/handler.h"
#include "core/row_shape.h"

namespace jaxops {

struct LogitsAttributes {
  ffi::Span<const int64_t> axes;
  int64_t query_axis, key_axis;
  bool has_scale, has_bias, has_where, has_parts;
  bool has_max = false;  // and total
  bool masked = false;   // backward pass
};

struct LogitsCall {
  enum Slot { kFull, kRow, kScale, kBias, kWhere, kDiagonal, kSlots };  // kRow: max and total

  RowShape<kSlots> shape;
  std::optional<AnyBuffer> x, y;  // forward: operand and result; backward: x or y, and dx
  std::optional<AnyBuffer> dy;    // backward
  std::optional<AnyBuffer> scale, bias, where;
  std::optional<AnyBuffer> max, total;  // forward results, backward operands
  bool causal = false, masked = false;
  std::optional<AnyBuffer> parts;

  bool has_options() const { return scale || bias || where || causal || masked; }
};

inline Error ParseLogits(const char* handler, bool backward, const LogitsAttributes& attributes,
                         const ffi::RemainingArgs& args, const ffi::RemainingRets& results, LogitsCall* call) {
  using Call = LogitsCall;
  if (backward && !attributes.has_max && (attributes.has_bias || attributes.has_where))
    return Invalid(handler, "takes neither bias nor where");
  RowShapeParser<Call::kSlots> parser(handler);
  BufferReader arg(handler, args);
  BufferReader result(handler, results);
  JAXOPS_RETURN_IF_ERROR(arg.Take(&call->x));
  JAXOPS_RETURN_IF_ERROR(result.Take(&call->y));
  JAXOPS_RETURN_IF_ERROR(parser.Start(*call->x, attributes.axes));
  JAXOPS_RETURN_IF_ERROR(parser.Full("the result", *call->y));
  const DataType accumulator = AccumulatorType(call->x->element_type());
  if (attributes.has_scale) {
    JAXOPS_RETURN_IF_ERROR(arg.Take(&call->scale));
    JAXOPS_RETURN_IF_ERROR(parser.BroadcastRow(Call::kScale, "scale", *call->scale));
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, "scale", *call->scale, accumulator));
  }
  if (attributes.has_bias) {
    JAXOPS_RETURN_IF_ERROR(arg.Take(&call->bias));
    JAXOPS_RETURN_IF_ERROR(parser.Broadcast(Call::kBias, "bias", *call->bias));
    const DataType type = call->bias->element_type();
    if (!IsFloating(type) || AccumulatorType(type) != accumulator) {
      return Invalid(handler, "bias must have a floating element type, f64 where x has it and only there");
    }
  }
  if (attributes.has_where) {
    JAXOPS_RETURN_IF_ERROR(arg.Take(&call->where));
    JAXOPS_RETURN_IF_ERROR(parser.Broadcast(Call::kWhere, "where", *call->where));
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, "where", *call->where, DataType::PRED));
  }
  if (attributes.has_max) {
    for (const auto& [name, statistic] : {std::pair{"max", &call->max}, std::pair{"total", &call->total}}) {
      JAXOPS_RETURN_IF_ERROR(backward ? arg.Take(statistic) : result.Take(statistic));
      JAXOPS_RETURN_IF_ERROR(CheckType(handler, name, **statistic, accumulator));
      JAXOPS_RETURN_IF_ERROR(parser.Row(Call::kRow, name, **statistic));
    }
  }
  if (backward) {
    JAXOPS_RETURN_IF_ERROR(arg.Take(&call->dy));
    JAXOPS_RETURN_IF_ERROR(parser.Full("dy", *call->dy));
  }
  call->causal = attributes.query_axis >= 0;
  call->masked = attributes.masked;
  if (call->causal) {
    JAXOPS_RETURN_IF_ERROR(parser.Diagonal(Call::kDiagonal, attributes.query_axis, attributes.key_axis));
  }
  if (attributes.has_parts) JAXOPS_RETURN_IF_ERROR(result.Take(&call->parts));
  JAXOPS_RETURN_IF_ERROR(arg.End());
  JAXOPS_RETURN_IF_ERROR(result.End());
  JAXOPS_RETURN_IF_ERROR(parser.Finish(&call->shape));
  if (!attributes.has_parts) return Error::Success();
  return CheckParts(handler, call->shape, accumulator, backward ? 1 : 2, *call->parts);
}

// An op's handlers, from its file's functions Forward and Backward; `...`: further attributes for Forward.
#define JAXOPS_LOGITS_ATTRIBUTES                     \
  RemainingArgs()                                    \
      .RemainingRets()                               \
      .Attr<::xla::ffi::Span<const int64_t>>("axes") \
      .Attr<int64_t>("query_axis")                   \
      .Attr<int64_t>("key_axis")                     \
      .Attr<bool>("has_scale")                       \
      .Attr<bool>("has_bias")                        \
      .Attr<bool>("has_where")                       \
      .Attr<bool>("has_parts")
#define JAXOPS_LOGITS_HANDLERS(op, ...)                                            \
  JAXOPS_HANDLER(op##_fwd, jaxops::Forward, JAXOPS_LOGITS_ATTRIBUTES __VA_ARGS__); \
  JAXOPS_HANDLER(op##_bwd, jaxops::Backward, JAXOPS_LOGITS_ATTRIBUTES.Attr<bool>("masked"))

}  // namespace jaxops

#endif  // JAXOPS_OPS_LOGITS_LOGITS_H_
