// Loops for op bodies on the CPU: maps, maxima, sums, and sums over rows. RowLoop is for rows with adjacent elements,
// BundleLoop for rows side by side (a bundle).
#ifndef JAXOPS_ROWS_LOOPS_CPU_H_
#define JAXOPS_ROWS_LOOPS_CPU_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/math_cpu.h"
#include "core/parallel_cpu.h"

namespace jaxops {

// A pack is this many elements that the loops compute together: a cache line of floats.
inline constexpr int64_t kPack = 16;

JAXOPS_INLINE int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

namespace loops_internal {

template <class A>
inline constexpr A kLowest = -std::numeric_limits<A>::infinity();

// Floats are summed in double, so that a sum is exact to a float's last place, however long it is. Doubles are summed
// by Kahan's method; excess: the last addition's rounding error.
template <class A>
JAXOPS_INLINE void Add(double value, double& total, double& excess) {
  if constexpr (std::is_same_v<A, double>) {
    const double corrected = value - excess, next = total + corrected;
    const double rounded = (next - total) - corrected;
    excess = rounded == rounded ? rounded : 0;  // infinity stays infinity
    total = next;
  } else {
    total += value;
  }
}

template <class T, int64_t kWidth>
struct Vector {
  typedef T Type __attribute__((vector_size(kWidth * sizeof(T))));
};

// A vector's elements kBegin, kBegin + 1, ... It is passed by reference, because the processor may lack such vectors.
template <int64_t kBegin, class From, class To, int64_t... i>
JAXOPS_INLINE void Part(const From& from, To& to, std::integer_sequence<int64_t, i...>) {
  to = __builtin_shufflevector(from, from, (kBegin + i)...);
}

// The maximum or sum over a vector's kWidth values, pairwise: the upper half joins the lower half, in registers.
template <bool kMax, int64_t kWidth, class T>
JAXOPS_INLINE T FoldVector(const typename Vector<T, kWidth>::Type& values) {
  constexpr int64_t kHalf = kWidth / 2;
  if constexpr (kHalf == 1) {
    return !kMax ? values[0] + values[1] : values[0] > values[1] ? values[0] : values[1];
  } else {
    typename Vector<T, kHalf>::Type low, high;
    Part<0>(values, low, std::make_integer_sequence<int64_t, kHalf>());
    Part<kHalf>(values, high, std::make_integer_sequence<int64_t, kHalf>());
    if constexpr (kMax) {
      low = low > high ? low : high;
    } else {
      low += high;
    }
    return FoldVector<kMax, kHalf, T>(low);
  }
}
// Does the same for an array, first joined in 32-byte vectors. They are read through pointers: GCC turns memcpy into
// 16-byte copies, and then a vector load waits until both halves are written.
template <bool kMax, int64_t kWidth, class T>
JAXOPS_INLINE void JoinHalves(const T* values, typename Vector<T, 32 / sizeof(T)>::Type& joined) {
  typedef T Unaligned __attribute__((vector_size(32), aligned(alignof(T)), may_alias));
  if constexpr (kWidth * sizeof(T) == 32) {
    joined = *reinterpret_cast<const Unaligned*>(values);
  } else {
    typename Vector<T, 32 / sizeof(T)>::Type upper;
    JoinHalves<kMax, kWidth / 2>(values, joined);
    JoinHalves<kMax, kWidth / 2>(values + kWidth / 2, upper);
    if constexpr (kMax) {
      joined = joined > upper ? joined : upper;
    } else {
      joined += upper;
    }
  }
}
template <bool kMax, int64_t kWidth, class T>
JAXOPS_INLINE T Fold(const T* values) {
  typename Vector<T, 32 / sizeof(T)>::Type joined;
  JoinHalves<kMax, kWidth>(values, joined);
  return FoldVector<kMax, 32 / sizeof(T), T>(joined);
}

}  // namespace loops_internal

// One value for each of up to kMost rows.
template <class A, int64_t kMost>
struct PerRow {
  A value[kMost];
  JAXOPS_INLINE A operator[](int64_t w) const { return value[w]; }
  JAXOPS_INLINE A& operator[](int64_t w) { return value[w]; }
};

// Loops over `rows` rows with adjacent elements. Element c in row w is number w * columns + c, and f gets both numbers.
// Each pass visits all rows before the next pass begins, so that folding a short row's sum overlaps with the next rows.
// If elements remain after a row's last whole pack, a pack that overlaps it computes them.
template <class A>
struct RowLoop {
  static constexpr int64_t kMaxRows = 16;

  int64_t columns, rows;

  using Value = PerRow<A, kMaxRows>;

