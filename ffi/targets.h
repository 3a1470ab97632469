// The FFI targets, one word each: both halves of jaxops define and register them under these names, in this order.
// jaxops/_kernel.py prefixes "jaxops." and appends the version of the calling convention.
#ifndef JAXOPS_TARGETS_H_
#define JAXOPS_TARGETS_H_

// Kernels that run on the CPU and on CUDA devices.
#define JAXOPS_ROW_TARGETS(X) \
  X(softmax_fwd)              \
  X(softmax_bwd)              \
  X(log_softmax_fwd)          \
  X(log_softmax_bwd)          \
  X(layer_norm_fwd)           \
  X(layer_norm_bwd)           \
  X(rms_norm_fwd)             \
  X(rms_norm_bwd)
#define JAXOPS_LOSS_TARGETS(X) X(cross_entropy_fwd) X(cross_entropy_bwd) X(cross_entropy_fwd_bwd)

#ifdef JAXOPS_CUDA
#define JAXOPS_TARGETS(X) \
  JAXOPS_ROW_TARGETS(X)   \
  JAXOPS_LOSS_TARGETS(X)  \
  X(matmul) X(epilogue_bwd) X(attention_fwd) X(attention_bwd)
#elif defined(JAXOPS_EMULATED)  // The row kernels for CUDA, as the CPU half.
#define JAXOPS_TARGETS(X) JAXOPS_ROW_TARGETS(X)
#else  // The CPU half of matmul, its epilogue and attention is XLA's own.
#define JAXOPS_TARGETS(X) JAXOPS_ROW_TARGETS(X) JAXOPS_LOSS_TARGETS(X)
#endif

#endif  // JAXOPS_TARGETS_H_
