#include "ops/norm/norm.cuh"

JAXOPS_NORM_BACKWARD(layer_norm, true);
