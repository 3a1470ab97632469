#include "ops/norm/norm.cuh"

JAXOPS_NORM_HANDLERS(rms_norm, false);
