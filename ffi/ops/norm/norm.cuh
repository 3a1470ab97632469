// layer_norm (centred) and rms_norm (not centred) on CUDA devices. Each op has a file of its own beside this one.
#ifndef JAXOPS_OPS_NORM_NORM_CUH_
#define JAXOPS_OPS_NORM_NORM_CUH_

#include "ops/norm/norm.h"
#include "rows/row_loop.cuh"

namespace jaxops {
namespace {

// y = (x - mean) rstd scale + bias; mean and rstd = 1 / sqrt(var(x) + epsilon) are kept for the backward pass.
// The variance comes from the deviations: exact also where mean(x)^2 >> var(x). Without centring, mean is 0.
template <bool kCentred, class T, class U>
struct NormForwardOp {
  using A = Accumulator<T>;
  const T* x;
  rows::Vector<A> scale, bias;
  A epsilon;
  U* y;
  A *mean_out, *rstd_out;

  __device__ void operator()(auto& row) const {
    const auto values = row.Load(x);
    const A share = rows::Reciprocal(static_cast<A>(row.columns));
    A mean = 0;
    if constexpr (kCentred) mean = row.template Reduce<rows::Sum>(values) * share;
    const auto squares = rows::Map([=](A value) { return (value - mean) * (value - mean); }, values);
    const A rstd = rows::Rsqrt(row.template Reduce<rows::Sum>(squares) * share + epsilon);
    if (row.Leads()) {
      if constexpr (kCentred) mean_out[row.index] = mean;
      rstd_out[row.index] = rstd;
    }
    const auto result = [=](A value, A s, A b) { return (value - mean) * rstd * s + b; };
    row.Store(y, rows::Map(result, values, row.LoadParameter(scale, A{1}), row.LoadParameter(bias, A{0})));
  }
};

// With x^ = (x - mean) rstd and g = dy scale:  dx = rstd (g - mean(g) - x^ mean(g x^))
// and, where sums of columns are wanted, the rows' shares of dscale = sum(dy x^) and dbias = sum(dy).
template <bool kCentred, class T, class U>
struct NormBackwardOp {
  using A = Accumulator<T>;
  const T* x;
  const U* dy;
  rows::Vector<A> scale;
  const A *mean, *rstd;
  T* dx;

  __device__ auto Parameters(const auto& row) const { return row.HoldParameter(scale, A{1}); }
  __device__ void operator()(auto& row) const { (*this)(row, row.LoadParameter(scale, A{1})); }

  __device__ void operator()(auto& row, const auto& scales, auto&... sums_of_columns) const {
    const A m = kCentred ? mean[row.index] : A{0}, r = rstd[row.index];
    const auto normalised = rows::Map([=](A value) { return (value - m) * r; }, row.Load(x));
    const auto cotangent = row.Load(dy);
    const auto gradient = rows::Map([](A g, A s) { return g * s; }, cotangent, scales);
    const auto product = rows::Map([](A g, A x_hat) { return g * x_hat; }, gradient, normalised);
    const auto sums = row.template Reduce<rows::Sum>(gradient, product);
    const A share = rows::Reciprocal(static_cast<A>(row.columns));
    const A mean_g = kCentred ? sums.first * share : A{0}, mean_gx = sums.second * share;
    row.Store(dx, rows::Map([=](A g, A x_hat) { return r * (g - mean_g - x_hat * mean_gx); }, gradient, normalised));
    const auto dscale = rows::Map([](A g, A x_hat) { return g * x_hat; }, cotangent, normalised);
    (sums_of_columns.Add(row, dscale, cotangent), ...);
  }
};

// dscale = sum(dy x^), dbias = sum(dy), over the rows of a group.
template <bool kCentred, class T, class U>
struct ParameterGradients {
  using A = Accumulator<T>;
  const T* x;
  const U* dy;
  const A *mean, *rstd;

  __device__ rows::ColumnSums<A> operator()(int64_t row, int64_t offset) const {
    const A g = static_cast<A>(dy[offset]), m = kCentred ? mean[row] : A{0};
    return {g * ((static_cast<A>(x[offset]) - m) * rstd[row]), g};
  }
};

template <class A>
rows::Vector<A> ToVector(const Parameter& parameter) {
  return {static_cast<const A*>(parameter.data), parameter.group_stride};
}

template <bool kCentred>
Error Forward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, bool has_scale, bool has_bias,
              double epsilon) {
  const char* handler = kCentred ? "layer_norm_fwd" : "rms_norm_fwd";
  NormForward call;
  JAXOPS_RETURN_IF_ERROR(ParseNormForward(handler, kCentred, has_scale, has_bias, args, results, &call));
  return rows::LaunchMap(handler, stream, *call.x, *call.y, *call.y, [&]<class T, class U> {
    using A = Accumulator<T>;
    return NormForwardOp<kCentred, T, U>{
        .x = Data<T>(*call.x),
        .scale = ToVector<A>(call.scale),
        .bias = ToVector<A>(call.bias),
        .epsilon = static_cast<A>(epsilon),
        .y = Data<U>(*call.y),
        .mean_out = static_cast<A*>(call.mean),
        .rstd_out = static_cast<A*>(call.rstd),
    };
  });
}

template <bool kCentred>
Error Backward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, bool has_scale, bool has_bias) {
  const char* handler = kCentred ? "layer_norm_bwd" : "rms_norm_bwd";
  NormBackward call;
  JAXOPS_RETURN_IF_ERROR(ParseNormBackward(handler, kCentred, has_scale, has_bias, args, results, &call));
  JAXOPS_RETURN_IF_ERROR(CheckType(handler, "dx", *call.dx, call.x->element_type()));
  JAXOPS_RETURN_IF_ERROR(rows::CheckAlignment(handler, {*call.x, *call.dy, *call.dx}));
  return VisitPair(handler, call.x->element_type(), call.dy->element_type(), [&]<class T, class U> {
    using A = Accumulator<T>;
    const NormBackwardOp<kCentred, T, U> op = {
        .x = Data<T>(*call.x),
        .dy = Data<U>(*call.dy),
        .scale = ToVector<A>(call.scale),
        .mean = static_cast<const A*>(call.mean),
        .rstd = static_cast<const A*>(call.rstd),
        .dx = Data<T>(*call.dx),
    };
    const rows::SumResults<A> sums = {
        .chunks = call.chunks,
        .workspace = static_cast<A*>(call.workspace),
        .first = static_cast<A*>(call.dscale),
        .second = static_cast<A*>(call.dbias),
    };
    if constexpr (!std::is_same_v<T, double>) {
      if (call.parameters > 0 && rows::RowLoopFits<T, U>(call.shape, call.chunks)) {
        return FromCuda(handler, rows::LaunchRowLoop<T, U>(stream, op, call.shape, sums));
      }
    }
    const cudaError_t status = rows::LaunchRows<T, U>(stream, op, call.shape);
    if (status != cudaSuccess || call.parameters == 0) return FromCuda(handler, status);
    const ParameterGradients<kCentred, T, U> gradients = {.x = op.x, .dy = op.dy, .mean = op.mean, .rstd = op.rstd};
    return FromCuda(handler, rows::LaunchColumnSums(stream, gradients, call.shape, sums));
  });
}

}  // namespace
}  // namespace jaxops

#endif  // JAXOPS_OPS_NORM_NORM_CUH_
