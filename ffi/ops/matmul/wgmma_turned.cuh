// Products of f32 operands as TF32 whose rhs lies along n.
//
// From shared memory the tensor cores take f32 operands along k alone, from registers any. So the product is computed
// turned, out^T = rhs^T lhs^T: threads read rhs^T, and lhs lies along k. The two columns of rhs that a thread reads at
// a time, adjacent ones, are those of the result that it has sums of and stores.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_TURNED_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_TURNED_CUH_

#include <cstdint>

#include "core/shared_memory.cuh"
#include "hopper/wgmma.cuh"
#include "ops/matmul/epilogue.cuh"
#include "ops/matmul/wgmma_ring.cuh"
#include "ops/matmul/wgmma_store.cuh"
#include "ops/matmul/wgmma_work.cuh"

namespace jaxops::matmul {

// A thread's part of a k tile of rhs, 64 columns of a warpgroup, as hopper::MultiplyAddFromRegisters takes it: of two
// adjacent columns the rows 8 i + t and 8 i + t + 4, t = thread % 4.
class TurnedFragments {
 public:
  // The first of the two, among the warpgroup's columns. Two warps share a box of 32; a thread reads one half of the 16
  // bytes with number Piece(). With these numbers and halves the swizzle leads all threads that read at the same time
  // to different banks.
  static __device__ int Column() { return Box() * 32 + Piece() * 4 + Half() * 2; }

  // rhs_tile: the warpgroup's columns.
  __device__ void Load(uint32_t rhs_tile) {
    const int row = threadIdx.x % 4;
    const uint32_t low = rhs_tile + (Box() * 32 + row) * hopper::kBoxRowBytes + (Piece() ^ row) * 16 + Half() * 8;
    const uint32_t high = (low ^ 64) + 4 * hopper::kBoxRowBytes;
#pragma unroll
    for (int step = 0; step < hopper::kSteps; ++step)
#pragma unroll
      for (int quad = 0; quad < 2; ++quad) {
        const uint2 pair = LoadShared<uint2>((quad ? high : low) + step * 8 * hopper::kBoxRowBytes);
        values_[step][2 * quad] = pair.x, values_[step][2 * quad + 1] = pair.y;
      }
  }

  // Begins the products with a k tile of lhs, all of its kRows rows.
  template <int kRows>
  __device__ void Multiply(uint32_t lhs_tile, float (&sums)[kRows / 2], bool add) const {
    const uint64_t lhs = hopper::Descriptor(lhs_tile);
    hopper::FenceRegisters();
#pragma unroll
    for (int step = 0; step < hopper::kSteps; ++step)
      hopper::MultiplyAddFromRegisters<kRows>(sums, values_[step], lhs + step * hopper::kStepBytes<Major::kDepth> / 16,
                                              step || add);
    hopper::CommitProducts();
  }

  // After hopper::WaitProducts.
  __device__ void Settle() { hopper::Settle(values_); }

 private:
  static __device__ int Warp() { return threadIdx.x % kWarpgroup / 32; }
  static __device__ int Group() { return threadIdx.x % 32 / 4; }
  static __device__ int Box() { return Warp() / 2; }
  static __device__ int Piece() { return Group() / 2 + Group() % 2 * 4; }
  static __device__ int Half() { return (Warp() ^ Group() / 2) % 2; }

  uint32_t values_[hopper::kSteps][4];
};

// A thread's way from sums of a tile to memory: of pairs of adjacent columns (2 i + h, h = column) in two adjacent
// rows, every 8 rows. As rows of rhs are aligned to 16 bytes, so are those of the result.
template <class P>
class TurnedStore {
 public:
  // Before the sums are ready: fetches the bias of the thread's columns, if it is the same for all rows. column: the
  // first of them.
  __device__ TurnedStore(const Problem& p, const WgmmaWork& work, int column)
      : p_(p), work_(work), row_(work.row + threadIdx.x % 4 * 2), column_(column) {
    if (p.scale) scale_ = static_cast<const float*>(p.scale)[p.batch.At(work.batch).scale];
    if (column < p.n && p.bias && p.bias_row_stride == 0) bias_ = make_float2(*Bias(0, 0), *Bias(0, 1));
  }

