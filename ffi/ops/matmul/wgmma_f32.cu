#include "ops/matmul/wgmma_tiles.cuh"

namespace jaxops::matmul {

// TF32, or f32 in full precision as three products of TF32 parts: these are exact, but long sums of them in the tensor
// cores are not.
template <>
cudaError_t LaunchWgmma<float, float>(cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  constexpr Major kDepth = Major::kDepth;
  if (plan.lhs.transposed || !plan.rhs.transposed) return cudaErrorNotSupported;
  if (plan.terms == 1 && plan.promote == 0)
    return LaunchPlanned<Product<float, float, kDepth, kDepth>>(WgmmaTiles{}, stream, p, plan);
  if (plan.terms == 1 || plan.promote == 0) return cudaErrorNotSupported;
  return LaunchPlanned<Product<float, float, kDepth, kDepth, 3, true>>(PromotedTiles{}, stream, p, plan);
}

}  // namespace jaxops::matmul
