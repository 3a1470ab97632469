// The tensor cores' kernel for 16-bit operands, which may lie along k, m or n.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_16BIT_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_16BIT_CUH_

#include "ops/matmul/wgmma_tiles.cuh"

namespace jaxops::matmul {

template <class T, class V>
cudaError_t LaunchWgmma(cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  constexpr Major kDepth = Major::kDepth, kSpace = Major::kSpace;
  const auto launch = [&]<Major kLhs, Major kRhs> {
    return LaunchPlanned<Product<T, V, kLhs, kRhs>>(WgmmaTiles{}, stream, p, plan);
  };
  if (plan.in_parts || plan.promote) return cudaErrorNotSupported;
  if (plan.lhs.transposed)
    return plan.rhs.transposed ? launch.template operator()<kSpace, kDepth>()
                               : launch.template operator()<kSpace, kSpace>();
  return plan.rhs.transposed ? launch.template operator()<kDepth, kDepth>()
                             : launch.template operator()<kDepth, kSpace>();
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_16BIT_CUH_
