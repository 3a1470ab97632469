#include "ops/matmul/wgmma_tiles.cuh"

namespace jaxops::matmul {

// TF32, or f32 in full precision: the products of its parts are exact, but long sums of them in the tensor cores are
// not.
template <>
cudaError_t LaunchWgmma<float, float>(cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  constexpr Major kDepth = Major::kDepth, kSpace = Major::kSpace;
  if (plan.lhs.transposed || (plan.in_parts && !plan.rhs.transposed) || plan.promote) return cudaErrorNotSupported;
  if (plan.in_parts)
    return LaunchPlanned<Product<float, float, kDepth, kDepth, false, true>>(PartsTiles{}, stream, p, plan);
  if (plan.rhs.transposed) return LaunchPlanned<Product<float, float, kDepth, kDepth>>(WgmmaTiles{}, stream, p, plan);
  return LaunchPlanned<Product<float, float, kDepth, kSpace>>(TurnedTiles{}, stream, p, plan);
}

}  // namespace jaxops::matmul
