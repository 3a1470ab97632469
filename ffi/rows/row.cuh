// A row, as an op body sees it. A body is algebra: it loads rows, maps and reduces them, and stores the result; which
// threads share the row and where it lives between passes is the row's business.
//
// A row's values are expressions: e(pack, column) gives a function of i, the value in column `column + i`. Expressions
// are evaluated where they are used, pack by pack, so a held row stays in registers in its own dtype, and a streamed
// row, which fits nowhere, is read again by each pass.
#ifndef JAXOPS_ROWS_ROW_CUH_
#define JAXOPS_ROWS_ROW_CUH_

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/row_shape.h"
#include "core/types.cuh"

namespace jaxops::rows {

struct Max {
  template <class A>
  static __device__ A Identity() {
    return -std::numeric_limits<A>::infinity();
  }
  static __device__ float Join(float a, float b) { return fmaxf(a, b); }
  static __device__ double Join(double a, double b) { return fmax(a, b); }
};
struct Sum {
  template <class A>
  static __device__ A Identity() {
    return 0;
  }
  template <class A>
  static __device__ A Join(A a, A b) {
    return a + b;
  }
};

// exp(x) = 2^(x log2 e) by the hardware's exponential: 2 ulp plus |x| / 2 ulp of the argument. Arguments here are
// differences to a row's maximum, so the error relative to the row's largest exponential, 1, stays below 1 ulp.
__device__ inline float Exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
  return result;
}
__device__ inline double Exp(double x) { return exp(x); }
__device__ inline float Log(float x) { return logf(x); }
__device__ inline double Log(double x) { return log(x); }
__device__ inline double Rsqrt(double x) { return rsqrt(x); }
__device__ inline float Rsqrt(float x) {  // the hardware's estimate and a Newton step, where that is defined
  const float r = rsqrtf(x), refined = fmaf(0.5f * r, fmaf(-x * r, r, 1.0f), r);
  return x > 0 && x < std::numeric_limits<float>::infinity() ? refined : r;
}

__device__ inline float Reciprocal(float x) { return __frcp_rn(x); }
__device__ inline double Reciprocal(double x) { return 1 / x; }

// Divides finite numbers by one number: a product with its reciprocal, brought to within an ulp by a Newton step unless
// the quotient is rounded to 16 bits anyway (kExact false).
template <class A, bool kExact = true>
struct Divisor {
  A divisor, reciprocal;

  explicit __device__ Divisor(A d) : divisor(d), reciprocal(Reciprocal(d)) {}
  friend __device__ A operator/(A value, const Divisor& d) {
    const A quotient = value * d.reciprocal;
    return kExact ? fma(fma(-quotient, d.divisor, value), d.reciprocal, quotient) : quotient;
  }
};

// fn applied to the values of one or more expressions.
template <class Fn, class... Es>
__device__ auto Map(Fn fn, const Es&... es) {
  return [=](int pack, int column) { return [=, ... values = es(pack, column)](int i) { return fn(values(i)...); }; };
}

// Who shares a row, and where it lives between passes. kLanes threads share a row; its elements are adjacent, or, when
// kStrided, those of 32 neighbouring rows interleave and a warp reads across them. kPacks packs a thread are held in
// registers; 0: streamed.
template <bool kStrided_, int kLanes_, int kPacks_>
struct Placement {
  static constexpr bool kStrided = kStrided_;
  static constexpr int kLanes = kLanes_, kPacks = kPacks_;
  static constexpr int kThreads = kStrided ? 32 * kLanes : kLanes > 128 ? kLanes : 128;
  static constexpr int kRows = kStrided ? 32 : kThreads / kLanes;  // rows a block
};

// What a kernel knows of the tensors' shape (RowShape says what the words mean).
struct Geometry {
  int64_t size, rows, rows_per_group, inner;
  int columns;

  explicit Geometry(const RowShape& shape)
      : size(shape.size()),
        rows(shape.total_rows()),
        rows_per_group(shape.rows_per_group()),
        inner(shape.inner),
        columns(static_cast<int>(shape.columns)) {}
};

// scale or bias: one row of values, the same for all groups (stride 0) or one a group; null if there is none.
template <class A>
struct Vector {
  const A* data;
  int64_t group_stride;
};

template <class P, int kPack, bool kAligned, class A>
class Row {
 public:
  static constexpr int kV = kPack;
  static constexpr bool kHeld = P::kPacks > 0;

  // Which of the block's rows this thread works on.
  static __device__ int Team() { return P::kStrided ? threadIdx.x % 32 : threadIdx.x / P::kLanes; }

  explicit __device__ Row(const Geometry& shape)
      : columns(shape.columns), shape_(shape), lane_(P::kStrided ? threadIdx.x / 32 : threadIdx.x % P::kLanes) {}

