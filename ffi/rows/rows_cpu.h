// The CPU's row loop. It hands rows with any dtype, axes and strides to an op's body as adjacent floats (or doubles),
// in one of two forms: single rows (RowLoop in rows/loops_cpu.h), or, if neighbouring rows are adjacent in memory,
// bundles, that is rows side by side (BundleLoop). An op's body is written once for both.
#ifndef JAXOPS_ROWS_ROWS_CPU_H_
#define JAXOPS_ROWS_ROWS_CPU_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "core/handler.h"
#include "core/math_cpu.h"
#include "core/parallel_cpu.h"
#include "core/row_shape.h"
#include "rows/loops_cpu.h"

namespace jaxops {

// An operand or result of a row kernel, and its layout's slot. A tensor without a buffer is absent. A Diagonal without
// a buffer is 1 where its layout's offsets are not negative, else 0.
struct RowTensor {
  void* data = nullptr;
  DataType type = DataType::INVALID;
  int slot = 0;

  RowTensor(const std::optional<AnyBuffer>& buffer, int slot) : slot(slot) {
    if (!buffer) return;
    data = buffer->untyped_data();
    type = buffer->element_type();
  }
  static RowTensor Diagonal(bool present, int slot) {
    RowTensor tensor(std::nullopt, slot);
    if (present) tensor.type = DataType::TOKEN;
    return tensor;
  }
  bool present() const { return type != DataType::INVALID; }
};

// A tensor with one value a row; null if absent.
template <class A>
A* RowValues(const std::optional<AnyBuffer>& buffer) {
  return buffer ? static_cast<A*>(buffer->untyped_data()) : nullptr;
}

// The rows in one call to an op's body: a row, or a bundle.
template <int kSlots>
struct Position {
  int64_t task;
  int64_t offsets[kSlots];  // the block's first row, in every layout
  const int64_t* steps;     // from a row to the next, in every layout
  int64_t row = 0;          // within the block: this call's first row

  // Row `row` + w's offset.
  JAXOPS_INLINE int64_t Offset(int slot, int64_t w) const { return offsets[slot] + (row + w) * steps[slot]; }
};

namespace rows_internal {

template <class A, class T>
struct Elements {
  const T* data;
  JAXOPS_INLINE A operator()(int64_t offset) const { return static_cast<A>(ToFloat(data[offset])); }
};
template <class A>
struct NotNegative {
  JAXOPS_INLINE A operator()(int64_t offset) const { return offset >= 0 ? A{1} : A{0}; }
};

// Copies between a tensor and a buffer: `rows` rows, row_step apart, each in runs of `length` columns, `step` apart. In
// the buffer, element c in row r is number c * lanes + r, or, if lanes = 0, r * columns + c.
struct Copy {
  const std::vector<int64_t>* runs;
  int64_t length, step, rows, row_step, lanes;

  int64_t columns() const { return static_cast<int64_t>(runs->size()) * length; }

  template <class Move>
  JAXOPS_INLINE void ForEach(Move move) const {
    if (lanes == 0 && step == 1 && runs->size() == 1 && (rows == 1 || row_step == length)) {
#pragma omp simd
      for (int64_t i = 0; i < rows * length; ++i) move(i, i);
    } else if (lanes == 0) {
      int64_t position = 0;
      for (int64_t r = 0; r < rows; ++r)
        for (const int64_t run : *runs) {
          const int64_t first = r * row_step + run;
          if (step == 1) {
#pragma omp simd
            for (int64_t i = 0; i < length; ++i) move(first + i, position + i);
          } else {
            for (int64_t i = 0; i < length; ++i) move(first + i * step, position + i);
          }
          position += length;
        }
    } else {
      int64_t position = 0;
      for (const int64_t run : *runs)
        for (int64_t i = 0; i < length; ++i, position += lanes) {
          const int64_t offset = run + i * step;
          if (row_step == 1) {
#pragma omp simd
            for (int64_t w = 0; w < rows; ++w) move(offset + w, position + w);
          } else {
            for (int64_t w = 0; w < rows; ++w) move(offset + w * row_step, position + w);
          }
        }
    }
  }
};

template <class A, class Source>
JAXOPS_CLONES void Gather(Source source, int64_t begin, const Copy& copy, A* buffer) {
  copy.ForEach([=](int64_t offset, int64_t position) { buffer[position] = source(begin + offset); });
}

template <class A, class T>
JAXOPS_CLONES void Scatter(const A* buffer, int64_t begin, const Copy& copy, T* target) {
  copy.ForEach([=](int64_t offset, int64_t position) { target[begin + offset] = FromFloat<T>(buffer[position]); });
}

// Splits the column axes into runs along the innermost axis.
template <int kSlots>
struct Columns {
  int64_t length = 1;
  const int64_t* strides;
  std::array<std::vector<int64_t>, kSlots> runs;

