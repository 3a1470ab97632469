// A checked matmul, reduced to the parameters of its kernels: out[b] = activation(scale[b] lhs[b] @ rhs[b] + bias[b]).
#ifndef JAXOPS_OPS_MATMUL_PROBLEM_H_
#define JAXOPS_OPS_MATMUL_PROBLEM_H_

#include <algorithm>
#include <cstdint>

#include "core/handler.h"
#include "core/row_shape.h"

namespace jaxops::matmul {

// The order is part of the calling convention; ACTIVATIONS in jaxops/ops/_epilogue.py has the same order.
enum class Activation : int32_t { kNone, kRelu, kGelu, kGeluExact, kSilu, kCount };

// The triangle above the diagonal (columns beyond the row). kResult: it need not be written. kLhs: lhs as stored is 0
// there. The order is part of the calling convention.
enum class Triangle : int32_t { kNone, kResult, kLhs, kCount };

// Batch axes along which all operands step evenly are merged. Up to 8 may remain, more than nested vmaps produce;
// products with more run on XLA (jaxops/_limits.py).
inline constexpr int kMaxBatchAxes = 8;

// The most blocks for a kernel that usually returns at once, because of a flag on the device: fewer blocks return
// sooner.
inline constexpr int64_t kFewBlocks = 512;

struct Offsets {
  int64_t lhs, rhs, scale, bias;
};

// Maps a batch index, row-major over the result's batch axes, to the operands' offsets; a broadcast axis has stride 0.
struct Batch {
  int axes = 0;
  int64_t sizes[kMaxBatchAxes];
  Offsets strides[kMaxBatchAxes];

  constexpr Offsets At(int64_t index) const {
    Offsets total = {0, 0, 0, 0};
    for (int axis = axes - 1; axis >= 0; --axis) {
      const int64_t i = index % sizes[axis];
      index /= sizes[axis];
      total.lhs += i * strides[axis].lhs;
      total.rhs += i * strides[axis].rhs;
      total.scale += i * strides[axis].scale;
      total.bias += i * strides[axis].bias;
    }
    return total;
  }
};

struct Problem {
  int64_t m, n, k, batches;
  // lhs is [m, k], or [k, m] if transposed; rhs is [k, n], or [n, k] if transposed.
  bool lhs_transposed, rhs_transposed;
  Batch batch;
  const void *lhs, *rhs, *scale, *bias;         // scale, bias: null if absent
  int64_t bias_row_stride, bias_column_stride;  // 0 along an axis where the bias broadcasts
  void *out, *preactivation;                    // preactivation: null unless the backward pass will need it
  Activation activation;
  Triangle triangle;
  const int32_t* only_if = nullptr;  // if not null and 0 on the device, the general kernels do nothing

