// layer_norm (centred) and rms_norm (not centred) on CUDA devices. Each op and direction has a separate file next to
// this one, so that more processors can share the build.
#ifndef JAXOPS_OPS_NORM_NORM_CUH_
#define JAXOPS_OPS_NORM_NORM_CUH_

#include <tuple>
#include <utility>

#include "ops/norm/norm.h"
#include "rows/launch.cuh"
#include "rows/segments.cuh"

namespace jaxops {
namespace {

using Slot = NormCall;

struct Product {
  template <class A>
  __device__ A operator()(A a, A b) const {
    return a * b;
  }
};

// The positions that count in the statistics, as an expression of 0 and 1; 1 everywhere unless kWhere.
template <bool kWhere, class A>
__device__ auto Weights(const auto& row, const uint8_t* where) {
  if constexpr (kWhere) {
    return row.Keep([&row, where](int pack, int column) {
      const auto counts = row.template ReadBroadcast<Slot::kWhere>(where, pack, column);
      return [=, &row](int i) { return (counts.lane[i] & 1) && row.Inside(column, i) ? A{1} : A{0}; };  // as XLA has it
    });
  } else {
    return [](int, int) { return [](int) { return A{1}; }; };
  }
}

// y = (x - mean) rstd scale + bias; mean and rstd = 1 / sqrt(var(x) + epsilon) are kept for the backward pass. The
// variance comes from the deviations: exact even if mean(x)^2 >> var(x). Without centring, mean is 0.
template <bool kCentred, bool kWhere, class T>
struct NormForwardOp {
  using A = Accumulator<T>;
  static constexpr int kInputs = 1, kSlots = Slot::kWhere + 1,
                       kBroadcasts = 1 << Slot::kScale | 1 << Slot::kBias | 1 << Slot::kWhere;
  static constexpr int kParameters = kCentred ? 2 : 1;
  static constexpr rows::Options kOptions = rows::Options::kNone;
  static constexpr bool kAsF32 = kWhere, kPadded = true;

  Tensor<const T> x, residual;
  const A *scale, *bias;
  const uint8_t* where;
  A epsilon;
  Tensor<T> y;
  Tensor<T> sum;
  A *mean_out, *rstd_out;

  template <class Visit>
  __device__ void ForEachInput(const Visit& visit) const {
    visit.template operator()<0>(x);
  }
  __host__ __device__ int Inputs() const { return 1; }
  bool MayStay() const { return !residual; }  // a sum is not fetched ahead
  // scale and bias
  __device__ auto Parameters(const auto& row) const {
    const auto scales = row.template KeepParameter<0>(row.template LoadParameter<Slot::kScale>(scale, A{1}));
    if constexpr (kCentred) {
      return std::pair(scales, row.template KeepParameter<1>(row.template LoadParameter<Slot::kBias>(bias, A{0})));
    } else {
      return std::pair(scales, row.Same(A{0}));
    }
  }
  __device__ int Scalars(const auto&) const { return 0; }
  __device__ void operator()(auto& row) const {
    (*this)(row,
            std::pair(row.KeepOfFew(row.template LoadParameter<Slot::kScale>(scale, A{1})),
                      row.KeepOfFew(row.template LoadParameter<Slot::kBias>(bias, A{0}))),
            0);
  }
  __device__ void operator()(auto& row, const auto& parameters, int) const {
    const auto values = row.LoadSum(x, residual, sum);
    Finish(row, values, parameters, row.Join(PartOf(row, values)));
  }
  // As above, in two halves.
  __device__ auto Begin(const auto& row, const auto&, int) const { return PartOf(row, row.LoadSum(x, residual, sum)); }
  __device__ void End(const auto& row, const auto& parameters, int, const auto& moments) const {
    Finish(row, row.template Load<0>(residual ? Tensor<const T>(sum) : x), parameters, moments);
  }

