// A generator of a device, which draws with one of the CPU.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include "machine.h"

namespace rehearsal {

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator of_cpu = at::detail::createCPUGenerator();

  explicit DeviceGenerator(DeviceIndex index)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override { of_cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return of_cpu.current_seed(); }
  uint64_t seed() override { return of_cpu.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { of_cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return of_cpu.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->of_cpu = of_cpu.clone();
    return copy;
  }
};

inline at::Generator new_generator(DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(index < 0 ? current_device : index);
}

// The generator of a device that draws where a call names none.
inline const at::Generator& default_generator(DeviceIndex index) {
  static auto* of_devices = new std::array<at::Generator, kMaxGpus>();
  at::Generator& generator = (*of_devices)[index < 0 ? current_device : index];
  if (!generator.defined()) generator = new_generator(index);
  return generator;
}

inline const at::Generator& cpu_generator_of(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->of_cpu;
}

}  // namespace rehearsal
