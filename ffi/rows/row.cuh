// Rows as an op's body sees them. A body is algebra: it loads rows, maps and reduces them, and stores the result. The
// row decides which threads share it, where it lives between passes, and how many rows a thread works on.
//
// A row's values are expressions: e(pack, column) returns a function of i, which gives the value at position i in that
// pack; the pack's first element lies in `column`. Expressions are evaluated when they are used, pack by pack.
// Therefore a held row stays in registers in its own dtype, and a streamed row is read again by each pass. One value
// per row is an expression too. docs/adding.md explains pack, held, streamed, staged and slot.
#ifndef JAXOPS_ROWS_ROW_CUH_
#define JAXOPS_ROWS_ROW_CUH_

#include <cstdint>

#include "rows/exchange.cuh"
#include "rows/row_packs.cuh"

namespace jaxops::rows {

// Applies fn to the values of one or more expressions.
template <class Fn, class... Es>
__device__ auto Map(Fn fn, const Es&... es) {
  return [=](int pack, int column) { return [=, ... values = es(pack, column)](int i) { return fn(values(i)...); }; };
}

template <class P, int kPack, Layout kLayout, class A_, class G, bool kPadded = false>
class Row : public RowPacks<P, kPack, kLayout, G, kPadded> {
  using Packs = RowPacks<P, kPack, kLayout, G, kPadded>;

 public:
  using A = A_;
  using Packs::Clip;
  using Packs::columns;
  using Packs::ForEachPack;
  using Packs::Inside;
  using Packs::kHeld;
  using Packs::kHeldPacks;
  using Packs::kRows;
  using Packs::kShifted;
  using Packs::kV;
  using Packs::Read;
  using Packs::Write;

  explicit __device__ Row(const G& geometry) : Packs(geometry), exchange_(geometry.team) {
    if constexpr (kOneCount) count_ = CountColumns();
  }

  // One value for each row that the thread has: an expression.
  template <class B>
  struct PerRow {
    B value[kRows];
    __device__ auto operator()(int, int) const {
      if constexpr (P::kAcross) {
        return [values = *this](int i) { return values.value[i]; };
      } else {
        return [chosen = value[0]](int) { return chosen; };
      }
    }
  };

  struct Nothing {
    __device__ void operator()(int, int) const {}
  };

  // Applies fn to values of the same row.
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

  template <class T>
  struct Held {
    Pack<T, kV> packs[kHeldPacks];
    __device__ auto operator()(int pack, int) const {
      return [values = packs[pack]](int i) { return values.template Widen<A>(i); };
    }
  };

  // The same, with each row multiplied by a positive number.
  template <class T>
  struct Scaled {
    Held<T> x;
    PerRow<A> factor;
    __device__ auto operator()(int pack, int) const {
      return [values = x.packs[pack], by = factor.value[0]](int i) { return Product(values.template Widen<A>(i), by); };
    }
  };

  // A tensor in x's shape. `outside` stands in packs beyond a row's edges, and should not change the row's reductions.
  // kInput: the tensor's number among the op's inputs, for rows that are fetched ahead.
  template <int kInput = 0, class Source>
  __device__ auto Load(const Source& tensor, ElementOf<Source> outside = ElementOf<Source>(0.0f)) const {
    if constexpr (kHeld) {
      Held<ElementOf<Source>> held = {};
      this->ReadAll(tensor, held.packs);
      this->ClipEdges(held.packs, outside);
      return held;
    } else {
      return [this, tensor, outside](int pack, int column) {
        auto values = Read(tensor, pack, column);
        Clip(values, column, outside);
        return [=](int i) { return values.template Widen<A>(i); };
      };
    }
  }

  // The sum, rounded to the tensor's dtype.
  template <class Source, class T>
  static __device__ Pack<T, kV> AddPacks(const Source& like, const Pack<T, kV>& a, const Pack<T, kV>& b) {
    return RoundTo<kV>(like, [&](int i) { return a.template Widen<A>(i) + b.template Widen<A>(i); });
  }

