// ffi/core/async_copy.cuh, emulated.
#ifndef JAXOPS_CORE_ASYNC_COPY_CUH_
#define JAXOPS_CORE_ASYNC_COPY_CUH_

#include "emulator.h"

namespace jaxops {

template <int kBytes>
void CopyAsync(uint32_t target, const void* source, int inside) {
  emulator::BeginCopy(target, source, kBytes, inside);
}
using emulator::CommitCopies;
template <int kPending>
void WaitCopies() {
  emulator::WaitCopies(kPending);
}

}  // namespace jaxops

#endif  // JAXOPS_CORE_ASYNC_COPY_CUH_
