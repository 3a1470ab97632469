#include "ops/norm/norm.cuh"

JAXOPS_NORM_HANDLERS(layer_norm, true);
