// How a row op sees its tensors, for any shape and axes: it normalises over the column axes; the others are row axes.
// Every operand and result has x's rank. Along an axis where it has size 1, an operand is constant and a result is
// summed, so its stride is 0. Nothing is ever transposed or broadcast in memory.
#ifndef JAXOPS_CORE_ROW_SHAPE_H_
#define JAXOPS_CORE_ROW_SHAPE_H_

#include <array>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "core/handler.h"

#ifdef __CUDACC__
#define JAXOPS_HOST_DEVICE __host__ __device__
#define JAXOPS_NOINLINE __noinline__
#else
#define JAXOPS_HOST_DEVICE
#define JAXOPS_NOINLINE
#endif
#ifdef __CUDA_ARCH__
#define JAXOPS_ROLLED _Pragma("unroll 1")
#else
#define JAXOPS_ROLLED
#endif

namespace jaxops {

// Division by a number below 2^31, fast for numerators below 2^31; Granlund and Montgomery (1994), figure 4.1.
struct Divisor32 {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  Divisor32() = default;
  explicit Divisor32(uint32_t d) : divisor(d), shift(static_cast<uint32_t>(std::bit_width(d - 1))) {
    multiplier = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d) / d + 1);
  }
  JAXOPS_HOST_DEVICE uint32_t Divide(uint32_t n) const {
    return (static_cast<uint32_t>(uint64_t{multiplier} * n >> 32) + n) >> shift;
  }
};

// Division of numbers from 2^31: rare, so not inlined.
JAXOPS_HOST_DEVICE JAXOPS_NOINLINE inline int64_t DivideFar(int64_t n, int64_t divisor) { return n / divisor; }

// Calls beyond these limits run on XLA; jaxops/_limits.py has the same limits.
inline constexpr int kMaxAxes = 12;
inline constexpr int64_t kMaxColumns = (int64_t{1} << 31) - (1 << 20) - 1;

// Up to kMax axes walked as one, the last axis fastest. kSlots: how many layouts there are, each with its own strides.
template <int kSlots, int kMax = kMaxAxes>
struct Axes {
  static constexpr int kMost = kMax;
  int count = 0;
  int64_t total = 1;
  int64_t sizes[kMax];
  Divisor32 divisors[kMax];
  int64_t strides[kMax][kSlots];

  Axes() = default;
  // The first kSlots layouts with at most kMax axes.
  template <int kMore, int kMost>
    requires(kMore >= kSlots)
  explicit Axes(const Axes<kMore, kMost>& from) : count(from.count), total(from.total) {
    for (int axis = 0; axis < count; ++axis) {
      sizes[axis] = from.sizes[axis];
      divisors[axis] = from.divisors[axis];
      for (int slot = 0; slot < kSlots; ++slot) strides[axis][slot] = from.strides[axis][slot];
    }
  }

  // Each layout's offset at position `index`, 0 <= index < total.
  JAXOPS_HOST_DEVICE void Offsets(int64_t index, int64_t (&offsets)[kSlots]) const {
    if constexpr (kMax == 1) {
      for (int slot = 0; slot < kSlots; ++slot) offsets[slot] = index * strides[0][slot];
    } else {
      for (int64_t& offset : offsets) offset = 0;
      ForEachAxis(index, [&](int axis, int64_t position) {
        for (int slot = 0; slot < kSlots; ++slot) offsets[slot] += position * strides[axis][slot];
      });
    }
  }
  // The offset in one layout.
  JAXOPS_HOST_DEVICE int64_t Offset(int slot, int64_t index) const {
    int64_t offset = 0;
    ForEachAxis(index, [&](int axis, int64_t position) { offset += position * strides[axis][slot]; });
    return offset;
  }
  // Calls visit(axis, position along it) for position `index`.
  template <class Visit>
  JAXOPS_HOST_DEVICE void ForEachAxis(int64_t index, const Visit& visit) const {
    JAXOPS_ROLLED for (int axis = count - 1; axis > 0; --axis) {
      int64_t position;
      if (total <= std::numeric_limits<int32_t>::max()) {
        const uint32_t n = static_cast<uint32_t>(index), quotient = divisors[axis].Divide(n);
        position = n - quotient * divisors[axis].divisor;
        index = quotient;
      } else {
        const int64_t quotient = DivideFar(index, sizes[axis]);
        position = index - quotient * sizes[axis];
        index = quotient;
      }
      visit(axis, position);
    }
    visit(0, index);
  }

