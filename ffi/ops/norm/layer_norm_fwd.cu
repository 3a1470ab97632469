#include "ops/norm/norm.cuh"

JAXOPS_NORM_FORWARD(layer_norm, true);