  // x + residual, rounded to their dtype and stored as the sum; x alone if residual is absent.
  template <class Source, class Target>
  __device__ auto LoadSum(const Source& x, const Source& residual, const Target& sum) const {
    if constexpr (kHeld) {
      auto held = Load(x);
      if (residual) {
        const auto added = Load(residual);
        ForEachPack([&](int pack, int column) {
          held.packs[pack] = AddPacks(x, held.packs[pack], added.packs[pack]);
          Write(sum, pack, column, held.packs[pack]);
        });
      }
      return held;
    } else {
      const auto read = [=, this](int pack, int column) {
        auto values = Read(x, pack, column);
        if (residual) values = AddPacks(x, values, Read(residual, pack, column));
        Clip(values, column, ElementOf<Source>(0.0f));
        return values;
      };
      if (residual) ForEachPack([&](int pack, int column) { Write(sum, pack, column, read(pack, column)); });
      return [read](int pack, int column) {
        return [values = read(pack, column)](int i) { return values.template Widen<A>(i); };
      };
    }
  }

  // Computes an expression's values now and keeps them, if the row is held.
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

  // The values in all packs, whether the row has columns there or not.
  template <class E>
  static __device__ Held<A> KeepAll(const E& expression) {
    Held<A> held;
#pragma unroll
    for (int pack = 0; pack < kHeldPacks; ++pack) held.packs[pack] = ToPack<A, kV>(expression(pack, 0));
    return held;
  }

  // Keeps values if registers are to spare beside a row's packs, which is so if rows are fetched ahead.
  template <class E>
  __device__ E KeepFew(const E& expression) const {
    return expression;
  }

  // Does the same in kernels for few rows: loads arrive while the threads join their values.
  template <class E>
  __device__ auto KeepOfFew(const E& expression) const {
    if constexpr (Packs::kOneRow && (P::kPacks <= 2 || (kV == 1 && P::kPacks == 8)) && P::kPacks > 0) {
      return Keep(expression);
    } else {
      return expression;
    }
  }

  // A broadcast operand with the accumulator's dtype; `absent` if it is missing.
  template <int kSlot>
  __device__ auto LoadParameter(const A* data, A absent) const {
    return [this, data, absent](int pack, int column) {
      Pack<A, kV> values;
#pragma unroll
      for (int i = 0; i < kV; ++i) values.lane[i] = absent;
      if (data) values = this->template ReadBroadcast<kSlot>(data, pack, column);
      return [=](int i) { return values.lane[i]; };
    };
  }

  // A broadcast operand with any floating dtype, as accumulator values; `absent` if it is missing.
  template <int kSlot>
  __device__ Pack<A, kV> ReadOperand(const AnyTensor& operand, int pack, int column, A absent) const {
    Pack<A, kV> values;
    const auto widen = [&](const auto& narrow) {
#pragma unroll
      for (int i = 0; i < kV; ++i) values.lane[i] = narrow.template Widen<A>(i);
    };
    if (!operand.data) {
#pragma unroll
      for (int i = 0; i < kV; ++i) values.lane[i] = absent;
    } else if (std::is_same_v<A, double> || operand.type == DataType::F32) {
      values = this->template ReadBroadcast<kSlot>(static_cast<const A*>(operand.data), pack, column);
    } else if (operand.type == DataType::BF16) {
      widen(this->template ReadBroadcast<kSlot>(static_cast<const __nv_bfloat16*>(operand.data), pack, column));
    } else {
      widen(this->template ReadBroadcast<kSlot>(static_cast<const __half*>(operand.data), pack, column));
    }
    return values;
  }

  // combine(values) -> Held<A>, applied to a broadcast operand with any floating dtype and held; `absent` if it is
  // missing. The dtype is asked for once. If each pack asked, no read could start before the last had ended.
  template <int kSlot, class Combine>
  __device__ Held<A> CombineOperand(const AnyTensor& operand, A absent, const Combine& combine) const {
    const auto read = [&]<class T>(const T* data) {
      Held<T> values = {};
      this->ForEachPackRead(
          [&](int pack, int column) { values.packs[pack] = this->template ReadBroadcast<kSlot>(data, pack, column); });
      return combine(values);
    };
    if (!operand.data) {
      Held<A> none;
#pragma unroll
      for (Pack<A, kV>& pack : none.packs) pack = ToPack<A, kV>([=](int) { return absent; });
      return combine(none);
    } else if (std::is_same_v<A, double> || operand.type == DataType::F32) {
      return read(static_cast<const A*>(operand.data));
    } else if (operand.type == DataType::BF16) {
      return read(static_cast<const __nv_bfloat16*>(operand.data));
    } else {
      return read(static_cast<const __half*>(operand.data));
    }
  }

  // Whether a condition on values of the same row holds for all rows that the thread has.
  template <class Fn, class... Bs>
  static __device__ bool All(Fn condition, const PerRow<Bs>&... values) {
    bool all = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) all = all && condition(values.value[r]...);
    return all;
  }

