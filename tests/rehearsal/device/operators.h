// The few operators that are no kernels: memory, and copies between host and device.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include "aliases.h"

namespace rehearsal {

using c10::SymInt;
using c10::SymIntArrayRef;
using OptionalType = std::optional<at::ScalarType>;
using OptionalDevice = std::optional<Device>;

inline c10::DeviceGuard guard_of(const OptionalDevice& device) {
  initialise();
  return c10::DeviceGuard(with_index(device.value_or(Device(DeviceType::CUDA))));
}

inline Tensor empty(SymIntArrayRef sizes, OptionalType dtype, std::optional<c10::Layout>, OptionalDevice device,
                    std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard = guard_of(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(SymIntArrayRef sizes, SymIntArrayRef strides, OptionalType dtype,
                            std::optional<c10::Layout>, OptionalDevice device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard = guard_of(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

// Says how the host waits for a copy from or to it. It goes on at once only if its memory is pinned, is copied as it
// is, and if it asked for that.
inline void report_copy(const Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_cuda() == from.is_cuda() || to.numel() == 0) return;
  const Tensor& of_host = to.is_cuda() ? from : to;
  const bool is_pinned = PinnedAllocator::is_pinned(of_host.storage().data());
  const bool as_it_is = to.dtype() == from.dtype() && to.is_contiguous() && from.is_contiguous();
  if (is_pinned && as_it_is && non_blocking) return;
  if (!to.is_cuda()) return host_waits("copy to the host");
  host_waits(is_pinned && as_it_is ? "copy to the device" : "copy to the device from pageable memory");
}

inline Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  report_copy(to, from, non_blocking);
  Tensor to_on_cpu = to.is_cuda() ? as_cpu(to) : to;
  const Tensor from_on_cpu = from.is_cuda() ? as_cpu(from) : from;
  at::AutoDispatchBelowADInplaceOrView below;
  to_on_cpu.copy_(from_on_cpu);
  return to;
}

inline Tensor& set_to_part(Tensor& tensor, c10::Storage storage, SymInt offset, SymIntArrayRef sizes,
                           SymIntArrayRef strides) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  return tensor;
}

inline Tensor& set_to_whole(Tensor& tensor, c10::Storage storage) {
  const std::array<int64_t, 1> sizes{static_cast<int64_t>(storage.nbytes()) / tensor.element_size()};
  const std::array<int64_t, 1> strides{1};
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(sizes, strides, 0);
  return tensor;
}

inline void record_stream(Tensor&, c10::Stream) {}

// Attention by its definition: scaled_dot_product_attention then asks for no kernel that only CUDA has.
inline int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                                std::optional<double>, bool) {
  return 0;
}

// Resizes the storage of a tensor, as FSDP does with what it has gathered.
inline void resize_storage(const Tensor& tensor, int64_t num_bytes) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (static_cast<size_t>(num_bytes) == storage->nbytes()) return;
  const c10::DeviceGuard guard = guard_of(tensor.device());
  c10::DataPtr memory = device_allocator.allocate(num_bytes);
  const size_t num_kept = std::min<size_t>(num_bytes, storage->nbytes());
  if (num_kept) std::memcpy(memory.get(), storage->data(), num_kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(num_bytes);
}

}  // namespace rehearsal
