// Rows, as an op body sees them. A body is algebra: it loads rows, maps and reduces them, and stores the result; which
// threads share a row, where it lives between passes and how many rows a thread works on is the row's business.
//
// A row's values are expressions: e(pack, column) gives a function of i, the value at position i of that pack, whose
// first element lies in `column`. Expressions are evaluated where they are used, pack by pack, so a held row stays in
// registers in its own dtype, and a streamed row is read again by each pass. One value a row is an expression too.
#ifndef JAXOPS_ROWS_ROW_CUH_
#define JAXOPS_ROWS_ROW_CUH_

#include <cstdint>

#include "rows/exchange.cuh"
#include "rows/geometry.cuh"

namespace jaxops::rows {

// fn applied to the values of one or more expressions.
template <class Fn, class... Es>
__device__ auto Map(Fn fn, const Es&... es) {
  return [=](int pack, int column) { return [=, ... values = es(pack, column)](int i) { return fn(values(i)...); }; };
}

// A broadcast operand: its layout's slot, its data (null: absent) and their dtype.
struct Operand {
  const void* data = nullptr;
  DataType type = DataType::F32;
};

// Reads through the cache for data that does not change; every operand of a kernel is such data.
template <class T, int N>
__device__ Pack<T, N> ReadPack(const T* source) {
  Pack<T, N> out;
  constexpr int kBytes = sizeof(out);
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      reinterpret_cast<uint4*>(&out)[i] = __ldg(reinterpret_cast<const uint4*>(source) + i);
  } else if constexpr (kBytes == 8) {
    reinterpret_cast<uint2&>(out) = __ldg(reinterpret_cast<const uint2*>(source));
  } else if constexpr (kBytes == 4) {
    reinterpret_cast<uint32_t&>(out) = __ldg(reinterpret_cast<const uint32_t*>(source));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out.Set(i, source[i]);
  }
  return out;
}

// The same from any address, for words of 4 bytes: out of the aligned vectors around them, as far as they hold one of
// the words [first, end), counted from the source; zeros elsewhere. An aligned vector that holds a word of an array
// lies in its allocation.
template <class T, int N>
__device__ Pack<T, N> ReadUnaligned(const T* source, int first, int end) {
  static_assert(sizeof(T) == 4 && N % 4 == 0);
  const int behind = static_cast<int>(reinterpret_cast<uintptr_t>(source) / 4 % 4);
  Pack<T, 4> around[N / 4 + 1] = {};
#pragma unroll
  for (int v = 0; v <= N / 4; ++v) {
    const int word = 4 * v - behind;
    if (word + 3 >= first && word < end) around[v] = ReadPack<T, 4>(source + word);
  }
  T words[N + 3];
#pragma unroll
  for (int i = 0; i < N + 3; ++i)
    words[i] = behind & 1 ? around[(i + 1) / 4].lane[(i + 1) % 4] : around[i / 4].lane[i % 4];
  Pack<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.lane[i] = behind & 2 ? words[i + 2] : words[i];
  if (first > 0 || end < N) {
#pragma unroll
    for (int i = 0; i < N; ++i) out.lane[i] = i >= first && i < end ? out.lane[i] : 0;
  }
  return out;
}

// kPadded: packs beyond a row's end, and rows beyond the last, are zeros that leave the body's sums alone, so that they
// are not tested for but where they are stored.
template <class P_, int kPack, Lay kLay_, class A_, class G, bool kPadded_ = false>
class Row {
 public:
  using P = P_;
  using A = A_;
  using Geometry = G;
  static constexpr int kV = kPack;
  static constexpr bool kPadded = kPadded_;
  static constexpr bool kShifted = kLay_ == Lay::kShifted;
  static constexpr int kSlots = G::kSlots;
  static constexpr Lay kLay = kLay_;
  static constexpr bool kHeld = P::kPacks > 0;
  static constexpr int kRows = P::kAcross ? kV : P::kRows;   // that a thread works on
  static constexpr int kStarts = P::kAcross ? 1 : P::kRows;  // places where its packs begin
  static constexpr int kBlockRows = P::kTeams * (P::kAcross ? kV : P::kRows);
  static constexpr int kPerRow = kHeld ? P::kPacks : 1;
  static constexpr int kHeldPacks = kStarts * kPerRow;
  static_assert(kHeld || P::kRows == 1);

