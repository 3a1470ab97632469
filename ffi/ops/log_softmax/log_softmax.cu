#include "ops/logits/logits.cuh"

namespace jaxops {
namespace {

// y = z - max - log(sum(exp(z - max))), -inf where masked
template <Given kGiven, class T, class U>
struct LogSoftmaxForward : LogitsOp<kGiven, 1> {
  using A = Accumulator<T>;
  LogitsOptions<kGiven, A> options;
  const T* x;
  U* y;

  explicit LogSoftmaxForward(const LogitsCall& call) : options(call), x(Data<T>(*call.x)), y(Data<U>(*call.y)) {}

  __device__ void operator()(auto& row) const {
    constexpr A kMasked = -std::numeric_limits<A>::infinity();
    options.Narrow(row);
    const auto [z, visible] = options.Load(row, x);
    const auto sums = row.ReduceExponentials(z);
    const auto log_sum = row.Each([](A sum) { return rows::Log(sum); }, sums.exponentials);
    const auto difference = [](A value, A max, A log_sum) { return (value - max) - log_sum; };
    const auto y_of_visible = rows::Map(difference, z, sums.max, log_sum);
    if (options.Ordinary(row, sums.exponentials)) {
      row.Store(y, y_of_visible, kMasked);
    } else {
      row.Store(y, rows::Map([](A value, bool seen) { return seen ? value : kMasked; }, y_of_visible, visible),
                kMasked);
    }
  }
};

// dx = scale dz, dz = dy - softmax(z) sum(dy). The softmax comes from x, not from y: exp of a rounded y would lose up
// to |y| ulp.
template <Given kGiven, class T, class U>
struct LogSoftmaxBackward : LogitsOp<kGiven, 2> {
  using A = Accumulator<T>;
  static constexpr bool kNone = kGiven == Given::kNone;
  LogitsOptions<kGiven, A> options;
  const T* x;
  const U* dy;
  T* dx;

  LogSoftmaxBackward(const LogitsCall& call)
      : options(call), x(Data<T>(*call.x)), dy(Data<U>(*call.dy)), dx(Data<T>(*call.y)) {}

  template <class Visit>
  __device__ void ForEachInput(const Visit& visit) const {
    visit.template operator()<0>(x);
    visit.template operator()<1>(dy);
  }
  __device__ void Narrow(auto& row) const { options.Narrow(row); }
  __device__ int Parameters(const auto&) const { return 0; }
  __device__ auto Scalars(const auto& row) const { return options.Scale(row); }
  __device__ void operator()(auto& row) const {
    Narrow(row);
    (*this)(row, 0, Scalars(row));
  }

  __device__ void operator()(auto& row, int, const auto& scale, auto&... sums_of_columns) const {
    const auto cotangent = row.template Load<1>(dy);
    const auto [z, visible] = options.Load(row, x);
    const auto g = rows::Map([](A g, bool seen) { return seen ? g : A{0}; }, cotangent, visible);
    const auto sums = row.ReduceExponentials(z, g);
    const auto factor = row.Each([](A sum, A total) { return total / sum; }, sums.exponentials, sums.sum);
    const auto gradient = [](A g, A value, bool seen, A max, A factor) {
      return seen ? g - rows::Exp(value - max) * factor : A{0};
    };
    const auto dz = rows::Map(gradient, g, z, visible, sums.max, factor);
    if constexpr (kNone) {
      row.Store(dx, dz);
    } else {
      row.Store(dx, rows::Map([](A dz, A scale) { return dz * scale; }, dz, scale));
    }
    (sums_of_columns.Add(row, dz), ...);
  }
};

Error Forward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
              int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where) {
  return ForwardLogits<LogSoftmaxForward>("log_softmax_fwd", stream, args, results,
                                          {axes, query_axis, key_axis, has_scale, has_bias, has_where});
}

Error Backward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool masked,
               bool has_dbias) {
  const LogitsAttributes attributes = {axes, query_axis, key_axis, has_scale, has_bias, has_where, masked, has_dbias};
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(ParseLogits("log_softmax_bwd", true, attributes, args, results, &call));
  JAXOPS_RETURN_IF_ERROR(CheckType("log_softmax_bwd", "dx", *call.y, call.x->element_type()));
  return BackwardLogits<LogSoftmaxBackward>("log_softmax_bwd", stream, call, *call.x, *call.dy);
}

}  // namespace
}  // namespace jaxops

JAXOPS_LOGITS_HANDLERS(log_softmax);
