#include "ops/norm/norm.cuh"

namespace jaxops::norm {

JAXOPS_NORM_KERNELS(, false, float);

}  // namespace jaxops::norm