  // One value for each of the thread's rows: an expression.
  template <class B>
  struct PerRow {
    B value[kRows];
    __device__ auto operator()(int pack, int) const {
      if constexpr (P::kAcross) {
        return [values = *this](int i) { return values.value[i]; };
      } else {
        return [chosen = value[pack / kPerRow]](int) { return chosen; };
      }
    }
  };
  struct Two {
    PerRow<A> first, second;
  };

  struct Nothing {
    __device__ void operator()(int, int) const {}
  };

  // fn of values of the same row.
  template <class Fn, class... Bs>
  static __device__ auto Each(Fn fn, const PerRow<Bs>&... values) {
    PerRow<decltype(fn(values.value[0]...))> out;
#pragma unroll
    for (int r = 0; r < kRows; ++r) out.value[r] = fn(values.value[r]...);
    return out;
  }

  // The same value for each row.
  static __device__ PerRow<A> Same(A value) {
    PerRow<A> out;
#pragma unroll
    for (A& each : out.value) each = value;
    return out;
  }

  explicit __device__ Row(const G& geometry)
      : geometry_(geometry),
        lane_((P::kAcross ? threadIdx.x / P::kTeams : threadIdx.x % P::kLanes) +
              (P::kCluster > 1 ? P::kLanes * ClusterRank() : 0)) {}

  // Turns to the rows first, first + every, ... of a group whose offsets are given; across, to kV rows from `first`.
  // From `end` on the last rows are repeated, and nothing is stored.
  __device__ void MoveTo(int64_t first, int64_t every, int64_t end, const int64_t (&group)[G::kSlots]) {
    limit_ = std::numeric_limits<int>::max();
#pragma unroll
    for (int s = 0; s < kStarts; ++s) {
      const int64_t wanted = first + s * every;
      live_[s] = wanted < end;
      geometry_.rows.Offsets(live_[s] ? wanted : end - (P::kAcross ? kV : 1), offsets_[s]);
#pragma unroll
      for (int slot = 0; slot < G::kSlots; ++slot) offsets_[s][slot] += group[slot];
      shift_[s] = kShifted ? static_cast<int>(offsets_[s][0] % kV) : 0;
      if constexpr (kLay != Lay::kGeneral) {
#pragma unroll
        for (int slot = 0; slot < G::kSlots; ++slot) offsets_[s][slot] += FirstColumn(s) * ColumnStride(slot);
      }
    }
  }

  // Turns to the rows of this thread's team among [begin, begin + kBlockRows).
  __device__ void MoveToTeam(int64_t begin, int64_t end, const int64_t (&group)[G::kSlots]) {
    MoveTo(begin + Team() * (P::kAcross ? kV : 1), P::kTeams, end, group);
  }
  static __device__ int Team() { return P::kAcross ? threadIdx.x % P::kTeams : threadIdx.x / P::kLanes; }

  __device__ int columns() const { return static_cast<int>(geometry_.columns.total); }
  __device__ bool live(int pack) const { return live_[pack / kPerRow]; }

  // Leaves out the columns from `limit` on, as far as they fill packs, until the next MoveTo.
  __device__ void Limit(int limit) { limit_ = limit; }

  // Calls fn(pack, column) for the thread's packs, and after() behind each run of at most kRun of them. An unaligned
  // row's first pack begins at the pack boundary before the row, so that all accesses are aligned: its column is
  // negative.
  template <class Fn, class After>
  __device__ void ForEachPack(Fn fn, After after) const {
    const int end = min(columns(), limit_);
    if constexpr (kPadded) {
#pragma unroll
      for (int pack = 0; pack < kHeldPacks; ++pack)
        fn(pack, FirstColumn(pack / kPerRow) + pack % kPerRow * kColumnStep);
      after();
    } else if constexpr (kHeld) {
      ForEachPackBetween(-kV, end, fn);
      after();
    } else {
      for (int begin = FirstColumn(0); begin < end; begin += kRun * kColumnStep) {
        const int stop = min(end, begin + kRun * kColumnStep);
#pragma unroll 4
        for (int column = begin; column < stop; column += kColumnStep) fn(0, column);
        after();
      }
    }
  }
  template <class Fn>
  __device__ void ForEachPack(Fn fn) const {
    ForEachPack(fn, [] {});
  }

