#include "ops/matmul/wgmma_launch.cuh"

namespace jaxops::matmul {

template <>
cudaError_t LaunchWgmma<__half, __half>(cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  return Launch16Bit<__half>(stream, p, plan);
}

}  // namespace jaxops::matmul
