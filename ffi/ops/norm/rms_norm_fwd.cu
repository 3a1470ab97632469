#include "ops/norm/norm.cuh"

JAXOPS_NORM_FORWARD(rms_norm, false);
