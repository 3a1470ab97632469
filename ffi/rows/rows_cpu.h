// The CPU's row loop: brings each row, whatever its dtype and stride, to an op body as contiguous floats (or doubles).
#ifndef JAXOPS_ROWS_ROWS_CPU_H_
#define JAXOPS_ROWS_ROWS_CPU_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <tuple>
#include <type_traits>

#include "core/handler.h"
#include "core/math_cpu.h"
#include "core/parallel_cpu.h"
#include "core/row_shape.h"

namespace jaxops {

// Rows that lie side by side (inner > 1) travel this many at a time: one cache line of floats. Both directions go
// through squares of this size, so that every cache line is used whole while it is there.
inline constexpr int64_t kBundle = 16;

// Calls copy(column, row) for all columns of `width` neighbouring rows, square by square.
template <class Copy>
JAXOPS_INLINE void ForEachSquare(int64_t columns, int64_t width, Copy copy) {
  for (int64_t begin = 0; begin < columns; begin += kBundle) {
    const int64_t end = begin + kBundle < columns ? begin + kBundle : columns;
    for (int64_t w = 0; w < width; ++w)
      for (int64_t c = begin; c < end; ++c) copy(c, w);
  }
}

// rows[w * pitch + c] = source[c * stride + w]
template <class A, class T>
JAXOPS_CLONES void Gather(const T* source, int64_t stride, int64_t columns, int64_t width, int64_t pitch, A* rows) {
  if (stride == 1) {
    for (int64_t c = 0; c < columns; ++c) rows[c] = ToFloat(source[c]);
  } else {
    ForEachSquare(columns, width, [=](int64_t c, int64_t w) { rows[w * pitch + c] = ToFloat(source[c * stride + w]); });
  }
}

template <class A, class T>
JAXOPS_CLONES void Scatter(const A* rows, int64_t stride, int64_t columns, int64_t width, int64_t pitch, T* target) {
  if (stride == 1) {
    for (int64_t c = 0; c < columns; ++c) target[c] = FromFloat<T>(rows[c]);
  } else {
    ForEachSquare(columns, width,
                  [=](int64_t c, int64_t w) { target[c * stride + w] = FromFloat<T>(rows[w * pitch + c]); });
  }
}

// Calls visit.operator()<T>() for the element type of a tensor whose rows are computed in A.
template <class A, class Visit>
void VisitElement(DataType type, Visit visit) {
  if constexpr (std::is_same_v<A, double>) {
    visit.template operator()<double>();
  } else if (type == DataType::BF16) {
    visit.template operator()<BFloat16>();
  } else if (type == DataType::F16) {
    visit.template operator()<Float16>();
  } else {
    visit.template operator()<float>();
  }
}

// Calls visit.operator()<A>() with the accumulator type that all the tensors share: double for f64, float for the rest.
template <class Visit>
Error VisitAccumulator(const char* handler, std::initializer_list<AnyBuffer> tensors, Visit visit) {
  const DataType accumulator = AccumulatorType(tensors.begin()->element_type());
  for (const AnyBuffer& tensor : tensors) {
    const DataType type = tensor.element_type();
    const bool floating =
        type == DataType::F64 || type == DataType::F32 || type == DataType::F16 || type == DataType::BF16;
    if (!floating || AccumulatorType(type) != accumulator) {
      return Invalid(handler, "element types must be f64 throughout, or any of f32, f16 and bf16");
    }
  }
  return accumulator == DataType::F64 ? visit.template operator()<double>() : visit.template operator()<float>();
}

// Calls body(task, row, inputs, outputs) for every row: inputs[k] and outputs[k] point at its `columns` values.
// Each group's rows are split into `tasks` consecutive ranges; a task never leaves its group, and the split depends on
// nothing but the shape, so sums taken task by task do not change with the number of threads.
template <class A, size_t kInputs, size_t kOutputs, class Body>
Error ForEachRow(Device& pool, const RowShape& shape, int64_t tasks, const std::array<AnyBuffer, kInputs>& inputs,
                 const std::array<AnyBuffer, kOutputs>& outputs, const Body& body) {
  if (shape.size() == 0) return Error::Success();
  const int64_t columns = shape.columns, inner = shape.inner;
  const int64_t width = std::min(inner, kBundle);
  const int64_t bundles_per_row = (inner + width - 1) / width;
  const int64_t bundles = shape.rows * bundles_per_row;
  const int64_t workers = std::max<int64_t>(1, std::min(pool.num_threads(), tasks * shape.groups));
  const DataType direct = std::is_same_v<A, double> ? DataType::F64 : DataType::F32;
  // Rows a power of two apart would all fall into the same few sets of the cache.
  const int64_t pitch = columns + kBundle, tensor_size = width * pitch,
                worker_size = (kInputs + kOutputs) * tensor_size;
  const auto scratch = std::make_unique_for_overwrite<A[]>(workers * worker_size);

  const auto run = [&](int64_t worker, int64_t task) {
    A* const buffers = scratch.get() + worker * worker_size;
    const int64_t group = task / tasks, part = task % tasks;
    for (int64_t bundle = bundles * part / tasks; bundle < bundles * (part + 1) / tasks; ++bundle) {
      const int64_t first = bundle % bundles_per_row * width, count = std::min(width, inner - first);
      const int64_t outer = group * shape.rows + bundle / bundles_per_row;
      const int64_t offset = outer * columns * inner + first;
      std::array<A*, kInputs + kOutputs> rows;
      for (size_t k = 0; k < rows.size(); ++k) {
        const AnyBuffer& tensor = k < kInputs ? inputs[k] : outputs[k - kInputs];
        const bool in_place = inner == 1 && tensor.element_type() == direct;
        rows[k] = in_place ? static_cast<A*>(tensor.untyped_data()) + offset : buffers + k * tensor_size;
        if (in_place || k >= kInputs) continue;
        VisitElement<A>(tensor.element_type(), [&]<class T> {
          Gather<A, T>(static_cast<const T*>(tensor.untyped_data()) + offset, inner, columns, count, pitch, rows[k]);
        });
      }
      for (int64_t w = 0; w < count; ++w) {
        std::array<const A*, kInputs> in;
        std::array<A*, kOutputs> out;
        for (size_t k = 0; k < kInputs; ++k) in[k] = rows[k] + w * pitch;
        for (size_t k = 0; k < kOutputs; ++k) out[k] = rows[kInputs + k] + w * pitch;
        body(task, outer * inner + first + w, in, out);
      }
      for (size_t k = 0; k < kOutputs; ++k) {
        const AnyBuffer& tensor = outputs[k];
        if (inner == 1 && tensor.element_type() == direct) continue;
        VisitElement<A>(tensor.element_type(), [&]<class T> {
          Scatter<A, T>(rows[kInputs + k], inner, columns, count, pitch,
                        static_cast<T*>(tensor.untyped_data()) + offset);
        });
      }
    }
  };
  ParallelFor(pool, workers, tasks * shape.groups, run);
  return Error::Success();
}

// Enough tasks that each holds about 16 Ki elements, at most 256 a group.
inline int64_t TasksPerGroup(const RowShape& shape) {
  const int64_t elements = shape.rows_per_group() * shape.columns;
  return std::clamp<int64_t>(elements >> 14, 1, 256);
}

// Writes output = body(input...) row by row: the whole of an op without parameters.
template <size_t kInputs, class Body>
Error MapRows(const char* handler, Device& pool, const std::array<AnyBuffer, kInputs>& inputs, const AnyBuffer& output,
              const Body& body) {
  RowShape shape;
  for (const AnyBuffer& input : inputs) JAXOPS_RETURN_IF_ERROR(ParseRows(handler, {input, output}, &shape));
  return VisitAccumulator(handler, {inputs.front(), inputs.back(), output}, [&]<class A> {
    return ForEachRow<A, kInputs, 1>(pool, shape, TasksPerGroup(shape), inputs, {output},
                                     [&](int64_t, int64_t, const auto& in, const auto& out) {
                                       std::apply([&](auto... rows) { body(shape.columns, rows..., out[0]); }, in);
                                     });
  });
}

}  // namespace jaxops

#endif  // JAXOPS_ROWS_ROWS_CPU_H_