  // One layout's axes.
  Axes<1, kMax> Only(int slot) const {
    Axes<1, kMax> out;
    out.count = count;
    out.total = total;
    for (int axis = 0; axis < count; ++axis) {
      out.sizes[axis] = sizes[axis];
      out.divisors[axis] = divisors[axis];
      out.strides[axis][0] = strides[axis][slot];
    }
    return out;
  }

  // Adds an innermost axis. Joins it to the last one if every layout steps through both evenly.
  bool Append(int64_t size, const std::array<int64_t, kSlots>& steps) {
    total *= size;
    bool even = count > 0;
    for (int slot = 0; even && slot < kSlots; ++slot) even = strides[count - 1][slot] == size * steps[slot];
    if (!even && count == kMax) return false;
    const int axis = even ? count - 1 : count++;
    sizes[axis] = even ? sizes[axis] * size : size;
    if (sizes[axis] > 0 && sizes[axis] <= std::numeric_limits<int32_t>::max()) {
      divisors[axis] = Divisor32(static_cast<uint32_t>(sizes[axis]));
    }
    for (int slot = 0; slot < kSlots; ++slot) strides[axis][slot] = steps[slot];
    return true;
  }
};

// Slot 0 is the layout that x and all tensors with its shape have. Rows in a group share column sums; without column
// sums there is one group.
template <int kSlots>
struct RowShape {
  Axes<kSlots> groups, rows, columns;
  bool across = false;   // adjacent in memory: neighbouring rows, not a row's elements
  bool aligned = true;   // no tensor begins within a vector (IsAligned)
  uint32_t present = 0;  // bit s: slot s has a tensor

  int64_t total_rows() const { return groups.total * rows.total; }
  int64_t size() const { return total_rows() * columns.total; }
};

