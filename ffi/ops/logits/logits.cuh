// The steps that softmax and log_softmax share on CUDA devices, before their kernels' algebra: scale, bias and masks.
#ifndef JAXOPS_OPS_LOGITS_LOGITS_CUH_
#define JAXOPS_OPS_LOGITS_LOGITS_CUH_

#include <utility>

#include "ops/logits/logits.h"
#include "rows/launch.cuh"
#include "rows/segments.cuh"

namespace jaxops {

using rows::Options;

template <Options kOptions, class A>
struct LogitsOptions {
  using Slot = LogitsCall;
  static constexpr bool kNone = kOptions == Options::kNone;

  const A* scale;
  AnyTensor bias;
  const uint8_t* where;
  bool causal;

  explicit LogitsOptions(const LogitsCall& call)
      : scale(DataOrNull<A>(call.scale)),
        bias(DataOrNull<AnyFloat>(call.bias)),
        where(DataOrNull<uint8_t>(call.where)),
        causal(call.causal) {}

  // The positions in a pack that lie in the row: bit i stands for position i.
  template <class Row>
  __device__ static uint32_t InsideBits(const Row& row, int column) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < Row::kV; ++i) bits |= static_cast<uint32_t>(row.Inside(column, i)) << i;
    return bits;
  }
  // The positions that causality leaves.
  template <class Row>
  __device__ uint32_t CausalBits(const Row& row, int pack, int column) const {
    constexpr uint32_t kAll = (1u << Row::kV) - 1;
    const int distance = static_cast<int>(row.Offset(Slot::kDiagonal, pack, column));  // from the key to the query
    const int step = static_cast<int>(row.Step(Slot::kDiagonal));
    if (step == -1) return distance < 0 ? 0 : distance >= Row::kV ? kAll : (2u << distance) - 1;
    uint32_t bits = kAll;
#pragma unroll
    for (int i = 0; i < Row::kV; ++i)
      if (distance + i * step < 0) bits &= ~(1u << i);
    return bits;
  }
  // The booleans in a pack that are true: their lowest bits count, as in XLA.
  template <int kV>
  __device__ static uint32_t TrueBits(const Pack<uint8_t, kV>& booleans) {
    uint32_t bits = 0;
    if constexpr (kV % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kV; i += 4) bits |= BitsOf(reinterpret_cast<const uint32_t&>(booleans.lane[i])) << i;
    } else {
#pragma unroll
      for (int i = 0; i < kV; ++i) bits |= (booleans.lane[i] & 1u) << i;
    }
    return bits;
  }

  // If a row has one query, leaves out the keys after it: they are neither read nor computed.
  __device__ void Narrow(auto& row) const {
    if constexpr (!kNone) {
      using Row = std::remove_reference_t<decltype(row)>;
      if constexpr (!Row::P::kAcross && Row::kLayout != rows::Layout::kGeneral) {
        if (causal && row.Step(Slot::kDiagonal) == -1) row.Limit(static_cast<int>(row.Origin(Slot::kDiagonal)) + 1);
      }
    }
  }

  // The entries that take part, as bits.
  template <class Row>
  __device__ uint32_t VisibleBits(const Row& row, int pack, int column) const {
    uint32_t bits = InsideBits(row, column);
    if (causal) bits &= CausalBits(row, pack, column);
    if (where && bits) bits &= TrueBits(row.template ReadBroadcast<Slot::kWhere>(where, pack, column));
    return bits;
  }

  // Whether the masks for such rows are applied to held packs, two 16-bit elements at a time.
  template <class T, class Row>
  static constexpr bool kByWords =
      !kNone && sizeof(T) == 2 && !Row::P::kAcross && Row::kLayout == rows::Layout::kPlain && Row::kV % 4 == 0 &&
      requires(const Row& row, const T* x) { row.template Load<0>(x).packs; };

  // The entries in the thread's packs that take part: a byte each, and as ones in their halves of a pack's words.
  template <class Row>
  struct HeldBooleans {
    static constexpr int kWords = Row::kV / 4;
    uint32_t packs[Row::kHeldPacks][kWords];
    __device__ HalfMasks<Row::kV> Halves(int pack) const {
      HalfMasks<Row::kV> masks;
#pragma unroll
      for (int w = 0; w < kWords; ++w) rows::SpreadBooleans(packs[pack][w], masks.words + 2 * w);
      return masks;
    }
  };
  // From `where` alone: all its reads begin before the first is used.
  template <class Row>
  __device__ HeldBooleans<Row> ReadWhere(const Row& row) const {
    HeldBooleans<Row> held;
#pragma unroll
    for (auto& pack : held.packs)
#pragma unroll
      for (uint32_t& word : pack) word = 0x01010101u;
    if (where) {
      row.ForEachPack([&](int pack, int column) {
        const auto seen = row.template ReadBroadcast<Slot::kWhere>(where, pack, column);
#pragma unroll
        for (int w = 0; w < held.kWords; ++w)
          held.packs[pack][w] = reinterpret_cast<const uint32_t&>(seen.lane[4 * w]) & 0x01010101u;
      });
    }
    return held;
  }
  template <class Row>
  __device__ HeldBooleans<Row> VisibleBooleans(const Row& row) const {
    HeldBooleans<Row> held = ReadWhere(row);
    if (causal) {
      const bool along = row.Step(Slot::kDiagonal) == -1;
      row.ForEachPack([&](int pack, int column) {
        // In a row with one query, all packs except one are before the query or left out.
        if (along && row.Offset(Slot::kDiagonal, pack, column) >= Row::kV - 1) return;
        const uint32_t bits = CausalBits(row, pack, column);
#pragma unroll
        for (int w = 0; w < held.kWords; ++w)
          held.packs[pack][w] &= (bits >> 4 * w & 0xfu) * 0x204081u & 0x01010101u;  // bit i to byte i
      });
    }
    return held;
  }

  // A bit for each element in held packs: a word has one pack's bits, or 32 single elements' bits.
  template <class Row>
  struct HeldBits {
    static constexpr int kPacks = Row::kV == 1 ? 32 : 1;  // per word
    static constexpr uint32_t kAll = (1u << Row::kV) - 1;
    uint32_t words[(Row::kHeldPacks + kPacks - 1) / kPacks];
    static __device__ int Shift(int pack) { return pack % kPacks * Row::kV; }
    __device__ void Keep(int pack, uint32_t bits) { words[pack / kPacks] &= ~((bits ^ kAll) << Shift(pack)); }
    __device__ auto operator()(int pack, int) const {
      return [bits = words[pack / kPacks] >> Shift(pack)](int i) { return (bits >> i & 1u) != 0; };
    }
  };
  // The options are tested once per row. If packs have few elements, all reads begin before the first is used; with
  // more, the booleans would take more registers than their bits.
  template <class Row>
  __device__ HeldBits<Row> ReadVisible(const Row& row) const {
    constexpr bool kCounted = Row::kPadded && Row::kV == 1;  // packs beyond the row's end, or its limit, are masked
    HeldBits<Row> held;
#pragma unroll
    for (int w = 0; w < static_cast<int>(std::size(held.words)); ++w) {
      const int inside = kCounted ? row.CountRead() - 32 * w : 32;
      held.words[w] = inside >= 32 ? ~0u : (1u << max(inside, 0)) - 1;
    }
    if constexpr (Row::kShifted) {
      row.ForEachPack([&](int pack, int column) { held.Keep(pack, InsideBits(row, column)); });
    }
    if (where) {
      const auto read = [&](int pack, int column) {
        return row.template ReadBroadcast<Slot::kWhere>(where, pack, column);
      };
      if constexpr (Row::kV <= 4 && Row::kLayout == rows::Layout::kPlain) {
        Pack<uint8_t, Row::kV> booleans[Row::kHeldPacks] = {};
        row.ForEachPackRead([&](int pack, int column) { booleans[pack] = read(pack, column); });
#pragma unroll
        for (int pack = 0; pack < Row::kHeldPacks; ++pack) held.Keep(pack, TrueBits(booleans[pack]));
      } else {
        row.ForEachPackRead([&](int pack, int column) { held.Keep(pack, TrueBits(read(pack, column))); });
      }
    }
    // Counted packs end at the limit: see Narrow.
    if (causal && !(kCounted && row.Step(Slot::kDiagonal) == -1)) {
      row.ForEachPackRead([&](int pack, int column) { held.Keep(pack, CausalBits(row, pack, column)); });
    }
    return held;
  }

  // The entries that take part, as a boolean expression; kKept: kept if the row is held.
  template <bool kKept = true, class Row>
  __device__ auto Visible(const Row& row) const {
    if constexpr (kNone) {
      return [](int, int) { return [](int) { return true; }; };
    } else if constexpr (kKept && Row::kHeld) {
      return ReadVisible(row);
    } else {
      return [this, &row](int pack, int column) {
        return [bits = VisibleBits(row, pack, column)](int i) { return (bits >> i & 1u) != 0; };
      };
    }
  }

  // The logits x scale + bias, -inf where masked; and the mask, to be kept (kKept) if it is read often.
  template <bool kKept = true, class Row, class Source>
  __device__ auto Load(const Row& row, const Source& x) const {
    using T = ElementOf<Source>;
    constexpr A kMasked = -std::numeric_limits<A>::infinity();
    const auto logit = [](A value, bool seen, A s, A b) { return seen ? rows::Product(value, s) + b : kMasked; };
    if constexpr (kNone) {
      return std::pair(row.template Load<0>(x, T(kMasked)), Visible(row));
    } else if constexpr (!kKept && kByWords<T, Row>) {
      const auto z = LoadByWords(row, x);
      return std::pair(z, Visible</*kKept=*/false>(row));
    } else if constexpr (kOptions == Options::kMasks) {
      const auto raw = row.template Load<0>(x);
      const auto visible = Visible(row);
      return std::pair(row.Keep(rows::Map(logit, raw, visible, Scale(row), row.Same(A{0}))), visible);
    } else if constexpr (Row::kHeld && !Row::P::kAcross && Row::kLayout != rows::Layout::kGeneral) {
      const auto raw = row.template Load<0>(x);
      const auto biases =
          row.template CombineOperand<Slot::kBias>(bias, A{0}, [](const auto& values) { return Row::KeepAll(values); });
      const auto visible = Visible(row);
      return std::pair(row.Keep(rows::Map(logit, raw, visible, Scale(row), biases)), visible);
    } else {
      const auto raw = row.template Load<0>(x);
      const auto biases = [this, &row](int pack, int column) {
        const auto values = row.template ReadOperand<Slot::kBias>(bias, pack, column, A{0});
        return [=](int i) { return values.lane[i]; };
      };
      const auto visible = Visible(row);
      return std::pair(row.Keep(rows::Map(logit, raw, visible, Scale(row), biases)), visible);
    }
  }

  // Whether masked logits (-inf) need no more care: if a row's sum of exponentials is a number, they give exp(-inf) =
  // 0, or -inf. In other rows, all masked or with NaN or infinities, only `visible` tells which are masked.
  template <class Row>
  __device__ static bool Ordinary(const Row&, const typename Row::template PerRow<A>& exponentials) {
    return kNone || Row::All([](A sum) { return sum > 0 && sum < std::numeric_limits<A>::infinity(); }, exponentials);
  }

  template <class Row>
  __device__ auto Scale(const Row& row) const {
    if constexpr (kNone) {
      return row.Same(A{1});
    } else {
      return scale ? row.template LoadRow<Slot::kScale>(scale) : row.Same(A{1});
    }
  }

 private:
  // Four booleans, one per byte, as bits: the product has the sum of the bytes' bits at 28, 29, 30 and 31, no carries.
  __device__ static uint32_t BitsOf(uint32_t booleans) { return (booleans & 0x01010101u) * 0x10204080u >> 28; }

  // Makes masked entries -inf, and their biases 0. A scale that is not positive goes into the packs, so that they stay
  // so. All reads begin before the first is used.
  template <class T, class Row>
  __device__ auto LoadByWords(const Row& row, const T* x) const {
    auto raw = row.template Load<0>(x);
    auto factor = Scale(row);
    const HeldBooleans<Row> seen = VisibleBooleans(row);
    const auto mask = [&] {
      if (!Row::All([](A s) { return s > 0; }, factor)) {
#pragma unroll
        for (int pack = 0; pack < Row::kHeldPacks; ++pack) {
          const A s = factor.value[0];
          raw.packs[pack] = raw.packs[pack].Times(T(s < 0 ? -1.0f : s == 0 ? 0.0f : 1.0f));
        }
        factor = row.Each([](A s) { return s < 0 ? -s : s == 0 ? A{1} : s; }, factor);
      }
#pragma unroll
      for (int pack = 0; pack < Row::kHeldPacks; ++pack)
        raw.packs[pack] = seen.Halves(pack).Choose(raw.packs[pack], T(-std::numeric_limits<A>::infinity()));
    };
    if constexpr (kOptions == Options::kMasks) {
      mask();
      return typename Row::template Scaled<T>{raw, factor};
    } else {
      return row.template CombineOperand<Slot::kBias>(bias, A{0}, [&]<class B>(B biases) {
        mask();
#pragma unroll
        for (int pack = 0; pack < Row::kHeldPacks; ++pack) {
          using Element = typename std::remove_cvref_t<decltype(biases.packs[pack])>::Element;
          biases.packs[pack] = seen.Halves(pack).Choose(biases.packs[pack], Element(0.0f));
        }
        return Row::KeepAll(
            rows::Map([](A value, A s, A b) { return rows::Product(value, s) + b; }, raw, factor, biases));
      });
    }
  }
};

