#include "ops/norm/norm.cuh"

JAXOPS_NORM_BACKWARD(rms_norm, false);