  explicit Columns(const Axes<kSlots>& axes) : strides(axes.strides[axes.count - 1]) {
    length = axes.sizes[axes.count - 1];
    const int64_t count = length > 0 ? axes.total / length : 0;
    for (auto& list : runs) list.resize(count);
    for (int64_t run = 0; run < count; ++run) {
      int64_t offsets[kSlots];
      axes.Offsets(run * length, offsets);
      for (int slot = 0; slot < kSlots; ++slot) runs[slot][run] = offsets[slot];
    }
  }

  Copy Rows(int slot, int64_t rows = 1, int64_t row_step = 0, int64_t lanes = 0) const {
    return {&runs[slot], length, strides[slot], rows, row_step, lanes};
  }
  bool Adjacent(int slot) const { return runs[slot].size() == 1 && strides[slot] == 1; }
};

struct AlignedDelete {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{64}); }
};

}  // namespace rows_internal

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

// Calls visit.operator()<A>() with the tensors' accumulator type: double for f64, float for other dtypes.
template <class Visit>
Error VisitAccumulator(const char* handler, std::initializer_list<AnyBuffer> tensors, Visit visit) {
  const DataType accumulator = AccumulatorType(tensors.begin()->element_type());
  for (const AnyBuffer& tensor : tensors) {
    if (!IsFloating(tensor.element_type()) || AccumulatorType(tensor.element_type()) != accumulator) {
      return Invalid(handler, "element types must be f64 throughout, or any of f32, f16 and bf16");
    }
  }
  return accumulator == DataType::F64 ? visit.template operator()<double>() : visit.template operator()<float>();
}

// Copies a tensor's elements into a buffer.
template <class A>
void GatherTensor(const RowTensor& tensor, int64_t begin, const rows_internal::Copy& copy, A* buffer) {
  using namespace rows_internal;
  if (tensor.type == DataType::TOKEN) return Gather<A>(NotNegative<A>{}, begin, copy, buffer);
  if (tensor.type == DataType::PRED) {
    return Gather<A>(Elements<A, Boolean>{static_cast<const Boolean*>(tensor.data)}, begin, copy, buffer);
  }
  VisitElement<A>(tensor.type,
                  [&]<class T> { Gather<A>(Elements<A, T>{static_cast<const T*>(tensor.data)}, begin, copy, buffer); });
}

// The tensors for a block of rows (or for one bundle), in place or in buffers. Consecutive rows are `pitches` apart.
template <class A, int kSlots, size_t kInputs, size_t kOutputs>
struct Block {
  Position<kSlots> position;
  int64_t rows;
  std::array<A*, kInputs + kOutputs> data;
  std::array<int64_t, kInputs + kOutputs> pitches;

  // Calls body(loop, position, inputs, outputs) for every `together` rows. The clone itself contains the loop over
  // rows: if the loop is in a function inlined into the clone, GCC 12 does not vectorise most loops in the body.
  template <class Body>
  JAXOPS_CLONES void Run(RowLoop<A> loop, const Body& body) {
    for (const int64_t together = loop.rows; position.row < rows; position.row += together) {
      loop.rows = std::min(together, rows - position.row);
      const auto [in, out] = Tensors();
      body(loop, position, in, out);
    }
  }
  // Runs a bundle, whose passes have their own clones.
  template <class Body>
  void Run(const BundleLoop<A>& loop, const Body& body) {
    const auto [in, out] = Tensors();
    body(loop, position, in, out);
  }

 private:
  // The tensors' elements in the current row.
  JAXOPS_INLINE std::pair<std::array<const A*, kInputs>, std::array<A*, kOutputs>> Tensors() const {
    std::pair<std::array<const A*, kInputs>, std::array<A*, kOutputs>> at;
    for (size_t k = 0; k < kInputs; ++k) at.first[k] = data[k] + position.row * pitches[k];
    for (size_t k = 0; k < kOutputs; ++k) at.second[k] = data[kInputs + k] + position.row * pitches[kInputs + k];
    return at;
  }
};

