// The Python face of one half of jaxops: compiled once as jaxops/_cpu and once, with JAXOPS_CUDA, as jaxops/_cuda.
#include <nanobind/nanobind.h>

#include "core/handler.h"

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
        for (const auto& [name, handler] : jaxops::RegisteredHandlers())
          targets[nb::str(name.data(), name.size())] = nb::capsule(reinterpret_cast<void*>(handler));
        return targets;
      },
      "Maps each kernel's name to the capsule of its FFI handler.");
  m.attr("jaxlib_headers") = JAXOPS_JAXLIB_HEADERS;
  m.attr("cuda_architectures") = JAXOPS_CUDA_ARCHITECTURES;
}