  // Stores an expression, and `beyond` in columns that are left out. A padded row leaves no columns out, so its
  // expression gives `beyond` itself.
  template <class Target, class E>
  __device__ void Store(const Target& tensor, const E& expression, A beyond = 0) const {
    using T = ElementOf<Target>;
    if constexpr (kHeld && std::is_same_v<Target, AnyTensor>) {
      const auto values = Keep(expression);
      VisitPointer(tensor, [&](auto* data) { Store(data, values, beyond); });
      return;
    }
    ForEachPack([&](int pack, int column) { Write(tensor, pack, column, ToPack<T, kV>(expression(pack, column))); });
    if (Packs::kPadded || this->limit_ >= columns()) return;
    const Pack<T, kV> values = ToPack<T, kV>([=](int) { return beyond; });
    this->ForEachPackInside([&](int pack, int column) {
      if (column >= this->limit_) Write(tensor, pack, column, values);
    });
  }

  // One value per row, in a slot's layout.
  template <int kSlot>
  __device__ PerRow<A> LoadRow(const A* source) const {
    PerRow<A> out;
#pragma unroll
    for (int r = 0; r < kRows; ++r) out.value[r] = __ldg(source + this->template RowOffset<kSlot>(r));
    return out;
  }
  template <int kSlot>
  __device__ void StoreRow(A* target, const PerRow<A>& values) const {
    if (this->lane_ != 0) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (this->live_) target[this->template RowOffset<kSlot>(r)] = values.value[r];
  }

