#include "ops/softmax/softmax.cuh"

namespace jaxops {

JAXOPS_LOGITS_KERNELS(, Softmax, __half);
JAXOPS_LOGITS_KERNELS(, Softmax, double);

}  // namespace jaxops
