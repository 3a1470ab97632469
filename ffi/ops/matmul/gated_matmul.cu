// Handlers for a gated MLP: activation(x w_gate) * (x w_up), and the cotangents of both products, given the cotangent
// of (activation(gate) * up) w_down.
#include <algorithm>
#include <initializer_list>
#include <optional>

#include "core/launch.cuh"
#include "core/shape.h"
#include "ops/matmul/block_product.cuh"
#include "ops/matmul/gated.cuh"

namespace jaxops {
namespace matmul {
namespace {

bool Aligned(std::initializer_list<const void*> arrays, int64_t n, int64_t k) {
  return std::ranges::all_of(arrays, IsAligned) && n % 8 == 0 && k % 8 == 0 && k > 0 && CompiledCapability() == kHopper;
}

// Kernels for operands that the copy engine cannot take, and for other GPUs (block_product.cuh).
struct ForwardProblem {
  int64_t m, n, k;
  const void *x, *w_gate, *w_up;  // [m, k], [k, n], [k, n]
  void *out, *gate, *up;          // [m, n]; gate, up: both products, or null
  Activation activation;
};

template <class T>
__global__ void __launch_bounds__(kSide* kSide) GeneralForward(const ForwardProblem p) {
  const auto [row, column] = PlaceInBlocks(p.n);
  float sums[2] = {};
  MultiplyInBlock<T, false>(p.x, {p.w_gate, p.w_up}, p.m, p.n, p.k, row, column, sums);
  if (row >= p.m || column >= p.n) return;
  const int64_t at = row * p.n + column;
  if (p.gate) {
    static_cast<T*>(p.gate)[at] = static_cast<T>(sums[0]);
    static_cast<T*>(p.up)[at] = static_cast<T>(sums[1]);
  }
  float gate[1] = {sums[0]};
  Activate<kAccuracyFor<T>>(p.activation, gate);
  static_cast<T*>(p.out)[at] = static_cast<T>(gate[0] * sums[1]);
}

template <class T>
cudaError_t LaunchForward(cudaStream_t stream, const ForwardProblem& p, int band) {
  if (Aligned({p.x, p.w_gate, p.w_up, p.out, p.gate, p.up}, p.n, p.k)) {
    using Pass = GatedForward<T>;
    typename Pass::Arguments arguments = {};
    arguments.activation = p.activation;
    arguments.keeps_products = p.gate != nullptr;
    cudaError_t status = DescribeAlongDepth<T>(p.x, p.m, p.k, Pass::Tile::kRows, &arguments.lhs, &arguments.lhs_edge,
                                               &arguments.lhs_at_edge);
    const auto describe = [&](const void* data, int64_t rows, int box_rows, CUtensorMap* map) {
      if (status == cudaSuccess && data) status = DescribeMatrix<T>(data, rows, p.n, box_rows, map);
    };
    describe(p.w_gate, p.k, Pass::P::kDepth, &arguments.rhs);
    describe(p.w_up, p.k, Pass::P::kDepth, &arguments.w_up);
    describe(p.out, p.m, 16, &arguments.out);
    describe(p.gate, p.m, 16, &arguments.gate);
    describe(p.up, p.m, 16, &arguments.up);
    if (status == cudaSuccess) status = LaunchPass<Pass>(stream, p.m, p.n, p.k, band, arguments);
    if (status != cudaErrorNotSupported) return status;
  }
  return Launch(stream, GeneralForward<T>, {CountBlocks(p.m, p.n), kSide * kSide}, p);
}

struct BackwardProblem {
  int64_t m, n, k;
  const void *dy, *w_down, *gate, *up;  // [m, k], [n, k], [m, n], [m, n]
  void *dgate, *dup;                    // [m, n]
  Activation activation;
};

template <class T>
__global__ void __launch_bounds__(kSide* kSide) GeneralBackward(const BackwardProblem p) {
  const auto [row, column] = PlaceInBlocks(p.n);
  float sums[1] = {};
  MultiplyInBlock<T, true>(p.dy, {p.w_down}, p.m, p.n, p.k, row, column, sums);
  if (row >= p.m || column >= p.n) return;
  const int64_t at = row * p.n + column;
  float gate[1] = {Element<T>(p.gate, at, true)}, dgate[1] = {sums[0] * Element<T>(p.up, at, true)};
  Differentiate<kAccuracyFor<T>>(p.activation, gate, dgate);
  Activate<kAccuracyFor<T>>(p.activation, gate);
  static_cast<T*>(p.dgate)[at] = static_cast<T>(dgate[0]);
  static_cast<T*>(p.dup)[at] = static_cast<T>(sums[0] * gate[0]);
}

template <class T>
cudaError_t LaunchBackward(cudaStream_t stream, const BackwardProblem& p, int band) {
  if (Aligned({p.dy, p.w_down, p.gate, p.up, p.dgate, p.dup}, p.n, p.k)) {
    using Pass = GatedBackward<T>;
    typename Pass::Arguments arguments = {};
    arguments.activation = p.activation;
    cudaError_t status = DescribeAlongDepth<T>(p.dy, p.m, p.k, Pass::Tile::kRows, &arguments.lhs, &arguments.lhs_edge,
                                               &arguments.lhs_at_edge);
    if (status == cudaSuccess)
      status = DescribeAlongDepth<T>(p.w_down, p.n, p.k, Pass::Tile::kColumns, &arguments.rhs, &arguments.rhs_edge,
                                     &arguments.rhs_at_edge);
    for (const auto& [data, map] : {std::pair(p.gate, &arguments.gate), std::pair(p.up, &arguments.up),
                                    std::pair<const void*, CUtensorMap*>(p.dgate, &arguments.dgate),
                                    std::pair<const void*, CUtensorMap*>(p.dup, &arguments.dup)})
      if (status == cudaSuccess) status = DescribeMatrix<T>(data, p.m, p.n, 16, map);
    if (status == cudaSuccess) status = LaunchPass<Pass>(stream, p.m, p.n, p.k, band, arguments);
    if (status != cudaErrorNotSupported) return status;
  }
  return Launch(stream, GeneralBackward<T>, {CountBlocks(p.m, p.n), kSide * kSide}, p);
}

}  // namespace
}  // namespace matmul

namespace {

using matmul::Activation;
using Elements = Types<__nv_bfloat16, __half>;

struct NamedMatrix {
  const char* name;
  const AnyBuffer& buffer;
  int64_t rows, columns;
};

// Checks that all matrices have these sizes and one dtype, and that the attributes are in range.
Error CheckMatrices(const char* handler, std::initializer_list<NamedMatrix> matrices, int32_t activation,
                    int32_t band) {
  if (activation <= 0 || activation >= static_cast<int32_t>(Activation::kCount))
    return Invalid(handler, "unknown activation " + std::to_string(activation));
  if (band < 1 || band > 64) return Invalid(handler, "band out of range");  // 64-column bands are counted in 32 bits
  const DataType type = matrices.begin()->buffer.element_type();
  for (const auto& [name, buffer, rows, columns] : matrices)
    JAXOPS_RETURN_IF_ERROR(CheckShape(handler, name, buffer, type, {rows, columns}));
  return Error::Success();
}

// x, w_gate, w_up -> out, [gate, up]
Error GatedMatmul(Device stream, AnyBuffer x, AnyBuffer w_gate, AnyBuffer w_up, BufferResult out,
                  ffi::RemainingRets products, int32_t activation, bool has_products, int32_t band) {
  constexpr const char* kHandler = "gated_matmul";
  std::optional<AnyBuffer> gate, up;
  BufferReader<ffi::RemainingRets> reader(kHandler, products);
  if (has_products) {
    JAXOPS_RETURN_IF_ERROR(reader.Take(&gate));
    JAXOPS_RETURN_IF_ERROR(reader.Take(&up));
  }
  JAXOPS_RETURN_IF_ERROR(reader.End());
  const int64_t m = MatrixSize(x, 0), k = MatrixSize(x, 1), n = MatrixSize(w_gate, 1);
  JAXOPS_RETURN_IF_ERROR(
      CheckMatrices(kHandler, {{"x", x, m, k}, {"w_gate", w_gate, k, n}, {"w_up", w_up, k, n}, {"out", *out, m, n}},
                    activation, band));
  if (has_products) {
    JAXOPS_RETURN_IF_ERROR(
        CheckMatrices(kHandler, {{"x", x, m, k}, {"gate", *gate, m, n}, {"up", *up, m, n}}, activation, band));
  }
  if (m * n == 0) return Error::Success();
  const matmul::ForwardProblem problem = {m,
                                          n,
                                          k,
                                          x.untyped_data(),
                                          w_gate.untyped_data(),
                                          w_up.untyped_data(),
                                          out->untyped_data(),
                                          gate ? gate->untyped_data() : nullptr,
                                          up ? up->untyped_data() : nullptr,
                                          static_cast<Activation>(activation)};
  const DataType type = x.element_type();
  return First(
      Elements{}, Invalid(kHandler, "no kernel for this element type"), [=]<class T> { return type == kDataType<T>; },
      [&]<class T> { return FromCuda(kHandler, matmul::LaunchForward<T>(stream, problem, band)); });
}

// dy, w_down, gate, up -> dgate, dup
Error GatedMatmulBwd(Device stream, AnyBuffer dy, AnyBuffer w_down, AnyBuffer gate, AnyBuffer up, BufferResult dgate,
                     BufferResult dup, int32_t activation, int32_t band) {
  constexpr const char* kHandler = "gated_matmul_bwd";
  const int64_t m = MatrixSize(dy, 0), k = MatrixSize(dy, 1), n = MatrixSize(w_down, 0);
  JAXOPS_RETURN_IF_ERROR(CheckMatrices(kHandler,
                                       {{"dy", dy, m, k},
                                        {"w_down", w_down, n, k},
                                        {"gate", gate, m, n},
                                        {"up", up, m, n},
                                        {"dgate", *dgate, m, n},
                                        {"dup", *dup, m, n}},
                                       activation, band));
  if (m * n == 0) return Error::Success();
  const matmul::BackwardProblem problem = {m,
                                           n,
                                           k,
                                           dy.untyped_data(),
                                           w_down.untyped_data(),
                                           gate.untyped_data(),
                                           up.untyped_data(),
                                           dgate->untyped_data(),
                                           dup->untyped_data(),
                                           static_cast<Activation>(activation)};
  const DataType type = dy.element_type();
  return First(
      Elements{}, Invalid(kHandler, "no kernel for this element type"), [=]<class T> { return type == kDataType<T>; },
      [&]<class T> { return FromCuda(kHandler, matmul::LaunchBackward<T>(stream, problem, band)); });
}

}  // namespace
}  // namespace jaxops

JAXOPS_HANDLER(gated_matmul, jaxops::GatedMatmul,
               Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .Ret<jaxops::AnyBuffer>()
                   .RemainingRets()
                   .Attr<int32_t>("activation")
                   .Attr<bool>("has_products")
                   .Attr<int32_t>("band"));
JAXOPS_HANDLER(gated_matmul_bwd, jaxops::GatedMatmulBwd,
               Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .Ret<jaxops::AnyBuffer>()
                   .Ret<jaxops::AnyBuffer>()
                   .Attr<int32_t>("activation")
                   .Attr<int32_t>("band"));