  // The packs that hold columns of the row, whatever kPadded.
  template <class Fn>
  __device__ void ForEachPackInside(Fn fn) const {
    ForEachPackBetween(-kV, columns(), fn);
  }

  // Whether position i of a pack belongs to the row.
  __device__ bool Inside(int column, int i) const {
    return !kShifted || static_cast<unsigned>(column + i) < static_cast<unsigned>(columns());
  }

  // A pack of a tensor of x's shape, with its neighbours' elements where it overlaps the row's edges.
  template <class T>
  __device__ Pack<T, kV> Read(const T* tensor, int pack, int column) const {
    const int64_t offset = Offset(0, pack, column);
    if (!kShifted || offset + kV <= geometry_.size) return ReadPack<T, kV>(tensor + offset);
    Pack<T, kV> values = {};
#pragma unroll
    for (int i = 0; i < kV; ++i)
      if (offset + i < geometry_.size) values.Set(i, tensor[offset + i]);
    return values;
  }

  // Puts `outside` where a pack overlaps the row's edges.
  template <class T>
  __device__ void Clip(Pack<T, kV>& values, int column, T outside) const {
    if constexpr (kShifted) {
      if (column >= 0 && column + kV <= columns()) return;
#pragma unroll
      for (int i = 0; i < kV; ++i)
        if (!Inside(column, i)) values.Set(i, outside);
    }
  }

  template <class T>
  struct Held {
    Pack<T, kV> packs[kHeldPacks];
    __device__ auto operator()(int pack, int) const {
      return [values = packs[pack]](int i) { return values.template Widen<A>(i); };
    }
  };

  // A tensor of x's shape. `outside`, what stands in the packs beyond a row's edges, should leave its reductions alone.
  // kInput: the tensor's number among the op's inputs, for rows that are fetched ahead.
  template <int kInput = 0, class T>
  __device__ auto Load(const T* tensor, T outside = T(0.0f)) const {
    if constexpr (kHeld) {
      Held<T> held = {};
      ForEachPack([&](int pack, int column) { held.packs[pack] = Read(tensor, pack, column); });
      if constexpr (kShifted) ForEachPack([&](int pack, int column) { Clip(held.packs[pack], column, outside); });
      return held;
    } else {
      return [this, tensor, outside](int pack, int column) {
        Pack<T, kV> values = Read(tensor, pack, column);
        Clip(values, column, outside);
        return [=](int i) { return values.template Widen<A>(i); };
      };
    }
  }

  template <class T>
  static __device__ Pack<T, kV> AddPacks(const Pack<T, kV>& a, const Pack<T, kV>& b) {
    return ToPack<T, kV>([&](int i) { return a.template Widen<A>(i) + b.template Widen<A>(i); });
  }

  // x + residual, rounded to their dtype and stored as the sum; x alone if there is no residual.
  template <class T>
  __device__ auto LoadSum(const T* x, const T* residual, T* sum) const {
    if constexpr (kHeld) {
      Held<T> held = Load(x);
      if (residual) {
        const Held<T> added = Load(residual);
        ForEachPack([&](int pack, int column) {
          held.packs[pack] = AddPacks(held.packs[pack], added.packs[pack]);
          Write(sum, pack, column, held.packs[pack]);
        });
      }
      return held;
    } else {
      const auto read = [=, this](int pack, int column) {
        Pack<T, kV> values = Read(x, pack, column);
        if (residual) values = AddPacks(values, Read(residual, pack, column));
        Clip(values, column, T(0.0f));
        return values;
      };
      if (residual) ForEachPack([&](int pack, int column) { Write(sum, pack, column, read(pack, column)); });
      return [read](int pack, int column) {
        return [values = read(pack, column)](int i) { return values.template Widen<A>(i); };
      };
    }
  }

  // An expression's values, computed now and kept, where the row is held.
  template <class E>
  __device__ auto Keep(const E& expression) const {
    if constexpr (kHeld) {
      Held<A> held = {};
      ForEachPack([&](int pack, int column) {
        const auto value = expression(pack, column);
#pragma unroll
        for (int i = 0; i < kV; ++i) held.packs[pack].lane[i] = value(i);
      });
      return held;
    } else {
      return expression;
    }
  }

  // The same where registers are to spare beside a row's packs, which is where rows are fetched ahead.
  template <class E>
  __device__ E KeepFew(const E& expression) const {
    return expression;
  }

