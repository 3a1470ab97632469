#include "ops/norm/norm.cuh"

namespace jaxops::norm {

JAXOPS_NORM_KERNELS_ELSEWHERE(true);

}  // namespace jaxops::norm

JAXOPS_NORM_HANDLERS(layer_norm, true);