  // A thread's share, or its warp's, in the join by J over each of its rows.
  template <class J_, int kCount_, bool kOfWarp_>
  struct Part {
    using J = J_;
    static constexpr int kCount = kCount_;
    static constexpr bool kOfWarp = kOfWarp_;
    Values<A, kCount> values[kRows];
    template <int k>
    __device__ PerRow<A> Component() const {
      return Row::Component<k>(values);
    }
  };
  // The share in each expression's join, from one walk along the rows, which also calls visit(pack, column).
  template <class M, class Visit, class... Es>
  __device__ auto PartOfEach(const Visit& visit, const Es&... es) const {
    Part<EachBy<M>, sizeof...(Es), false> part;
    Fold<M>(part.values, visit, es...);
    return part;
  }
  template <class M, class E>
  __device__ auto PartOf(const E& expression) const {
    return PartOfEach<M>(Nothing{}, expression);
  }
  // The share in the values' count, mean and sum of squared deviations from it; each warp takes deviations from its own
  // mean. kWeighted: only values with weight 1 count, not values with weight 0.
  template <bool kWeighted, class E, class W>
  __device__ auto PartOfMoments(const E& values, const W& weights) const {
    const auto counted = [](A value, A weight) { return kWeighted && weight == 0 ? A{0} : value; };
    Values<A, 2> sums[kRows];
    PerRow<A> mean;
    if constexpr (kWeighted) {
      Fold<Sum>(sums, Nothing{}, weights, Map(counted, values, weights));
      exchange_.template JoinWarp<EachBy<Sum>>(sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) mean.value[r] = sums[r].v[1] * ShareOf(sums[r].v[0]);
    } else {
      Values<A, 1> totals[kRows];
      Fold<Sum>(totals, Nothing{}, values);
      exchange_.template JoinWarp<EachBy<Sum>>(totals);
      const Count inside = kOneCount ? count_ : CountColumns();
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[r] = {inside.count, totals[r].v[0]};
        mean.value[r] = sums[r].v[1] * inside.share;
      }
    }
    const auto square = [=](A value, A weight, A origin) {
      const A deviation = counted(value - origin, weight);
      return deviation * deviation;
    };
    // Packs beyond the columns are zeros, and their deviation from 0 is 0.
    const auto origin = [&](int pack, int column) {
      return [value = mean(pack, column), inside = !Packs::kPadded || this->Begins(pack, column)](int i) {
        return inside ? value(i) : A{0};
      };
    };
    Values<A, 1> squares[kRows];
    Fold<Sum, true>(squares, Nothing{}, Map(square, values, weights, origin));
    exchange_.template JoinWarp<EachBy<Sum>>(squares);
    Part<CountMeanSquares, 3, true> part;
#pragma unroll
    for (int r = 0; r < kRows; ++r) part.values[r] = {sums[r].v[0], mean.value[r], squares[r].v[0]};
    return part;
  }

  // Joins the shares of all threads in a row; every thread gets the result.
  template <class Part>
  __device__ Part Join(Part part) {
    if constexpr (Part::kOfWarp) {
      exchange_.template JoinWarps<typename Part::J>(part.values);
    } else {
      exchange_.template Join<typename Part::J>(part.values);
    }
    return part;
  }
  // Does the same in two steps: see Exchange.
  template <class Part>
  __device__ void Post(Part part) {
    static_assert(kRows == 1);
    if constexpr (!Part::kOfWarp) exchange_.template JoinWarp<typename Part::J>(part.values);
    exchange_.template Post<typename Part::J>(part.values[0]);
  }
  template <class Part>
  __device__ Part Collect() {
    return {{exchange_.template Collect<typename Part::J, Values<A, Part::kCount>>()}};
  }

  // Joins an expression's values over each row.
  template <class M, class E>
  __device__ PerRow<A> Reduce(const E& expression) {
    return Join(PartOf<M>(expression)).template Component<0>();
  }

  // The share in max(x) and the total of exp(x - max(x)).
  template <class E>
  __device__ auto PartOfExponentials(const E& x) const {
    Part<Exponentials, 2, kHeld> part;
    if constexpr (kHeld) {
      Values<A, 1> max[kRows], totals[kRows];
      FoldMax(max, x);
      exchange_.template JoinWarp<EachBy<Max>>(max);
      // If many small values are added to a sum near 1, each is rounded; therefore fewer are added at a time.
      constexpr int kParts = P::kStaged ? 4 : kFoldParts;
      Fold<Sum, false, kParts>(totals, Nothing{}, Map(Exponential{}, x, Each(Finite{}, Component<0>(max))));
      exchange_.template JoinWarp<EachBy<Sum>>(totals);
#pragma unroll
      for (int r = 0; r < kRows; ++r) part.values[r] = {max[r].v[0], totals[r].v[0]};
    } else {
      FoldExponentials(part.values, x);
    }
    return part;
  }

  // Joins these shares in one exchange between warps.
  template <class E>
  __device__ auto ReduceExponentials(const E& x) {
    if constexpr (kHeld && P::kAcross) {
      // A thread has so many rows that a second exchange is cheaper than the joins' exponentials.
      Values<A, 1> maxima[kRows];
      FoldMax(maxima, x);
      exchange_.template Join<EachBy<Max>>(maxima);
      const PerRow<A> total = Reduce<Sum>(Map(Exponential{}, x, Each(Finite{}, Component<0>(maxima))));
      Part<Exponentials, 2, kHeld> joined;
#pragma unroll
      for (int r = 0; r < kRows; ++r) joined.values[r] = {maxima[r].v[0], total.value[r]};
      return joined;
    } else {
      return Join(PartOfExponentials(x));
    }
  }

 protected:
  // Joins over each warp's lanes.
  template <class J, class V>
  __device__ void JoinWarp(V& values) const {
    exchange_.template JoinWarp<J>(values);
  }

 private:
  struct Finite {
    __device__ A operator()(A max) const { return Exponentials::FiniteOrZero(max); }
  };
  struct Exponential {
    __device__ A operator()(A value, A origin) const { return Exp(value - origin); }
  };

  // An expression, with M's neutral value beyond a row's edges.
  template <class M, class E>
  __device__ auto OnlyInside(const E& expression) const {
    return [=, this](int pack, int column) {
      return [=, this, value = expression(pack, column)](int i) {
        return Inside(column, i) ? static_cast<A>(value(i)) : M::template Identity<A>();
      };
    };
  }

  template <int k, int kCount>
  static __device__ PerRow<A> Component(const Values<A, kCount> (&values)[kRows]) {
    PerRow<A> out;
#pragma unroll
    for (int r = 0; r < kRows; ++r) out.value[r] = values[r].v[k];
    return out;
  }

  // A thread's join of each expression, in kParts interleaved parts. A streamed row is also joined in runs of kRun
  // packs, so that rounding errors grow with the square root of a row's length instead of with the length. kOnlyInside:
  // for expressions that are not neutral beyond a row's edges.
  static constexpr int kFoldParts = P::kAcross || kV == 1 ? 1 : 2;
  template <class M, bool kOnlyInside = false, int kParts = kFoldParts, class Visit, class... Es>
  __device__ void Fold(Values<A, sizeof...(Es)> (&out)[kRows], const Visit& visit, const Es&... es) const {
    constexpr int kCount = sizeof...(Es);
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
          A joined = run[0][r].v[k];
#pragma unroll
          for (int part = 1; part < kParts; ++part) joined = M::Join(joined, run[part][r].v[k]);
          out[r].v[k] = M::Join(out[r].v[k], joined);
#pragma unroll
          for (int part = 0; part < kParts; ++part) run[part][r].v[k] = M::template Identity<A>();
        }
    };
    const auto add = [&](int pack, int column) {
      const auto join = [&](const auto&... values) {
#pragma unroll
        for (int i = 0; i < kV; ++i) {
          Values<A, kCount>& target = run[(kV == 1 ? pack : i) % kParts][P::kAcross ? i : 0];
          int k = 0;
          ((target.v[k] = M::Join(target.v[k], static_cast<A>(values(i))), ++k), ...);
        }
      };
      visit(pack, column);
      if (!kOnlyInside || this->Whole(column)) {
        join(es(pack, column)...);
      } else {
        join(OnlyInside<M>(es)(pack, column)...);
      }
    };
    ForEachPack(add, flush);
  }

  // A thread's largest value in each row; 16-bit elements are taken two at a time.
  template <class E>
  __device__ void FoldMax(Values<A, 1> (&out)[kRows], const E& x) const {
    Fold<Max>(out, Nothing{}, x);
  }
  template <class T>
    requires(sizeof(T) == 2 && kV % 2 == 0)
  __device__ void FoldMax(Values<A, 1> (&out)[kRows], const Held<T>& x) const {
    Pack<T, kV> largest;
#pragma unroll
    for (int i = 0; i < kV; ++i) largest.Set(i, T(Max::Identity<A>()));
    ForEachPack([&](int pack, int) { largest = Larger(largest, x.packs[pack]); });
    if constexpr (P::kAcross) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) out[r].v[0] = largest.template Widen<A>(r);
    } else {
      out[0].v[0] = Max::Identity<A>();
#pragma unroll
      for (int i = 0; i < kV; ++i) out[0].v[0] = Max::Join(out[0].v[0], largest.template Widen<A>(i));
    }
  }

  template <class T>
  __device__ void FoldMax(Values<A, 1> (&out)[kRows], const Scaled<T>& z) const {
    FoldMax(out, z.x);
#pragma unroll
    for (int r = 0; r < kRows; ++r) out[r].v[0] *= z.factor.value[r];
  }

  // A thread's share in a streamed row's maximum and total of exponentials, from one walk, in runs as in Fold.
  template <class E>
  __device__ void FoldExponentials(Values<A, 2> (&out)[kRows], const E& x) const {
    const Values<A, 2> nothing = Exponentials::Identity<A>();
    Values<A, 2> run[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) out[r] = run[r] = nothing;
    const auto flush = [&] {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        out[r] = Exponentials::Join(out[r], run[r]);
        run[r] = nothing;
      }
    };
    if constexpr (P::kAcross) {
      // Takes several columns' values at a time, so that rescaling the earlier total needs one exponential for them
      // all.
      const auto join = [&](const auto&... values) {
#pragma unroll
        for (int i = 0; i < kV; ++i) {
          const A before = run[i].v[0];
          A max = before;
          ((max = Max::Join(max, values(i))), ...);
          const A origin = Exponentials::FiniteOrZero(max);
          run[i] = {max, run[i].v[1] * Exp(before - origin) + (Exp(values(i) - origin) + ...)};
        }
      };
      this->template ForEachFewPacks<P::kFew>([&](auto... columns) { join(x(0, columns)...); }, flush);
    } else {
      const auto add = [&](int pack, int column) {
        const auto value = x(pack, column);
        Values<A, 2> part = nothing;
#pragma unroll
        for (int i = 0; i < kV; ++i) part.v[0] = Max::Join(part.v[0], value(i));
        const A origin = Exponentials::FiniteOrZero(part.v[0]);
#pragma unroll
        for (int i = 0; i < kV; ++i) part.v[1] += Exp(value(i) - origin);
        run[0] = Exponentials::Join(run[0], part);
      };
      ForEachPack(add, flush);
    }
  }

  // How many of a row's columns the warp has, and 1 / that number.
  struct Count {
    A count, share;
  };
  static constexpr bool kOneWarp = P::kInWarp;
  static constexpr bool kOneCount = (P::kAhead || P::kStaged) && !kShifted;  // all rows have the same
  static __device__ A ShareOf(A count) { return kOneWarp || count > 0 ? Reciprocal(count) : A{0}; }
  __device__ Count CountColumns() const {
    const A count = kOneWarp ? columns() : this->ColumnsOfWarp();
    return {count, ShareOf(count)};
  }

  Exchange<P> exchange_;
  Count count_;  // if kOneCount
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_ROW_CUH_
