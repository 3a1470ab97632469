#include "ops/norm/norm.cuh"

namespace jaxops::norm {

JAXOPS_NORM_KERNELS(, false, __nv_bfloat16);

}  // namespace jaxops::norm
