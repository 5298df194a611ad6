// The current device, streams and events. Everything runs at once, so a stream is a number and an event has happened.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "machine.h"
#include "trace.h"

namespace rehearsal {

using c10::Stream;

inline thread_local std::array<c10::StreamId, kMaxGpus> current_streams{};
inline std::atomic<c10::StreamId> last_stream{0};
inline std::atomic<int64_t> last_event{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }

  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }

  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getStream(Device device) const override { return stream(device, current_streams[with_index(device).index()]); }
  Stream getNewStream(Device device, int) const override { return stream(device, ++last_stream); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return stream(device, ++last_stream); }
  Stream exchangeStream(Stream next) const override {
    const Stream before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(++last_event);
    trace(&Traced::trace_gpu_event_creation, number_of(*event));
    trace(&Traced::trace_gpu_event_record, number_of(*event), static_cast<uintptr_t>(stream.id()));
  }
  void block(void* event, const Stream& stream) const override {
    trace(&Traced::trace_gpu_event_wait, number_of(event), static_cast<uintptr_t>(stream.id()));
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }

  void synchronizeEvent(void* event) const override {
    host_waits("synchronize an event");
    trace(&Traced::trace_gpu_event_synchronization, number_of(event));
  }
  void synchronizeStream(const Stream& stream) const override {
    host_waits("synchronize a stream");
    trace(&Traced::trace_gpu_stream_synchronization, static_cast<uintptr_t>(stream.id()));
  }
  void synchronizeDevice(const DeviceIndex) const override {
    host_waits("synchronize the device");
    trace(&Traced::trace_gpu_device_synchronization);
  }

 private:
  static Stream stream(Device device, c10::StreamId id) { return Stream(Stream::UNSAFE, with_index(device), id); }
};

}  // namespace rehearsal
