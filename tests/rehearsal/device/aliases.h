// Tensors of a device that look like tensors of the CPU, and the other way round, on the same memory.
#pragma once

#include <ATen/Tensor.h>
#include <c10/core/CPUAllocator.h>

#include "memory.h"

namespace rehearsal {

using at::Tensor;

inline Tensor with_storage(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// A tensor of the CPU on the memory of a tensor of a device.
inline Tensor as_cpu(const Tensor& of_device) {
  auto* held = new c10::Storage(of_device.storage());
  auto release = [](void* context) { delete static_cast<c10::Storage*>(context); };
  c10::DataPtr pointer(held->mutable_data(), held, release, Device(DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), held->nbytes(), std::move(pointer), c10::GetCPUAllocator(),
                       /*resizable=*/true);
  Tensor made = with_storage(std::move(storage), c10::DispatchKey::CPU, of_device);
  if (of_device.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// A tensor of a device that takes over the memory of a tensor of the CPU, and counts it.
inline Tensor as_cuda(const Tensor& of_cpu, Device device) {
  struct Held {
    c10::Storage storage;
    int64_t num_bytes;
    Device device;
  };
  auto* held = new Held{of_cpu.storage(), rounded(of_cpu.storage().nbytes()), device};
  count(device, held->num_bytes);
  auto release = [](void* context) {
    auto* given_back = static_cast<Held*>(context);
    count(given_back->device, -given_back->num_bytes);
    delete given_back;
  };
  c10::DataPtr pointer(held->storage.mutable_data(), held, release, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), held->storage.nbytes(), std::move(pointer), &device_allocator,
                       /*resizable=*/true);
  return with_storage(std::move(storage), c10::DispatchKey::CUDA, of_cpu);
}

}  // namespace rehearsal
