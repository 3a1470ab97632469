// Checks of a buffer's memory, dtype and shape, for handlers whose shapes are known beforehand.
#ifndef JAXOPS_CORE_SHAPE_H_
#define JAXOPS_CORE_SHAPE_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/handler.h"
#include "core/row_shape.h"

namespace jaxops {

inline bool HasShape(const AnyBuffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  return std::equal(dims.begin(), dims.end(), shape.begin(), shape.end());
}

// A matrix's size along an axis; 0 for a buffer of another rank, which CheckShape then reports.
inline int64_t MatrixSize(const AnyBuffer& buffer, size_t axis) {
  return buffer.dimensions().size() == 2 ? buffer.dimensions()[axis] : 0;
}

inline Error CheckShape(const char* handler, const char* name, const AnyBuffer& buffer, DataType type,
                        std::initializer_list<int64_t> shape) {
  JAXOPS_RETURN_IF_ERROR(CheckBuffer(handler, buffer));
  JAXOPS_RETURN_IF_ERROR(CheckType(handler, name, buffer, type));
  if (HasShape(buffer, shape)) return Error::Success();
  const AnyBuffer::Dimensions wanted(shape.begin(), shape.size());
  return Invalid(handler,
                 std::string(name) + " has shape " + Describe(buffer.dimensions()) + ", expected " + Describe(wanted));
}

}  // namespace jaxops

#endif  // JAXOPS_CORE_SHAPE_H_