  // target = f, which may read target's own element.
  template <class F>
  JAXOPS_INLINE void Map(A* target, F f) const {
    for (int64_t row = 0; row < rows; ++row) {
      A* const to = target + row * columns;
      const auto element = [&](int64_t i) { return f(row * columns + i, row); };
      if (columns < kPack) {
        MapFew(element, to);
        continue;
      }
      const int64_t before = BeforeLast();
#pragma omp simd
      for (int64_t i = 0; i < before; ++i) to[i] = element(i);
      if (before == columns) continue;
      A last[kPack];
      TakeLast(element, last);
#pragma omp simd
      for (int64_t w = 0; w < kPack; ++w) to[before + w] = element(before + w);
      StoreLast(last, to);
    }
  }

  // max over f. NaN is ignored here; the caller's subtraction brings it back.
  template <class F>
  JAXOPS_INLINE Value Max(F f) const {
    const auto larger = [](A a, A b) { return a > b ? a : b; };
    constexpr A kLowest = loops_internal::kLowest<A>;
    Value result;
    for (int64_t row = 0; row < rows; ++row) {
      const auto element = [&](int64_t i) { return f(row * columns + i, row); };
      if (columns < kPack) {
        result[row] = kLowest;
        for (int64_t i = 0; i < columns; ++i) result[row] = larger(element(i), result[row]);
        continue;
      }
      A max[kLanes];
      for (A& value : max) value = kLowest;
      const auto join = [&](int64_t w, A value) { max[w] = larger(value, max[w]); };
      ForEachLane<4>(element, larger, join);
      if (BeforeLast() < columns) {
        JoinLast(element, [&](int64_t w) { return element(columns - kPack + w); }, join, kLowest);
      }
      result[row] = loops_internal::Fold<true, kLanes>(max);
    }
    return result;
  }

  template <class F>
  JAXOPS_INLINE Value Sum(F f) const {
    return SumOf<false>(nullptr, f);
  }
  // The sum over f; stores f into target.
  template <class F>
  JAXOPS_INLINE Value MapSum(A* target, F f) const {
    return SumOf<true>(target, f);
  }

  // sums[c] += f(element in column c).
  template <class F>
  JAXOPS_INLINE void AddColumns(F f, A* sums) const {
    const RowLoop row_of_sums = {columns, 1};
    for (int64_t row = 0; row < rows; ++row) {
      row_of_sums.Map(sums, [&](int64_t i, int64_t) { return sums[i] + f(row * columns + i, row); });
    }
  }

 private:
  static constexpr int64_t kLanes = std::is_same_v<A, double> ? 2 * kPack : kPack, kHalf = kPack / 2;

  // The columns before the last two packs if these overlap, else all columns.
  JAXOPS_INLINE int64_t BeforeLast() const { return columns % kPack == 0 ? columns : columns / kPack * kPack - kPack; }

  template <bool kStore, class F>
  JAXOPS_INLINE Value SumOf(A* target, F f) const {
    Value result;
    for (int64_t row = 0; row < rows; ++row) {
      A* const to = kStore ? target + row * columns : nullptr;
      const auto element = [&](int64_t i) { return f(row * columns + i, row); };
      const auto stored = [&](int64_t i) {
        const A value = element(i);
        if constexpr (kStore) to[i] = value;
        return value;
      };
      if (columns < kPack) {
        if constexpr (kStore) MapFew(element, to);
        double total = 0, excess = 0;
        if (kStore || columns < kHalf) {
          for (int64_t i = 0; i < columns; ++i) loops_internal::Add<A>(kStore ? to[i] : element(i), total, excess);
        } else {
          total = SumHalves(element);
        }
        result[row] = static_cast<A>(total);
        continue;
      }
      double total[kLanes], excess[kLanes] = {};
      for (double& value : total) value = -0.0;  // -0 + x is x; zeroing all bits would use a slow instruction
      const auto join = [&](int64_t w, A value) { loops_internal::Add<A>(value, total[w], excess[w]); };
      // Add floats in fours or pairs first, which is cheaper than converting each to double.
      constexpr int kTogether = std::is_same_v<A, double> ? 1 : kStore ? 2 : 4;
      ForEachLane<kTogether>(stored, [](A a, A b) { return a + b; }, join);
      if (BeforeLast() < columns) {
        if constexpr (kStore) {
          A last[kPack];
          TakeLast(element, last);
          JoinLast(stored, [&](int64_t w) { return last[w]; }, join, A{0});
          StoreLast(last, to);
        } else {
          JoinLast(element, [&](int64_t w) { return element(columns - kPack + w); }, join, A{0});
        }
      }
      result[row] = static_cast<A>(loops_internal::Fold<false, kLanes>(total));
    }
    return result;
  }

