#include "ops/log_softmax/log_softmax.cuh"

namespace jaxops {

JAXOPS_LOGITS_KERNELS(, LogSoftmax, float);

}  // namespace jaxops
