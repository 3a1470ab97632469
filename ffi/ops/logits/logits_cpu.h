// Shared by softmax and log_softmax on the CPU: a call's tiles, logits and mask.
#ifndef JAXOPS_OPS_LOGITS_LOGITS_CPU_H_
#define JAXOPS_OPS_LOGITS_LOGITS_CPU_H_

#include <limits>

#include "ops/logits/logits.h"
#include "rows/rows_cpu.h"

namespace jaxops {

// A row's unmasked entries.
template <class A>
struct Visible {
  const A *where, *diagonal;  // 0 or 1; the same array twice if only one was given

  JAXOPS_INLINE Visible(const A* where, const A* diagonal)
      : where(where ? where : diagonal), diagonal(diagonal ? diagonal : where) {}
  JAXOPS_INLINE bool all() const { return !where; }
  JAXOPS_INLINE bool operator()(int64_t i) const { return where[i] * diagonal[i] != 0; }
};

// target = value where masked.
template <class Loop, class A>
JAXOPS_INLINE void FillMasked(const Loop& loop, const Visible<A>& visible, A value, A* target) {
  if (visible.all()) return;
  loop.Map(target, [=](int64_t i, int64_t) { return Select(visible(i), target[i], value); });
}

// Every row's scale; 1 if absent.
template <class Loop, class Position, class A>
JAXOPS_INLINE auto Scales(const Loop& loop, const Position& position, const A* scale) {
  typename Loop::Value scales;
  for (int64_t w = 0; w < loop.rows; ++w) {
    scales[w] = scale ? scale[position.Offset(LogitsCall::kScale, w)] : A{1};
  }
  return scales;
}

// z = x scale + bias, -inf where masked.
template <class Loop, class Value, class A>
JAXOPS_INLINE void FillLogits(const Loop& loop, const A* x, const Value& scale, const A* bias,
                              const Visible<A>& visible, A* z) {
  loop.Map(z, [&](int64_t i, int64_t w) { return x[i] * scale[w]; });
  // Not in one expression, which may be contracted: forward and backward pass must round alike, because exp(z - max)
  // may overflow for logits above their maximum. The gradients for scale and bias start from the rounded product.
  if (bias) loop.Map(z, [&](int64_t i, int64_t) { return z[i] + bias[i]; });
  FillMasked(loop, visible, -std::numeric_limits<A>::infinity(), z);
}

// Calls body(loop, position, z, visible, y) for every row or bundle in a forward call; z may be y.
template <class Body>
Error MapLogits(const char* handler, Device& pool, const LogitsCall& call, const Body& body) {
  using Call = LogitsCall;
  return VisitAccumulator(handler, {*call.x, *call.y}, [&]<class A> {
    const bool composed = call.has_options();
    const A* const scale = RowValues<A>(call.scale);
    ForEachRow<A, Call::kSlots, 4, 1>(
        pool, call.shape, TasksPerGroup(call.shape), /*summed=*/false,
        {RowTensor(call.x, Call::kFull), RowTensor(call.bias, Call::kBias), RowTensor(call.where, Call::kWhere),
         RowTensor::Diagonal(call.causal, Call::kDiagonal)},
        {RowTensor(call.y, Call::kFull)}, [=](const auto& loop, const auto& position, const auto& in, const auto& out) {
          const auto [x, bias, where, diagonal] = in;
          A* const y = out[0];
          const Visible<A> visible(where, diagonal);
          if (composed) FillLogits(loop, x, Scales(loop, position, scale), bias, visible, y);
          body(loop, position, composed ? y : x, visible, y);
        });
    return Error::Success();
  });
}

// Calls body(loop, position, z or y, visible, dy, dz) for every row or bundle in a backward call, then computes dx = dz
// scale. logits: the first operand is x and becomes z, which may share memory with dz.
template <class Body>
Error MapGradient(const char* handler, Device& pool, const LogitsCall& call, bool logits, const Body& body) {
  using Call = LogitsCall;
  return VisitAccumulator(handler, {*call.x, *call.dy, *call.y}, [&]<class A> {
    const bool composed = logits && call.has_options();
    const A* const scale = RowValues<A>(call.scale);
    ForEachRow<A, Call::kSlots, 5, 1>(
        pool, call.shape, TasksPerGroup(call.shape), /*summed=*/false,
        {RowTensor(call.x, Call::kFull), RowTensor(call.bias, Call::kBias), RowTensor(call.where, Call::kWhere),
         RowTensor::Diagonal(call.causal && logits, Call::kDiagonal), RowTensor(call.dy, Call::kFull)},
        {RowTensor(call.y, Call::kFull)}, [=](const auto& loop, const auto& position, const auto& in, const auto& out) {
          const auto [x, bias, where, diagonal, dy] = in;
          A* const dz = out[0];
          const Visible<A> visible(where, diagonal);
          const auto scales = Scales(loop, position, scale);
          if (composed) FillLogits(loop, x, scales, bias, visible, dz);
          body(loop, position, composed ? dz : x, visible, dy, dz);
          if (scale) loop.Map(dz, [&](int64_t i, int64_t w) { return dz[i] * scales[w]; });
        });
    return Error::Success();
  });
}

}  // namespace jaxops

#endif  // JAXOPS_OPS_LOGITS_LOGITS_CPU_H_
