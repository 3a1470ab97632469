#include "ops/matmul/wgmma_16bit.cuh"

namespace jaxops::matmul {

template cudaError_t LaunchWgmma<__nv_bfloat16, __nv_bfloat16>(cudaStream_t, const Problem&, const WgmmaPlan&);

}  // namespace jaxops::matmul