  // A broadcast operand of the accumulator's dtype; `absent` if there is none.
  template <int kSlot>
  __device__ auto LoadParameter(const A* data, A absent) const {
    return [this, data, absent](int pack, int column) {
      Pack<A, kV> values;
#pragma unroll
      for (int i = 0; i < kV; ++i) values.lane[i] = absent;
      // A thread's rows share their parameters (the launch sees to it), so that they are read once for all of them.
      if (data) values = ReadBroadcast<kSlot>(data, P::kAcross ? pack : pack % kPerRow, column);
      return [=](int i) { return values.lane[i]; };
    };
  }

  // A broadcast operand of any floating dtype, as values of the accumulator's; `absent` if there is none.
  template <int kSlot>
  __device__ Pack<A, kV> ReadOperand(const Operand& operand, int pack, int column, A absent) const {
    Pack<A, kV> values;
    const auto widen = [&](const auto& narrow) {
#pragma unroll
      for (int i = 0; i < kV; ++i) values.lane[i] = narrow.template Widen<A>(i);
    };
    if (!operand.data) {
#pragma unroll
      for (int i = 0; i < kV; ++i) values.lane[i] = absent;
    } else if (std::is_same_v<A, double> || operand.type == DataType::F32) {
      values = ReadBroadcast<kSlot>(static_cast<const A*>(operand.data), pack, column);
    } else if (operand.type == DataType::BF16) {
      widen(ReadBroadcast<kSlot>(static_cast<const __nv_bfloat16*>(operand.data), pack, column));
    } else {
      widen(ReadBroadcast<kSlot>(static_cast<const __half*>(operand.data), pack, column));
    }
    return values;
  }

  // use(expression of a broadcast operand of any floating dtype), its packs read before; `absent` if there is none.
  template <int kSlot, class Use>
  __device__ void WithOperand(const Operand& operand, A absent, const Use& use) const {
    const auto read = [&]<class T>(const T* data) {
      Held<T> held = {};
      ForEachPack([&](int pack, int column) { held.packs[pack] = ReadBroadcast<kSlot>(data, pack, column); });
      use(held);
    };
    if (!operand.data) {
      use(Same(absent));
    } else if (std::is_same_v<A, double> || operand.type == DataType::F32) {
      read(static_cast<const A*>(operand.data));
    } else if (operand.type == DataType::BF16) {
      read(static_cast<const __nv_bfloat16*>(operand.data));
    } else {
      read(static_cast<const __half*>(operand.data));
    }
  }

  // A pack of a broadcast operand; anything beyond the row's edges.
  template <int kSlot, class T>
  __device__ Pack<T, kV> ReadBroadcast(const T* data, int pack, int column) const {
    const T* const source = data + Offset(kSlot, pack, column);
    [[maybe_unused]] const int64_t step = Step(kSlot);
    if constexpr (kShifted && sizeof(T) == 4) {
      if (step == 1) return ReadUnaligned<T, kV>(source, -column, columns() - column);
    }
    if constexpr (kLay == Lay::kPlain && !P::kAcross) {
      return ReadPack<T, kV>(source);
    } else {
      if (kLay == Lay::kPlain && step != 0) return ReadPack<T, kV>(source);
      Pack<T, kV> values = {};
#pragma unroll
      for (int i = 0; i < kV; ++i)
        values.Set(i, Inside(column, i) ? source[kLay == Lay::kPlain ? 0 : i * step] : T(0.0f));
      return values;
    }
  }

  // The offset in a layout of a pack's first element.
  __device__ int64_t Offset(int slot, int pack, int column) const {
    const int64_t start = offsets_[pack / kPerRow][slot];
    if constexpr (kLay == Lay::kGeneral) return start + geometry_.ColumnOffset(slot, column);
    // The distance from the thread's first pack is the same for all threads: it costs no registers.
    const int distance = kHeld ? pack % kPerRow * kColumnStep : column - FirstColumn(0);
    return start + distance * ColumnStride(slot);
  }
  __device__ int64_t Step(int slot) const { return geometry_.steps[slot]; }

  // The offset in a layout of the first row's column 0.
  __device__ int64_t Origin(int slot) const { return offsets_[0][slot] - FirstColumn(0) * ColumnStride(slot); }

