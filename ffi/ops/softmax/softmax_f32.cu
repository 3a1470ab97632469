#include "ops/softmax/softmax.cuh"

namespace jaxops {

JAXOPS_LOGITS_KERNELS(, Softmax, float);

}  // namespace jaxops
