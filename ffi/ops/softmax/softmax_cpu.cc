#include "ops/logits/logits_cpu.h"

namespace jaxops {
namespace {

template <class Loop, class A>
JAXOPS_INLINE void ForwardRow(const Loop& loop, const A* z, const Visible<A>& visible, A* y) {
  const auto max = loop.Max([&](int64_t i, int64_t) { return z[i]; });
  const auto sum = loop.MapSum(y, [&](int64_t i, int64_t w) { return Exp(z[i] - max[w]); });
  auto inverse = sum;
  for (int64_t w = 0; w < loop.rows; ++w) inverse[w] = 1 / sum[w];
  loop.Map(y, [&](int64_t i, int64_t w) {
    const A quotient = y[i] * inverse[w];
    return quotient + (y[i] - quotient * sum[w]) * inverse[w];
  });
  FillMasked(loop, visible, A{0}, y);
}

// dz = y (dy - <y, dy>); masked: entries with y = 0 have gradient 0 whatever dy is.
template <class Loop, class A>
JAXOPS_INLINE void BackwardRow(bool masked, const Loop& loop, const A* y, const A* dy, A* dz) {
  if (masked) {
    const auto dot = loop.Sum([&](int64_t i, int64_t) { return Select(y[i] != 0, y[i] * dy[i], A{0}); });
    loop.Map(dz, [&](int64_t i, int64_t w) { return Select(y[i] != 0, y[i] * (dy[i] - dot[w]), A{0}); });
  } else {
    const auto dot = loop.Sum([&](int64_t i, int64_t) { return y[i] * dy[i]; });
    loop.Map(dz, [&](int64_t i, int64_t w) { return y[i] * (dy[i] - dot[w]); });
  }
}

Error Forward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
              int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool has_parts) {
  const char* handler = "softmax_fwd";
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(ParseLogits(handler, /*backward=*/false,
                                     {axes, query_axis, key_axis, has_scale, has_bias, has_where, has_parts}, args,
                                     results, &call));
  return MapLogits(handler, pool, call,
                   [](const auto& loop, const auto&, const auto&... row) { ForwardRow(loop, row...); });
}

Error Backward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool has_parts,
               bool masked) {
  const char* handler = "softmax_bwd";
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(
      ParseLogits(handler, /*backward=*/true,
                  {axes, query_axis, key_axis, has_scale, has_bias, has_where, has_parts, /*has_max=*/false, masked},
                  args, results, &call));
  return MapGradient(handler, pool, call, /*logits=*/false,
                     [=](const auto& loop, const auto&, const auto* y, const auto&, const auto* dy, auto* dz) {
                       BackwardRow(masked, loop, y, dy, dz);
                     });
}

}  // namespace
}  // namespace jaxops

JAXOPS_LOGITS_HANDLERS(softmax);