// Walks a call's rows, in lines along the innermost row axis.
//
// f32 rows are used in place. Other dtypes are copied to a buffer, and so are rows that an op's body gets several at a
// time, if they are not contiguous. Operands that are the same for all rows are repeated in the buffer. A bundle is
// used in place if all its tensors are f32 and have x's layout.
template <class A, int kSlots, size_t kInputs, size_t kOutputs, class Body>
class RowWalk {
 public:
  // threads: bundles are divided among so many threads; 0 if a bundle's width must not depend on the number.
  RowWalk(const RowShape<kSlots>& shape, int64_t tasks, int64_t threads, const std::array<RowTensor, kInputs>& inputs,
          const std::array<RowTensor, kOutputs>& outputs, const Body& body)
      : shape_(shape),
        tasks_(tasks),
        body_(body),
        columns_(shape.columns),
        n_(shape.columns.total),
        line_(shape.rows.sizes[shape.rows.count - 1]),
        steps_(shape.rows.strides[shape.rows.count - 1]),
        bundled_(steps_[kFull] == 1 && line_ >= kPack / 4),
        together_(n_ > (steps_[kFull] == n_ ? kShortColumns : kCopiedColumns)
                      ? 1
                      : std::min({line_, RowLoop<A>::kMaxRows, kBlockElements / std::max<int64_t>(n_, 1)})) {
    for (size_t k = 0; k < kTensors; ++k) tensors_.push_back(k < kInputs ? inputs[k] : outputs[k - kInputs]);
    bool uniform = columns_.runs[kFull].size() == 1;
    for (const RowTensor& t : tensors_) uniform &= !t.present() || (t.slot == kFull && Direct(t));
    for (size_t k = 0; k < kTensors; ++k) {
      const RowTensor& t = tensors_[k];
      const bool follows = together_ == 1 || steps_[t.slot] == n_;  // each row follows the one before it
      in_place_[k] = t.present() && (bundled_ ? uniform : Direct(t) && columns_.Adjacent(t.slot) && follows);
    }
    if (bundled_) {
      SetBundles(shape.total_rows() / line_, threads, uniform);
    } else {
      width_ = std::clamp<int64_t>(kBlockElements / std::max<int64_t>(n_, 1), 1, line_);
    }
    // The first output shares the first input's buffer.
    const bool shared = tensors_[0].present() && !in_place_[0];
    for (size_t k = 0; k < kTensors; ++k) {
      if (tensors_[k].present() && !in_place_[k]) buffer_[k] = k == kInputs && shared ? buffer_[0] : buffers_++;
    }
    pitch_ = uniform ? columns_.strides[kFull] : RoundUp(width_, kPack);
    buffer_size_ = RoundUp((bundled_ ? RoundUp(width_, kPack) : width_) * n_, kPack);
  }

  void Run(Device& pool) const {
    const int64_t tasks = tasks_ * shape_.groups.total;
    const int64_t workers = parts_ > 1 ? 1 : std::max<int64_t>(1, std::min(pool.num_threads(), tasks));
    const std::unique_ptr<A, rows_internal::AlignedDelete> buffers(
        static_cast<A*>(::operator new(workers * buffers_ * buffer_size_ * sizeof(A), std::align_val_t{64})));
    std::vector<double> values(parts_ > 1 ? parts_ * width_ : 0);
    const ColumnParts parts = {parts_, &pool, values.data()};
    ParallelFor(pool, workers, tasks, [&](int64_t worker, int64_t task) {
      State state;
      state.task = task;
      state.parts = parts;
      state.buffers = buffers.get() + worker * buffers_ * buffer_size_;
      shape_.groups.Offsets(task / tasks_, state.group);
      state.gathered.fill(std::numeric_limits<int64_t>::min());
      if (bundled_) {
        WalkBundles(state);
      } else {
        WalkRows(state);
      }
    });
  }

 private:
  static constexpr int kFull = 0;
  static constexpr size_t kTensors = kInputs + kOutputs;
  // A block's buffers fit the L1 cache, a bundle's buffers the L2 cache.
  static constexpr int64_t kBlockElements = 2048, kBundleElements = 1 << 17;
  // An op's body gets several rows at a time if they have at most so many columns. The limit is lower for rows that are
  // not contiguous, because they must be copied.
  static constexpr int64_t kShortColumns = 768, kCopiedColumns = 128;

