#include <cmath>
#include <limits>

#include "ops/logits/logits_cpu.h"

namespace jaxops {
namespace {

// y = z - max - log(sum(exp(z - max)))
template <class Loop, class A>
JAXOPS_INLINE void ForwardRow(const Loop& loop, const A* z, const Visible<A>& visible, A* y) {
  const auto max = loop.Max([&](int64_t i, int64_t) { return z[i]; });
  auto log_sum = loop.Sum([&](int64_t i, int64_t w) { return Exp(z[i] - max[w]); });
  for (int64_t w = 0; w < loop.rows; ++w) log_sum[w] = std::log(log_sum[w]);
  loop.ForEach([&](int64_t i, int64_t w) { y[i] = (z[i] - max[w]) - log_sum[w]; });
  FillMasked(loop, visible, -std::numeric_limits<A>::infinity(), y);
}

// dz = dy - softmax(z) sum(dy), dy taken as 0 where masked. The softmax comes from z, not from y: exp of a rounded y
// would lose up to |y| ulp.
template <class Loop, class A>
JAXOPS_INLINE void BackwardRow(const Loop& loop, const A* z, const Visible<A>& visible, const A* dy, A* dz) {
  const auto max = loop.Max([&](int64_t i, int64_t) { return z[i]; });
  const auto sum = loop.Sum([&](int64_t i, int64_t w) { return dz[i] = Exp(z[i] - max[w]); });
  auto factor = visible.all() ? loop.Sum([&](int64_t i, int64_t) { return dy[i]; })
                              : loop.Sum([&](int64_t i, int64_t) { return visible(i) ? dy[i] : A{0}; });
  for (int64_t w = 0; w < loop.rows; ++w) factor[w] /= sum[w];
  loop.ForEach([&](int64_t i, int64_t w) { dz[i] = dy[i] - dz[i] * factor[w]; });
  FillMasked(loop, visible, A{0}, dz);
}

Error Forward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
              int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where) {
  const char* handler = "log_softmax_fwd";
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(ParseLogits(
      handler, /*backward=*/false, {axes, query_axis, key_axis, has_scale, has_bias, has_where}, args, results, &call));
  return MapLogits(handler, pool, call, [](const auto&... row) { ForwardRow(row...); });
}

Error Backward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool masked,
               bool has_dbias) {
  const char* handler = "log_softmax_bwd";
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(ParseLogits(handler, /*backward=*/true,
                                     {axes, query_axis, key_axis, has_scale, has_bias, has_where, masked, has_dbias},
                                     args, results, &call));
  return MapGradient(handler, pool, call, /*logits=*/true, [](const auto&... row) { BackwardRow(row...); });
}

}  // namespace
}  // namespace jaxops

JAXOPS_LOGITS_HANDLERS(log_softmax);