  template <int kSums>
  __device__ void Store(const float (&sums)[1][kSums]) const {
    if (column_ >= p_.n) return;
    const int64_t first = (int64_t{work_.slice} * p_.m + row_) * p_.n + column_;
    const bool same = p_.bias_row_stride == 0;  // the bias, for all rows
    if (!p_.preactivation && p_.activation == Activation::kNone && same) {
      // Without this sum ptxas would move all sums in each k tile, to and from the pairs of registers that are stored.
      StoreGroups<kSums>(p_.out, first, 0,
                         [&](int i) { return fmaf(sums[0][i], scale_, i % 4 < 2 ? bias_.x : bias_.y); });
      return;
    }
    constexpr int kAtOnce = kSums == 128 ? 8 : 16;  // measured: more code takes longer, less has less to do at a time
#pragma unroll 1
    for (int step = 0; step < kSums / kAtOnce; ++step) {
      float z[kAtOnce];
      SelectGroup<0, kSums / kAtOnce>(sums, step, z);
      const int group = step * kAtOnce / 4;
      if (same) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) z[i] = fmaf(z[i], scale_, i % 4 < 2 ? bias_.x : bias_.y);
      } else {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) z[i] = fmaf(z[i], scale_, *Bias((group + i / 4) * 8 + i % 2, i % 4 / 2));
      }
      if (p_.preactivation) StoreGroups<kAtOnce>(p_.preactivation, first, group, [&](int i) { return z[i]; });
      Activate<P::template kAccuracy<float>>(p_.activation, z);
      StoreGroups<kAtOnce>(p_.out, first, group, [&](int i) { return z[i]; });
    }
  }

 private:
  // That of a row and a column after the first ones.
  __device__ const float* Bias(int row, int column) const {
    return static_cast<const float*>(p_.bias) + p_.batch.At(work_.batch).bias +
           min(int64_t{row_ + row}, p_.m - 1) * p_.bias_row_stride + (column_ + column) * p_.bias_column_stride;
  }
  // kCount values, of groups of 8 rows from `group` on.
  template <int kCount, class Value>
  __device__ void StoreGroups(void* target, int64_t first, int group, const Value& value) const {
    float* const out = static_cast<float*>(target) + first + group * 8 * p_.n;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (row_ + (group + i) * 8 + j < p_.m)
          StoreVector(reinterpret_cast<float2*>(out + (i * 8 + j) * p_.n),
                      make_float2(value(4 * i + j), value(4 * i + 2 + j)));
  }

  const Problem& p_;
  const WgmmaWork& work_;
  const int row_, column_;
  float scale_ = 1;
  float2 bias_ = {};
};

template <class Tile, class P>
__device__ void MultiplyTurned(const WgmmaArguments& arguments, const Ring<Tile>& ring, int warpgroup) {
  constexpr int kRows = Tile::kRows, kColumns = 64;  // of a warpgroup
  static_assert(Tile::kColumns == Tile::kMultipliers * kColumns && !Tile::kPingPong);
  const WgmmaWorks<Tile, P> works(arguments);
  RingPlace<Tile> place;
  float sums[1][kRows / 2];
  TurnedFragments even, odd;
  const auto load = [&](TurnedFragments& fragments) {
    ring.Full(place.stage).Wait(place.parity);
    fragments.Load(ring.Rhs(place.stage) + warpgroup * kColumns * hopper::kBoxRowBytes);
  };
  const StageRelease<Tile> release(arguments, ring);
  works.ForEach([&](const WgmmaWork& work) {
    const int depth = work.last - work.first;
    const TurnedStore<P> store(arguments.problem, work, work.column + warpgroup * kColumns + TurnedFragments::Column());
    // The products of k tile i run while the next one's fragments are read.
    const auto multiply = [&](int i, TurnedFragments& own, TurnedFragments& next) {
      const int stage = place.stage;
      own.Multiply<kRows>(ring.Lhs(stage), sums[0], i > 0);
      place.Advance();
      if (i + 1 < depth) load(next);
      hopper::WaitProducts<0>();
      own.Settle();
      release(stage);
    };
    load(even);
    for (int i = 0; i < depth; i += 2) {
      multiply(i, even, odd);
      if (i + 1 < depth) multiply(i + 1, odd, even);
    }
    hopper::Settle(sums);
    if constexpr (Tile::kMostParts > 1) {
      if (arguments.summed() && !SumCluster(arguments, ring, warpgroup, sums)) return;
    }
    store.Store(sums);
  });
}

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_TURNED_CUH_
