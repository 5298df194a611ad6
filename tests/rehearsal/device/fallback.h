// Runs any operator of the device with its kernel of the CPU, on the same memory, and refuses what a device refuses.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <unordered_set>

#include "aliases.h"
#include "generator.h"

namespace rehearsal {

using c10::IValue;

// Operators whose result the host must know before it can go on.
inline const std::unordered_set<std::string> kAskTheDevice = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::equal",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
    "aten::bincount",
};
// Operators that take a tensor apart by another one, which may lie on the CPU: the device then copies it.
inline const std::unordered_set<std::string> kIndex = {"aten::index",         "aten::index_put",
                                                       "aten::index_put_",    "aten::_index_put_impl_",
                                                       "aten::_unsafe_index", "aten::_unsafe_index_put"};

// One call of an operator with tensors of a device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op),
        stack_(stack),
        num_arguments_(op.schema().arguments().size()),
        num_results_(op.schema().returns().size()) {}

  void run() {
    take_arguments();
    check_devices();
    report_waits();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(stack_);
    }
    update_arguments();
    give_results();
  }

 private:
  // Replaces every tensor of a device by one of the CPU, and devices and generators as well.
  void take_arguments() {
    const size_t first = stack_->size() - num_arguments_;
    for (size_t i = 0; i < num_arguments_; i++) {
      IValue& value = (*stack_)[first + i];
      if (value.isTensor()) {
        value = taken(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(taken(tensor));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorList().vec())
          list.push_back(tensor ? std::optional(taken(*tensor)) : std::nullopt);
        value = list;
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        if (!device_) device_ = with_index(value.toDevice());
        value = Device(DeviceType::CPU);
      }
    }
    // Last: by now the device is known on which a call without a generator draws.
    for (size_t i = 0; i < num_arguments_; i++) take_generator(op_.schema().arguments()[i], (*stack_)[first + i]);
  }

  Tensor taken(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (tensor.is_cpu()) on_cpu_.push_back(tensor);
      if (pairs_.empty()) is_first_on_cpu_ = tensor.is_cpu();
      return tensor;
    }
    if (device_ && tensor.device() != *device_) other_device_ = tensor.device();
    if (!device_) device_ = tensor.device();
    pairs_.emplace_back(tensor, as_cpu(tensor));
    return pairs_.back().second;
  }

  void take_generator(const c10::Argument& argument, IValue& value) {
    if (argument.type()->str().rfind("Generator", 0) != 0) return;
    if (value.isNone()) {
      value = cpu_generator_of(default_generator(device().index()));
      return;
    }
    const at::Generator generator = value.toGenerator();
    TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                generator.device().type(), "' (", name(), ")");
    value = cpu_generator_of(generator);
  }

  // Refuses tensors of several devices; a single number may lie on the CPU, and so may indices.
  void check_devices() {
    if (other_device_) refuse(*device_, *other_device_);
    const bool is_index = kIndex.count(op_.schema().name());
    if (is_index && is_first_on_cpu_) refuse(Device(DeviceType::CPU), *device_);
    for (const Tensor& tensor : on_cpu_)
      if (device_ && tensor.dim() > 0 && !(is_index && is_index_type(tensor))) refuse(*device_, tensor.device());
  }

  static bool is_index_type(const Tensor& tensor) {
    return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
  }

  void refuse(Device one, Device other) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
                other, "! (", name(), ")");
  }

  void report_waits() {
    const std::string& operator_name = op_.schema().name();
    if (kAskTheDevice.count(operator_name)) host_waits(operator_name.c_str());
    if (operator_name == "aten::repeat_interleave" && (*stack_).back().isNone()) host_waits(operator_name.c_str());
    if (operator_name == "aten::where" && !on_cpu_.empty()) host_waits("copy a number to the device");
    if (!kIndex.count(operator_name)) return;
    if (std::any_of(on_cpu_.begin(), on_cpu_.end(), [](const Tensor& tensor) { return tensor.dim() > 0; }))
      host_waits("copy indices to the device");
    for (size_t i = 1; i < pairs_.size(); i++)
      if (pairs_[i].first.scalar_type() == at::kBool && pairs_[0].first.scalar_type() != at::kBool)
        host_waits("index with a mask");
  }

  // An argument that was given other memory or another shape, as by out=, keeps it.
  void update_arguments() {
    for (auto& [of_device, of_cpu] : pairs_) {
      c10::TensorImpl* impl = of_device.unsafeGetTensorImpl();
      if (of_cpu.storage().data() != of_device.storage().data())
        impl->set_storage_keep_dtype(as_cuda(of_cpu, device()).storage());
      const bool is_same = of_cpu.sizes() == of_device.sizes() && of_cpu.strides() == of_device.strides() &&
                           of_cpu.storage_offset() == of_device.storage_offset();
      if (!is_same) impl->set_sizes_and_strides(of_cpu.sizes(), of_cpu.strides(), of_cpu.storage_offset());
    }
  }

  void give_results() {
    const size_t first = stack_->size() - num_results_;
    for (size_t i = 0; i < num_results_; i++) {
      IValue& value = (*stack_)[first + i];
      if (value.isTensor()) {
        value = given(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(given(tensor));
        value = list;
      }
    }
  }

  // A result is an argument, a view of an argument, or new.
  Tensor given(const Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (auto& [of_device, of_cpu] : pairs_)
      if (of_cpu.is_same(result)) return of_device;
    for (auto& [of_device, of_cpu] : pairs_)
      if (of_cpu.storage().is_alias_of(result.storage()))
        return with_storage(c10::Storage(of_device.storage()), c10::DispatchKey::CUDA, result);
    return as_cuda(result, device());
  }

  Device device() const { return device_.value_or(Device(DeviceType::CUDA, current_device)); }

  std::string name() const {
    const auto& schema = op_.schema();
    return schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const size_t num_arguments_;
  const size_t num_results_;
  std::optional<Device> device_;
  std::optional<Device> other_device_;
  bool is_first_on_cpu_ = false;
  std::vector<Tensor> on_cpu_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // (of the device, the same memory as one of the CPU)
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace rehearsal
