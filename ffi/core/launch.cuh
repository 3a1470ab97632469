// Launches kernels, and asks devices for their limits.
#ifndef JAXOPS_CORE_LAUNCH_CUH_
#define JAXOPS_CORE_LAUNCH_CUH_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>

#include "core/handler.h"

namespace jaxops {

struct Grid {
  int64_t blocks;
  int threads;
  int cluster = 1;          // blocks per cluster; more than 8 are allowed if the device can
  size_t shared_bytes = 0;  // dynamic shared memory
};

// Facts about kernels on devices, each asked for once: a table from keys to values that threads share without locks. If
// two keys want one place, the later one takes it, and the earlier one is asked for again.
class KernelCache {
 public:
  // ask() -> int from 0 to 2^16 - 2, or -1: not known, and asked for again.
  template <class Ask>
  int Get(const void* kernel, uint64_t detail, const Ask& ask) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return -1;
    uint64_t key = reinterpret_cast<uintptr_t>(kernel) * 0x9e3779b97f4a7c15u;
    for (const uint64_t more : {detail, static_cast<uint64_t>(device)})
      key = (key ^ (key >> 29) ^ more) * 0xbf58476d1ce4e5b9u;
    key |= 0xffff;
    std::atomic<uint64_t>& place = places_[(key >> 40) % places_.size()];
    const uint64_t found = place.load(std::memory_order_relaxed);
    if ((found | 0xffff) == key) return static_cast<int>(found & 0xffff);
    const int value = ask();
    if (value >= 0) place.store(key - 0xffff + std::min(value, 0xfffe), std::memory_order_relaxed);
    return value;
  }

 private:
  std::array<std::atomic<uint64_t>, 4096> places_ = {};
};
inline KernelCache prepared_kernels, resident_clusters;

// Prepares a kernel for a grid, once per device, before the kernel is launched or asked about: it may take the most
// dynamic shared memory, whatever a launch takes, and clusters with more than 8 blocks.
template <class... Parameters>
cudaError_t Prepare(void (*kernel)(Parameters...), const Grid& grid) {
  cudaError_t status = cudaSuccess;
  const bool large = grid.shared_bytes > 16 << 10;  // up to 48 KiB need no opt-in; up to 32 KiB of them may be static
  const bool wide = grid.cluster > 8;
  if (!large && !wide) return status;
  prepared_kernels.Get(reinterpret_cast<const void*>(kernel), large + 2 * wide, [&] {
    int device = 0, most = 0;
    cudaFuncAttributes attributes;
    if (large) {
      if ((status = cudaGetDevice(&device)) != cudaSuccess ||
          (status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) != cudaSuccess ||
          (status = cudaFuncGetAttributes(&attributes, kernel)) != cudaSuccess ||
          (status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         most - static_cast<int>(attributes.sharedSizeBytes))) != cudaSuccess) {
        return -1;
      }
    }
    if (wide) status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    return status == cudaSuccess ? 1 : -1;
  });
  return status;
}

// A grid's launch; it points to `attribute`.
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

// Launches a kernel with its parameters, or does nothing if there are no blocks. Host work only: safe while a stream is
// captured.
template <class... Parameters, class... Arguments>
cudaError_t Launch(cudaStream_t stream, void (*kernel)(Parameters...), const Grid& grid,
                   const Arguments&... arguments) {
  if (grid.blocks == 0) return cudaSuccess;
  if (grid.blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  if (const cudaError_t status = Prepare(kernel, grid); status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = Configuration(grid, stream, &attribute);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// A number for each device, asked for once. 0 means unknown and is asked for again.
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

// The current device's multiprocessors.
inline cudaError_t CountMultiprocessors(int* count) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  return status == cudaSuccess ? cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device) : status;
}

// How many of a kernel's clusters the current device runs at once; 0 if none, or if that is not known.
template <class... Parameters>
int ResidentClusters(void (*kernel)(Parameters...), Grid grid) {
  const uint64_t detail = (grid.shared_bytes << 20) + (static_cast<uint64_t>(grid.threads) << 8) + grid.cluster;
  const int found = resident_clusters.Get(reinterpret_cast<const void*>(kernel), detail, [&] {
    int count = 0, multiprocessors = 0;
    if (Prepare(kernel, grid) != cudaSuccess) return -1;
    if (grid.cluster > 1) {
      grid.blocks = grid.cluster;
      cudaLaunchAttribute attribute;
      const cudaLaunchConfig_t config = Configuration(grid, nullptr, &attribute);
      if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess) return count;
      cudaGetLastError();  // such a cluster cannot be launched here: this too is an answer
      return 0;
    }
    if (CountMultiprocessors(&multiprocessors) != cudaSuccess ||
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, grid.threads, grid.shared_bytes) != cudaSuccess) {
      return -1;
    }
    return count * multiprocessors;
  });
  return std::max(found, 0);
}

// Whether the current device runs any cluster in such a grid. A slice of a GPU, or a GPU with few neighbouring
// multiprocessors, may not fit a cluster with 16 blocks. Single blocks always fit.
template <class... Parameters>
bool ClustersFit(void (*kernel)(Parameters...), const Grid& grid) {
  return grid.cluster == 1 || ResidentClusters(kernel, grid) > 0;
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
// own if the device runs code compiled for an older one; 0 if it is not known.
inline int CompiledCapability() {
  static PerDevice capability;
  return capability.Get([] {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, CompiledKernel<>) == cudaSuccess ? attributes.ptxVersion : 0;
  });
}
inline constexpr int kHopper = 90;  // the first with clusters, and the only one with wgmma

// The most blocks in a cluster, by generation: only Hopper, and the data-centre GPUs that followed it, run more than 8.
// A slice of a GPU may run fewer, which ClustersFit tells.
inline int MostClusterBlocks() {
  const int capability = CompiledCapability();
  return capability < kHopper ? 1 : capability / 10 <= 10 ? 16 : 8;
}

}  // namespace jaxops

#endif  // JAXOPS_CORE_LAUNCH_CUH_
