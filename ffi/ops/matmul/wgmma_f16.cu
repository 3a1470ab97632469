#include "ops/matmul/wgmma_16bit.cuh"

namespace jaxops::matmul {

template cudaError_t LaunchWgmma<__half, __half>(cudaStream_t, const Problem&, const WgmmaPlan&);

}  // namespace jaxops::matmul
