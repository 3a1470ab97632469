#include "rows/launch.cuh"

namespace jaxops {
namespace {

// y = x - max - log(sum(exp(x - max)))
template <class T, class U>
struct LogSoftmaxForward {
  const T* x;
  U* y;

  __device__ void operator()(auto& row) const {
    const auto values = row.Load(x);
    const auto max = row.template Reduce<rows::Max>(values);
    const auto exponentials = rows::Map([=](auto value) { return rows::Exp(value - max); }, values);
    const auto log_sum = rows::Log(row.template Reduce<rows::Sum>(exponentials));
    row.Store(y, rows::Map([=](auto value) { return (value - max) - log_sum; }, values));
  }
};

// dx = dy - softmax(x) sum(dy). The softmax comes from x, not from y: exp of a rounded y would lose up to |y| ulp.
template <class T, class U>
struct LogSoftmaxBackward {
  const T* x;
  const U* dy;
  T* dx;

  __device__ void operator()(auto& row) const {
    const auto values = row.Load(x);
    const auto cotangents = row.Load(dy);
    const auto max = row.template Reduce<rows::Max>(values);
    const auto exponentials = rows::Map([=](auto value) { return rows::Exp(value - max); }, values);
    const auto sums = row.template Reduce<rows::Sum>(exponentials, cotangents);
    const auto factor = sums.second / sums.first;
    row.Store(dx, rows::Map([=](auto e, auto g) { return g - e * factor; }, exponentials, cotangents));
  }
};

Error Forward(Device stream, AnyBuffer x, BufferResult y) {
  return rows::LaunchMap("log_softmax_fwd", stream, x, *y, *y,
                         [&]<class T, class U> { return LogSoftmaxForward<T, U>{Data<T>(x), Data<U>(*y)}; });
}

Error Backward(Device stream, AnyBuffer x, AnyBuffer dy, BufferResult dx) {
  JAXOPS_RETURN_IF_ERROR(CheckType("log_softmax_bwd", "dx", *dx, x.element_type()));
  return rows::LaunchMap("log_softmax_bwd", stream, x, dy, *dx, [&]<class T, class U> {
    return LogSoftmaxBackward<T, U>{Data<T>(x), Data<U>(dy), Data<T>(*dx)};
  });
}

}  // namespace
}  // namespace jaxops

JAXOPS_HANDLER(log_softmax_fwd, jaxops::Forward, Arg<jaxops::AnyBuffer>().Ret<jaxops::AnyBuffer>());
JAXOPS_HANDLER(log_softmax_bwd, jaxops::Backward,
               Arg<jaxops::AnyBuffer>().Arg<jaxops::AnyBuffer>().Ret<jaxops::AnyBuffer>());
