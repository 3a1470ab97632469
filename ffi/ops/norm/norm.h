// The operands of layer_norm (centred) and rms_norm (not centred), checked; shared by the CPU and the CUDA handlers.
//   forward:  x, [residual], [scale], [bias], [where]          -> y, [sum], [mean], rstd
//   backward: x, [scale], [where], [mean], rstd, dy, [dsum]    -> dx, [workspace, [dscale], [dbias]]
// mean is there for layer_norm only. With a residual, x + residual is normalised and is the result `sum`; the backward
// pass takes that sum as x, and adds its cotangent dsum to dx. where says which positions count in the statistics.
// scale and bias, their gradients, mean and rstd have the accumulator's dtype.
#ifndef JAXOPS_OPS_NORM_NORM_H_
#define JAXOPS_OPS_NORM_NORM_H_

#include "core/handler.h"
#include "core/row_shape.h"

namespace jaxops {

struct NormCall {
  enum Slot { kFull, kRow, kScale, kBias, kWhere, kSum, kSlots };  // kSum: dscale and dbias

  RowShape<kSlots> shape, ungrouped;  // ungrouped: the same with all rows in one group
  std::optional<AnyBuffer> x, residual, scale, bias, where;
  std::optional<AnyBuffer> y, sum, mean, rstd;  // results of the forward pass; mean and rstd: operands of the backward
  std::optional<AnyBuffer> dy, dsum, dx;
  SummedResults sums;
  bool has_dscale = false, has_dbias = false;  // sums.results: those that are there, in this order
};

struct NormForwardAttributes {
  ffi::Span<const int64_t> axes;
  bool has_residual, has_scale, has_bias, has_where;
};
struct NormBackwardAttributes {
  ffi::Span<const int64_t> axes;
  bool has_scale, has_where, has_dsum, has_dscale, has_dbias;
};

namespace norm_internal {

using Parser = RowShapeParser<NormCall::kSlots>;

template <class Source>
Error TakeFull(const char* handler, const char* name, bool present, DataType type, BufferReader<Source>& source,
               const Parser& parser, std::optional<AnyBuffer>* out) {
  if (!present) return Error::Success();
  JAXOPS_RETURN_IF_ERROR(source.Take(out));
  JAXOPS_RETURN_IF_ERROR(CheckType(handler, name, **out, type));
  return parser.Full(name, **out);
}

template <class Source>
Error TakeBroadcast(const char* handler, const char* name, bool present, DataType type, int slot,
                    BufferReader<Source>& source, Parser& parser, std::optional<AnyBuffer>* out) {
  if (!present) return Error::Success();
  JAXOPS_RETURN_IF_ERROR(source.Take(out));
  JAXOPS_RETURN_IF_ERROR(CheckType(handler, name, **out, type));
  return parser.Broadcast(slot, name, **out);
}

template <class Source>
Error TakeRow(const char* handler, const char* name, bool present, DataType type, BufferReader<Source>& source,
              Parser& parser, std::optional<AnyBuffer>* out) {
  if (!present) return Error::Success();
  JAXOPS_RETURN_IF_ERROR(source.Take(out));
  JAXOPS_RETURN_IF_ERROR(CheckType(handler, name, **out, type));
  return parser.Row(NormCall::kRow, name, **out);
}

}  // namespace norm_internal

inline Error ParseNormForward(const char* handler, bool centred, const NormForwardAttributes& has,
                              const ffi::RemainingArgs& args, const ffi::RemainingRets& results, NormCall* call) {
  using namespace norm_internal;
  using Call = NormCall;
  Parser parser(handler);
  BufferReader arg(handler, args);
  BufferReader result(handler, results);
  JAXOPS_RETURN_IF_ERROR(arg.Take(&call->x));
  JAXOPS_RETURN_IF_ERROR(parser.Start(*call->x, has.axes));
  const DataType type = call->x->element_type(), wide = AccumulatorType(type);
  JAXOPS_RETURN_IF_ERROR(TakeFull(handler, "residual", has.has_residual, type, arg, parser, &call->residual));
  JAXOPS_RETURN_IF_ERROR(TakeBroadcast(handler, "scale", has.has_scale, wide, Call::kScale, arg, parser, &call->scale));
  JAXOPS_RETURN_IF_ERROR(TakeBroadcast(handler, "bias", has.has_bias, wide, Call::kBias, arg, parser, &call->bias));
  JAXOPS_RETURN_IF_ERROR(
      TakeBroadcast(handler, "where", has.has_where, DataType::PRED, Call::kWhere, arg, parser, &call->where));
  JAXOPS_RETURN_IF_ERROR(result.Take(&call->y));
  JAXOPS_RETURN_IF_ERROR(parser.Full("y", *call->y));
  JAXOPS_RETURN_IF_ERROR(TakeFull(handler, "sum", has.has_residual, type, result, parser, &call->sum));
  JAXOPS_RETURN_IF_ERROR(TakeRow(handler, "mean", centred, wide, result, parser, &call->mean));
  JAXOPS_RETURN_IF_ERROR(TakeRow(handler, "rstd", true, wide, result, parser, &call->rstd));
  JAXOPS_RETURN_IF_ERROR(arg.End());
  JAXOPS_RETURN_IF_ERROR(result.End());
  return parser.Finish(&call->shape);
}

inline Error ParseNormBackward(const char* handler, bool centred, const NormBackwardAttributes& has,
                               const ffi::RemainingArgs& args, const ffi::RemainingRets& results, NormCall* call) {
  using namespace norm_internal;
  using Call = NormCall;
  Parser parser(handler);
  BufferReader arg(handler, args);
  BufferReader result(handler, results);
  JAXOPS_RETURN_IF_ERROR(arg.Take(&call->x));
  JAXOPS_RETURN_IF_ERROR(parser.Start(*call->x, has.axes));
  const DataType type = call->x->element_type(), wide = AccumulatorType(type);
  JAXOPS_RETURN_IF_ERROR(TakeBroadcast(handler, "scale", has.has_scale, wide, Call::kScale, arg, parser, &call->scale));
  JAXOPS_RETURN_IF_ERROR(
      TakeBroadcast(handler, "where", has.has_where, DataType::PRED, Call::kWhere, arg, parser, &call->where));
  JAXOPS_RETURN_IF_ERROR(TakeRow(handler, "mean", centred, wide, arg, parser, &call->mean));
  JAXOPS_RETURN_IF_ERROR(TakeRow(handler, "rstd", true, wide, arg, parser, &call->rstd));
  JAXOPS_RETURN_IF_ERROR(arg.Take(&call->dy));
  JAXOPS_RETURN_IF_ERROR(parser.Full("dy", *call->dy));
  JAXOPS_RETURN_IF_ERROR(TakeFull(handler, "dsum", has.has_dsum, type, arg, parser, &call->dsum));
  JAXOPS_RETURN_IF_ERROR(TakeFull(handler, "dx", true, type, result, parser, &call->dx));
  std::optional<AnyBuffer> workspace, gradients[2];
  int count = 0;
  if (has.has_dscale || has.has_dbias) JAXOPS_RETURN_IF_ERROR(result.Take(&workspace));
  for (const auto& [name, present] : {std::pair{"dscale", has.has_dscale}, std::pair{"dbias", has.has_dbias}}) {
    if (!present) continue;
    std::optional<AnyBuffer>& gradient = gradients[count++];
    JAXOPS_RETURN_IF_ERROR(result.Take(&gradient));
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, name, *gradient, wide));
    JAXOPS_RETURN_IF_ERROR(parser.Summed(Call::kSum, name, *gradient));
    if (count == 2 && gradients[0]->dimensions() != gradient->dimensions()) {
      return Invalid(handler, "dscale and dbias must have the same shape");
    }
  }
  JAXOPS_RETURN_IF_ERROR(arg.End());
  JAXOPS_RETURN_IF_ERROR(result.End());
  JAXOPS_RETURN_IF_ERROR(parser.Finish(&call->shape));
  JAXOPS_RETURN_IF_ERROR(parser.Finish(&call->ungrouped, false));
  call->has_dscale = has.has_dscale;
  call->has_dbias = has.has_dbias;
  if (count == 0) return Error::Success();
  return ParseSums(handler, call->shape, wide, *workspace, {gradients, gradients + count}, &call->sums);
}

// The handlers of both ops, from Forward<centred> and Backward<centred> of the including file.
#define JAXOPS_NORM_HANDLERS(op, centred)                           \
  JAXOPS_HANDLER(op##_fwd, (jaxops::Forward<centred>),              \
                 RemainingArgs()                                    \
                     .RemainingRets()                               \
                     .Attr<::xla::ffi::Span<const int64_t>>("axes") \
                     .Attr<bool>("has_residual")                    \
                     .Attr<bool>("has_scale")                       \
                     .Attr<bool>("has_bias")                        \
                     .Attr<bool>("has_where")                       \
                     .Attr<double>("epsilon"));                     \
  JAXOPS_HANDLER(op##_bwd, (jaxops::Backward<centred>),             \
                 RemainingArgs()                                    \
                     .RemainingRets()                               \
                     .Attr<::xla::ffi::Span<const int64_t>>("axes") \
                     .Attr<bool>("has_scale")                       \
                     .Attr<bool>("has_where")                       \
                     .Attr<bool>("has_dsum")                        \
                     .Attr<bool>("has_dscale")                      \
                     .Attr<bool>("has_dbias"))

}  // namespace jaxops

#endif  // JAXOPS_OPS_NORM_NORM_H_
