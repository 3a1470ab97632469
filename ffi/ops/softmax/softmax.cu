#include "ops/softmax/softmax.cuh"

namespace jaxops {

JAXOPS_LOGITS_KERNELS_ELSEWHERE(Softmax);

namespace {

Error Forward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
              int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool has_parts) {
  return ForwardLogits<SoftmaxForward>("softmax_fwd", stream, args, results,
                                       {axes, query_axis, key_axis, has_scale, has_bias, has_where, has_parts});
}

Error Backward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool has_parts,
               bool masked, bool has_dbias) {
  const LogitsAttributes attributes = {axes,      query_axis, key_axis,          has_scale, has_bias,
                                       has_where, has_parts,  /*has_max=*/false, masked,    has_dbias};
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(ParseLogitsOnDevice("softmax_bwd", true, attributes, args, results, &call));
  if (has_bias || has_where) return Invalid("softmax_bwd", "takes neither bias nor where");
  JAXOPS_RETURN_IF_ERROR(CheckType("softmax_bwd", "dy", *call.dy, call.x->element_type()));
  return BackwardLogits<SoftmaxBackward>("softmax_bwd", stream, call, *call.x, *call.y);
}

}  // namespace
}  // namespace jaxops

JAXOPS_LOGITS_HANDLERS(softmax);