  int64_t lhs_stride() const { return lhs_transposed ? m : k; }
  int64_t rhs_stride() const { return rhs_transposed ? k : n; }
};

// Every operand has the result's rank, and its batch axes have the result's size or 1. The bias may have size 1 along
// any axis; the scale has size 1 along m and n.
inline Error ParseProblem(const char* handler, const AnyBuffer& lhs, const AnyBuffer& rhs, const AnyBuffer* scale,
                          const AnyBuffer* bias, const AnyBuffer& out, const AnyBuffer* preactivation,
                          bool lhs_transposed, bool rhs_transposed, int32_t activation, int32_t triangle,
                          Problem* problem) {
  const auto l = lhs.dimensions(), r = rhs.dimensions(), o = out.dimensions();
  const size_t rank = o.size();
  const auto fits = [rank](const AnyBuffer* operand) { return !operand || operand->dimensions().size() == rank; };
  if (rank < 2 || !fits(&lhs) || !fits(&rhs) || !fits(scale) || !fits(bias)) {
    return Invalid(handler, "lhs, rhs, scale, bias and result must have one rank, at least 2");
  }
  if (activation < 0 || activation >= static_cast<int32_t>(Activation::kCount)) {
    return Invalid(handler, "unknown activation " + std::to_string(activation));
  }
  if (triangle < 0 || triangle >= static_cast<int32_t>(Triangle::kCount)) {
    return Invalid(handler, "unknown triangle " + std::to_string(triangle));
  }
  Problem& p = *problem;
  p.m = o[rank - 2];
  p.n = o[rank - 1];
  p.k = l[lhs_transposed ? rank - 2 : rank - 1];
  p.lhs_transposed = lhs_transposed;
  p.rhs_transposed = rhs_transposed;
  if (l[lhs_transposed ? rank - 1 : rank - 2] != p.m || r[rhs_transposed ? rank - 1 : rank - 2] != p.k ||
      r[rhs_transposed ? rank - 2 : rank - 1] != p.n) {
    return Invalid(handler, "lhs " + Describe(l) + " and rhs " + Describe(r) + " do not give " + Describe(o));
  }
  if (preactivation) {
    const auto z = preactivation->dimensions();
    if (!std::equal(z.begin(), z.end(), o.begin(), o.end()))
      return Invalid(handler, "the preactivation's shape is off");
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, "preactivation", *preactivation, out.element_type()));
  }
  const int64_t ones[2] = {1, 1};
  const int64_t* const b = bias ? bias->dimensions().begin() : nullptr;
  const int64_t* const bias_tile = bias ? b + rank - 2 : ones;
  if (bias && ((bias_tile[0] != 1 && bias_tile[0] != p.m) || (bias_tile[1] != 1 && bias_tile[1] != p.n))) {
    return Invalid(handler, "bias " + Describe(bias->dimensions()) + " does not broadcast to " + Describe(o));
  }
  const int64_t* const s = scale ? scale->dimensions().begin() : nullptr;
  if (scale && (s[rank - 2] != 1 || s[rank - 1] != 1)) {
    return Invalid(handler, "scale " + Describe(scale->dimensions()) + " has more than one element for a product");
  }
  p.bias_column_stride = bias_tile[1] == 1 ? 0 : 1;
  p.bias_row_stride = bias_tile[0] == 1 ? 0 : bias_tile[1];
  p.batches = 1;
  p.batch.axes = 0;
  Offsets stride = {p.m * p.k, p.k * p.n, 1, bias_tile[0] * bias_tile[1]};
  Batch reversed;
  for (size_t axis = rank - 2; axis-- > 0;) {
    const int64_t size = o[axis];
    if ((l[axis] != size && l[axis] != 1) || (r[axis] != size && r[axis] != 1) ||
        (s && s[axis] != size && s[axis] != 1) || (b && b[axis] != size && b[axis] != 1)) {
      return Invalid(handler, "batch axes do not broadcast to the result's");
    }
    if (size != 1) {
      const Offsets own = {l[axis] == 1 ? 0 : stride.lhs, r[axis] == 1 ? 0 : stride.rhs,
                           !s || s[axis] == 1 ? 0 : stride.scale, !b || b[axis] == 1 ? 0 : stride.bias};
      const int last = reversed.axes - 1;
      const auto continues = [&](int64_t Offsets::* operand) {
        return own.*operand == reversed.strides[last].*operand * reversed.sizes[last];
      };
      if (last >= 0 && continues(&Offsets::lhs) && continues(&Offsets::rhs) && continues(&Offsets::scale) &&
          continues(&Offsets::bias)) {
        reversed.sizes[last] *= size;
      } else if (reversed.axes == kMaxBatchAxes) {
        return Invalid(handler, "more than " + std::to_string(kMaxBatchAxes) + " batch axes that cannot be merged");
      } else {
        reversed.sizes[reversed.axes] = size;
        reversed.strides[reversed.axes++] = own;
      }
    }
    stride.lhs *= l[axis];
    stride.rhs *= r[axis];
    stride.scale *= s ? s[axis] : 1;
    stride.bias *= b ? b[axis] : 1;
    p.batches *= size;
  }
  p.batch.axes = reversed.axes;
  for (int axis = 0; axis < reversed.axes; ++axis) {
    p.batch.sizes[axis] = reversed.sizes[reversed.axes - 1 - axis];
    p.batch.strides[axis] = reversed.strides[reversed.axes - 1 - axis];
  }
  p.lhs = lhs.untyped_data();
  p.rhs = rhs.untyped_data();
  p.scale = scale ? scale->untyped_data() : nullptr;
  p.bias = bias ? bias->untyped_data() : nullptr;
  p.out = out.untyped_data();
  p.preactivation = preactivation ? preactivation->untyped_data() : nullptr;
  p.activation = static_cast<Activation>(activation);
  p.triangle = static_cast<Triangle>(triangle);
  return Error::Success();
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_PROBLEM_H_
