#include "ops/logits/logits.cuh"

namespace jaxops {
namespace {

// y = exp(z - max) / sum(exp(z - max)), 0 where masked
template <Given kGiven, class T, class U>
struct SoftmaxForward : LogitsOp<kGiven, 1> {
  using A = Accumulator<T>;
  LogitsOptions<kGiven, A> options;
  const T* x;
  U* y;

  explicit SoftmaxForward(const LogitsCall& call) : options(call), x(Data<T>(*call.x)), y(Data<U>(*call.y)) {}

  __device__ void operator()(auto& row) const {
    options.Narrow(row);
    const auto [z, visible] = options.Load(row, x);
    const auto sums = row.ReduceExponentials(z);
    const auto y_of_visible = [&] {
      if constexpr (sizeof(U) > 2) {
        using Quotient = rows::Divisor<A>;
        const auto total = row.Each([](A sum) { return Quotient(sum); }, sums.total);
        const auto quotient = [](A value, A max, Quotient sum) { return rows::PreciseExp(value - max) / sum; };
        return rows::Map(quotient, z, sums.max, total);
      } else {
        const auto log2_sum = row.Each([](A sum) { return rows::Log2(sum); }, sums.total);
        return rows::Map([](A value, A max, A sum) { return rows::ExpOver(value - max, sum); }, z, sums.max, log2_sum);
      }
    }();
    if (options.Ordinary(row, sums.total)) {
      row.Store(y, y_of_visible);
    } else {
      row.Store(y, rows::Map([](A value, bool seen) { return seen ? value : A{0}; }, y_of_visible, visible));
    }
  }
};

// dx = scale dz, dz = y (dy - <y, dy>)
template <Given kGiven, class T, class U>
struct SoftmaxBackward : LogitsOp<kGiven, 2> {
  using A = Accumulator<T>;
  static constexpr bool kNone = kGiven == Given::kNone;
  LogitsOptions<kGiven, A> options;
  const T *y, *dy;
  U* dx;
  bool masked;

  SoftmaxBackward(const LogitsCall& call)
      : options(call), y(Data<T>(*call.x)), dy(Data<T>(*call.dy)), dx(Data<U>(*call.y)), masked(call.masked) {}

  template <class Visit>
  __device__ void ForEachInput(const Visit& visit) const {
    visit.template operator()<0>(y);
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
    const auto p = row.template Load<0>(y);
    const auto cotangent = row.template Load<1>(dy);
    const auto product = [mask = !kNone && masked](A p, A g) { return mask && p == 0 ? A{0} : p * g; };
    const auto dot = row.template Reduce<rows::Sum>(rows::Map(product, p, cotangent));
    const auto gradient = [=](A p, A g, A dot) { return product(p, g - dot); };
    const auto dz = rows::Map(gradient, p, cotangent, dot);
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
  return ForwardLogits<SoftmaxForward>("softmax_fwd", stream, args, results,
                                       {axes, query_axis, key_axis, has_scale, has_bias, has_where});
}

Error Backward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool masked,
               bool has_dbias) {
  const LogitsAttributes attributes = {axes,      query_axis,        key_axis, has_scale, has_bias,
                                       has_where, /*has_max=*/false, masked,   has_dbias};
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(ParseLogitsOnDevice("softmax_bwd", true, attributes, args, results, &call));
  if (has_bias || has_where) return Invalid("softmax_bwd", "takes neither bias nor where");
  JAXOPS_RETURN_IF_ERROR(CheckType("softmax_bwd", "dy", *call.dy, call.x->element_type()));
  return BackwardLogits<SoftmaxBackward>("softmax_bwd", stream, call, *call.x, *call.y);
}

}  // namespace
}  // namespace jaxops

JAXOPS_LOGITS_HANDLERS(softmax);