// The description of an op with these options for the row library. kRowValues: it has a layout for max and total, as
// log_softmax has.
template <Options kOptions_, int kInputs_, bool kRowValues = false>
struct LogitsOp {
  static constexpr Options kOptions = kOptions_;
  static constexpr bool kNone = kOptions == Options::kNone;
  static_assert(LogitsCall::kRow == LogitsCall::kFull + 1);
  static constexpr int kInputs = kInputs_, kSlots = kNone ? LogitsCall::kFull + 1 + kRowValues : LogitsCall::kSlots,
                       kBroadcasts = kNone ? 0 : 1 << LogitsCall::kBias | 1 << LogitsCall::kWhere;
  static constexpr int kParameters = 0;
  static constexpr bool kAsF32 = false;
  static constexpr bool kPadded = kNone && kInputs == 2;  // zeros are no logits, but cotangents
  static constexpr bool MayStay() { return true; }
  __host__ __device__ int Inputs() const { return kInputs; }
  __device__ int Parameters(const auto&) const { return 0; }
  __device__ int Scalars(const auto&) const { return 0; }
};

// A forward pass. Op::Finish(row, z, visible, sums) stores results for rows with logits z, where the visible ones
// count; sums are their maximum and the sum of their exponentials.
template <class Op, Options kOptions, class T, bool kRowValues = false>
struct LogitsForward : LogitsOp<kOptions, 1, kRowValues> {
  using A = Accumulator<T>;
  LogitsOptions<kOptions, A> options;
  Tensor<const T> x;
  Tensor<T> y;