  // One task's state.
  struct State {
    int64_t task;
    ColumnParts parts;
    A* buffers;
    int64_t group[kSlots];
    std::array<int64_t, kTensors> gathered;  // the offsets at which the buffers begin
  };

  // A wider bundle reads columns in longer runs of memory. If there are few large bundles in place, threads share their
  // columns; otherwise each thread gets its own bundles, as long as they stay wide enough.
  void SetBundles(int64_t lines, int64_t threads, bool in_place) {
    constexpr int64_t kFew = 16, kLargeElements = 1 << 18, kParts = 16, kFewLanes = 128, kMostBufferedLanes = 512;
    const int64_t widest = std::min(line_, BundleLoop<A>::kMaxLanes);
    if (in_place && lines * ((line_ + widest - 1) / widest) < kFew && n_ * widest >= kLargeElements) {
      width_ = widest;
      parts_ = kParts;
      return;
    }
    const int64_t bundles = threads ? (threads + lines - 1) / lines : line_;
    width_ = std::clamp(RoundUp((line_ + bundles - 1) / bundles, kPack), kFewLanes, BundleLoop<A>::kMaxLanes);
    if (!in_place) {
      const int64_t fitting = kBundleElements / std::max<int64_t>(n_, 1) / kPack * kPack;
      width_ = std::min({width_, std::max(fitting, kPack), kMostBufferedLanes});
    }
    width_ = std::min(width_, line_);
  }

  static bool Direct(const RowTensor& t) {
    return t.type == (std::is_same_v<A, double> ? DataType::F64 : DataType::F32);
  }

  void WalkRows(State& state) const {
    const int64_t part = state.task % tasks_, total = shape_.rows.total;
    const int64_t end = total * (part + 1) / tasks_;
    for (int64_t row = total * part / tasks_, count; row < end; row += count) {
      const int64_t line_end = std::min(end, (row / line_ + 1) * line_);
      count = std::min(width_, line_end - row);
      Compute(RowLoop<A>{n_, together_}, row, count, state);
    }
  }

  void WalkBundles(State& state) const {
    const int64_t part = state.task % tasks_, bundles_per_line = (line_ + width_ - 1) / width_;
    const int64_t total = shape_.rows.total / line_ * bundles_per_line;
    for (int64_t bundle = total * part / tasks_; bundle < total * (part + 1) / tasks_; ++bundle) {
      const int64_t first = bundle % bundles_per_line * width_, count = std::min(width_, line_ - first);
      const int64_t lanes = in_place_[0] ? count : RoundUp(count, kPack);
      Compute(BundleLoop<A>{n_, pitch_, lanes, count, state.parts}, bundle / bundles_per_line * line_ + first, count,
              state);
    }
  }

  // Computes rows [row, row + count).
  template <class Loop>
  void Compute(const Loop& loop, int64_t row, int64_t count, State& state) const {
    Block<A, kSlots, kInputs, kOutputs> block;
    block.rows = bundled_ ? 1 : count;
    block.position.task = state.task;
    block.position.steps = steps_;
    int64_t begin[kSlots];
    shape_.rows.Offsets(row, begin);
    for (int slot = 0; slot < kSlots; ++slot) block.position.offsets[slot] = begin[slot] += state.group[slot];
    const auto copy = [&](int slot) {
      const int64_t rows = steps_[slot] != 0 ? count : bundled_ ? width_ : together_;
      return columns_.Rows(slot, rows, steps_[slot], bundled_ ? pitch_ : 0);
    };
    for (size_t k = 0; k < kTensors; ++k) {
      const RowTensor& t = tensors_[k];
      const int64_t step = steps_[t.slot];
      block.pitches[k] = !t.present() || step == 0 ? 0 : in_place_[k] ? step : n_;
      if (!t.present()) {
        block.data[k] = nullptr;
      } else if (in_place_[k]) {
        block.data[k] = static_cast<A*>(t.data) + begin[t.slot];
      } else {
        block.data[k] = state.buffers + buffer_[k] * buffer_size_;
        if (k < kInputs && !(step == 0 && state.gathered[k] == begin[t.slot])) {
          GatherTensor<A>(t, begin[t.slot], copy(t.slot), block.data[k]);
          state.gathered[k] = begin[t.slot];
        }
      }
    }
    block.Run(loop, body_);
    for (size_t k = kInputs; k < kTensors; ++k) {
      const RowTensor& t = tensors_[k];
      if (!t.present() || in_place_[k]) continue;
      VisitElement<A>(t.type, [&]<class T> {
        rows_internal::Scatter<A>(block.data[k], begin[t.slot], copy(t.slot), static_cast<T*>(t.data));
      });
    }
  }

