// Queries that see no key: their result is the mean of all values, as from equal logits. The kernels for scores leave 0
// in these rows and -inf as their logsumexp; the kernels here look for such rows, and mostly find none.
#ifndef JAXOPS_OPS_ATTENTION_UNSEEN_CUH_
#define JAXOPS_OPS_ATTENTION_UNSEEN_CUH_

#include <cstdint>

#include "core/types.cuh"
#include "ops/attention/launch.cuh"
#include "ops/attention/masks.cuh"
#include "ops/attention/problem.h"

namespace jaxops::attention {

inline constexpr int kUnseenThreads = 256, kUnseenPack = 8;

// Sums over rows of `depth` columns, by a block. Each thread adds its rows in order, and then the threads' sums are
// added in order: the same bits in every run.
struct ColumnSums {
  int depth;
  float* sums;  // [kUnseenThreads, kUnseenPack] in shared memory; then the totals: [depth]
  float own[kUnseenPack] = {};

  __device__ ColumnSums(int depth, float* sums) : depth(depth), sums(sums) {}
  __device__ int packs() const { return depth / kUnseenPack; }
  __device__ int rows() const { return kUnseenThreads / packs(); }  // at once
  __device__ int row() const { return static_cast<int>(threadIdx.x) / packs(); }
  __device__ int column() const { return static_cast<int>(threadIdx.x) % packs() * kUnseenPack; }

  template <class T>
  __device__ void Add(const Pack<T, kUnseenPack>& pack) {
#pragma unroll
    for (int i = 0; i < kUnseenPack; ++i) own[i] += pack.template Widen<float>(i);
  }
  __device__ void Finish(float factor) {
#pragma unroll
    for (int i = 0; i < kUnseenPack; ++i) sums[threadIdx.x * kUnseenPack + i] = own[i];
    __syncthreads();
    float total = 0;
    if (static_cast<int>(threadIdx.x) < depth)
      for (int row = 0; row < rows(); ++row) total += sums[row * depth + threadIdx.x];
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < depth) sums[threadIdx.x] = total * factor;
    __syncthreads();
  }
};

// Whether a query within the lengths has seen nothing. lse: its head's.
inline __device__ bool IsUnseen(const float* lse, int query) { return lse[query] == -kInfinity; }

inline __device__ bool AnyUnseen(const float* lse, int queries) {
  bool found = false;
  for (int query = threadIdx.x; query < queries; query += kUnseenThreads) found |= IsUnseen(lse, query);
  return __syncthreads_or(found);
}

// Writes the mean to the results. Each block has a head.
template <class T>
__global__ void __launch_bounds__(kUnseenThreads) AverageForUnseen(const __grid_constant__ Problem p) {
  using Eight = Pack<T, kUnseenPack>;
  __shared__ float sums[kUnseenThreads * kUnseenPack];
  const int batch = blockIdx.x / p.heads, head = blockIdx.x % p.heads, queries = p.QueriesOf(batch);
  const float* const lse = p.lse + int64_t{blockIdx.x} * p.queries;
  if (!AnyUnseen(lse, queries)) return;
  ColumnSums mean(p.depth, sums);
  const int64_t stride = int64_t{p.key_heads} * p.head_stride();
  const T* const values = static_cast<const T*>(p.v) + int64_t{batch} * p.keys * stride +
                          int64_t{head / p.group()} * p.head_stride() + mean.column();
  if (mean.row() < mean.rows()) {
#pragma unroll 4
    for (int key = mean.row(); key < p.keys; key += mean.rows())
      mean.Add(*reinterpret_cast<const Eight*>(values + key * stride));
  }
  mean.Finish(1.0f / static_cast<float>(p.keys));
  if (mean.row() >= mean.rows()) return;
  const Eight rounded = ToPack<T, kUnseenPack>([&](int i) { return sums[mean.column() + i]; });
  const int64_t row = int64_t{p.heads} * p.depth;
  T* const out = static_cast<T*>(p.out) + int64_t{batch} * p.queries * row + int64_t{head} * p.depth + mean.column();
  for (int query = mean.row(); query < queries; query += mean.rows())
    if (IsUnseen(lse, query)) *reinterpret_cast<Eight*>(out + query * row) = rounded;
}

// Adds the cotangents of such results, divided by the number of keys, to the gradient of every value. Each block has
// one of dv's heads: all heads if they are taken apart, else the key heads.
template <class T, class U>
__global__ void __launch_bounds__(kUnseenThreads)
    SpreadFromUnseen(const __grid_constant__ Problem p, const float* all_lse, const T* dout, U* dv, int heads) {
  using Eight = Pack<T, kUnseenPack>;
  using Values = Pack<U, kUnseenPack>;
  __shared__ float sums[kUnseenThreads * kUnseenPack];
  const int batch = blockIdx.x / heads, head = blockIdx.x % heads, group = p.heads / heads;
  const int queries = p.QueriesOf(batch);
  const float* const lse = all_lse + (int64_t{batch} * p.heads + int64_t{head} * group) * p.queries;
  bool found = false;
  for (int i = 0; i < group; ++i) found |= AnyUnseen(lse + int64_t{i} * p.queries, queries);
  if (!found) return;
  ColumnSums total(p.depth, sums);
  const int64_t row = int64_t{p.heads} * p.depth;
  const bool takes_rows = total.row() < total.rows();
  for (int i = 0; i < group && takes_rows; ++i) {
    const T* const from =
        dout + int64_t{batch} * p.queries * row + int64_t{head * group + i} * p.depth + total.column();
    for (int query = total.row(); query < queries; query += total.rows())
      if (IsUnseen(lse + int64_t{i} * p.queries, query)) total.Add(*reinterpret_cast<const Eight*>(from + query * row));
  }
  total.Finish(1.0f / static_cast<float>(p.keys));
  if (!takes_rows) return;
  const int64_t stride = int64_t{heads} * p.head_stride();
  U* const to = dv + int64_t{batch} * p.keys * stride + int64_t{head} * p.head_stride() + total.column();
  for (int key = total.row(); key < p.keys; key += total.rows()) {
    Values* const place = reinterpret_cast<Values*>(to + key * stride);
    const Values before = *place;
    *place = ToPack<U, kUnseenPack>([&](int i) { return before.template Widen<float>(i) + sums[total.column() + i]; });
  }
}

template <class T>
cudaError_t LaunchAverage(Device stream, const Problem& p) {
  const Grid grid = {.blocks = int64_t{p.batches} * p.heads, .threads = kUnseenThreads};
  return Launch(stream, AverageForUnseen<T>, grid, p);
}
// heads: dv's heads; U: its dtype.
template <class T, class U>
cudaError_t LaunchSpread(Device stream, const Problem& p, const float* lse, const void* dout, void* dv, int heads) {
  const Grid grid = {.blocks = int64_t{p.batches} * heads, .threads = kUnseenThreads};
  return Launch(stream, SpreadFromUnseen<T, U>, grid, p, lse, static_cast<const T*>(dout), static_cast<U*>(dv), heads);
}

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_UNSEEN_CUH_
