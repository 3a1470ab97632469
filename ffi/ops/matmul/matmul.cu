#include <optional>

#include "ops/matmul/mma.cuh"
#include "ops/matmul/simt.cuh"

namespace jaxops {
namespace {

using matmul::Problem;

// The dtypes of the operands (both the same) and of the result.
using MatmulPairs = Types<Pair<__nv_bfloat16, __nv_bfloat16>, Pair<__nv_bfloat16, float>, Pair<__half, __half>,
                          Pair<__half, float>, Pair<float, float>, Pair<double, double>>;

// lhs, rhs, [bias] -> out, [preactivation]
Error Matmul(Device stream, AnyBuffer lhs, AnyBuffer rhs, ffi::RemainingArgs rest, BufferResult out,
             ffi::RemainingRets more, bool lhs_transposed, bool rhs_transposed, int32_t activation) {
  constexpr const char* kHandler = "matmul";
  if (rest.size() > 1 || more.size() > 1) return Invalid(kHandler, "too many operands or results");
  std::optional<AnyBuffer> bias, preactivation;
  if (rest.size() == 1) {
    auto buffer = rest.get<AnyBuffer>(0);
    if (!buffer.has_value()) return Invalid(kHandler, "bias is no array");
    bias = *buffer;
  }
  if (more.size() == 1) {
    auto buffer = more.get<AnyBuffer>(0);
    if (!buffer.has_value()) return Invalid(kHandler, "preactivation is no array");
    preactivation = **buffer;
  }
  const DataType operands = lhs.element_type(), result = out->element_type();
  Problem problem;
  JAXOPS_RETURN_IF_ERROR(CheckType(kHandler, "rhs", rhs, operands));
  if (bias) JAXOPS_RETURN_IF_ERROR(CheckType(kHandler, "bias", *bias, AccumulatorType(operands)));
  JAXOPS_RETURN_IF_ERROR(matmul::ParseProblem(kHandler, lhs, rhs, bias ? &*bias : nullptr, *out,
                                              preactivation ? &*preactivation : nullptr, lhs_transposed, rhs_transposed,
                                              activation, &problem));
  if (problem.m * problem.n * problem.batches == 0) return Error::Success();
  return First(
      MatmulPairs{}, Invalid(kHandler, "no kernel for these element types"),
      [=]<class P> { return operands == kDataType<typename P::Input> && result == kDataType<typename P::Output>; },
      [&]<class P> {
        using T = typename P::Input;
        if constexpr (sizeof(T) == 2) {
          return FromCuda(kHandler, matmul::LaunchMma<T, typename P::Output>(stream, problem));
        } else {
          return FromCuda(kHandler, matmul::LaunchSimt<T>(stream, problem));
        }
      });
}

}  // namespace
}  // namespace jaxops

JAXOPS_HANDLER(matmul, jaxops::Matmul,
               Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .RemainingArgs()
                   .Ret<jaxops::AnyBuffer>()
                   .RemainingRets()
                   .Attr<bool>("lhs_transposed")
                   .Attr<bool>("rhs_transposed")
                   .Attr<int32_t>("activation"));
