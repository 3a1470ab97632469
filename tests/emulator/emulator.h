// Lets the host's compiler read the CUDA sources, and the host run their kernels: included before each source.
//
// A block is a thread of the operating system, and each CUDA thread in it is a fiber (a thread that the program itself
// schedules); therefore `__shared__` means thread_local. Fibers change only when they wait for each other, in the order
// of their numbers. Races that need another order do not show; make sanitize-gpu finds them.
//
// If the hardware copies asynchronously, the emulator copies as late as the kernel allows, and poisons the targets as
// early as the kernel allows. Dynamic shared memory is poisoned before a block runs, and the bytes behind it are
// checked afterwards. Static shared memory keeps the values that the last block on its thread left.
//
// JAXOPS_EMULATED_CAPABILITY is the GPU's capability, 90 by default. JAXOPS_EMULATED_CLUSTER is the most blocks that a
// cluster may have.
#ifndef JAXOPS_TESTS_EMULATOR_EMULATOR_H_
#define JAXOPS_TESTS_EMULATOR_EMULATOR_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>

#include "xla/ffi/api/ffi.h"

#undef __shared__
#undef __launch_bounds__
#undef __maxnreg__
#undef __noinline__
#define __shared__ thread_local
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __noinline__ __attribute__((noinline))

namespace emulator {

void SyncBlock();
// The value that the warp's lane `source` gives.
uint64_t Exchange(uint64_t value, int source);

// cp.async and its groups.
void BeginCopy(uint32_t target, const void* source, int bytes, int inside);
void CommitCopies();
void WaitCopies(int pending);

// The block's dynamic shared memory.
char* Shared();

uint32_t ClusterRank();
void ClusterArrive();
void ClusterWait();
void InitByteBarrier(uint64_t* barrier);
void ExpectBytes(uint64_t* barrier, int bytes);
void WaitForBytes(uint64_t* barrier, uint32_t parity);
void SendToBlock(const void* value, int bytes, void* target, uint64_t* barrier, uint32_t rank);

void RunGrid(const cudaLaunchConfig_t& config, const std::function<void()>& thread);

template <class... Parameters, class... Arguments>
cudaError_t Launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), const Arguments&... arguments) {
  RunGrid(*config, [&] { kernel(arguments...); });
  return cudaSuccess;
}

template <class T>
T Shuffle(T value, int source) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = Exchange(bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulator

// The parts of the runtime that launches ask for: a device with few multiprocessors, so that blocks have many rows.
template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <class... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Parameters...)) {
  *attributes = {};
  attributes->sharedSizeBytes = 0;
  const char* const capability = std::getenv("JAXOPS_EMULATED_CAPABILITY");
  attributes->ptxVersion = capability ? std::atoi(capability) : 90;
  return cudaSuccess;
}
template <class... Parameters>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void (*)(Parameters...), int, size_t) {
  *count = 1;
  return cudaSuccess;
}
template <class... Parameters>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, void (*)(Parameters...), const cudaLaunchConfig_t* config) {
  const char* const most = std::getenv("JAXOPS_EMULATED_CLUSTER");
  *count = !most || static_cast<int>(config->attrs[0].val.clusterDim.x) <= std::atoi(most);
  return cudaSuccess;
}

extern thread_local uint3 threadIdx, blockIdx;
extern thread_local dim3 gridDim, blockDim;
#define cudaLaunchKernelEx ::emulator::Launch
#define __syncthreads ::emulator::SyncBlock

template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return emulator::Shuffle(value, source);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  return emulator::Shuffle(value, static_cast<int>(threadIdx.x % 32) ^ distance);
}
inline void __syncwarp() { emulator::Exchange(0, static_cast<int>(threadIdx.x % 32)); }
template <class T>
T __ldg(const T* source) {
  return *source;
}
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const char*>(pointer) - emulator::Shared();
}
inline void* __cvta_shared_to_generic(size_t address) { return emulator::Shared() + address; }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float __log2f(float x) { return std::log2(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
template <class T, class U>
auto min(T a, U b) {
  return a < b ? a : b;
}
template <class T, class U>
auto max(T a, U b) {
  return a > b ? a : b;
}

// Handlers run as soon as they are called: their stream is null.
template <>
struct xla::ffi::CtxDecoding<xla::ffi::PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return nullptr;
  }
};

#endif  // JAXOPS_TESTS_EMULATOR_EMULATOR_H_
