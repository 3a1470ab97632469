#include "ops/matmul/wgmma_launch.cuh"

namespace jaxops::matmul {
namespace {

using FastTiles =
    Types<WgmmaTile<64, 128, 1, 8>, WgmmaTile<128, 128, 2, 6, Schedule::kPingPong>, WgmmaTile<128, 256, 2, 4>>;
// Promoted sums take twice the registers.
using PromotedTiles = Types<WgmmaTile<64, 128, 1, 8>, WgmmaTile<128, 128, 2, 6>, WgmmaTile<128, 192, 2, 4>>;

}  // namespace

// The tensor cores keep sums of 8-bit products to 14 bits: long sums are promoted, or fast.
template <class T, class V>
cudaError_t LaunchWgmma(cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  constexpr Major kDepth = Major::kDepth;
  if (plan.in_parts || plan.lhs.transposed || !plan.rhs.transposed) return cudaErrorNotSupported;
  if (plan.promote) return LaunchPlanned<Product<T, V, kDepth, kDepth, true>>(PromotedTiles{}, stream, p, plan);
  return LaunchPlanned<Product<T, V, kDepth, kDepth>>(FastTiles{}, stream, p, plan);
}

using hopper::E4M3;
using hopper::E5M2;
template cudaError_t LaunchWgmma<E4M3, E4M3>(cudaStream_t, const Problem&, const WgmmaPlan&);
template cudaError_t LaunchWgmma<E4M3, E5M2>(cudaStream_t, const Problem&, const WgmmaPlan&);
template cudaError_t LaunchWgmma<E5M2, E4M3>(cudaStream_t, const Problem&, const WgmmaPlan&);
template cudaError_t LaunchWgmma<E5M2, E5M2>(cudaStream_t, const Problem&, const WgmmaPlan&);

}  // namespace jaxops::matmul