  explicit LogitsForward(const LogitsCall& call) : options(call), x(Data<const T>(*call.x)), y(Data<T>(*call.y)) {}

  __device__ void operator()(auto& row) const {
    options.Narrow(row);
    (*this)(row, 0, 0);
  }
  __device__ void operator()(auto& row, int, int) const {
    const auto [z, visible] = options.template Load</*kKept=*/false>(row, x);
    op().Finish(row, z, visible, row.ReduceExponentials(z));
  }
  // As above, in two halves.
  template <class Visit>
  __device__ void ForEachInput(const Visit& visit) const {
    visit.template operator()<0>(x);
  }
  __device__ auto Begin(const auto& row, int, int) const { return row.PartOfExponentials(options.Load(row, x).first); }
  __device__ void End(const auto& row, int, int, const auto& sums) const {
    const auto [z, visible] = options.template Load</*kKept=*/false>(row, x);
    op().Finish(row, z, visible, sums);
  }

 private:
  __device__ const Op& op() const { return static_cast<const Op&>(*this); }
};

// The query and key axes in causal calls: kernels count from one to the other in 32 bits (jaxops/_limits.py).
inline constexpr int64_t kMaxCausalSize = std::numeric_limits<int>::max() - 1;

// ParseLogits for the kernels.
inline Error ParseLogitsOnDevice(const char* handler, bool backward, const LogitsAttributes& attributes,
                                 const ffi::RemainingArgs& args, const ffi::RemainingRets& results, LogitsCall* call) {
  JAXOPS_RETURN_IF_ERROR(ParseLogits(handler, backward, attributes, args, results, call));
  if (!call->causal) return Error::Success();
  const auto dims = call->x->dimensions();
  if (std::max(dims[attributes.query_axis], dims[attributes.key_axis]) <= kMaxCausalSize) return Error::Success();
  return Invalid(handler, "causal with more than " + std::to_string(kMaxCausalSize) + " queries or keys");
}

