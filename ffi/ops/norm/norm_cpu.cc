#include <cmath>

#include "ops/norm/norm.h"
#include "rows/rows_cpu.h"

namespace jaxops {
namespace {

// sum = x + residual, rounded to x's type.
template <class Loop, class A>
JAXOPS_INLINE void AddResidual(const Loop& loop, DataType type, const A* x, const A* residual, A* sum) {
  VisitElement<A>(type, [&]<class T> {
    loop.Map(sum, [&](int64_t i, int64_t) { return ToFloat(FromFloat<T>(x[i] + residual[i])); });
  });
}

// mean(x) and 1 / sqrt(var(x) + epsilon). The variance comes from deviations: exact even if mean(x)^2 >> var(x).
// Without centring, mean is 0 and the "variance" is the mean square. where: 1 at the positions that count, else 0.
template <class Loop, class A, class Value>
JAXOPS_INLINE void ForwardRow(const Loop& loop, bool centred, const A* x, const A* scale, const A* bias, const A* where,
                              A epsilon, A* y, Value* mean_out, Value* rstd_out) {
  Value mean, rstd, count;
  for (int64_t w = 0; w < loop.rows; ++w) mean[w] = 0, count[w] = static_cast<A>(loop.columns);
  if (where) count = loop.Sum([&](int64_t i, int64_t) { return where[i]; });
  if (centred) {
    mean = where ? loop.Sum([&](int64_t i, int64_t) { return Select(where[i] != 0, x[i], A{0}); })
                 : loop.Sum([&](int64_t i, int64_t) { return x[i]; });
  }
  for (int64_t w = 0; w < loop.rows; ++w) mean[w] /= count[w];
  const auto deviation = [&](int64_t i, int64_t w) { return centred ? x[i] - mean[w] : x[i]; };
  const auto square = [&](int64_t i, int64_t w) { return deviation(i, w) * deviation(i, w); };
  rstd = where ? loop.Sum([&](int64_t i, int64_t w) { return Select(where[i] != 0, square(i, w), A{0}); })
               : loop.Sum(square);
  for (int64_t w = 0; w < loop.rows; ++w) rstd[w] = 1 / std::sqrt(rstd[w] / count[w] + epsilon);
  const auto normalised = [&](int64_t i, int64_t w) { return deviation(i, w) * rstd[w]; };
  if (scale && bias) {
    loop.Map(y, [&](int64_t i, int64_t w) { return normalised(i, w) * scale[i] + bias[i]; });
  } else if (scale) {
    loop.Map(y, [&](int64_t i, int64_t w) { return normalised(i, w) * scale[i]; });
  } else if (bias) {
    loop.Map(y, [&](int64_t i, int64_t w) { return normalised(i, w) + bias[i]; });
  } else {
    loop.Map(y, [&](int64_t i, int64_t w) { return normalised(i, w); });
  }
  *mean_out = mean;
  *rstd_out = rstd;
}

// With x^ = (x - mean) rstd, g = dy scale and n' the number of positions that count (w = 1 there, else 0):
//   dx = rstd (g - w / n' (sum(g) + x^ sum(g x^))) + dsum, dscale += dy x^, dbias += dy
template <class Loop, class A, class Value, class G>
JAXOPS_INLINE void BackwardRow(const Loop& loop, bool centred, const A* x, const G& g, const A* where, const A* dy,
                               const A* dsum, const Value& mean, const Value& rstd, A* dx, A* dscale, A* dbias) {
  const auto normalised = [&](int64_t i, int64_t w) { return (centred ? x[i] - mean[w] : x[i]) * rstd[w]; };
  Value mean_g, mean_gx, count;
  for (int64_t w = 0; w < loop.rows; ++w) mean_g[w] = 0, count[w] = static_cast<A>(loop.columns);
  if (centred) mean_g = loop.Sum(g);
  mean_gx = loop.Sum([&](int64_t i, int64_t w) { return g(i, w) * normalised(i, w); });
  if (where) count = loop.Sum([&](int64_t i, int64_t) { return where[i]; });
  for (int64_t w = 0; w < loop.rows; ++w) mean_g[w] /= count[w], mean_gx[w] /= count[w];
  if (dscale) loop.AddColumns([&](int64_t i, int64_t w) { return dy[i] * normalised(i, w); }, dscale);
  if (dbias) loop.AddColumns([&](int64_t i, int64_t) { return dy[i]; }, dbias);
  const auto shared = [&](int64_t i, int64_t w) { return mean_g[w] + normalised(i, w) * mean_gx[w]; };
  if (where) {
    loop.Map(dx, [&](int64_t i, int64_t w) { return rstd[w] * (g(i, w) - Select(where[i] != 0, shared(i, w), A{0})); });
  } else {
    loop.Map(dx, [&](int64_t i, int64_t w) { return rstd[w] * (g(i, w) - shared(i, w)); });
  }
  if (dsum) loop.Map(dx, [&](int64_t i, int64_t) { return dx[i] + dsum[i]; });
}

template <bool kCentred>
Error Forward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
              bool has_residual, bool has_scale, bool has_bias, bool has_where, bool has_parts, double epsilon) {
  const char* handler = kCentred ? "layer_norm_fwd" : "rms_norm_fwd";
  NormCall call;
  const NormAttributes attributes = {axes, has_residual, has_scale, has_bias, has_where, has_parts};
  JAXOPS_RETURN_IF_ERROR(ParseNorm(handler, /*backward=*/false, kCentred, attributes, args, results, &call));
  return VisitAccumulator(handler, {*call.x, *call.y}, [&]<class A> {
    A* const means = RowValues<A>(call.mean);
    A* const rstds = RowValues<A>(call.rstd);
    const DataType type = call.x->element_type();
    ForEachRow<A, NormCall::kSlots, 5, 2>(
        pool, call.shape, TasksPerGroup(call.shape), /*summed=*/false,
        {RowTensor(call.x, NormCall::kFull), RowTensor(call.residual, NormCall::kFull),
         RowTensor(call.scale, NormCall::kScale), RowTensor(call.bias, NormCall::kBias),
         RowTensor(call.where, NormCall::kWhere)},
        {RowTensor(call.y, NormCall::kFull), RowTensor(call.sum, NormCall::kFull)},
        [=](const auto& loop, const auto& position, const auto& in, const auto& out) {
          const auto& [x, residual, scale, bias, where] = in;
          A* const sum = out[1];
          if (residual) AddResidual(loop, type, x, residual, sum);
          typename std::remove_cvref_t<decltype(loop)>::Value mean, rstd;
          ForwardRow(loop, kCentred, residual ? sum : x, scale, bias, where, static_cast<A>(epsilon), out[0], &mean,
                     &rstd);
          for (int64_t w = 0; w < loop.rows; ++w) {
            const int64_t row = position.Offset(NormCall::kRow, w);
            if (means) means[row] = mean[w];
            rstds[row] = rstd[w];
          }
        });
    return Error::Success();
  });
}

template <bool kCentred>
Error Backward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               bool has_scale, bool has_where, bool has_parts, bool has_dsum, bool has_dscale, bool has_dbias) {
  const char* handler = kCentred ? "layer_norm_bwd" : "rms_norm_bwd";
  NormCall call;
  const NormAttributes attributes = {.axes = axes,
                                     .has_scale = has_scale,
                                     .has_where = has_where,
                                     .has_parts = has_parts,
                                     .has_dsum = has_dsum,
                                     .has_dscale = has_dscale,
                                     .has_dbias = has_dbias};
  JAXOPS_RETURN_IF_ERROR(ParseNorm(handler, /*backward=*/true, kCentred, attributes, args, results, &call));
  return VisitAccumulator(handler, {*call.x, *call.dy, *call.dx}, [&]<class A> {
    const A* const means = RowValues<A>(call.mean);
    const A* const rstds = RowValues<A>(call.rstd);
    const ColumnSums<A> sums(call.shape, call.sums);
    ForEachRow<A, NormCall::kSlots, 5, 1>(
        pool, call.shape, sums.tasks(), has_dscale || has_dbias,
        {RowTensor(call.x, NormCall::kFull), RowTensor(call.scale, NormCall::kScale),
         RowTensor(call.where, NormCall::kWhere), RowTensor(call.dy, NormCall::kFull),
         RowTensor(call.dsum, NormCall::kFull)},
        {RowTensor(call.dx, NormCall::kFull)},
        [=](const auto& loop, const auto& position, const auto& in, const auto& out) {
          const auto& [x, scale, where, dy, dsum] = in;
          typename std::remove_cvref_t<decltype(loop)>::Value mean, rstd;
          for (int64_t w = 0; w < loop.rows; ++w) {
            const int64_t row = position.Offset(NormCall::kRow, w);
            mean[w] = means ? means[row] : A{0};
            rstd[w] = rstds[row];
          }
          A* const dscale = has_dscale ? sums.Partial(0, position.task) : nullptr;
          A* const dbias = has_dbias ? sums.Partial(has_dscale, position.task) : nullptr;
          const auto run = [&](const auto& g) {
            BackwardRow(loop, kCentred, x, g, where, dy, dsum, mean, rstd, out[0], dscale, dbias);
          };
          if (scale) {
            run([&](int64_t i, int64_t) { return dy[i] * scale[i]; });
          } else {
            run([&](int64_t i, int64_t) { return dy[i]; });
          }
        });
    sums.Finish(pool, call.shape, NormCall::kSum);
    return Error::Success();
  });
}

}  // namespace
}  // namespace jaxops

JAXOPS_NORM_FORWARD(layer_norm, true);
JAXOPS_NORM_BACKWARD(layer_norm, true);
JAXOPS_NORM_FORWARD(rms_norm, false);
JAXOPS_NORM_BACKWARD(rms_norm, false);