 private:
  __device__ auto PartOf(const auto& row, const auto& values) const {
    if constexpr (kCentred) {
      return row.template PartOfMoments<kWhere>(values, Weights<kWhere, A>(row, where));
    } else {
      return row.template PartOf<rows::Sum>(rows::Map([](A value) { return value * value; }, values));
    }
  }
  __device__ void Finish(const auto& row, const auto& values, const auto& parameters, const auto& moments) const {
    const auto [share, mean, squares] = [&] {
      if constexpr (kCentred) {
        return std::tuple(row.Each([](A count) { return rows::Reciprocal(count); }, moments.template Component<0>()),
                          moments.template Component<1>(), moments.template Component<2>());
      } else {
        return std::tuple(row.Same(rows::Reciprocal(static_cast<A>(row.columns()))), row.Same(A{0}),
                          moments.template Component<0>());
      }
    }();
    const auto rstd =
        row.Each([eps = epsilon](A sum, A share) { return rows::Rsqrt(sum * share + eps); }, squares, share);
    if constexpr (kCentred) row.template StoreRow<Slot::kRow>(mean_out, mean);
    row.template StoreRow<Slot::kRow>(rstd_out, rstd);
    const auto result = [](A value, A mean, A rstd, A s, A b) { return (value - mean) * rstd * s + b; };
    row.Store(y, rows::Map(result, values, mean, rstd, parameters.first, parameters.second));
  }
};

// With x^ = (x - mean) rstd, g = dy scale and w = 1 / (how many positions count) where they do:
//   dx = rstd (g - w (sum(g) + x^ sum(g x^))) + dsum        (sum(g) only if centred)
// and, if column sums are wanted, the rows' shares of dscale = sum(dy x^) and dbias = sum(dy).
template <bool kCentred, bool kWhere, class T>
struct NormBackwardOp {
  using A = Accumulator<T>;
  static constexpr int kInputs = 2, kSlots = Slot::kSlots,
                       kBroadcasts = 1 << Slot::kScale | 1 << Slot::kBias | 1 << Slot::kWhere;
  static constexpr int kParameters = 1, kSums = kCentred ? 2 : 1, kSumSlot = Slot::kSum;
  static constexpr rows::Options kOptions = rows::Options::kNone;
  static constexpr bool kAsF32 = kWhere, kPadded = true;

  Tensor<const T> x, dsum;
  Tensor<const T> dy;
  const A* scale;
  const uint8_t* where;
  const A *mean, *rstd;
  Tensor<T> dx;

  template <class Visit>
  __device__ void ForEachInput(const Visit& visit) const {
    visit.template operator()<0>(x);
    visit.template operator()<1>(dy);
    if (dsum) visit.template operator()<2>(dsum);
  }
  __host__ __device__ int Inputs() const { return dsum ? 3 : 2; }
  // scale, and 1 / columns
  __device__ auto Parameters(const auto& row) const {
    return std::pair(row.template KeepParameter<0>(row.template LoadParameter<Slot::kScale>(scale, A{1})),
                     rows::Reciprocal(static_cast<A>(row.columns())));
  }
  // mean and rstd
  __device__ auto Scalars(const auto& row) const {
    return std::pair(kCentred ? row.template LoadRow<Slot::kRow>(mean) : row.Same(A{0}),
                     row.template LoadRow<Slot::kRow>(rstd));
  }
  __device__ void operator()(auto& row) const {
    (*this)(row,
            std::pair(row.KeepOfFew(row.template LoadParameter<Slot::kScale>(scale, A{1})),
                      rows::Reciprocal(static_cast<A>(row.columns()))),
            Scalars(row));
  }

  __device__ void operator()(auto& row, const auto& parameters, const auto& statistics,
                             auto&... sums_of_columns) const {
    const auto values = row.template Load<0>(x);
    const auto cotangent = row.template Load<1>(dy);
    const auto normalised = row.KeepFew(Normalised(values, statistics));
    const auto gradient = row.KeepFew(rows::Map(Product{}, cotangent, parameters.first));
    const auto sums = row.Join(PartOf(row, cotangent, normalised, gradient, sums_of_columns...));
    Finish(row, parameters, statistics, gradient, normalised, row.Same(A{1}), sums);
  }
  // As above, in two halves.
  __device__ auto Begin(const auto& row, const auto& parameters, const auto& statistics,
                        auto&... sums_of_columns) const {
    const auto cotangent = row.template Load<1>(dy);
    return PartOf(row, cotangent, Normalised(row.template Load<0>(x), statistics),
                  rows::Map(Product{}, cotangent, parameters.first), sums_of_columns...);
  }
  __device__ void End(auto& row, const auto& parameters, const auto& statistics, const auto& sums) const {
    Finish(row, parameters, statistics, rows::Map(Product{}, row.template Load<1>(dy), parameters.first),
           Deviation(row.template Load<0>(x), statistics), statistics.second, sums);
  }