  const RowShape<kSlots>& shape_;
  const int64_t tasks_;
  const Body& body_;
  const rows_internal::Columns<kSlots> columns_;
  const int64_t n_, line_;
  const int64_t* const steps_;  // from row to row along a line
  const bool bundled_;
  const int64_t together_;  // rows per call to an op's body
  std::vector<RowTensor> tensors_;
  std::array<bool, kTensors> in_place_;
  std::array<int64_t, kTensors> buffer_ = {};  // the buffers of tensors that are not in place
  int64_t buffers_ = 0;
  int64_t parts_ = 1;                    // parts of a bundle's columns
  int64_t width_, pitch_, buffer_size_;  // width: rows per block or bundle
};

// Calls body(loop, position, inputs, outputs) for all rows: a few at a time with a RowLoop, or by bundles with a
// BundleLoop. inputs[k] and outputs[k] point at elements in the loop's order; they are null if the tensor is absent.
// outputs[0] may be the same memory as inputs[0]; other tensors do not overlap.
//
// Each group's rows are split into `tasks` consecutive ranges; a task never leaves its group. If `summed`, the body
// sums columns over a task's rows, and nothing depends on the number of threads; otherwise the bundles' width does.
template <class A, int kSlots, size_t kInputs, size_t kOutputs, class Body>
void ForEachRow(Device& pool, const RowShape<kSlots>& shape, int64_t tasks, bool summed,
                const std::array<RowTensor, kInputs>& inputs, const std::array<RowTensor, kOutputs>& outputs,
                const Body& body) {
  if (shape.total_rows() == 0) return;
  const int64_t threads = summed ? 0 : std::max<int64_t>(1, pool.num_threads());
  RowWalk<A, kSlots, kInputs, kOutputs, Body>(shape, tasks, threads, inputs, outputs, body).Run(pool);
}

// Gives each task about 16 Ki elements, with at most one task per row and 256 tasks per group.
template <int kSlots>
int64_t TasksPerGroup(const RowShape<kSlots>& shape) {
  const int64_t most = std::clamp<int64_t>(shape.rows.total, 1, 256);
  return std::clamp<int64_t>(shape.rows.total * shape.columns.total >> 14, 1, most);
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

// Sums over each group's rows. The workspace [results, groups, tasks, columns] has one partial sum per task.
template <class A>
class ColumnSums {
 public:
  template <int kSlots>
  ColumnSums(const RowShape<kSlots>& shape, const SummedResults& results)
      : results_(results),
        columns_(shape.columns.total),
        groups_(shape.groups.total),
        tasks_(results.count ? std::min(results.chunks, TasksPerGroup(shape)) : TasksPerGroup(shape)) {
    if (results.count) std::fill_n(Partial(0, 0), results.count * groups_ * tasks_ * columns_, A{0});
  }

  // As many chunks as tasks; a GPU may use the workspace's rest.
  int64_t tasks() const { return tasks_; }

  // task: counts over all groups, as in Position.
  A* Partial(int result, int64_t task) const {
    return static_cast<A*>(results_.workspace) + (result * groups_ * tasks_ + task) * columns_;
  }

  template <int kSlots>
  void Finish(Device& pool, const RowShape<kSlots>& shape, int slot) const {
    if (results_.count == 0) return;
    const rows_internal::Columns<kSlots> columns(shape.columns);
    ParallelFor(pool, std::min(pool.num_threads(), groups_), groups_, [&](int64_t, int64_t group) {
      int64_t offsets[kSlots];
      shape.groups.Offsets(group, offsets);
      for (int result = 0; result < results_.count; ++result) {
        A* const sums = Partial(result, group * tasks_);  // the first task's sums
        AddRows(tasks_, columns_, sums, sums);
        rows_internal::Scatter<A>(sums, offsets[slot], columns.Rows(slot), static_cast<A*>(results_.results[result]));
      }
    });
  }

 private:
  SummedResults results_;
  int64_t columns_, groups_, tasks_;
};

}  // namespace jaxops

#endif  // JAXOPS_ROWS_ROWS_CPU_H_