// Runs Op<kOptions, T>(call).
template <template <Options, class> class Op, Options kOptions, class T>
cudaError_t LaunchLogits(cudaStream_t stream, const LogitsCall& call) {
  const Op<kOptions, T> op(call);
  const Op<kOptions, rows::Single<T>> single(call);
  if constexpr (kOptions == Options::kNone) {
    cudaError_t status = cudaSuccess;
    if (call.parts && rows::LaunchSplitRows<T>(stream, op, single, call.shape, *call.parts, {}, &status)) return status;
  }
  return rows::LaunchRows<T>(stream, op, single, call.shape);
}

// The dtypes of `first` and `second` choose T in Op<kOptions, T>. kMasksAlone: there are kernels for masks alone.
template <template <Options, class> class Op, bool kMasksAlone>
Error RunLogits(const char* handler, cudaStream_t stream, const LogitsCall& call, const AnyBuffer& first,
                const AnyBuffer& second) {
  return VisitDtype(handler, first.element_type(), second.element_type(), [&]<class T> {
    if (!call.has_options()) return FromCuda(handler, LaunchLogits<Op, Options::kNone, T>(stream, call));
    if constexpr (kMasksAlone) {
      cudaError_t status = cudaSuccess;
      if (!call.bias && rows::LaunchPlainRows<T>(stream, Op<Options::kMasks, T>(call), call.shape, &status))
        return FromCuda(handler, status);
    }
    return FromCuda(handler, LaunchLogits<Op, Options::kAny, T>(stream, call));
  });
}

template <template <Options, class> class Op>
Error ForwardLogits(const char* handler, cudaStream_t stream, const ffi::RemainingArgs& args,
                    const ffi::RemainingRets& results, const LogitsAttributes& attributes) {
  LogitsCall call;
  JAXOPS_RETURN_IF_ERROR(ParseLogitsOnDevice(handler, false, attributes, args, results, &call));
  return RunLogits<Op, /*kMasksAlone=*/true>(handler, stream, call, *call.x, *call.y);
}

}  // namespace jaxops

#endif  // JAXOPS_OPS_LOGITS_LOGITS_CUH_