inline std::string Describe(AnyBuffer::Dimensions dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

inline Error CheckType(const char* handler, const char* operand, const AnyBuffer& buffer, DataType expected) {
  if (buffer.element_type() == expected) return Error::Success();
  return Invalid(handler, std::string(operand) + " has element type " +
                              std::to_string(static_cast<int>(buffer.element_type())) + ", expected " +
                              std::to_string(static_cast<int>(expected)));
}

inline bool IsFloating(DataType type) {
  return type == DataType::F64 || type == DataType::F32 || type == DataType::F16 || type == DataType::BF16;
}

// The dtype for sums, statistics, parameters and parameter gradients.
inline DataType AccumulatorType(DataType type) { return type == DataType::F64 ? DataType::F64 : DataType::F32; }

// Checks the shapes that a call's operands and results have, and derives the RowShape from them.
template <int kSlots>
class RowShapeParser {
 public:
  explicit RowShapeParser(const char* handler) : handler_(handler) {}

  // axes: the normalised axes, ascending.
  Error Start(const AnyBuffer& x, ffi::Span<const int64_t> axes) {
    const auto dims = x.dimensions();
    sizes_.assign(dims.begin(), dims.end());
    normalised_.assign(sizes_.size(), false);
    kept_.assign(sizes_.size(), false);
    strides_.assign(sizes_.size(), {});
    for (int64_t axis : axes) {
      if (axis < 0 || axis >= rank() || normalised_[axis])
        return Invalid(handler_, "axes do not fit the operand's rank");
      normalised_[axis] = true;
    }
    SetStrides(0, x);
    aligned_ = IsAligned(x.untyped_data());
    return Error::Success();
  }

  // A tensor with x's shape.
  Error Full(const char* name, const AnyBuffer& buffer) {
    return Check(name, buffer, [&](int64_t axis, int64_t size) { return size == sizes_[axis]; });
  }

  // One value a row.
  Error Row(int slot, const char* name, const AnyBuffer& buffer) {
    JAXOPS_RETURN_IF_ERROR(Check(
        name, buffer, [&](int64_t axis, int64_t size) { return size == (normalised_[axis] ? 1 : sizes_[axis]); }));
    SetStrides(slot, buffer);
    return Error::Success();
  }

  // An operand that has x's size or 1 along each axis.
  Error Broadcast(int slot, const char* name, const AnyBuffer& buffer) {
    JAXOPS_RETURN_IF_ERROR(
        Check(name, buffer, [&](int64_t axis, int64_t size) { return size == 1 || size == sizes_[axis]; }));
    SetStrides(slot, buffer);
    return Error::Success();
  }

  // An operand that has x's size or 1 along each row axis, and 1 along the column axes.
  Error BroadcastRow(int slot, const char* name, const AnyBuffer& buffer) {
    JAXOPS_RETURN_IF_ERROR(Check(name, buffer, [&](int64_t axis, int64_t size) {
      return size == 1 || (size == sizes_[axis] && !normalised_[axis]);
    }));
    SetStrides(slot, buffer);
    return Error::Success();
  }

  // A result that is summed over each group's rows, along the row axes where it has size 1.
  Error Summed(int slot, const char* name, const AnyBuffer& buffer) {
    JAXOPS_RETURN_IF_ERROR(Check(name, buffer, [&](int64_t axis, int64_t size) {
      return size == sizes_[axis] || (size == 1 && !normalised_[axis]);
    }));
    SetStrides(slot, buffer);
    for (int64_t axis = 0; axis < rank(); ++axis)
      kept_[axis] = !normalised_[axis] && buffer.dimensions()[axis] == sizes_[axis];
    return Error::Success();
  }

  // A layout without a tensor: its offsets are (position along `query`) - (position along `key`).
  Error Diagonal(int slot, int64_t query, int64_t key) {
    if (query < 0 || query >= rank() || key < 0 || key >= rank() || query == key) {
      return Invalid(handler_, "query_axis and key_axis must be two of the operand's axes");
    }
    strides_[query][slot] = 1;
    strides_[key][slot] = -1;
    return Error::Success();
  }

  // grouped: each position along the axes that a summed result keeps is a group.
  Error Finish(RowShape<kSlots>* shape, bool grouped = true) const {
    for (int64_t axis = 0; axis < rank(); ++axis) {
      if (sizes_[axis] == 1) continue;
      Axes<kSlots>& list = normalised_[axis] ? shape->columns : grouped && kept_[axis] ? shape->groups : shape->rows;
      if (!list.Append(sizes_[axis], strides_[axis])) return Invalid(handler_, "too many axes that do not join");
      shape->across = !normalised_[axis];
    }
    shape->aligned = aligned_;
    shape->present = present_;
    for (Axes<kSlots>* list : {&shape->groups, &shape->rows, &shape->columns})
      if (list->count == 0) list->Append(1, {});
    if (shape->columns.total > kMaxColumns)
      return Invalid(handler_, "rows of more than " + std::to_string(kMaxColumns) + " elements");
    return Error::Success();
  }

 private:
  int64_t rank() const { return static_cast<int64_t>(sizes_.size()); }

  template <class Fits>
  Error Check(const char* name, const AnyBuffer& buffer, Fits fits) {
    aligned_ &= IsAligned(buffer.untyped_data());
    const auto dims = buffer.dimensions();
    bool same = dims.size() == sizes_.size();
    for (int64_t axis = 0; same && axis < rank(); ++axis) same = fits(axis, dims[axis]);
    if (same) return Error::Success();
    const AnyBuffer::Dimensions wanted(sizes_.data(), sizes_.size());
    return Invalid(handler_,
                   std::string(name) + " has shape " + Describe(dims) + ", which does not fit " + Describe(wanted));
  }

  void SetStrides(int slot, const AnyBuffer& buffer) {
    present_ |= 1u << slot;
    int64_t stride = 1;
    for (int64_t axis = rank() - 1; axis >= 0; --axis) {
      const int64_t size = buffer.dimensions()[axis];
      strides_[axis][slot] = size == 1 ? 0 : stride;
      stride *= size;
    }
  }

  const char* handler_;
  std::vector<int64_t> sizes_;
  std::vector<bool> normalised_, kept_;
  std::vector<std::array<int64_t, kSlots>> strides_;
  uint32_t present_ = 0;
  bool aligned_ = true;
};

// Results summed over each group's rows, and their workspace [results, groups, chunks, columns], which holds the sums
// over each chunk of rows. Chunks are added in order, so the sums never depend on scheduling.
struct SummedResults {
  int count = 0;
  int64_t chunks = 0;
  void* workspace = nullptr;
  void* results[2] = {};
};

template <int kSlots>
Error ParseSums(const char* handler, const RowShape<kSlots>& shape, DataType type, const AnyBuffer& workspace,
                const std::vector<std::optional<AnyBuffer>>& results, SummedResults* out) {
  JAXOPS_RETURN_IF_ERROR(CheckType(handler, "the workspace", workspace, type));
  const auto dims = workspace.dimensions();
  const int64_t count = static_cast<int64_t>(results.size());
  if (dims.size() != 4 || dims[0] != count || dims[1] != shape.groups.total || dims[2] < 1 ||
      dims[3] != shape.columns.total) {
    return Invalid(handler, "the workspace has shape " + Describe(dims) + ", expected [" + std::to_string(count) +
                                ", " + std::to_string(shape.groups.total) + ", chunks, " +
                                std::to_string(shape.columns.total) + "]");
  }
  out->count = static_cast<int>(count);
  out->chunks = dims[2];
  out->workspace = workspace.untyped_data();
  for (int64_t i = 0; i < count; ++i) out->results[i] = results[i]->untyped_data();
  return Error::Success();
}

// The workspace [parts, values, rows] for split rows. Different blocks work on a row's parts, and each stores its share
// of the values that are joined over the row.
template <int kSlots>
Error CheckParts(const char* handler, const RowShape<kSlots>& shape, DataType type, int values,
                 const AnyBuffer& workspace) {
  JAXOPS_RETURN_IF_ERROR(CheckType(handler, "the parts' workspace", workspace, type));
  JAXOPS_RETURN_IF_ERROR(CheckStart(handler, workspace.untyped_data()));
  const auto dims = workspace.dimensions();
  if (dims.size() == 3 && dims[0] > 0 && dims[0] <= shape.columns.total && dims[1] == values &&
      dims[2] == shape.total_rows()) {
    return Error::Success();
  }
  return Invalid(handler, "the parts' workspace has shape " + Describe(dims) + ", expected [parts, " +
                              std::to_string(values) + ", " + std::to_string(shape.total_rows()) +
                              "], at most as many parts as columns");
}

// Takes a call's operands or results in order.
template <class Source>
class BufferReader {
 public:
  BufferReader(const char* handler, const Source& source) : handler_(handler), source_(source) {}

  Error Take(std::optional<AnyBuffer>* out) {
    auto buffer = source_.template get<AnyBuffer>(next_++);
    if (!buffer.has_value()) return Invalid(handler_, "an operand or a result is missing or no array");
    if constexpr (std::is_same_v<Source, ffi::RemainingArgs>) {
      *out = *buffer;
    } else {
      *out = **buffer;
    }
    return CheckBuffer(handler_, **out);
  }

  Error End() const {
    return next_ == source_.size() ? Error::Success() : Invalid(handler_, "too many operands or results");
  }

 private:
  const char* handler_;
  const Source& source_;
  size_t next_ = 0;
};

}  // namespace jaxops

#endif  // JAXOPS_CORE_ROW_SHAPE_H_
