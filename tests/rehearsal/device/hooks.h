// What torch asks of its CUDA part.
#pragma once

#include <ATen/detail/CUDAHooksInterface.h>

#include "generator.h"
#include "guard.h"
#include "memory.h"

namespace rehearsal {

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}

  void init() const override { initialise(); }
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return user == getpid(); }

  DeviceIndex deviceCount() const override { return num_devices(); }
  int getNumGPUs() const override { return num_devices(); }
  DeviceIndex current_device() const override { return rehearsal::current_device; }
  DeviceIndex getCurrentDevice() const override { return rehearsal::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { set_current_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex before = rehearsal::current_device;
    set_current_device(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  void deviceSynchronize(DeviceIndex index) const override { Guard().synchronizeDevice(index); }

  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, rehearsal::current_device); }

  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return new_generator(index); }
};

}  // namespace rehearsal
