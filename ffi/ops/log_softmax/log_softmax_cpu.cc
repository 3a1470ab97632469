#include <cmath>
#include <limits>

#include "ops/logits/logits_cpu.h"

namespace jaxops {
namespace {

// y = z - max - log(total), total = sum(exp(z - max)); max and total are kept for the backward pass.
template <class Loop, class A, class Value>
JAXOPS_INLINE void ForwardRow(const Loop& loop, const A* z, const Visible<A>& visible, A* y, Value* max_out,
                              Value* total_out) {
  const Value max = loop.Max([&](int64_t i, int64_t) { return z[i]; });
  const Value total = loop.Sum([&](int64_t i, int64_t w) { return Exp(z[i] - max[w]); });
  Value log_total;
  for (int64_t w = 0; w < loop.rows; ++w) log_total[w] = std::log(total[w]);
  loop.Map(y, [&](int64_t i, int64_t w) { return (z[i] - max[w]) - log_total[w]; });
  FillMasked(loop, visible, -std::numeric_limits<A>::infinity(), y);
  *max_out = max;
  *total_out = total;
}

// dz = dy - exp(z - max) sum(dy) / total, dy taken as 0 where masked. The softmax comes from z, not from y: exp of a
// rounded y would lose up to |y| ulp.
template <class Loop, class A, class Value>
JAXOPS_INLINE void BackwardRow(const Loop& loop, const A* z, const Visible<A>& visible, const Value& max,
                               const Value& total, const A* dy, A* dz) {
  auto factor = visible.all() ? loop.Sum([&](int64_t i, int64_t) { return dy[i]; })
                              : loop.Sum([&](int64_t i, int64_t) { return Select(visible(i), dy[i], A{0}); });
  for (int64_t w = 0; w < loop.rows; ++w) factor[w] /= total[w];
  loop.Map(dz, [&](int64_t i, int64_t w) { return dy[i] - Exp(z[i] - max[w]) * factor[w]; });
  FillMasked(loop, visible, A{0}, dz);
}

Error Forward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
              int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool has_parts,
              bool has_max) {
  const char* handler = "log_softmax_fwd";
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(ParseLogits(handler, /*backward=*/false,
                                     {axes, query_axis, key_axis, has_scale, has_bias, has_where, has_parts, has_max},
                                     args, results, &call));
  const auto body = [&]<class A>(const auto& loop, const auto& position, const A* z, const auto& visible, A* y) {
    typename std::remove_cvref_t<decltype(loop)>::Value max, total;
    ForwardRow(loop, z, visible, y, &max, &total);
    if (!has_max) return;
    for (int64_t w = 0; w < loop.rows; ++w) {
      const int64_t row = position.Offset(LogitsCall::kRow, w);
      RowValues<A>(call.max)[row] = max[w];
      RowValues<A>(call.total)[row] = total[w];
    }
  };
  return MapLogits(handler, pool, call, body);
}

Error Backward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool has_parts,
               bool masked) {
  const char* handler = "log_softmax_bwd";
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(
      ParseLogits(handler, /*backward=*/true,
                  {axes, query_axis, key_axis, has_scale, has_bias, has_where, has_parts, /*has_max=*/true, masked},
                  args, results, &call));
  const auto body = [&]<class A>(const auto& loop, const auto& position, const A* z, const auto& visible, const A* dy,
                                 A* dz) {
    typename std::remove_cvref_t<decltype(loop)>::Value max, total;
    for (int64_t w = 0; w < loop.rows; ++w) {
      const int64_t row = position.Offset(LogitsCall::kRow, w);
      max[w] = RowValues<A>(call.max)[row];
      total[w] = RowValues<A>(call.total)[row];
    }
    BackwardRow(loop, z, visible, max, total, dy, dz);
  };
  return MapGradient(handler, pool, call, /*logits=*/true, body);
}

}  // namespace
}  // namespace jaxops

JAXOPS_LOGITS_HANDLERS(log_softmax, .Attr<bool>("has_max"));
