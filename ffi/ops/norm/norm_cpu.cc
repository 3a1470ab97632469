#include <algorithm>
#include <cmath>

#include "ops/norm/norm.h"
#include "rows/rows_cpu.h"

namespace jaxops {
namespace {

// mean(x) and 1 / sqrt(var(x) + epsilon), the variance from the deviations: exact also where mean(x)^2 >> var(x).
// Without centring, mean is 0 and the "variance" is the mean square.
template <class A>
JAXOPS_CLONES void ForwardRow(bool centred, int64_t n, const A* x, const A* scale, const A* bias, A epsilon, A* y,
                              A* mean_out, A* rstd_out) {
  const A mean = centred ? SumOf<A>(n, [=](int64_t i) { return x[i]; }) / n : A{0};
  const A variance = SumOf<A>(n, [=](int64_t i) { return (x[i] - mean) * (x[i] - mean); }) / n;
  const A rstd = 1 / std::sqrt(variance + epsilon);
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * rstd;
  if (scale)
    for (int64_t i = 0; i < n; ++i) y[i] *= scale[i];
  if (bias)
    for (int64_t i = 0; i < n; ++i) y[i] += bias[i];
  if (centred) *mean_out = mean;
  *rstd_out = rstd;
}

// With x^ = (x - mean) rstd and g = dy scale:  dx = rstd (g - mean(g) - x^ mean(g x^)), dscale += dy x^, dbias += dy.
template <class A>
JAXOPS_CLONES void BackwardRow(bool centred, int64_t n, const A* x, const A* scale, const A* dy, A mean, A rstd, A* dx,
                               A* dscale, A* dbias) {
  const auto g = [=](int64_t i) { return scale ? dy[i] * scale[i] : dy[i]; };
  const A sum = centred ? SumOf<A>(n, g) : A{0};
  const A dot = SumOf<A>(n, [=](int64_t i) { return g(i) * ((x[i] - mean) * rstd); });
  const A mean_g = sum / n, mean_gx = dot / n;
  if (dscale)
    for (int64_t i = 0; i < n; ++i) dscale[i] += dy[i] * ((x[i] - mean) * rstd);
  if (dbias)
    for (int64_t i = 0; i < n; ++i) dbias[i] += dy[i];
  for (int64_t i = 0; i < n; ++i) dx[i] = rstd * (g(i) - mean_g - (x[i] - mean) * rstd * mean_gx);
}

// sum[i] = values[0][i] + values[1][i] + ..., in double, a block of columns at a time.
template <class A>
JAXOPS_CLONES void AddRows(int64_t rows, int64_t n, const A* values, A* sum) {
  constexpr int64_t kBlock = 64;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t width = std::min(kBlock, n - begin);
    double total[kBlock] = {};
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < width; ++i) total[i] += values[r * n + begin + i];
    for (int64_t i = 0; i < width; ++i) sum[begin + i] = static_cast<A>(total[i]);
  }
}

template <bool kCentred>
Error Forward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, bool has_scale, bool has_bias,
              double epsilon) {
  const char* handler = kCentred ? "layer_norm_fwd" : "rms_norm_fwd";
  NormForward call;
  JAXOPS_RETURN_IF_ERROR(ParseNormForward(handler, kCentred, has_scale, has_bias, args, results, &call));
  return VisitAccumulator(handler, {*call.x, *call.y}, [&]<class A> {
    A *const mean = static_cast<A*>(call.mean), *const rstd = static_cast<A*>(call.rstd);
    return ForEachRow<A, 1, 1>(pool, call.shape, TasksPerGroup(call.shape), {*call.x}, {*call.y},
                               [&](int64_t, int64_t row, const auto& in, const auto& out) {
                                 const int64_t group = row / call.shape.rows_per_group();
                                 ForwardRow<A>(kCentred, call.shape.columns, in[0], call.scale.ForGroup<A>(group),
                                               call.bias.ForGroup<A>(group), static_cast<A>(epsilon), out[0],
                                               mean + row, rstd + row);
                               });
  });
}

template <bool kCentred>
Error Backward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, bool has_scale, bool has_bias) {
  const char* handler = kCentred ? "layer_norm_bwd" : "rms_norm_bwd";
  NormBackward call;
  JAXOPS_RETURN_IF_ERROR(ParseNormBackward(handler, kCentred, has_scale, has_bias, args, results, &call));
  const RowShape& shape = call.shape;
  return VisitAccumulator(handler, {*call.x, *call.dy, *call.dx}, [&]<class A> {
    const A *const mean = static_cast<const A*>(call.mean), *const rstd = static_cast<const A*>(call.rstd);
    A *const workspace = static_cast<A*>(call.workspace), *const dscale = static_cast<A*>(call.dscale),
             *const dbias = static_cast<A*>(call.dbias);
    // As many chunks as tasks; the rest of the workspace is for devices with more of them.
    const int64_t tasks = call.parameters ? std::min(call.chunks, TasksPerGroup(shape)) : TasksPerGroup(shape);
    const int64_t partial = shape.groups * tasks * shape.columns;
    if (workspace) std::fill_n(workspace, call.parameters * partial, A{0});
    A *const dscale_parts = workspace, *const dbias_parts = workspace + (dscale ? partial : 0);
    Error error = ForEachRow<A, 2, 1>(pool, shape, tasks, {*call.x, *call.dy}, {*call.dx},
                                      [&](int64_t task, int64_t row, const auto& in, const auto& out) {
                                        BackwardRow<A>(kCentred, shape.columns, in[0],
                                                       call.scale.ForGroup<A>(row / shape.rows_per_group()), in[1],
                                                       kCentred ? mean[row] : A{0}, rstd[row], out[0],
                                                       dscale ? dscale_parts + task * shape.columns : nullptr,
                                                       dbias ? dbias_parts + task * shape.columns : nullptr);
                                      });
    for (int64_t group = 0; group < shape.groups; ++group) {
      const int64_t offset = group * shape.columns;
      if (dscale) AddRows(tasks, shape.columns, dscale_parts + offset * tasks, dscale + offset);
      if (dbias) AddRows(tasks, shape.columns, dbias_parts + offset * tasks, dbias + offset);
    }
    return error;
  });
}

}  // namespace
}  // namespace jaxops

JAXOPS_NORM_HANDLERS(layer_norm, true);
JAXOPS_NORM_HANDLERS(rms_norm, false);
