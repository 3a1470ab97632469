#include "ops/logits/logits.cuh"

namespace jaxops {
namespace {

// y = exp(z - max) / sum(exp(z - max)), 0 where masked
template <Options kOptions, class T>
struct SoftmaxForward : LogitsForward<SoftmaxForward<kOptions, T>, kOptions, T> {
  using Base = LogitsForward<SoftmaxForward, kOptions, T>;
  using A = Accumulator<T>;
  using Base::Base;
  using Base::options, Base::y;

  __device__ void Finish(const auto& row, const auto& z, const auto& visible, const auto& sums) const {
    const auto max = sums.template Component<0>(), sum = sums.template Component<1>();
    const auto y_of_visible = [&] {
      if constexpr (sizeof(T) > 2) {
        using Quotient = rows::Divisor<A>;
        const auto total = row.Each([](A sum) { return Quotient(sum); }, sum);
        const auto quotient = [](A value, A max, Quotient sum) { return rows::PreciseExp(value - max) / sum; };
        return rows::Map(quotient, z, max, total);
      } else {
        const auto log2_sum = row.Each([](A sum) { return rows::Log2(sum); }, sum);
        return rows::Map([](A value, A max, A sum) { return rows::ExpOver(value - max, sum); }, z, max, log2_sum);
      }
    }();
    if (options.Ordinary(row, sum)) {
      row.Store(y, y_of_visible);
    } else {
      row.Store(y, rows::Map([](A value, bool seen) { return seen ? value : A{0}; }, y_of_visible, visible));
    }
  }
};

// dx = scale dz, dz = y (dy - <y, dy>)
template <Options kOptions, class T>
struct SoftmaxBackward : LogitsOp<kOptions, 2> {
  using A = Accumulator<T>;
  using LogitsOp<kOptions, 2>::kNone;
  LogitsOptions<kOptions, A> options;
  Tensor<const T> y, dy;
  Tensor<T> dx;
  bool masked;

  SoftmaxBackward(const LogitsCall& call)
      : options(call),
        y(Data<const T>(*call.x)),
        dy(Data<const T>(*call.dy)),
        dx(Data<T>(*call.y)),
        masked(call.masked) {}

  template <class Visit>
  __device__ void ForEachInput(const Visit& visit) const {
    visit.template operator()<0>(y);
    visit.template operator()<1>(dy);
  }
  __device__ auto Scalars(const auto& row) const { return options.Scale(row); }
  __device__ void operator()(auto& row) const {
    options.Narrow(row);
    (*this)(row, 0, Scalars(row));
  }

  __device__ void operator()(auto& row, int, const auto& scale) const {
    const auto p = row.template Load<0>(y);
    const auto cotangent = row.template Load<1>(dy);
    Finish(row, p, cotangent, scale, row.Join(PartOf(row, p, cotangent)));
  }
  // As above, in two halves.
  __device__ auto Begin(const auto& row, int, const auto&) const {
    return PartOf(row, row.template Load<0>(y), row.template Load<1>(dy));
  }
  __device__ void End(auto& row, int, const auto& scale, const auto& dots) const {
    Finish(row, row.template Load<0>(y), row.template Load<1>(dy), scale, dots);
  }

 private:
  __device__ A Product(A p, A g) const { return !kNone && masked && p == 0 ? A{0} : p * g; }
  __device__ auto PartOf(const auto& row, const auto& p, const auto& cotangent) const {
    const auto product = [this](A p, A g) { return Product(p, g); };
    return row.template PartOf<rows::Sum>(rows::Map(product, p, cotangent));
  }
  __device__ void Finish(auto& row, const auto& p, const auto& cotangent, const auto& scale, const auto& dots) const {
    const auto gradient = [this](A p, A g, A dot) { return Product(p, g - dot); };
    const auto dz = rows::Map(gradient, p, cotangent, dots.template Component<0>());
    if constexpr (kNone) {
      row.Store(dx, dz);
    } else {
      row.Store(dx, rows::Map([](A dz, A scale) { return dz * scale; }, dz, scale));
    }
  }
};

Error Forward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
              int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool has_parts) {
  return ForwardLogits<SoftmaxForward>("softmax_fwd", stream, args, results,
                                       {axes, query_axis, key_axis, has_scale, has_bias, has_where, has_parts});
}

Error Backward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool has_parts,
               bool masked) {
  const LogitsAttributes attributes = {axes,      query_axis, key_axis,          has_scale, has_bias,
                                       has_where, has_parts,  /*has_max=*/false, masked};
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(ParseLogitsOnDevice("softmax_bwd", true, attributes, args, results, &call));
  JAXOPS_RETURN_IF_ERROR(CheckType("softmax_bwd", "dy", *call.dy, call.x->element_type()));
  return RunLogits<SoftmaxBackward, /*kMasksAlone=*/false>("softmax_bwd", stream, call, *call.x, *call.y);
}

}  // namespace
}  // namespace jaxops

JAXOPS_LOGITS_HANDLERS(softmax);
