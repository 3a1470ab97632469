// The Python face of one half of jaxops: compiled once as jaxops/_cpu and once, with JAXOPS_CUDA, as jaxops/_cuda.
#include <nanobind/nanobind.h>

#include "targets.h"
#include "xla/ffi/api/c_api.h"

#define JAXOPS_DECLARE(name) extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame*);
JAXOPS_TARGETS(JAXOPS_DECLARE)
#undef JAXOPS_DECLARE

namespace nb = nanobind;

#ifdef JAXOPS_CUDA
NB_MODULE(_cuda, m) {
#else
NB_MODULE(_cpu, m) {
#endif
  m.def(
      "targets",
      [] {
        nb::dict targets;
#define JAXOPS_CAPSULE(name) targets[#name] = nb::capsule(reinterpret_cast<void*>(name));
        JAXOPS_TARGETS(JAXOPS_CAPSULE)
#undef JAXOPS_CAPSULE
        return targets;
      },
      "Maps each kernel's name to the capsule of its FFI handler.");
  m.attr("jaxlib_headers") = JAXOPS_JAXLIB_HEADERS;
  m.attr("cuda_architectures") = JAXOPS_CUDA_ARCHITECTURES;
}
