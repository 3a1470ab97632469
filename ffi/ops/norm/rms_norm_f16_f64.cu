#include "ops/norm/norm.cuh"

namespace jaxops::norm {

JAXOPS_NORM_KERNELS(, false, __half);
JAXOPS_NORM_KERNELS(, false, double);

}  // namespace jaxops::norm
