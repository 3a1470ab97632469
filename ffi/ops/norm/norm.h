// The operands of layer_norm (centred) and rms_norm (not centred), checked; shared by the CPU and the CUDA handlers.
//   forward:  x, [scale], [bias]             -> y, [mean], rstd
//   backward: x, [scale], [mean], rstd, dy   -> dx, [workspace, [dscale], [dbias]]
// mean is there for layer_norm only; scale, bias and their gradients as has_scale and has_bias say.
//   tensors [groups, rows, columns, inner]; mean, rstd [groups, rows, inner]; scale, bias [1 or groups, columns];
//   dscale, dbias [groups, columns]; workspace [parameters, groups, chunks, columns]: each chunk of rows' share of the
//   parameter gradients, added up in chunk order afterwards, so that results never depend on scheduling.
#ifndef JAXOPS_OPS_NORM_NORM_H_
#define JAXOPS_OPS_NORM_NORM_H_

#include <optional>
#include <string>

#include "core/handler.h"
#include "core/row_shape.h"

namespace jaxops {

// scale or bias: one row of `columns` values, the same for all groups (stride 0) or one a group.
struct Parameter {
  const void* data = nullptr;
  int64_t group_stride = 0;

  template <class A>
  const A* ForGroup(int64_t group) const {
    return data ? static_cast<const A*>(data) + group * group_stride : nullptr;
  }
};

struct NormForward {
  RowShape shape;
  std::optional<AnyBuffer> x, y;
  Parameter scale, bias;
  void *mean = nullptr, *rstd = nullptr;
};

struct NormBackward {
  RowShape shape;
  std::optional<AnyBuffer> x, dy, dx;
  Parameter scale;
  const void *mean = nullptr, *rstd = nullptr;
  void *workspace = nullptr, *dscale = nullptr, *dbias = nullptr;
  int64_t chunks = 0;
  int parameters = 0;
};

namespace norm_internal {

// Takes the operands (or results) one after the other.
template <class Source>
struct Cursor {
  const char* handler;
  const Source& source;
  size_t next = 0;

  Error Take(std::optional<AnyBuffer>* out) {
    auto buffer = source.template get<AnyBuffer>(next++);
    if (!buffer.has_value()) return Invalid(handler, "an operand or a result is missing or no array");
    if constexpr (std::is_same_v<Source, ffi::RemainingArgs>) {
      *out = *buffer;
    } else {
      *out = **buffer;
    }
    return Error::Success();
  }

  Error End() const {
    return next == source.size() ? Error::Success() : Invalid(handler, "too many operands or results");
  }

  Error TakeParameter(const RowShape& shape, DataType type, Parameter* out) {
    std::optional<AnyBuffer> buffer;
    JAXOPS_RETURN_IF_ERROR(Take(&buffer));
    const auto dims = buffer->dimensions();
    const int64_t groups = dims.size() > 0 && dims[0] == 1 ? 1 : shape.groups;
    JAXOPS_RETURN_IF_ERROR(CheckDimensions(handler, "a parameter", *buffer, {groups, shape.columns}));
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, "a parameter", *buffer, type));
    *out = {buffer->untyped_data(), groups == 1 ? 0 : shape.columns};
    return Error::Success();
  }

  template <class Pointer>
  Error TakeArray(const char* name, std::initializer_list<int64_t> dims, DataType type, Pointer* out) {
    std::optional<AnyBuffer> buffer;
    JAXOPS_RETURN_IF_ERROR(Take(&buffer));
    JAXOPS_RETURN_IF_ERROR(CheckDimensions(handler, name, *buffer, dims));
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, name, *buffer, type));
    *out = buffer->untyped_data();
    return Error::Success();
  }
};

}  // namespace norm_internal