  // Computes rows shorter than a pack: in half packs, which overlap as packs do, or one by one.
  template <class F>
  JAXOPS_INLINE void MapFew(F element, A* to) const {
    if (columns < kHalf) {
      for (int64_t i = 0; i < columns; ++i) to[i] = element(i);
      return;
    }
    A last[kHalf];
#pragma omp simd
    for (int64_t w = 0; w < kHalf; ++w) last[w] = element(columns - kHalf + w);
#pragma omp simd
    for (int64_t w = 0; w < kHalf; ++w) to[w] = element(w);
    std::memcpy(to + columns - kHalf, last, sizeof(last));
  }
  // The sum over two halves that overlap.
  template <class F>
  JAXOPS_INLINE double SumHalves(F element) const {
    const int overlap = static_cast<int>(kPack - columns);
    double total[kHalf];
#pragma omp simd
    for (int w = 0; w < kHalf; ++w) {
      total[w] = static_cast<double>(element(w));
      total[w] += static_cast<double>(Select(w >= overlap, element(columns - kHalf + w), A{0}));
    }
    return loops_internal::Fold<false, kHalf>(total);
  }

  // Calls join(lane, element) for the columns before the last two packs. As long as there are kTogether elements,
  // pair(pair(), pair()) joins them first.
  template <int kTogether, class F, class Pair, class Join>
  JAXOPS_INLINE void ForEachLane(F element, Pair pair, Join join) const {
    const int64_t end = BeforeLast();
    int64_t i = 0;
    if constexpr (kTogether > 1) {
      for (; i + kTogether * kLanes <= end; i += kTogether * kLanes) {
#pragma omp simd
        for (int64_t w = 0; w < kLanes; ++w) {
          A value = pair(element(i + w), element(i + kLanes + w));
          if constexpr (kTogether == 4) {
            value = pair(value, pair(element(i + 2 * kLanes + w), element(i + 3 * kLanes + w)));
          }
          join(w, value);
        }
      }
    }
    for (; i + kLanes <= end; i += kLanes) {
#pragma omp simd
      for (int64_t w = 0; w < kLanes; ++w) join(w, element(i + w));
    }
    if constexpr (kLanes > kPack) {
      if (i + kPack > end) return;
#pragma omp simd
      for (int64_t w = 0; w < kPack; ++w) join(w, element(i + w));
    }
  }

  // If the last two packs overlap, the last one is computed before the other is stored. Both are joined, each element
  // once, the last pack's elements as last(lane). The last pack is stored last.
  template <class F>
  JAXOPS_INLINE void TakeLast(F element, A (&last)[kPack]) const {
#pragma omp simd
    for (int64_t w = 0; w < kPack; ++w) last[w] = element(columns - kPack + w);
  }
  template <class F, class Last, class Join>
  JAXOPS_INLINE void JoinLast(F element, Last last, Join join, A neutral) const {
    const int64_t begin = BeforeLast();
    const int overlap = static_cast<int>(2 * kPack - (columns - begin));
#pragma omp simd
    for (int w = 0; w < kPack; ++w) {
      join(w, element(begin + w));
      join(w, Select(w >= overlap, last(w), neutral));
    }
  }
  JAXOPS_INLINE void StoreLast(const A (&last)[kPack], A* to) const {
    std::memcpy(to + columns - kPack, last, sizeof(last));
  }
};

// The parts of a bundle's columns; threads share a pass over them. Sums are taken part by part, whatever the number of
// threads.
struct ColumnParts {
  int64_t count = 1;
  Device* pool = nullptr;    // needed, as is `values`, if there are several parts
  double* values = nullptr;  // [count, lanes]

  // Calls run(context, part) for each part on the pool's threads. It is not inlined, or every pass would have a copy.
  __attribute__((noinline)) void ForEach(void (*run)(const void*, int64_t), const void* context) const {
    ParallelFor(*pool, std::min(pool->num_threads(), count), count, [=](int64_t, int64_t part) { run(context, part); });
  }
};

// The same loops for `rows` rows side by side: element c of row w is number c * pitch + w. lanes: how many rows are
// computed; results beyond `rows` are ignored.
template <class A>
struct BundleLoop {
  static constexpr int64_t kMaxLanes = 1024;

  int64_t columns, pitch, lanes, rows;
  ColumnParts parts;

  using Value = PerRow<A, kMaxLanes>;

  template <class F>
  JAXOPS_INLINE void Map(A* target, F f) const {
    ForEachPart([&](int64_t, int64_t begin, int64_t end) { MapIn(begin, end, target, f); });
  }

  template <class F>
  JAXOPS_INLINE Value Max(F f) const {
    return Reduce([&](int64_t begin, int64_t end, double* values) { MaxIn(begin, end, f, values); },
                  [](double value, double& max, double&) { max = value > max ? value : max; });
  }

