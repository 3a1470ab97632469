// The one way in which kernels are launched.
#ifndef JAXOPS_CORE_LAUNCH_CUH_
#define JAXOPS_CORE_LAUNCH_CUH_

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>

#include "core/handler.h"

namespace jaxops {

// Whether vectors and the copy engine can take what begins there. Null is aligned.
inline bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

struct Grid {
  int64_t blocks;
  int threads;
  int cluster = 1;          // blocks a cluster; more than 8 are allowed where the device can
  size_t shared_bytes = 0;  // dynamic shared memory
};

// Kernels with up to 48 KiB of shared memory need no opt-in; of that up to 32 KiB may be static.
inline bool NeedsOptIn(const Grid& grid) { return grid.shared_bytes > 16 << 10; }
// The opt-in is a property of the kernel, not of the launch: who needs one holds this lock until it has launched,
// because another thread could set a smaller limit for the same kernel.
class OptInLock {
 public:
  explicit OptInLock(const Grid& grid) : lock_(mutex_, std::defer_lock) {
    if (NeedsOptIn(grid)) lock_.lock();
  }

 private:
  static inline std::mutex mutex_;
  std::unique_lock<std::mutex> lock_;
};

// What a kernel needs before it is launched on a grid, or asked about it.
template <class... Parameters>
cudaError_t Prepare(void (*kernel)(Parameters...), const Grid& grid) {
  cudaError_t status = cudaSuccess;
  if (NeedsOptIn(grid)) {
    status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes));
  }
  if (status == cudaSuccess && grid.cluster > 8) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  return status;
}

// The launch of a grid; it points to `attribute`.
inline cudaLaunchConfig_t Configuration(const Grid& grid, cudaStream_t stream, cudaLaunchAttribute* attribute) {
  *attribute = {};
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = grid.cluster > 1 ? 1 : 0;
  return config;
}

// Launches a kernel on (parameters of the kernel); nothing where there are no blocks. Host work only: safe while a
// stream is captured.
template <class... Parameters, class... Arguments>
cudaError_t Launch(cudaStream_t stream, void (*kernel)(Parameters...), const Grid& grid,
                   const Arguments&... arguments) {
  if (grid.blocks == 0) return cudaSuccess;
  if (grid.blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  const OptInLock lock(grid);
  if (const cudaError_t status = Prepare(kernel, grid); status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = Configuration(grid, stream, &attribute);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// A number of each device, asked for once; 0, that it is not known, is asked for again.
class PerDevice {
 public:
  // ask(): the current device's.
  template <class Ask>
  int Get(const Ask& ask) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 0;
    if (device >= static_cast<int>(values_.size())) return ask();
    int value = values_[device].load(std::memory_order_relaxed);
    if (value == 0) values_[device].store(value = ask(), std::memory_order_relaxed);
    return value;
  }

 private:
  std::array<std::atomic<int>, 64> values_ = {};
};

// The multiprocessors of the current device.
inline cudaError_t CountMultiprocessors(int* count) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  return status == cudaSuccess ? cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device) : status;
}

// How many clusters of a kernel the current device runs at once; 0 if that is not known.
template <class... Parameters>
int ResidentClusters(void (*kernel)(Parameters...), Grid grid) {
  int count = 0, multiprocessors = 0;
  const OptInLock lock(grid);
  if (Prepare(kernel, grid) != cudaSuccess) return 0;
  if (grid.cluster > 1) {
    grid.blocks = grid.cluster;
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = Configuration(grid, nullptr, &attribute);
    return cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess ? count : 0;
  }
  if (CountMultiprocessors(&multiprocessors) != cudaSuccess ||
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, grid.threads, grid.shared_bytes) != cudaSuccess) {
    return 0;
  }
  return count * multiprocessors;
}

// The dynamic shared memory that a block may have on the current device beside up to 16 KiB of static shared memory.
inline int MostDynamicShared() {
  int device = 0, most = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess;
  return known ? most - (16 << 10) : 0;
}

template <int = 0>
__global__ void CompiledKernel() {}

// The compute capability of the code that the current device runs, as __CUDA_ARCH__ / 10. It is lower than the device's
// own where that runs code compiled for an older one; 0 if it is not known.
inline int CompiledCapability() {
  static PerDevice capability;
  return capability.Get([] {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, CompiledKernel<>) == cudaSuccess ? attributes.ptxVersion : 0;
  });
}
inline constexpr int kHopper = 90;  // the first with clusters, and the only one with wgmma

}  // namespace jaxops

#endif  // JAXOPS_CORE_LAUNCH_CUH_
