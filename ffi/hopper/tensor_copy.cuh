// The copy engine (TMA) copies tensor boxes between global and shared memory.
#ifndef JAXOPS_HOPPER_TENSOR_COPY_CUH_
#define JAXOPS_HOPPER_TENSOR_COPY_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/async_copy.cuh"
#include "hopper/barrier.cuh"

namespace jaxops::hopper {

// The length of every box row: the width of the 128-byte swizzle, which XORs a 16-byte piece's number with its row's
// (mod 8).
inline constexpr int kBoxRowBytes = 128;

// [slices, rows, columns] in memory, rows `stride` elements apart, copied in boxes of box_rows x 128 bytes; reads
// beyond an edge give zeros, writes there are dropped. The memory and `stride` must be aligned to 16 bytes.
struct TensorView {
  const void* data;
  CUtensorMapDataType type;
  int element_bytes;
  int64_t columns, rows, slices, stride;
  int box_rows;
};

// 16-bit elements [batches, rows, heads, columns], dense except that heads lie head_stride elements apart, copied in
// boxes: box_rows rows in one head by 128 bytes.
struct HeadsView {
  const void* data;
  CUtensorMapDataType type;
  int64_t batches, rows, heads, columns, head_stride;
  int box_rows;
};

// sizes, box: from the innermost axis on; strides: in bytes, for all other axes.
template <int kAxes>
cudaError_t Encode(CUtensorMap* map, CUtensorMapDataType type, const void* data, const int64_t (&sizes)[kAxes],
                   const int64_t (&strides)[kAxes - 1], const int (&box)[kAxes]) {
  using Function = decltype(&cuTensorMapEncodeTiled);
  // Found at run time: the module must load on machines without a driver.
  static const Function encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function)
                                                                         : nullptr;
  }();
  if (!encode) return cudaErrorNotSupported;
  cuuint64_t sizes_of_map[kAxes], strides_of_map[kAxes - 1];
  cuuint32_t box_of_map[kAxes], steps[kAxes];
  for (int axis = 0; axis < kAxes; ++axis) {
    sizes_of_map[axis] = static_cast<cuuint64_t>(sizes[axis]);
    box_of_map[axis] = static_cast<cuuint32_t>(box[axis]);
    steps[axis] = 1;
    if (axis > 0) strides_of_map[axis - 1] = static_cast<cuuint64_t>(strides[axis - 1]);
  }
  // The L2 cache fetches 256 bytes at a time if rows begin at multiples of 256; for other rows this only costs.
  const CUtensorMapL2promotion promotion =
      strides[0] % 256 == 0 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE;
  const CUresult result =
      encode(map, type, kAxes, const_cast<void*>(data), sizes_of_map, strides_of_map, box_of_map, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t Describe(const TensorView& view, CUtensorMap* map) {
  return Encode<3>(map, view.type, view.data, {view.columns, view.rows, view.slices},
                   {view.stride * view.element_bytes, view.rows * view.stride * view.element_bytes},
                   {kBoxRowBytes / view.element_bytes, view.box_rows, 1});
}
inline cudaError_t Describe(const HeadsView& view, CUtensorMap* map) {
  const int64_t head = view.head_stride * 2, row = view.heads * head;
  return Encode<4>(map, view.type, view.data, {view.columns, view.rows, view.heads, view.batches},
                   {row, head, view.rows * row}, {kBoxRowBytes / 2, view.box_rows, 1, 1});
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
// Loads a box from a HeadsView.
__device__ inline void LoadHeadBox(uint32_t target, const CUtensorMap& map, Barrier barrier, int column, int row,
                                   int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(target),
      "l"(&map), "r"(barrier.address), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// Brings a box into the L2 cache.
__device__ inline void PrefetchHeadBox(const CUtensorMap& map, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(column), "r"(row),
               "r"(head), "r"(batch)
               : "memory");
}
// LoadBox for both blocks in a cluster of two: to the same place in each one's shared memory, where its bytes count
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
// Stores a box, as a separate group.
__device__ inline void StoreBox(const CUtensorMap& map, uint32_t source, int column, int row, int slice) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\ncp.async.bulk.commit_group;" ::
          "l"(&map),
      "r"(source), "r"(column), "r"(row), "r"(slice)
      : "memory");
}
// Stores a box into a HeadsView, in the group that the next CommitStores closes.
__device__ inline void StoreHeadBox(const CUtensorMap& map, uint32_t source, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// Adjacent bytes: both places aligned to 16 bytes, `bytes` a multiple of 16.
__device__ inline void LoadBytes(uint32_t target, const void* source, int bytes, Barrier barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier.address)
               : "memory");
}
// Stored, or added to the floats there, in the group that the next CommitStores closes.
__device__ inline void StoreFloats(float* target, uint32_t source, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
               : "memory");
}
__device__ inline void AddFloats(float* target, uint32_t source, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target), "r"(source),
               "r"(bytes)
               : "memory");
}
__device__ inline void CommitStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all this thread's stores are in memory.
__device__ inline void WaitStores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders this thread's accesses to global and shared memory, and others' accesses that it has learned about, before
// later ones by the copy engine, and the other way round.
__device__ inline void FenceCopies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Waits until all except kPending of this thread's stores have read their shared memory.
template <int kPending>
__device__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace jaxops::hopper

#endif  // JAXOPS_HOPPER_TENSOR_COPY_CUH_
