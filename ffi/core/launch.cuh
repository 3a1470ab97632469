// The one way in which kernels are launched.
#ifndef JAXOPS_CORE_LAUNCH_CUH_
#define JAXOPS_CORE_LAUNCH_CUH_

#include <cstdint>
#include <limits>

#include "core/handler.h"

namespace jaxops {

struct Grid {
  int64_t blocks;
  int threads;
  int cluster = 1;          // blocks a cluster; more than 8 are allowed where the device can
  size_t shared_bytes = 0;  // dynamic shared memory
};

// Launches a kernel on (parameters of the kernel). Host work only: safe while a stream is captured.
template <class... Parameters, class... Arguments>
cudaError_t Launch(cudaStream_t stream, void (*kernel)(Parameters...), const Grid& grid,
                   const Arguments&... arguments) {
  if (grid.blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  // Up to 48 KiB together with the kernel's static shared memory need no leave.
  if (grid.shared_bytes > 16 << 10) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes));
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  if (grid.cluster > 8) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = grid.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Whether the current device has thread block clusters.
inline bool HasClusters() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

}  // namespace jaxops

#endif  // JAXOPS_CORE_LAUNCH_CUH_
