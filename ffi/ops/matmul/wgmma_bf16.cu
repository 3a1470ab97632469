#include "ops/matmul/wgmma_launch.cuh"

namespace jaxops::matmul {

template <>
cudaError_t LaunchWgmma<__nv_bfloat16, __nv_bfloat16>(cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  return Launch16Bit<__nv_bfloat16>(stream, p, plan);
}

}  // namespace jaxops::matmul