  // Whether a condition on values of the same row holds for all rows of the thread.
  template <class Fn, class... Bs>
  static __device__ bool All(Fn condition, const PerRow<Bs>&... values) {
    bool all = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) all = all && condition(values.value[r]...);
    return all;
  }

  // Stores an expression; `beyond` in the columns that are left out.
  template <class T, class E>
  __device__ void Store(T* tensor, const E& expression, A beyond = 0) const {
    ForEachPack([&](int pack, int column) { Write(tensor, pack, column, ToPack<T, kV>(expression(pack, column))); });
    if (limit_ >= columns()) return;
    const Pack<T, kV> values = ToPack<T, kV>([=](int) { return beyond; });
    ForEachPackBetween(limit_, columns(), [&](int pack, int column) { Write(tensor, pack, column, values); });
  }

  template <class T>
  __device__ void Write(T* tensor, int pack, int column, const Pack<T, kV>& values) const {
    if (!live(pack) || (kPadded && column >= columns())) return;
    T* const target = tensor + Offset(0, pack, column);
    if (!kShifted || (column >= 0 && column + kV <= columns())) {
      *reinterpret_cast<Pack<T, kV>*>(target) = values;
    } else {
#pragma unroll
      for (int i = 0; i < kV; ++i)
        if (Inside(column, i)) target[i] = values.Get(i);
    }
  }

  // One value a row, in the layout of a slot.
  template <int kSlot>
  __device__ PerRow<A> LoadRow(const A* source) const {
    PerRow<A> out;
#pragma unroll
    for (int r = 0; r < kRows; ++r) out.value[r] = __ldg(source + RowOffset<kSlot>(r));
    return out;
  }
  template <int kSlot>
  __device__ void StoreRow(A* target, const PerRow<A>& values) const {
    if (lane_ != 0) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (live_[P::kAcross ? 0 : r]) target[RowOffset<kSlot>(r)] = values.value[r];
  }

  // The join of an expression's values over each row, known to all its threads.
  template <class M, class E>
  __device__ PerRow<A> Reduce(const E& expression) {
    Values<A, 1> values[kRows];
    Fold<M>(values, Nothing{}, expression);
    JoinWarp<P, EachBy<M>>(values);
    exchange_.template JoinWarps<EachBy<M>>(values);
    return Component<0>(values);
  }
  // The same for an expression that is not neutral beyond a row's edges.
  template <class M, class E>
  __device__ PerRow<A> ReduceInside(const E& expression) {
    return Reduce<M>(OnlyInside<M>(expression));
  }
  // Both joins for one walk along the rows, which also calls visit(pack, column), and one exchange between the threads.
  template <class M, class E, class F, class Visit = Nothing>
  __device__ Two Reduce(const E& first, const F& second, const Visit& visit = {}) {
    Values<A, 2> values[kRows];
    Fold<M>(values, visit, first, second);
    JoinWarp<P, EachBy<M>>(values);
    exchange_.template JoinWarps<EachBy<M>>(values);
    return {Component<0>(values), Component<1>(values)};
  }

  struct MeanAndSquares {
    PerRow<A> share, mean, squares;  // share: 1 / (how many values count)
  };
  // The mean of the values and the sum of their squared deviations from it, for one exchange between warps: each warp
  // takes deviations from a mean of its own. kWeighted: only values of weight 1 count, not those of weight 0.
  template <bool kWeighted, class E, class W>
  __device__ MeanAndSquares ReduceMoments(const E& values, const W& weights) {
    constexpr bool kOneWarp = P::kWarps == 1 && P::kCluster == 1;
    const auto counted = [](A value, A weight) { return kWeighted && weight == 0 ? A{0} : value; };
    Values<A, 2> sums[kRows];
    if constexpr (kWeighted) {
      Fold<Sum>(sums, Nothing{}, weights, Map(counted, values, weights));
      JoinWarp<P, EachBy<Sum>>(sums);
    } else {
      Values<A, 1> totals[kRows];
      Fold<Sum>(totals, Nothing{}, values);
      JoinWarp<P, EachBy<Sum>>(totals);
      const int inside = kOneWarp ? columns() : ColumnsOfWarp();
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = {static_cast<A>(inside), totals[r].v[0]};
    }
    PerRow<A> share, mean;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      share.value[r] = kOneWarp ? Reciprocal(sums[r].v[0]) : sums[r].v[0] > 0 ? Reciprocal(sums[r].v[0]) : A{0};
      mean.value[r] = sums[r].v[1] * share.value[r];
    }
    const auto square = [=](A value, A weight, A mean) {
      const A deviation = counted(value - mean, weight);
      return deviation * deviation;
    };
    Values<A, 1> squares[kRows];
    Fold<Sum>(squares, Nothing{}, OnlyInside<Sum>(Map(square, values, weights, mean)));
    JoinWarp<P, EachBy<Sum>>(squares);
    if constexpr (kOneWarp) {
      return {share, mean, Component<0>(squares)};
    } else {
      Values<A, 3> moments[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) moments[r] = {sums[r].v[0], mean.value[r], squares[r].v[0]};
      exchange_.template JoinWarps<CountMeanSquares>(moments);
      const auto reciprocal = [](A count) { return Reciprocal(count); };
      return {Each(reciprocal, Component<0>(moments)), Component<1>(moments), Component<2>(moments)};
    }
  }

  struct MaxAndSums {
    PerRow<A> max, exponentials, sum;
  };
  // max(x), sum(exp(x - max(x))) and the sum of another expression, for one exchange between warps.
  template <class E, class... F>
  __device__ MaxAndSums ReduceExponentials(const E& x, const F&... added) {
    const auto finite = [](A max) { return Exponentials::FiniteOrZero(max); };
    if constexpr (kHeld && P::kAcross) {
      // So many rows a thread that a second exchange is cheaper than the exponentials of the joins.
      const PerRow<A> max = Reduce<Max>(x);
      const auto exponentials = Map([](A value, A o) { return Exp(value - o); }, x, Each(finite, max));
      if constexpr (sizeof...(F) == 0) {
        return {max, Reduce<Sum>(exponentials), Same(0)};
      } else {
        const Two sums = Reduce<Sum>(exponentials, added...);
        return {max, sums.first, sums.second};
      }
    }
    Values<A, 3> values[kRows];
    if constexpr (kHeld) {
      Values<A, 1> max[kRows];
      Fold<Max>(max, Nothing{}, x);
      JoinWarp<P, EachBy<Max>>(max);
      PerRow<A> origin;
#pragma unroll
      for (int r = 0; r < kRows; ++r) origin.value[r] = finite(max[r].v[0]);
      const auto exponentials = Map([](A value, A o) { return Exp(value - o); }, x, origin);
      Values<A, 1 + sizeof...(F)> sums[kRows];
      Fold<Sum>(sums, Nothing{}, exponentials, added...);
      JoinWarp<P, EachBy<Sum>>(sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) values[r] = {max[r].v[0], sums[r].v[0], sums[r].v[sizeof...(F)]};
    } else {
      FoldExponentials(values, x, added...);
      JoinWarp<P, Exponentials>(values);
    }
    exchange_.template JoinWarps<Exponentials>(values);
    return {Component<0>(values), Component<1>(values), Component<2>(values)};
  }

 protected:
  static constexpr int kRun = 16;
  static constexpr int kWide = P::kAcross ? 1 : kV;                    // columns a pack
  static constexpr int kColumnStep = P::kLanes * P::kCluster * kWide;  // from a thread's pack to its next

  // For the packs that begin in [from, to).
  template <class Fn>
  __device__ void ForEachPackBetween(int from, int to, Fn fn) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int k = 0; k < P::kPacks; ++k)
