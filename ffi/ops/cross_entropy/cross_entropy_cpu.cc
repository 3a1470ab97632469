#include <cmath>
#include <limits>

#include "ops/cross_entropy/cross_entropy.h"
#include "rows/rows_cpu.h"

namespace jaxops {
namespace {

using Pass = CrossEntropyPass;

// tanh(u) by (1 - exp(-2|u|)) / (1 + exp(-2|u|)); near 0, where this cancels, by its Taylor series.
JAXOPS_INLINE float Tanh(float u) {
  const float e = Exp(-2 * std::fabs(u)), far = (1 - e) / (1 + e), s = u * u;
  float p = 21844.0f / 6081075;
  p = p * s - 1382.0f / 155925;
  p = p * s + 62.0f / 2835;
  p = p * s - 17.0f / 315;
  p = p * s + 2.0f / 15;
  p = p * s - 1.0f / 3;
  const float near = u + u * s * p;
  return Select(s < 0.12f, near, Select(u < 0, -far, far));
}
JAXOPS_INLINE double Tanh(double u) { return std::tanh(u); }

// x's logits, and their derivative.
template <class A>
struct Cap {
  A cap, reciprocal;

  JAXOPS_INLINE A Logit(A x) const { return cap * Tanh(x * reciprocal); }
  JAXOPS_INLINE A Derivative(A z) const { return 1 - (z * reciprocal) * (z * reciprocal); }
};

template <class A>
JAXOPS_INLINE int64_t Number(const RowLoop<A>& loop, int64_t column, int64_t w) {
  return w * loop.columns + column;
}
template <class A>
JAXOPS_INLINE int64_t Number(const BundleLoop<A>& loop, int64_t column, int64_t w) {
  return column * loop.pitch + w;
}

// Each row's values.
template <class A>
struct RowResults {
  A *origin, *total, *picked, *sum;
};
template <class A>
struct RowOperands {
  const A *dtotal, *dpicked, *dsum;
};

// Computes one row or bundle (rows side by side). z: element number -> its logit; visible: element number -> whether it
// takes part.
template <class Value, class A, class Loop, class Offset, class Z, class Visible>
JAXOPS_INLINE void FillResults(const Loop& loop, const Offset& offset, const A* x, const Z& z, const Visible& visible,
                               const int32_t* labels, const RowResults<A>& to) {
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  const Value max = loop.Max([&](int64_t i, int64_t) { return Select(visible(i), z(i), -kInfinity); });
  Value origin;
  for (int64_t w = 0; w < loop.rows; ++w) origin[w] = std::fabs(max[w]) < kInfinity ? max[w] : A{0};
  const Value total = loop.Sum([&](int64_t i, int64_t w) { return Select(visible(i), Exp(z(i) - origin[w]), A{0}); });
  Value sum;
  if (to.sum) sum = loop.Sum([&](int64_t i, int64_t) { return Select(visible(i), z(i), A{0}); });
  for (int64_t w = 0; w < loop.rows; ++w) {
    const int64_t row = offset(w);
    to.origin[row] = origin[w];
    to.total[row] = total[w];
    if (max[w] == kInfinity) {  // beyond Exp's range: infinite unless there is a NaN
      A all = kInfinity;
      for (int64_t c = 0; c < loop.columns; ++c) {
        const A value = x[Number(loop, c, w)];
        if (visible(Number(loop, c, w)) && value != value) all = value;
      }
      to.total[row] = all;
    }
    if (to.sum) to.sum[row] = sum[w];
    if (!labels) continue;
    const int64_t column = ColumnOfLabel(labels[row], loop.columns);
    to.picked[row] = column < 0 ? std::numeric_limits<A>::quiet_NaN() : z(Number(loop, column, w));
  }
}

// dx may be x. origin, dtotal: each row's.
template <class Value, class A, class Loop, class Offset, class Z, class Slope, class Visible>
JAXOPS_INLINE void FillGradient(const Loop& loop, const Offset& offset, const Z& z, const Slope& slope,
                                const Visible& visible, const int32_t* labels, const Value& origin, const Value& dtotal,
                                const RowOperands<A>& from, A* dx) {
  Value dsum, at_label;
  for (int64_t w = 0; w < loop.rows; ++w) {
    const int64_t row = offset(w), column = labels ? ColumnOfLabel(labels[row], loop.columns) : -1;
    dsum[w] = from.dsum ? from.dsum[row] : A{0};
    at_label[w] = column < 0 ? A{0} : from.dpicked[row] * slope(z(Number(loop, column, w)));
  }
  loop.Map(dx, [&](int64_t i, int64_t w) {
    const A logit = z(i), dz = Exp(logit - origin[w]) * dtotal[w] + dsum[w];
    return Select(visible(i), dz * slope(logit), A{0});
  });
  for (int64_t w = 0; w < loop.rows; ++w) {
    const int64_t row = offset(w), column = labels ? ColumnOfLabel(labels[row], loop.columns) : -1;
    if (dtotal[w] == 0 && dsum[w] == 0 && (!from.dpicked || from.dpicked[row] == 0)) {
      for (int64_t c = 0; c < loop.columns; ++c) dx[Number(loop, c, w)] = 0;
    } else if (column >= 0) {
      dx[Number(loop, column, w)] += at_label[w];
    }
  }
}

template <Pass kPass>
Error Run(const char* handler, Device& pool, const CrossEntropyCall& call) {
  using Call = CrossEntropyCall;
  return VisitAccumulator(handler, {*call.x}, [&]<class A> {
    const RowResults<A> to = {RowValues<A>(call.origin), RowValues<A>(call.total), RowValues<A>(call.picked),
                              RowValues<A>(call.sum)};
    const RowOperands<A> from = {RowValues<A>(call.dtotal), RowValues<A>(call.dpicked), RowValues<A>(call.dsum)};
    const int32_t* const labels = RowValues<int32_t>(call.labels);
    const Cap<A> cap = {static_cast<A>(call.cap), static_cast<A>(call.cap > 0 ? 1 / call.cap : 0)};
    const A z_loss = static_cast<A>(call.z_loss);
    const auto body = [=](const auto& loop, const auto& position, const auto& in, const auto& out) {
      using Value = typename std::remove_cvref_t<decltype(loop)>::Value;
      const A *const x = in[0], *const where = in[1];
      const auto offset = [&](int64_t w) { return position.Offset(Call::kRow, w); };
      const auto pass = [&](const auto& z, const auto& slope, const auto& visible) {
        if constexpr (kPass != Pass::kBackward) FillResults<Value>(loop, offset, x, z, visible, labels, to);
        if constexpr (kPass != Pass::kForward) {
          Value origin, dtotal;
          for (int64_t w = 0; w < loop.rows; ++w) {
            const int64_t row = offset(w);
            origin[w] = to.origin[row];
            dtotal[w] = from.dtotal[row];
            if (kPass == Pass::kBoth && dtotal[w] != 0) {
              dtotal[w] *= (1 + 2 * z_loss * (origin[w] + std::log(to.total[row]))) / to.total[row];
            }
          }
          FillGradient<Value>(loop, offset, z, slope, visible, labels, origin, dtotal, from, out[0]);
        }
      };
      const auto masked = [&](const auto& z, const auto& slope) {
        if (where) {
          pass(z, slope, [=](int64_t i) { return where[i] != 0; });
        } else {
          pass(z, slope, [](int64_t) { return true; });
        }
      };
      if (cap.cap > 0) {
        masked([=](int64_t i) { return cap.Logit(x[i]); }, [=](A z) { return cap.Derivative(z); });
      } else {
        masked([=](int64_t i) { return x[i]; }, [](A) { return A{1}; });
      }
    };
    const RowTensor x(call.x, Call::kFull), where(call.where, Call::kWhere);
    const int64_t tasks = TasksPerGroup(call.shape);
    if constexpr (kPass == Pass::kForward) {
      ForEachRow<A, Call::kSlots, 2, 0>(pool, call.shape, tasks, /*summed=*/false, {x, where}, {}, body);
    } else {
      ForEachRow<A, Call::kSlots, 2, 1>(pool, call.shape, tasks, /*summed=*/false, {x, where},
                                        {RowTensor(call.dx, Call::kFull)}, body);
    }
    return Error::Success();
  });
}

Error Forward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
              double cap, bool has_labels, bool has_where, bool has_sum) {
  const char* handler = "cross_entropy_fwd";
  CrossEntropyCall call;
  JAXOPS_RETURN_IF_ERROR(
      ParseCrossEntropy(handler, Pass::kForward, axes, cap, 0, has_labels, has_where, has_sum, args, results, &call));
  return Run<Pass::kForward>(handler, pool, call);
}

Error Backward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               double cap, bool has_labels, bool has_where, bool has_dsum) {
  const char* handler = "cross_entropy_bwd";
  CrossEntropyCall call;
  JAXOPS_RETURN_IF_ERROR(
      ParseCrossEntropy(handler, Pass::kBackward, axes, cap, 0, has_labels, has_where, has_dsum, args, results, &call));
  return Run<Pass::kBackward>(handler, pool, call);
}

Error ForwardBackward(Device pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
                      double cap, bool has_labels, bool has_where, bool has_sum, double z_loss) {
  const char* handler = "cross_entropy_fwd_bwd";
  CrossEntropyCall call;
  JAXOPS_RETURN_IF_ERROR(
      ParseCrossEntropy(handler, Pass::kBoth, axes, cap, z_loss, has_labels, has_where, has_sum, args, results, &call));
  return Run<Pass::kBoth>(handler, pool, call);
}

}  // namespace
}  // namespace jaxops

JAXOPS_CROSS_ENTROPY_HANDLERS;
