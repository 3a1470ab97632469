#include "ops/softmax/softmax.cuh"

namespace jaxops {

JAXOPS_LOGITS_KERNELS(, Softmax, __nv_bfloat16);

}  // namespace jaxops
