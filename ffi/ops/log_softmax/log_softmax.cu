#include "ops/log_softmax/log_softmax.cuh"

namespace jaxops {

JAXOPS_LOGITS_KERNELS_ELSEWHERE(LogSoftmax);

namespace {

Error Forward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
              int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool has_parts,
              bool has_max) {
  return ForwardLogits<LogSoftmaxForward>(
      "log_softmax_fwd", stream, args, results,
      {axes, query_axis, key_axis, has_scale, has_bias, has_where, has_parts, has_max});
}

Error Backward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool has_parts,
               bool masked, bool has_dbias) {
  const LogitsAttributes attributes = {axes,      query_axis, key_axis,         has_scale, has_bias,
                                       has_where, has_parts,  /*has_max=*/true, masked,    has_dbias};
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(ParseLogitsOnDevice("log_softmax_bwd", true, attributes, args, results, &call));
  JAXOPS_RETURN_IF_ERROR(CheckType("log_softmax_bwd", "dx", *call.y, call.x->element_type()));
  return BackwardLogits<LogSoftmaxBackward>("log_softmax_bwd", stream, call, *call.x, *call.dy);
}

}  // namespace
}  // namespace jaxops

JAXOPS_LOGITS_HANDLERS(log_softmax, .Attr<bool>("has_max"));
