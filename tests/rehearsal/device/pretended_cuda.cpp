// A CUDA device that is none, for a build of torch without CUDA: its memory is that of the host, its kernels are those
// of the CPU. Tensors say that they are on `cuda`, and mixing devices is an error. Nothing happens when this is loaded:
// no thread is started, and CUDA_VISIBLE_DEVICES is read when the device is first used.
#include <torch/library.h>

#include "fallback.h"
#include "guard.h"
#include "hooks.h"
#include "operators.h"

namespace rehearsal {

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)

const bool has_allocator = [] {
  c10::SetAllocator(DeviceType::CUDA, &device_allocator);
  return true;
}();

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("set_.source_Storage_storage_offset", &set_to_part);
  library.impl("set_.source_Storage", &set_to_whole);
  library.impl("record_stream", &record_stream);
  library.impl("_fused_sdp_choice", &choose_attention);
}

// What tests/rehearsal/install.py makes torch.cuda of.
TORCH_LIBRARY(rehearsal, library) {
  library.def("initialise() -> ()", [] { initialise(); });
  library.def("is_in_bad_fork() -> bool", [] { return is_in_bad_fork(); });
  library.def("visible_gpus() -> int[]", [] {
    const std::vector<int> gpus = visible_gpus();
    return std::vector<int64_t>(gpus.begin(), gpus.end());
  });
  library.def("uuid(int gpu) -> str", [](int64_t gpu) { return uuid_of(static_cast<int>(gpu)); });
  library.def("current_device() -> int", [] { return static_cast<int64_t>(current_device); });
  library.def("set_device(int index) -> ()", [](int64_t index) {
    initialise();
    check_index(index);
    set_current_device(static_cast<DeviceIndex>(index));
  });
  library.def("default_generator(int index) -> Generator?",
              [](int64_t index) { return default_generator(static_cast<DeviceIndex>(index)); });
  library.def("synchronize() -> ()", [] { Guard().synchronizeDevice(current_device); });
  library.def("bytes_of_gpu() -> int", [] { return bytes_of_gpu(); });
  library.def("taken(int index) -> int[]",
              [](int64_t index) { return std::vector<int64_t>{taken.at(index).now, taken.at(index).peak}; });
  library.def("reset_peak(int index) -> ()", [](int64_t index) { taken.at(index).peak = taken.at(index).now.load(); });
  library.def("as_cpu(Tensor tensor) -> Tensor", [](const Tensor& tensor) { return as_cpu(tensor); });
  library.def("resize_storage(Tensor tensor, int num_bytes) -> ()", &resize_storage);
}

}  // namespace rehearsal

// Sets who is told when the host waits; nobody by default.
extern "C" void rehearsal_listen(rehearsal::Listener listens) { rehearsal::listener = listens; }
