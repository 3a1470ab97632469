#include "ops/norm/norm.cuh"

namespace jaxops::norm {

JAXOPS_NORM_KERNELS(, true, float);

}  // namespace jaxops::norm
