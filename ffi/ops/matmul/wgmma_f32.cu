#include "ops/matmul/wgmma_launch.cuh"

namespace jaxops::matmul {
namespace {

using Tf32Tiles =
    Types<WgmmaTile<64, 64, 1, 12>, WgmmaTile<64, 192, 1, 6>, WgmmaTile<128, 128, 2, 6, Schedule::kPingPong>,
          WgmmaTile<128, 192, 2, 4, Schedule::kPingPong, 4>, WgmmaTile<128, 256, 2, 4>>;
template <int kRows, int kColumns, int kStages>
using TurnedTile = WgmmaTile<kRows, kColumns, kColumns / 64, kStages, Schedule::kCooperative, 0>;
using TurnedTiles = Types<TurnedTile<64, 64, 12>, TurnedTile<128, 64, 8>, TurnedTile<128, 128, 6>,
                          TurnedTile<192, 128, 5>, TurnedTile<256, 128, 4>>;
// Sums for operands in parts take three times the registers.
template <int kRows, int kColumns, int kMultipliers, int kStages>
using PartsTile = WgmmaTile<kRows, kColumns, kMultipliers, kStages, Schedule::kCooperative, 2, 2>;
using PartsTiles = Types<PartsTile<64, 128, 1, 4>, PartsTile<128, 128, 2, 3>>;

}  // namespace

// TF32, or f32 in full precision: the parts' products are exact, but their long sums in the tensor cores are not.
template <>
cudaError_t LaunchWgmma<float, float>(cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  constexpr Major kDepth = Major::kDepth, kSpace = Major::kSpace;
  if (plan.lhs.transposed || (plan.in_parts && !plan.rhs.transposed) || plan.promote) return cudaErrorNotSupported;
  if (plan.in_parts)
    return LaunchPlanned<Product<float, float, kDepth, kDepth, false, true>>(PartsTiles{}, stream, p, plan);
  if (plan.rhs.transposed) return LaunchPlanned<Product<float, float, kDepth, kDepth>>(Tf32Tiles{}, stream, p, plan);
  return LaunchPlanned<Product<float, float, kDepth, kSpace>>(TurnedTiles{}, stream, p, plan);
}

}  // namespace jaxops::matmul