  // Turns to the row of this index; past `end` the row before it is repeated, and nothing is stored.
  __device__ void MoveTo(int64_t wanted, int64_t end) {
    live = wanted < end;
    index = live ? wanted : end - 1;
    if constexpr (P::kStrided) {
      const int64_t outer = index / shape_.inner;
      stride_ = shape_.inner;
      begin_ = outer * columns * shape_.inner + (index - outer * shape_.inner);
    } else {
      begin_ = index * columns;
      if constexpr (!kAligned) shift_ = static_cast<int>(begin_ % kV);
    }
  }

  int64_t index;  // among the rows of all groups
  bool live;
  int columns;

  // One thread a row: it stores the row's scalars.
  __device__ bool Leads() const { return live && lane_ == 0; }

  template <class T>
  __device__ auto Load(const T* tensor) const {
    if constexpr (kHeld) {
      Held<T> held = {};
      ForEachPack([&](int pack, int column) { held.packs[pack] = Read(tensor, column); });
      return held;
    } else {
      return [this, tensor](int, int column) {
        return [values = Read(tensor, column)](int i) { return static_cast<A>(values.lane[i]); };
      };
    }
  }

  // The vector's value for each column, read where it is used; `absent` if there is no vector.
  __device__ auto LoadParameter(Vector<A> parameter, A absent) const {
    const A* const vector = OfGroup(parameter);
    return [this, vector, absent](int, int column) {
      Pack<A, kV> values;
#pragma unroll
      for (int i = 0; i < kV; ++i) values.lane[i] = absent;
      if (vector) values = ReadVector(vector, column);
      return [=](int i) { return values.lane[i]; };
    };
  }

  // The same, read at once and held in registers: for the columns of this row and of others at the same pack boundary.
  __device__ auto HoldParameter(Vector<A> parameter, A absent) const {
    const A* const vector = OfGroup(parameter);
    Held<A> held;
#pragma unroll
    for (auto& pack : held.packs)
#pragma unroll
      for (A& value : pack.lane) value = absent;
    if (vector) ForEachPack([&](int pack, int column) { held.packs[pack] = ReadVector(vector, column); });
    return held;
  }

  template <class T, class E>
  __device__ void Store(T* tensor, const E& expression) const {
    ForEachPack([&](int pack, int column) {
      const auto value = expression(pack, column);
      Pack<T, kV> values;
#pragma unroll
      for (int i = 0; i < kV; ++i) values.lane[i] = static_cast<T>(value(i));
      if (!live) return;
      T* const target = tensor + Offset(column);
      if (Whole(column)) {
        *reinterpret_cast<Pack<T, kV>*>(target) = values;
      } else {
#pragma unroll
        for (int i = 0; i < kV; ++i)
          if (Inside(column + i)) target[i] = values.lane[i];
      }
    });
  }

  // The join of an expression's values over the row, known to all its threads.
  template <class M, class E>
  __device__ A Reduce(const E& expression) {
    A value = Fold<M>(expression);
    Combine<M>(&value, 1);
    return value;
  }

  struct Two {
    A first, second;
  };
  // Both joins for one walk along the row and one exchange between the threads.
  template <class M, class E, class F>
  __device__ Two Reduce(const E& first, const F& second) {
    const Two folded = Fold<M>(first, second);
    A values[2] = {folded.first, folded.second};
    Combine<M>(values, 2);
    return {values[0], values[1]};
  }

