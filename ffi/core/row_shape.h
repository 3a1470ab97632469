// The one layout every row kernel sees: [groups, rows, columns, inner], dense, row-major.
// A row is `columns` elements that lie `inner` apart. Rows of one group share their scale and bias, and their
// parameter gradients are summed together. jaxops/_rows.py brings any array and any axes into this form.
#ifndef JAXOPS_CORE_ROW_SHAPE_H_
#define JAXOPS_CORE_ROW_SHAPE_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/handler.h"

namespace jaxops {

struct RowShape {
  int64_t groups, rows, columns, inner;

  constexpr int64_t rows_per_group() const { return rows * inner; }
  constexpr int64_t total_rows() const { return groups * rows * inner; }
  constexpr int64_t size() const { return groups * rows * columns * inner; }
};

inline std::string Describe(AnyBuffer::Dimensions dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

inline Error CheckDimensions(const char* handler, const char* operand, const AnyBuffer& buffer,
                             std::initializer_list<int64_t> expected) {
  const auto dims = buffer.dimensions();
  bool same = dims.size() == expected.size();
  for (size_t i = 0; same && i < dims.size(); ++i) same = dims[i] == expected.begin()[i];
  if (same) return Error::Success();
  const AnyBuffer::Dimensions wanted(expected.begin(), expected.size());
  return Invalid(handler, std::string(operand) + " has shape " + Describe(dims) + ", expected " + Describe(wanted));
}

inline Error CheckType(const char* handler, const char* operand, const AnyBuffer& buffer, DataType expected) {
  if (buffer.element_type() == expected) return Error::Success();
  return Invalid(handler, std::string(operand) + " has element type " +
                              std::to_string(static_cast<int>(buffer.element_type())) + ", expected " +
                              std::to_string(static_cast<int>(expected)));
}

// Reads the shape off the first tensor and requires every other tensor to have it too.
inline Error ParseRows(const char* handler, std::initializer_list<AnyBuffer> tensors, RowShape* shape) {
  const auto dims = tensors.begin()->dimensions();
  if (dims.size() != 4) {
    return Invalid(handler, "expected [groups, rows, columns, inner], got shape " + Describe(dims));
  }
  *shape = {dims[0], dims[1], dims[2], dims[3]};
  for (const AnyBuffer& tensor : tensors) {
    if (Error error = CheckDimensions(handler, "a tensor", tensor, {dims[0], dims[1], dims[2], dims[3]});
        error.failure()) {
      return error;
    }
  }
  return Error::Success();
}

// The dtype of sums, statistics, parameters and parameter gradients.
inline DataType AccumulatorType(DataType type) { return type == DataType::F64 ? DataType::F64 : DataType::F32; }

}  // namespace jaxops

#define JAXOPS_RETURN_IF_ERROR(expression) \
  if (::jaxops::Error error_ = (expression); error_.failure()) return error_

#endif  // JAXOPS_CORE_ROW_SHAPE_H_