 private:
  static __device__ auto Deviation(const auto& values, const auto& statistics) {
    return rows::Map([](A value, A m) { return kCentred ? value - m : value; }, values, statistics.first);
  }
  // x^
  static __device__ auto Normalised(const auto& values, const auto& statistics) {
    return rows::Map(Product{}, Deviation(values, statistics), statistics.second);
  }
  // For sum(g) and sum(g x^).
  __device__ auto PartOf(const auto& row, const auto& cotangent, const auto& normalised, const auto& gradient,
                         auto&... sums_of_columns) const {
    const auto add_columns = [&](int pack, int column) {
      const auto dscale = rows::Map(Product{}, cotangent, normalised);
      if constexpr (kCentred) {
        (sums_of_columns.AddPack(row, pack, column, dscale, cotangent), ...);
      } else {
        (sums_of_columns.AddPack(row, pack, column, dscale), ...);
      }
    };
    return row.template PartOfEach<rows::Sum>(add_columns, gradient, rows::Map(Product{}, gradient, normalised));
  }
  // x^ is `factor` times `deviation`.
  __device__ void Finish(auto& row, const auto& parameters, const auto& statistics, const auto& gradient,
                         const auto& deviation, const auto& factor, const auto& sums) const {
    const auto& r = statistics.second;
    auto share = row.Same(parameters.second);
    const auto weights = Weights<kWhere, A>(row, where);
    if constexpr (kWhere) {
      share = row.Each([](A count) { return 1 / count; }, row.template Reduce<rows::Sum>(weights));
    }
    const auto scaled = [](A sum, A share, A r) { return sum * share * r; };
    const auto of_g = row.Each([=](A sum, A share, A r) { return kCentred ? scaled(sum, share, r) : A{0}; },
                               sums.template Component<0>(), share, r);
    const auto of_gx = row.Each([=](A sum, A share, A r, A factor) { return scaled(sum, share, r) * factor; },
                                sums.template Component<1>(), share, r, factor);
    const auto result = [](A g, A deviation, A w, A r, A of_g, A of_gx) {
      if (kWhere) return fma(g, r, w == 0 ? A{0} : -fma(deviation, of_gx, of_g));  // which may be infinite there
      return fma(-deviation, of_gx, fma(g, r, -of_g));
    };
    const auto own = rows::Map(result, gradient, deviation, weights, r, of_g, of_gx);
    if (dsum) {
      row.Store(dx, rows::Map([](A own, A added) { return own + added; }, own, row.template Load<2>(dsum)));
    } else {
      row.Store(dx, own);
    }
  }
};

// dscale = sum(dy x^), dbias = sum(dy), over a group's rows.
template <bool kCentred, class T>
struct ParameterGradients {
  using A = Accumulator<T>;
  static constexpr int kSlots = Slot::kSlots, kSums = kCentred ? 2 : 1, kSumSlot = Slot::kSum;
  Tensor<const T> x, dy;
  const A *mean, *rstd;

  __device__ Pack<A, kSums> operator()(const int64_t (&offsets)[kSlots]) const {
    const A g = static_cast<A>(rows::ReadElement(dy + offsets[Slot::kFull]));
    const A m = kCentred ? mean[offsets[Slot::kRow]] : A{0}, r = rstd[offsets[Slot::kRow]];
    const A dscale = ScaleShare(static_cast<A>(rows::ReadElement(x + offsets[Slot::kFull])), g, m, r);
    if constexpr (kCentred) {
      return {dscale, g};
    } else {
      return {dscale};
    }
  }
  template <int kV>
  __device__ void AddPack(int64_t row, int64_t place, A (&sums)[kSums][kV]) const {
    const auto values = rows::ReadPack<kV>(x + place), cotangent = rows::ReadPack<kV>(dy + place);
    const A m = kCentred ? mean[row] : A{0}, r = rstd[row];
#pragma unroll
    for (int i = 0; i < kV; ++i) {
      const A g = cotangent.template Widen<A>(i);
      sums[0][i] += ScaleShare(values.template Widen<A>(i), g, m, r);
      if constexpr (kCentred) sums[1][i] += g;
    }
  }