#pragma unroll
        for (int s = 0; s < kStarts; ++s) {
          const int column = FirstColumn(s) + k * kColumnStep;
          if (column >= from && column < to) fn(s * P::kPacks + k, column);
        }
    } else {
      for (int column = FirstColumn(0); column < to; column += kColumnStep)
        if (column >= from) fn(0, column);
    }
  }

  // An expression, neutral to M beyond a row's edges.
  template <class M, class E>
  __device__ auto OnlyInside(const E& expression) const {
    return [=, this](int pack, int column) {
      return [=, this, value = expression(pack, column)](int i) {
        return Inside(column, i) ? static_cast<A>(value(i)) : M::template Identity<A>();
      };
    };
  }

  // How many of the row's columns the thread's warp has: the same for all rows of the thread but where they begin at
  // different places in a pack.
  __device__ int ColumnsOfWarp() const {
    int inside = 0;
    ForEachPack([&](int pack, int column) {
      if (pack >= kPerRow && kHeld) return;
      if constexpr (kShifted) {
        inside += max(0, min(column + kV, columns()) - max(column, 0));
      } else {
        inside += kWide;
      }
    });
#pragma unroll
    for (int distance = P::kWarpLanes / 2; distance > 0; distance /= 2)
      inside += __shfl_xor_sync(0xffffffffu, inside, distance * P::kStep);
    return inside;
  }

  __device__ int FirstColumn(int start) const { return lane_ * kWide - shift_[start]; }
  __device__ int64_t ColumnStride(int slot) const {
    return slot == 0 && !P::kAcross ? 1 : geometry_.columns.strides[0][slot];
  }

  template <int kSlot>
  __device__ int64_t RowOffset(int r) const {
    return P::kAcross ? offsets_[0][kSlot] + r * geometry_.steps[kSlot] : offsets_[r][kSlot];
  }

  template <int k, int kCount>
  static __device__ PerRow<A> Component(const Values<A, kCount> (&values)[kRows]) {
    PerRow<A> out;
#pragma unroll
    for (int r = 0; r < kRows; ++r) out.value[r] = values[r].v[k];
    return out;
  }

  // A thread's joins of each expression, in kParts interleaved parts; a streamed row's also in runs of kRun packs, so
  // that rounding errors grow with the square root of a row's length instead of with the length.
  template <class M, class Visit, class... Es>
  __device__ void Fold(Values<A, sizeof...(Es)> (&out)[kRows], const Visit& visit, const Es&... es) const {
    constexpr int kCount = sizeof...(Es), kParts = P::kAcross || kV == 1 ? 1 : 2;
    Values<A, kCount> run[kParts][kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        out[r].v[k] = M::template Identity<A>();
#pragma unroll
        for (int part = 0; part < kParts; ++part) run[part][r].v[k] = M::template Identity<A>();
      }
    const auto flush = [&] {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          out[r].v[k] =
              M::Join(out[r].v[k], kParts == 1 ? run[0][r].v[k] : M::Join(run[0][r].v[k], run[kParts - 1][r].v[k]));
#pragma unroll
          for (int part = 0; part < kParts; ++part) run[part][r].v[k] = M::template Identity<A>();
        }
    };
    const auto add = [&](int pack, int column) {
      const auto join = [&](const auto&... values) {
#pragma unroll
        for (int i = 0; i < kV; ++i) {
          Values<A, kCount>& target = run[i % kParts][P::kAcross ? i : pack / kPerRow];
          int k = 0;
          ((target.v[k] = M::Join(target.v[k], static_cast<A>(values(i))), ++k), ...);
        }
      };
      visit(pack, column);
      join(es(pack, column)...);
    };
    ForEachPack(add, flush);
  }

  // A streamed row's share of max, sum of exponentials and sum, in one walk; in runs as Fold.
  template <class E, class... F>
  __device__ void FoldExponentials(Values<A, 3> (&out)[kRows], const E& x, const F&... added) const {
    const Values<A, 3> nothing = {Max::Identity<A>(), 0, 0};
    Values<A, 3> run[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) out[r] = run[r] = nothing;
    const auto flush = [&] {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        out[r] = Exponentials::Join(out[r], run[r]);
        run[r] = nothing;
      }
    };
    const auto add = [&](int pack, int column) {
      const auto join = [&](const auto& value, const auto&... extra) {
        if constexpr (P::kAcross) {
#pragma unroll
          for (int i = 0; i < kV; ++i) run[i] = Exponentials::Join(run[i], {value(i), 1, (A{0} + ... + extra(i))});
        } else {
          Values<A, 3> part = nothing;
#pragma unroll
          for (int i = 0; i < kV; ++i) part.v[0] = Max::Join(part.v[0], value(i));
          const A origin = Exponentials::FiniteOrZero(part.v[0]);
#pragma unroll
          for (int i = 0; i < kV; ++i) {
            part.v[1] += Exp(value(i) - origin);
            part.v[2] += (A{0} + ... + extra(i));
          }
          run[0] = Exponentials::Join(run[0], part);
        }
      };
      join(x(pack, column), added(pack, column)...);
    };
    ForEachPack(add, flush);
  }

  const G& geometry_;
  int lane_;
  int64_t offsets_[kStarts][G::kSlots];
  int shift_[kStarts];
  bool live_[kStarts];
  int limit_ = std::numeric_limits<int>::max();
  Exchange<P> exchange_;
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_ROW_CUH_
