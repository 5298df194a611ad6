// The GPUs of the pretended machine, which of them this process sees, and who waits for them.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace rehearsal {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr int kMaxGpus = 64;

// The number of GPUs of the machine: REHEARSAL_GPUS.
inline int gpus_of_machine() {
  const char* given = std::getenv("REHEARSAL_GPUS");
  return given ? std::min(std::atoi(given), kMaxGpus) : 1;
}

// The id of a GPU of the machine without its prefix "GPU-", as torch and NVML name it.
inline std::string uuid_of(int gpu) {
  std::ostringstream text;
  text << "00000000-0000-0000-0000-" << std::string(gpu < 10 ? 11 : 10, '0') << gpu;
  return text.str();
}

// Returns the GPU that an item of CUDA_VISIBLE_DEVICES names, by number or by the start of its id; -1 if there is none.
inline int gpu_named(const std::string& item) {
  for (int gpu = 0; gpu < gpus_of_machine(); gpu++) {
    const bool is_id = item.size() > 4 && ("GPU-" + uuid_of(gpu)).rfind(item, 0) == 0;
    if (is_id || item == std::to_string(gpu)) return gpu;
  }
  return -1;
}

// Reads CUDA_VISIBLE_DEVICES as CUDA does: an item that names no GPU hides itself and all that follow.
inline std::vector<int> read_visible_gpus() {
  std::vector<int> gpus;
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) {
    for (int gpu = 0; gpu < gpus_of_machine(); gpu++) gpus.push_back(gpu);
    return gpus;
  }
  std::istringstream items(visible);
  for (std::string item; std::getline(items, item, ',');) {
    const int gpu = gpu_named(item);
    if (gpu < 0) break;
    gpus.push_back(gpu);
  }
  return gpus;
}

// The process that has used the device, and the GPUs that it saw then: as with CUDA, later changes of the environment
// change nothing, and a fork of that process cannot use the device.
inline std::atomic<pid_t> user{0};
inline std::vector<int> gpus_of_user;

inline bool is_in_bad_fork() { return user != 0 && user != getpid(); }

inline void initialise() {
  TORCH_CHECK(!is_in_bad_fork(), "Cannot re-initialize CUDA in forked subprocess.");
  if (user != 0) return;
  gpus_of_user = read_visible_gpus();
  TORCH_CHECK(!gpus_of_user.empty(), "No CUDA GPUs are available");
  user = getpid();
}

inline std::vector<int> visible_gpus() { return user == getpid() ? gpus_of_user : read_visible_gpus(); }

inline DeviceIndex num_devices() {
  return static_cast<DeviceIndex>(user == getpid() ? gpus_of_user.size() : read_visible_gpus().size());
}

inline void check_index(int64_t index) {
  TORCH_CHECK(index >= 0 && index < num_devices(), "CUDA error: invalid device ordinal: ", index, " of ",
              static_cast<int>(num_devices()));
}

// The device on which this thread computes by default.
inline thread_local DeviceIndex current_device = 0;

inline void set_current_device(DeviceIndex index) {
  if (index >= 0) {
    check_index(index);
    current_device = index;
  }
}

// A device with an index: the current one where none is named.
inline Device with_index(Device device) {
  return Device(DeviceType::CUDA, device.index() < 0 ? current_device : device.index());
}

// Is called whenever a real device would let its host wait, with what the host does.
using Listener = void (*)(const char* what);
inline std::atomic<Listener> listener{nullptr};

inline void host_waits(const char* what) {
  if (Listener listens = listener) listens(what);
}

}  // namespace rehearsal
