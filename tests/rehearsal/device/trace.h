// Tells torch's sanitizer what it must know to find accesses of streams that do not wait for each other: events, waits
// and memory, as torch's own CUDA does. What the kernels read and write the sanitizer sees by itself.
#pragma once

#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/PyInterpreter.h>

#include <cstdint>

namespace rehearsal {

inline uintptr_t number_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// Calls a method of the interpreter that listens, if one does: under TORCH_CUDA_SANITIZER.
template <typename Method, typename... Numbers>
void trace(Method method, Numbers... numbers) {
  if (const auto* interpreter = c10::impl::GPUTrace::get_trace()) {
    ((**interpreter).*method)(c10::DeviceType::CUDA, numbers...);
  }
}

using Traced = c10::impl::PyInterpreterVTable;

}  // namespace rehearsal