  // Calls fn(pack, column of its first element) for this thread's packs. An unaligned row's first pack begins at the
  // pack boundary before the row, so that all accesses are aligned: its column is negative.
  template <class Fn>
  __device__ void ForEachPack(Fn fn) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int pack = 0; pack < P::kPacks; ++pack) {
        const int column = (pack * P::kLanes + lane_) * kV - shift_;
        if (column < columns) fn(pack, column);
      }
    } else {
      for (int column = lane_ * kV - shift_; column < columns; column += P::kLanes * kV) fn(0, column);
    }
  }

  __device__ bool Inside(int column) const { return kAligned || (column >= 0 && column < columns); }

 private:
  __device__ bool Whole(int column) const { return kAligned || (column >= 0 && column + kV <= columns); }
  __device__ int64_t Offset(int column) const { return begin_ + (P::kStrided ? column * stride_ : int64_t{column}); }

  // A pack that overlaps the row's edges also reads its neighbours' elements, but nothing beyond the tensor.
  template <class T>
  __device__ Pack<T, kV> Read(const T* tensor, int column) const {
    const int64_t offset = Offset(column);
    if (kAligned || offset + kV <= shape_.size) return *reinterpret_cast<const Pack<T, kV>*>(tensor + offset);
    Pack<T, kV> values = {};
#pragma unroll
    for (int i = 0; i < kV; ++i)
      if (offset + i < shape_.size) values.lane[i] = tensor[offset + i];
    return values;
  }

  // A row's packs, in registers in the tensor's own dtype.
  template <class T>
  struct Held {
    Pack<T, kV> packs[kHeld ? P::kPacks : 1];
    __device__ auto operator()(int pack, int) const {
      return [values = packs[pack]](int i) { return static_cast<A>(values.lane[i]); };
    }
  };

  __device__ const A* OfGroup(Vector<A> parameter) const {
    const int64_t group = parameter.group_stride ? index / shape_.rows_per_group : 0;
    return parameter.data ? parameter.data + group * parameter.group_stride : nullptr;
  }

  // A vector's values for a pack of columns; anything where they lie outside the row.
  __device__ Pack<A, kV> ReadVector(const A* vector, int column) const {
    if constexpr (kAligned) {
      return *reinterpret_cast<const Pack<A, kV>*>(vector + column);
    } else {
      Pack<A, kV> values;
#pragma unroll
      for (int i = 0; i < kV; ++i) values.lane[i] = vector[Inside(column + i) ? column + i : 0];
      return values;
    }
  }

  // This thread's join of each expression. A streamed row's values are joined in runs of kRun packs, so that rounding
  // errors grow with the square root of a row's length instead of with the length.
  template <class M, class E, class F>
  __device__ Two Fold(const E& first, const F& second) const {
    constexpr int kRun = 16;
    const A identity = M::template Identity<A>();
    Two total = {identity, identity}, run = total;
    int packs = 0;
    ForEachPack([&](int pack, int column) {
      const auto a = first(pack, column);
      const auto b = second(pack, column);
      if (Whole(column)) {
#pragma unroll
        for (int i = 0; i < kV; ++i) run = {M::Join(run.first, A{a(i)}), M::Join(run.second, A{b(i)})};
      } else {
#pragma unroll
        for (int i = 0; i < kV; ++i)
          if (Inside(column + i)) run = {M::Join(run.first, A{a(i)}), M::Join(run.second, A{b(i)})};
      }
      if constexpr (!kHeld) {
        if (++packs % kRun == 0) {
          total = {M::Join(total.first, run.first), M::Join(total.second, run.second)};
          run = {identity, identity};
        }
      }
    });
    return {M::Join(total.first, run.first), M::Join(total.second, run.second)};
  }

  template <class M, class E>
  __device__ A Fold(const E& expression) const {
    const auto nothing = [](int, int) { return [](int) { return M::template Identity<A>(); }; };
    return Fold<M>(expression, nothing).first;
  }

  // Joins values[0..count) over the row's threads. Two sets of slots take turns, so that one barrier is enough: nobody
  // can reach the set's next use before all have passed the barrier of the other set.
  template <class M>
  __device__ void Combine(A* values, int count) {
    if constexpr (P::kStrided) {
      __shared__ A shared[2][2][P::kLanes][32];
      auto& slots = shared[turn_ ^= 1];
      for (int k = 0; k < count; ++k) slots[k][lane_][threadIdx.x % 32] = values[k];
      __syncthreads();
      for (int k = 0; k < count; ++k) {
        A parts[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) parts[q] = slots[k][q][threadIdx.x % 32];
#pragma unroll
        for (int y = 4; y < P::kLanes; ++y) parts[y % 4] = M::Join(parts[y % 4], slots[k][y][threadIdx.x % 32]);
        values[k] = M::Join(M::Join(parts[0], parts[1]), M::Join(parts[2], parts[3]));
      }
    } else {
      for (int k = 0; k < count; ++k) values[k] = JoinLanes<M, (P::kLanes < 32 ? P::kLanes : 32)>(values[k]);
      if constexpr (P::kLanes > 32) {
        constexpr int kWarps = P::kLanes / 32, kTeams = P::kThreads / P::kLanes;
        __shared__ A shared[2][2][kTeams][kWarps];
        auto& slots = shared[turn_ ^= 1];
        const int team = threadIdx.x / P::kLanes, warp = lane_ / 32, lane = lane_ % 32;
        if (lane == 0)
          for (int k = 0; k < count; ++k) slots[k][team][warp] = values[k];
        __syncthreads();
        for (int k = 0; k < count; ++k) {
          const A part = lane < kWarps ? slots[k][team][lane] : M::template Identity<A>();
          values[k] = JoinLanes<M, 32>(part);
        }
      }
    }
  }

  template <class M, int kWidth>
  static __device__ A JoinLanes(A value) {
#pragma unroll
    for (int distance = kWidth / 2; distance > 0; distance /= 2)
      value = M::Join(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
  }

  const Geometry& shape_;
  int64_t begin_, stride_ = 1;
  int lane_, shift_ = 0, turn_ = 0;
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_ROW_CUH_