 private:
  // An element's share in dscale.
  static __device__ A ScaleShare(A value, A g, A m, A r) { return g * ((value - m) * r); }
};

template <bool kCentred>
Error Forward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
              bool has_residual, bool has_scale, bool has_bias, bool has_where, bool has_parts, double epsilon) {
  const char* handler = kCentred ? "layer_norm_fwd" : "rms_norm_fwd";
  NormCall call;
  const NormAttributes attributes = {axes, has_residual, has_scale, has_bias, has_where, has_parts};
  JAXOPS_RETURN_IF_ERROR(ParseNorm(handler, /*backward=*/false, kCentred, attributes, args, results, &call));
  const auto make = [&]<bool kWhere, class T> {
    using A = Accumulator<T>;
    return NormForwardOp<kCentred, kWhere, T>{
        .x = Data<const T>(*call.x),
        .residual = DataOrNull<const T>(call.residual),
        .scale = DataOrNull<const A>(call.scale),
        .bias = DataOrNull<const A>(call.bias),
        .where = DataOrNull<const uint8_t>(call.where),
        .epsilon = static_cast<A>(epsilon),
        .y = Data<T>(*call.y),
        .sum = DataOrNull<T>(call.sum),
        .mean_out = DataOrNull<A>(call.mean),
        .rstd_out = DataOrNull<A>(call.rstd),
    };
  };
  const auto launch = [&]<bool kWhere, class T> {
    using S = rows::Single<T>;
    const auto op = make.template operator()<kWhere, T>();
    const auto single = make.template operator()<kWhere, S>();
    if constexpr (!kWhere) {
      cudaError_t status = cudaSuccess;
      if (call.parts && rows::LaunchSplitRows<T>(stream, op, single, call.shape, *call.parts, {}, &status))
        return FromCuda(handler, status);
    }
    return FromCuda(handler, rows::LaunchRows<T>(stream, op, single, call.shape));
  };
  const DataType input = call.x->element_type(), output = call.y->element_type();
  return VisitDtype(handler, input, output, [&]<class T> {
    // Masks are rare: kernels whose tensors tell their dtypes do.
    if constexpr (kCentred) {
      if (has_where) return launch.template operator()<true, rows::Single<T>>();
    }
    return launch.template operator()<false, T>();
  });
}

template <bool kCentred>
Error Backward(Device stream, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> axes,
               bool has_scale, bool has_where, bool has_parts, bool has_dsum, bool has_dscale, bool has_dbias) {
  const char* handler = kCentred ? "layer_norm_bwd" : "rms_norm_bwd";
  NormCall call;
  const NormAttributes attributes = {.axes = axes,
                                     .has_scale = has_scale,
                                     .has_where = has_where,
                                     .has_parts = has_parts,
                                     .has_dsum = has_dsum,
                                     .has_dscale = has_dscale,
                                     .has_dbias = has_dbias};
  JAXOPS_RETURN_IF_ERROR(ParseNorm(handler, /*backward=*/true, kCentred, attributes, args, results, &call));
  const auto make = [&]<bool kWhere, class T> {
    using A = Accumulator<T>;
    return NormBackwardOp<kCentred, kWhere, T>{
        .x = Data<const T>(*call.x),
        .dsum = DataOrNull<const T>(call.dsum),
        .dy = Data<const T>(*call.dy),
        .scale = DataOrNull<const A>(call.scale),
        .where = DataOrNull<const uint8_t>(call.where),
        .mean = DataOrNull<const A>(call.mean),
        .rstd = DataOrNull<const A>(call.rstd),
        .dx = Data<T>(*call.dx),
    };
  };
  const auto launch = [&]<bool kWhere, class T> {
    using A = Accumulator<T>;
    using S = rows::Single<T>;
    const auto op = make.template operator()<kWhere, T>();
    const auto single = make.template operator()<kWhere, S>();
    const rows::SumResults<A> sums(call.sums, call.shape, has_dscale, has_dbias);
    if (call.shape.size() == 0) return FromCuda(handler, rows::ClearSums(stream, sums, call.shape));
    cudaError_t status = cudaSuccess;
    bool done = false;
    [[maybe_unused]] const bool few = rows::kTuned<T> && rows::HasFewRows(call.shape, Slot::kSum, sums.chunks);
    if constexpr (!kWhere) {
      const bool alone = call.shape.rows.total == 1 && !call.shape.across;  // each row in its group
      rows::SumPointers<A> direct = {};
      if (alone) direct = {sums.results[0], sums.results[1]};
      done = call.parts && rows::LaunchSplitRows<T>(stream, op, single, call.ungrouped, *call.parts, direct, &status);
      if (done && alone) return FromCuda(handler, status);
      const bool looped = !done && !few && call.sums.count && !call.shape.across &&
                          rows::LaunchRowSums<T>(stream, op, single, call.shape, sums, &status);
      if (looped) return FromCuda(handler, status);
    }
    if (!done) status = rows::LaunchRows<T>(stream, op, single, call.ungrouped);
    if (status != cudaSuccess || call.sums.count == 0) return FromCuda(handler, status);
    const auto gradients_of = [&]<class V>(const auto& op) {
      return ParameterGradients<kCentred, V>{.x = op.x, .dy = op.dy, .mean = op.mean, .rstd = op.rstd};
    };
    if constexpr (rows::kTuned<T>) {
      const auto gradients = gradients_of.template operator()<T>(op);
      if (few) return FromCuda(handler, rows::LaunchSumsOfFewRows<T>(stream, gradients, call.shape, sums));
    }
    const auto gradients = gradients_of.template operator()<S>(single);
    return FromCuda(handler, rows::LaunchColumnSums<A>(stream, gradients, call.shape, sums));
  };
  const DataType input = call.x->element_type(), output = call.dy->element_type();
  return VisitDtype(handler, input, output, [&]<class T> {
    // Masks are rare: kernels whose tensors tell their dtypes do.
    if constexpr (kCentred) {
      if (has_where) return launch.template operator()<true, rows::Single<T>>();
    }
    return launch.template operator()<false, T>();
  });
}

}  // namespace
}  // namespace jaxops

#endif  // JAXOPS_OPS_NORM_NORM_CUH_