inline Error ParseNormForward(const char* handler, bool centred, bool has_scale, bool has_bias,
                              const ffi::RemainingArgs& args, const ffi::RemainingRets& results, NormForward* out) {
  norm_internal::Cursor<ffi::RemainingArgs> arg{handler, args};
  norm_internal::Cursor<ffi::RemainingRets> result{handler, results};
  JAXOPS_RETURN_IF_ERROR(arg.Take(&out->x));
  JAXOPS_RETURN_IF_ERROR(result.Take(&out->y));
  JAXOPS_RETURN_IF_ERROR(ParseRows(handler, {*out->x, *out->y}, &out->shape));
  const RowShape& s = out->shape;
  const DataType type = AccumulatorType(out->x->element_type());
  if (has_scale) JAXOPS_RETURN_IF_ERROR(arg.TakeParameter(s, type, &out->scale));
  if (has_bias) JAXOPS_RETURN_IF_ERROR(arg.TakeParameter(s, type, &out->bias));
  if (centred) JAXOPS_RETURN_IF_ERROR(result.TakeArray("mean", {s.groups, s.rows, s.inner}, type, &out->mean));
  JAXOPS_RETURN_IF_ERROR(result.TakeArray("rstd", {s.groups, s.rows, s.inner}, type, &out->rstd));
  JAXOPS_RETURN_IF_ERROR(arg.End());
  return result.End();
}

inline Error ParseNormBackward(const char* handler, bool centred, bool has_scale, bool has_bias,
                               const ffi::RemainingArgs& args, const ffi::RemainingRets& results, NormBackward* out) {
  norm_internal::Cursor<ffi::RemainingArgs> arg{handler, args};
  norm_internal::Cursor<ffi::RemainingRets> result{handler, results};
  JAXOPS_RETURN_IF_ERROR(arg.Take(&out->x));
  JAXOPS_RETURN_IF_ERROR(result.Take(&out->dx));
  JAXOPS_RETURN_IF_ERROR(ParseRows(handler, {*out->x, *out->dx}, &out->shape));
  const RowShape& s = out->shape;
  const DataType type = AccumulatorType(out->x->element_type());
  if (has_scale) JAXOPS_RETURN_IF_ERROR(arg.TakeParameter(s, type, &out->scale));
  if (centred) JAXOPS_RETURN_IF_ERROR(arg.TakeArray("mean", {s.groups, s.rows, s.inner}, type, &out->mean));
  JAXOPS_RETURN_IF_ERROR(arg.TakeArray("rstd", {s.groups, s.rows, s.inner}, type, &out->rstd));
  JAXOPS_RETURN_IF_ERROR(arg.Take(&out->dy));
  JAXOPS_RETURN_IF_ERROR(ParseRows(handler, {*out->x, *out->dy}, &out->shape));
  out->parameters = int{has_scale} + int{has_bias};
  if (out->parameters) {
    std::optional<AnyBuffer> workspace;
    JAXOPS_RETURN_IF_ERROR(result.Take(&workspace));
    if (workspace->dimensions().size() != 4) return Invalid(handler, "the workspace must have 4 dimensions");
    out->chunks = workspace->dimensions()[2];
    JAXOPS_RETURN_IF_ERROR(
        CheckDimensions(handler, "the workspace", *workspace, {out->parameters, s.groups, out->chunks, s.columns}));
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, "the workspace", *workspace, type));
    if (out->chunks < 1) return Invalid(handler, "the workspace needs at least one chunk");
    out->workspace = workspace->untyped_data();
  }
  if (has_scale) JAXOPS_RETURN_IF_ERROR(result.TakeArray("dscale", {s.groups, s.columns}, type, &out->dscale));
  if (has_bias) JAXOPS_RETURN_IF_ERROR(result.TakeArray("dbias", {s.groups, s.columns}, type, &out->dbias));
  JAXOPS_RETURN_IF_ERROR(arg.End());
  return result.End();
}

// The handlers of both ops, from Forward<centred> and Backward<centred> of the including file.
#define JAXOPS_NORM_HANDLERS(op, centred)                                                                      \
  JAXOPS_HANDLER(                                                                                              \
      op##_fwd, (jaxops::Forward<centred>),                                                                    \
      RemainingArgs().RemainingRets().Attr<bool>("has_scale").Attr<bool>("has_bias").Attr<double>("epsilon")); \
  JAXOPS_HANDLER(op##_bwd, (jaxops::Backward<centred>),                                                        \
                 RemainingArgs().RemainingRets().Attr<bool>("has_scale").Attr<bool>("has_bias"))

}  // namespace jaxops

#endif  // JAXOPS_OPS_NORM_NORM_H_
