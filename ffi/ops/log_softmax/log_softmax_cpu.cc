#include <cmath>

#include "rows/rows_cpu.h"

namespace jaxops {
namespace {

// y = x - max - log(sum(exp(x - max)))
template <class A>
JAXOPS_CLONES void ForwardRow(int64_t n, const A* x, A* y) {
  const A max = MaxOf<A>(n, [=](int64_t i) { return x[i]; });
  const A log_sum = std::log(SumOf<A>(n, [=](int64_t i) { return Exp(x[i] - max); }));
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - max) - log_sum;
}

// dx = dy - softmax(x) sum(dy). The softmax comes from x, not from y: exp of a rounded y would lose up to |y| ulp.
template <class A>
JAXOPS_CLONES void BackwardRow(int64_t n, const A* x, const A* dy, A* dx) {
  const A max = MaxOf<A>(n, [=](int64_t i) { return x[i]; });
  const A total = SumOf<A>(n, [=](int64_t i) { return dy[i]; });
  const A sum = SumOf<A>(n, [=](int64_t i) { return Exp(x[i] - max); });
  const A factor = total / sum;
  for (int64_t i = 0; i < n; ++i) dx[i] = dy[i] - Exp(x[i] - max) * factor;
}

Error Forward(Device pool, AnyBuffer x, BufferResult y) {
  return MapRows<1>("log_softmax_fwd", pool, {x}, *y, [](auto... row) { ForwardRow(row...); });
}

Error Backward(Device pool, AnyBuffer x, AnyBuffer dy, BufferResult dx) {
  return MapRows<2>("log_softmax_bwd", pool, {x, dy}, *dx, [](auto... row) { BackwardRow(row...); });
}

}  // namespace
}  // namespace jaxops

JAXOPS_HANDLER(log_softmax_fwd, jaxops::Forward, Arg<jaxops::AnyBuffer>().Ret<jaxops::AnyBuffer>());
JAXOPS_HANDLER(log_softmax_bwd, jaxops::Backward,
               Arg<jaxops::AnyBuffer>().Arg<jaxops::AnyBuffer>().Ret<jaxops::AnyBuffer>());
