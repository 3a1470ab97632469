#include "rows/launch.cuh"

namespace jaxops {
namespace {

// y = exp(x - max) / sum(exp(x - max))
template <class T, class U>
struct SoftmaxForward {
  const T* x;
  U* y;

  __device__ void operator()(auto& row) const {
    const auto values = row.Load(x);
    const auto max = row.template Reduce<rows::Max>(values);
    const auto exponentials = rows::Map([=](auto value) { return rows::Exp(value - max); }, values);
    const rows::Divisor<Accumulator<T>, (sizeof(U) > 2)> sum(row.template Reduce<rows::Sum>(exponentials));
    row.Store(y, rows::Map([=](auto value) { return value / sum; }, exponentials));
  }
};

// dx = y (dy - <y, dy>)
template <class T, class U>
struct SoftmaxBackward {
  const T *y, *dy;
  U* dx;

  __device__ void operator()(auto& row) const {
    const auto probabilities = row.Load(y), cotangents = row.Load(dy);
    const auto product = rows::Map([](auto p, auto g) { return p * g; }, probabilities, cotangents);
    const auto dot = row.template Reduce<rows::Sum>(product);
    row.Store(dx, rows::Map([=](auto p, auto g) { return p * (g - dot); }, probabilities, cotangents));
  }
};

Error Forward(Device stream, AnyBuffer x, BufferResult y) {
  return rows::LaunchMap("softmax_fwd", stream, x, *y, *y,
                         [&]<class T, class U> { return SoftmaxForward<T, U>{Data<T>(x), Data<U>(*y)}; });
}

Error Backward(Device stream, AnyBuffer y, AnyBuffer dy, BufferResult dx) {
  JAXOPS_RETURN_IF_ERROR(CheckType("softmax_bwd", "dy", dy, y.element_type()));
  return rows::LaunchMap("softmax_bwd", stream, y, *dx, dy, [&]<class T, class U> {
    return SoftmaxBackward<T, U>{Data<T>(y), Data<T>(dy), Data<U>(*dx)};
  });
}

}  // namespace
}  // namespace jaxops

JAXOPS_HANDLER(softmax_fwd, jaxops::Forward, Arg<jaxops::AnyBuffer>().Ret<jaxops::AnyBuffer>());
JAXOPS_HANDLER(softmax_bwd, jaxops::Backward,
               Arg<jaxops::AnyBuffer>().Arg<jaxops::AnyBuffer>().Ret<jaxops::AnyBuffer>());
