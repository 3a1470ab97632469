// Copies of boxes of tensors between global and shared memory by the copy engine (TMA).
#ifndef JAXOPS_HOPPER_TENSOR_COPY_CUH_
#define JAXOPS_HOPPER_TENSOR_COPY_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/async_copy.cuh"
#include "hopper/barrier.cuh"

namespace jaxops::hopper {

// Every box row is this long: the width of the 128-byte swizzle, which XORs the number of a 16-byte piece with its
// row's (mod 8).
inline constexpr int kBoxRowBytes = 128;

// [slices, rows, columns] in memory, rows `stride` elements apart, copied in boxes of box_rows x 128 bytes; what lies
// beyond an edge is read as zeros and not written. The memory and `stride` must be aligned to 16 bytes.
struct TensorView {
  const void* data;
  CUtensorMapDataType type;
  int element_bytes;
  int64_t columns, rows, slices, stride;
  int box_rows;
};

inline cudaError_t Describe(const TensorView& view, CUtensorMap* map) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  // Found at run time: the module must load on machines without a driver.
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  if (!encode) return cudaErrorNotSupported;
  const auto u64 = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t sizes[3] = {u64(view.columns), u64(view.rows), u64(view.slices)};
  const cuuint64_t strides[2] = {u64(view.stride * view.element_bytes),
                                 u64(view.rows * view.stride * view.element_bytes)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(kBoxRowBytes / view.element_bytes),
                             static_cast<cuuint32_t>(view.box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  // The L2 cache fetches 256 bytes at a time where rows begin at such; elsewhere that only costs (TUNING.md).
  const CUtensorMapL2promotion promotion =
      strides[0] % 256 == 0 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE;
  const CUresult result =
      encode(map, view.type, 3, const_cast<void*>(view.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

__device__ inline void Prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Loads a box; its bytes count towards the barrier's. once: nothing else reads it, and it is the first to leave the L2
// cache; a policy for other boxes, too, would make every load slower.
__device__ inline void LoadBox(uint32_t target, const CUtensorMap& map, Barrier barrier, int column, int row, int slice,
                               bool once = false) {
  if (once) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
        "l"(&map), "r"(barrier.address), "r"(column), "r"(row), "r"(slice), "l"(kEvictFirst)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(target),
        "l"(&map), "r"(barrier.address), "r"(column), "r"(row), "r"(slice)
        : "memory");
  }
}
// The same for both blocks of a cluster of two: to the same place of each one's shared memory, where its bytes count
// towards that block's barrier.
__device__ inline void LoadBoxForPair(uint32_t target, const CUtensorMap& map, Barrier barrier, int column, int row,
                                      int slice) {
  constexpr uint16_t kBoth = 3;  // a bit for each rank
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
      "l"(&map), "r"(barrier.address), "r"(column), "r"(row), "r"(slice), "h"(kBoth)
      : "memory");
}
// Stores a box, as a group of its own.
__device__ inline void StoreBox(const CUtensorMap& map, uint32_t source, int column, int row, int slice) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\ncp.async.bulk.commit_group;" ::
          "l"(&map),
      "r"(source), "r"(column), "r"(row), "r"(slice)
      : "memory");
}
// Until all but kPending of this thread's stores have read their shared memory.
template <int kPending>
__device__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace jaxops::hopper

#endif  // JAXOPS_HOPPER_TENSOR_COPY_CUH_
