// The base of every FFI handler: its device, its errors, and the macro that exports it.
#ifndef JAXOPS_CORE_HANDLER_H_
#define JAXOPS_CORE_HANDLER_H_

#include <algorithm>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>

#ifdef JAXOPS_CUDA
#include <cuda_runtime.h>
#endif

#include "xla/ffi/api/ffi.h"

#define JAXOPS_RETURN_IF_ERROR(expression) \
  if (::jaxops::Error error_ = (expression); error_.failure()) return error_

namespace jaxops {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using ffi::DataType;
using ffi::Error;
using BufferResult = ffi::Result<AnyBuffer>;

#ifdef JAXOPS_CUDA
using Device = cudaStream_t;
inline auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }
// Handlers enqueue the same device work for the same call: no allocation, no synchronisation, no host copies.
inline constexpr std::initializer_list<ffi::Traits> kTraits = {ffi::Traits::kCmdBufferCompatible};

inline Error FromCuda(const char* handler, cudaError_t status) {
  if (status == cudaSuccess) return Error::Success();
  return Error::Internal(std::string(handler) + ": " + cudaGetErrorString(status));
}
#else
using Device = ffi::ThreadPool;
inline auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }
inline constexpr std::initializer_list<ffi::Traits> kTraits = {};
#endif

inline Error Invalid(const char* handler, const std::string& what) {
  return Error::InvalidArgument(std::string(handler) + ": " + what);
}

// Refuses unusable buffers: more bytes than an int64 counts (ignoring empty axes, because strides are products too), a
// null pointer, or memory that is not aligned to the elements.
inline Error CheckBuffer(const char* handler, const AnyBuffer& buffer) {
  const DataType type = buffer.element_type();
  const uintptr_t alignment = type == DataType::F64                             ? 8
                              : type == DataType::F32 || type == DataType::S32  ? 4
                              : type == DataType::F16 || type == DataType::BF16 ? 2
                                                                                : 1;
  int64_t bytes = 16;  // the largest element's size
  bool fits = true, empty = false;
  for (const int64_t size : buffer.dimensions()) {
    fits = fits && size >= 0 && !__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes);
    empty |= size == 0;
  }
  if (!fits) return Invalid(handler, "an operand's or a result's sizes are negative or too large");
  if (!empty && !buffer.untyped_data()) return Invalid(handler, "an operand or a result has no memory");
  if (reinterpret_cast<uintptr_t>(buffer.untyped_data()) % alignment)
    return Invalid(handler, "an operand or a result is not aligned to its elements");
  return Error::Success();
}

// Whether vectors and the copy engine can take data that begins there. Null is aligned. XLA aligns its buffers, but it
// may hand over a slice of one, which begins anywhere.
inline bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Refuses an array that vectors or the copy engine cannot take.
inline Error CheckStart(const char* handler, const void* data) {
  if (IsAligned(data)) return Error::Success();
  return Invalid(handler,
                 "an array begins between multiples of 16 bytes, because XLA made it a part of a larger array; "
                 "jax.lax.optimization_barrier around it makes XLA copy it");
}

// No exception crosses the FFI: a standard-library exception (no memory) becomes an error status.
template <auto kHandler>
struct Guarded;
template <class... Args, Error (*kHandler)(Args...)>
struct Guarded<kHandler> {
  static Error Call(Args... args) {
    try {
      return kHandler(args...);
    } catch (const std::exception& error) {
      return Error(ffi::ErrorCode::kResourceExhausted, error.what());
    }
  }
};

// This half's handlers by name, complete once the module is loaded. jaxops/_kernel.py prefixes "jaxops." and appends
// the calling convention's version. Hidden, because each half has its own.
using Handlers = std::map<std::string_view, XLA_FFI_Error* (*)(XLA_FFI_CallFrame*)>;
[[gnu::visibility("hidden")]] inline Handlers& RegisteredHandlers() {
  static Handlers handlers;
  return handlers;
}

// Defines the FFI target `name` and registers it.
#define JAXOPS_HANDLER(name, function, ...)                                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, ::jaxops::Guarded<function>::Call, ::jaxops::Bind().__VA_ARGS__, \
                                ::jaxops::kTraits);                                                    \
  [[maybe_unused]] static const bool name##_is_registered = ::jaxops::RegisteredHandlers().emplace(#name, name).second

}  // namespace jaxops

#endif  // JAXOPS_CORE_HANDLER_H_
