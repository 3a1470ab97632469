#include "ops/logits/logits.cuh"

namespace jaxops {
namespace {

// y = z - max - log(total), total = sum(exp(z - max)), -inf where masked; max and total are kept for the backward pass.
template <Options kOptions, class T>
struct LogSoftmaxForward : LogitsForward<LogSoftmaxForward<kOptions, T>, kOptions, T, /*kRowValues=*/true> {
  using Base = LogitsForward<LogSoftmaxForward, kOptions, T, /*kRowValues=*/true>;
  using A = Accumulator<T>;
  using Base::options, Base::y;
  A *max_out, *total_out;  // null if they are not wanted

  explicit LogSoftmaxForward(const LogitsCall& call)
      : Base(call), max_out(DataOrNull<A>(call.max)), total_out(DataOrNull<A>(call.total)) {}

  __device__ void Finish(const auto& row, const auto& z, const auto& visible, const auto& sums) const {
    constexpr A kMasked = -std::numeric_limits<A>::infinity();
    const auto max = sums.template Component<0>(), total = sums.template Component<1>();
    if (max_out) {
      row.template StoreRow<LogitsCall::kRow>(max_out, max);
      row.template StoreRow<LogitsCall::kRow>(total_out, total);
    }
    const auto log_total = row.Each([](A total) { return rows::Log(total); }, total);
    const auto difference = [](A value, A max, A log_total) { return (value - max) - log_total; };
    const auto y_of_visible = rows::Map(difference, z, max, log_total);
    if (options.Ordinary(row, total)) {
      row.Store(y, y_of_visible, kMasked);
    } else {
      row.Store(y, rows::Map([](A value, bool seen) { return seen ? value : kMasked; }, y_of_visible, visible),
                kMasked);
    }
  }
};

// dx = scale dz, dz = dy - exp(z - max) sum(dy) / total. The softmax comes from x, not from y: exp of a rounded y would
// lose up to |y| ulp.
template <Options kOptions, class T>
struct LogSoftmaxBackward : LogitsOp<kOptions, 2, /*kRowValues=*/true> {
  using A = Accumulator<T>;
  using LogitsOp<kOptions, 2, /*kRowValues=*/true>::kNone;
  LogitsOptions<kOptions, A> options;
  Tensor<const T> x;
  Tensor<const T> dy;
  Tensor<T> dx;
  const A *max, *total;

  LogSoftmaxBackward(const LogitsCall& call)
      : options(call),
        x(Data<const T>(*call.x)),
        dy(Data<const T>(*call.dy)),
        dx(Data<T>(*call.y)),
        max(Data<A>(*call.max)),
        total(Data<A>(*call.total)) {}

  template <class Visit>
  __device__ void ForEachInput(const Visit& visit) const {
    visit.template operator()<0>(x);
    visit.template operator()<1>(dy);
  }
  template <class Value>
  struct OfRow {
    Value scale, max, total;
  };
  __device__ auto Scalars(const auto& row) const {
    const auto load = [&](const A* values) { return row.template LoadRow<LogitsCall::kRow>(values); };
    return OfRow<decltype(load(max))>{options.Scale(row), load(max), load(total)};
  }
  __device__ void operator()(auto& row) const {
    options.Narrow(row);
    (*this)(row, 0, Scalars(row));
  }

  __device__ void operator()(auto& row, int, const auto& values) const {
    const auto cotangent = row.template Load<1>(dy);
    const auto [z, visible] = options.Load(row, x);
    const auto g = Visible(cotangent, visible);
    Finish(row, z, visible, g, values, row.Join(row.template PartOf<rows::Sum>(g)));
  }
  // As above, in two halves.
  __device__ auto Begin(const auto& row, int, const auto&) const {
    return row.template PartOf<rows::Sum>(Visible(row.template Load<1>(dy), options.Visible(row)));
  }
  __device__ void End(auto& row, int, const auto& values, const auto& sums) const {
    const auto [z, visible] = options.Load(row, x);
    Finish(row, z, visible, Visible(row.template Load<1>(dy), visible), values, sums);
  }

 private:
  static __device__ auto Visible(const auto& cotangent, const auto& visible) {
    return rows::Map([](A g, bool seen) { return seen ? g : A{0}; }, cotangent, visible);
  }
  __device__ void Finish(auto& row, const auto& z, const auto& visible, const auto& g, const auto& values,
                         const auto& sums) const {
    const auto factor =
        row.Each([](A sum, A total) { return sum / total; }, sums.template Component<0>(), values.total);
    const auto gradient = [](A g, A value, bool seen, A max, A factor) {
      return seen ? g - rows::Exp(value - max) * factor : A{0};
    };
    const auto dz = rows::Map(gradient, g, z, visible, values.max, factor);
    if constexpr (kNone) {
      row.Store(dx, dz);
    } else {
      row.Store(dx, rows::Map([](A dz, A scale) { return dz * scale; }, dz, values.scale));
    }
  }
};

Error Forward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
              int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool has_parts,
              bool has_max) {
  return ForwardLogits<LogSoftmaxForward>(
      "log_softmax_fwd", stream, args, results,
      {axes, query_axis, key_axis, has_scale, has_bias, has_where, has_parts, has_max});
}

Error Backward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               int64_t query_axis, int64_t key_axis, bool has_scale, bool has_bias, bool has_where, bool has_parts,
               bool masked) {
  const LogitsAttributes attributes = {axes,      query_axis, key_axis,         has_scale, has_bias,
                                       has_where, has_parts,  /*has_max=*/true, masked};
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(ParseLogitsOnDevice("log_softmax_bwd", true, attributes, args, results, &call));
  JAXOPS_RETURN_IF_ERROR(CheckType("log_softmax_bwd", "dx", *call.y, call.x->element_type()));
  return RunLogits<LogSoftmaxBackward, /*kMasksAlone=*/false>("log_softmax_bwd", stream, call, *call.x, *call.dy);
}

}  // namespace
}  // namespace jaxops

JAXOPS_LOGITS_HANDLERS(log_softmax, .Attr<bool>("has_max"));
