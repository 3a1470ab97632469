#include "ops/log_softmax/log_softmax.cuh"

namespace jaxops {

JAXOPS_LOGITS_KERNELS(, LogSoftmax, __nv_bfloat16);

}  // namespace jaxops
