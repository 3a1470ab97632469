#include "rows/rows_cpu.h"

namespace jaxops {
namespace {

template <class A>
JAXOPS_CLONES void ForwardRow(int64_t n, const A* x, A* y) {
  const A max = MaxOf<A>(n, [=](int64_t i) { return x[i]; });
  for (int64_t i = 0; i < n; ++i) y[i] = Exp(x[i] - max);
  const A sum = SumOf<A>(n, [=](int64_t i) { return y[i]; });
  for (int64_t i = 0; i < n; ++i) y[i] /= sum;
}

// dx = y (dy - <y, dy>)
template <class A>
JAXOPS_CLONES void BackwardRow(int64_t n, const A* y, const A* dy, A* dx) {
  const A dot = SumOf<A>(n, [=](int64_t i) { return y[i] * dy[i]; });
  for (int64_t i = 0; i < n; ++i) dx[i] = y[i] * (dy[i] - dot);
}

Error Forward(Device pool, AnyBuffer x, BufferResult y) {
  return MapRows<1>("softmax_fwd", pool, {x}, *y, [](auto... row) { ForwardRow(row...); });
}

Error Backward(Device pool, AnyBuffer y, AnyBuffer dy, BufferResult dx) {
  return MapRows<2>("softmax_bwd", pool, {y, dy}, *dx, [](auto... row) { BackwardRow(row...); });
}

}  // namespace
}  // namespace jaxops

JAXOPS_HANDLER(softmax_fwd, jaxops::Forward, Arg<jaxops::AnyBuffer>().Ret<jaxops::AnyBuffer>());
JAXOPS_HANDLER(softmax_bwd, jaxops::Backward,
               Arg<jaxops::AnyBuffer>().Arg<jaxops::AnyBuffer>().Ret<jaxops::AnyBuffer>());