  template <class F>
  JAXOPS_INLINE Value Sum(F f) const {
    return Reduce([&](int64_t begin, int64_t end, double* values) { SumIn(begin, end, f, values); },
                  [](double value, double& total, double& excess) { loops_internal::Add<A>(value, total, excess); });
  }

  template <class F>
  JAXOPS_INLINE Value MapSum(A* target, F f) const {
    return Sum([=](int64_t i, int64_t w) { return target[i] = f(i, w); });
  }

  template <class F>
  JAXOPS_INLINE void AddColumns(F f, A* sums) const {
    ForEachPart([&](int64_t, int64_t begin, int64_t end) { AddColumnsIn(begin, end, f, sums); });
  }

 private:
  template <class Run>
  JAXOPS_INLINE void ForEachPart(const Run& run) const {
    if (parts.count == 1) return run(0, 0, columns);
    const auto run_part = [&](int64_t part) {
      run(part, columns * part / parts.count, columns * (part + 1) / parts.count);
    };
    using Part = decltype(run_part);
    parts.ForEach([](const void* context, int64_t part) { (*static_cast<const Part*>(context))(part); }, &run_part);
  }

  // Joins reduce(begin, end, values) over all parts, in order.
  template <class Run, class Join>
  JAXOPS_INLINE Value Reduce(const Run& reduce, Join join) const {
    double own[kMaxLanes];
    double* const values = parts.count == 1 ? own : parts.values;
    ForEachPart([&](int64_t part, int64_t begin, int64_t end) { reduce(begin, end, values + part * lanes); });
    Value result;
    for (int64_t w = 0; w < lanes; ++w) {
      double joined = values[w], excess = 0;
      for (int64_t part = 1; part < parts.count; ++part) join(values[part * lanes + w], joined, excess);
      result[w] = static_cast<A>(joined);
    }
    return result;
  }

  // The passes over columns [begin, end). Each is a function with its own clones, because functions that run on the
  // pool's threads are not inlined.
  template <class F>
  JAXOPS_CLONES void MapIn(int64_t begin, int64_t end, A* target, F f) const {
    for (int64_t c = begin; c < end; ++c) {
#pragma omp simd
      for (int64_t w = 0; w < lanes; ++w) target[c * pitch + w] = f(c * pitch + w, w);
    }
  }

  template <class F>
  JAXOPS_CLONES void MaxIn(int64_t begin, int64_t end, F f, double* values) const {
    A max[kMaxLanes];
    for (int64_t w = 0; w < lanes; ++w) max[w] = loops_internal::kLowest<A>;
    for (int64_t c = begin; c < end; ++c) {
#pragma omp simd
      for (int64_t w = 0; w < lanes; ++w) {
        const A value = f(c * pitch + w, w);
        max[w] = value > max[w] ? value : max[w];
      }
    }
    for (int64_t w = 0; w < lanes; ++w) values[w] = max[w];
  }

  template <class F>
  JAXOPS_CLONES void SumIn(int64_t begin, int64_t end, F f, double* values) const {
    double excesses[kMaxLanes];
    for (int64_t w = 0; w < lanes; ++w) values[w] = excesses[w] = 0;
    // Takes several columns for each read and write to the totals.
    const auto add = [&]<int64_t kColumns>(int64_t c) {
#pragma omp simd
      for (int64_t w = 0; w < lanes; ++w) {
        double total = values[w], excess = excesses[w];
        if constexpr (kColumns == 1 || std::is_same_v<A, double>) {
          for (int64_t k = 0; k < kColumns; ++k) {
            loops_internal::Add<A>(static_cast<double>(f((c + k) * pitch + w, w)), total, excess);
          }
        } else {  // in pairs, as RowLoop does
          for (int64_t k = 0; k < kColumns; k += 2) {
            const A first = f((c + k) * pitch + w, w), second = f((c + k + 1) * pitch + w, w);
            loops_internal::Add<A>(static_cast<double>(first + second), total, excess);
          }
        }
        values[w] = total, excesses[w] = excess;
      }
    };
    constexpr int64_t kFew = 4;
    int64_t c = begin;
    for (; c + kFew <= end; c += kFew) add.template operator()<kFew>(c);
    for (; c < end; ++c) add.template operator()<1>(c);
  }

  template <class F>
  JAXOPS_CLONES void AddColumnsIn(int64_t begin, int64_t end, F f, A* sums) const {
    for (int64_t c = begin; c < end; ++c) {
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t w = 0; w < rows; ++w) sum += static_cast<double>(f(c * pitch + w, w));
      sums[c] += static_cast<A>(sum);
    }
  }
};

}  // namespace jaxops

#endif  // JAXOPS_ROWS_LOOPS_CPU_H_
