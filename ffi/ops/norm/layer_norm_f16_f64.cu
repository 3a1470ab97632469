#include "ops/norm/norm.cuh"

namespace jaxops::norm {

JAXOPS_NORM_KERNELS(, true, __half);
JAXOPS_NORM_KERNELS(, true, double);

}  // namespace jaxops::norm
