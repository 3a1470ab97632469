// The placement table, and the launch of a row kernel.
#ifndef JAXOPS_ROWS_LAUNCH_CUH_
#define JAXOPS_ROWS_LAUNCH_CUH_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "rows/row.cuh"

namespace jaxops::rows {

template <int kLanes, int kPacks>
using Held = Placement<false, kLanes, kPacks>;
template <int kLanes>
using Streamed = Placement<false, kLanes, 0>;
template <int kLanes, int kPacks>
using StridedHeld = Placement<true, kLanes, kPacks>;
template <int kLanes>
using StridedStreamed = Placement<true, kLanes, 0>;

// The first placement that holds the row is taken. A pack is 16 bytes of the widest dtype involved; a comment gives the
// columns of 16-bit elements that fit.
using RowPlacements = Types<Held<8, 1>,    //    64
                            Held<32, 1>,   //   256
                            Held<32, 2>,   //   512
                            Held<32, 4>,   //  1024
                            Held<64, 4>,   //  2048
                            Held<128, 4>,  //  4096
                            Held<256, 4>,  //  8192
                            Held<512, 4>,  // 16384
                            Held<512, 8>,  // 32768
                            Streamed<1024>>;
// Fewer for results of another dtype than the input's, and for f64: rare, and each placement costs build time.
using MixedRowPlacements = Types<Held<32, 1>, Held<32, 4>, Held<128, 4>, Held<512, 4>, Streamed<1024>>;
using WideRowPlacements = Types<Held<32, 2>, Streamed<256>>;
// Rows along another axis than the last: one element a pack.
using StridedPlacements = Types<StridedHeld<8, 16>,   //  128
                                StridedHeld<32, 32>,  // 1024
                                StridedStreamed<32>>;
using WideStridedPlacements = Types<StridedHeld<8, 8>, StridedStreamed<16>>;

// Elements a pack: 16 bytes of the wider dtype.
template <class T, class U>
inline constexpr int kPack = 16 / std::max(sizeof(T), sizeof(U));

template <class P, int kV, bool kAligned, class A, class Op>
__global__ void __launch_bounds__(P::kThreads) RowKernel(const Op op, const Geometry shape) {
  Row<P, kV, kAligned, A> row(shape);
  row.MoveTo(int64_t{blockIdx.x} * P::kRows + row.Team(), shape.rows);
  op(row);
}

template <class P, int kV, bool kAligned, class A, class Op>
cudaError_t LaunchPlacement(cudaStream_t stream, const Op& op, const RowShape& shape) {
  const int64_t blocks = (shape.total_rows() + P::kRows - 1) / P::kRows;
  if (blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(P::kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, RowKernel<P, kV, kAligned, A, Op>, op, Geometry(shape));
}

template <class Placements, int kV, bool kAligned, class A, class Op>
cudaError_t LaunchAligned(cudaStream_t stream, const Op& op, const RowShape& shape) {
  const int64_t packs = (shape.columns + (kAligned ? 0 : kV - 1) + kV - 1) / kV;
  return First(
      Placements{}, cudaErrorInvalidValue,
      [=]<class P> { return P::kPacks == 0 || packs <= int64_t{P::kLanes} * P::kPacks; },
      [&]<class P> { return LaunchPlacement<P, kV, kAligned, A>(stream, op, shape); });
}

// Runs op(row) for every row of tensors of the dtypes T and U.
template <class T, class U, class Op>
cudaError_t LaunchRows(cudaStream_t stream, const Op& op, const RowShape& shape) {
  using A = Accumulator<T>;
  constexpr int kV = kPack<T, U>;
  if (shape.size() == 0) return cudaSuccess;
  if (shape.columns > std::numeric_limits<int>::max() - 1024 * kV) return cudaErrorInvalidValue;
  constexpr bool kWide = std::is_same_v<A, double>;
  using SameRows = std::conditional_t<std::is_same_v<T, U>, RowPlacements, MixedRowPlacements>;
  using Rows = std::conditional_t<kWide, WideRowPlacements, SameRows>;
  using Strided = std::conditional_t<kWide, WideStridedPlacements, StridedPlacements>;
  if (shape.inner > 1) return LaunchAligned<Strided, 1, true, A>(stream, op, shape);
  if (shape.columns % kV == 0) return LaunchAligned<Rows, kV, true, A>(stream, op, shape);
  return LaunchAligned<Rows, kV, false, A>(stream, op, shape);
}

// XLA aligns its buffers to 128 bytes or more; packs need 16.
inline Error CheckAlignment(const char* handler, std::initializer_list<AnyBuffer> buffers) {
  for (const AnyBuffer& buffer : buffers) {
    if (reinterpret_cast<uintptr_t>(buffer.untyped_data()) % 16)
      return Invalid(handler, "a buffer is not 16-byte aligned");
  }
  return Error::Success();
}

// Runs the op make.operator()<T, U>() over the rows of `first`, of dtype T, `second`, of dtype U, and a third tensor
// like one of them.
template <class Make>
Error LaunchMap(const char* handler, cudaStream_t stream, const AnyBuffer& first, const AnyBuffer& second,
                const AnyBuffer& third, const Make& make) {
  RowShape shape;
  JAXOPS_RETURN_IF_ERROR(ParseRows(handler, {first, second, third}, &shape));
  JAXOPS_RETURN_IF_ERROR(CheckAlignment(handler, {first, second, third}));
  return VisitPair(handler, first.element_type(), second.element_type(), [&]<class T, class U> {
    return FromCuda(handler, LaunchRows<T, U>(stream, make.template operator()<T, U>(), shape));
  });
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_LAUNCH_CUH_
