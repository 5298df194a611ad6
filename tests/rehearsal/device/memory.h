// Memory of the devices, which is counted, and pinned memory. Both are memory of the host.
#pragma once

#include <c10/core/Allocator.h>

#include <cstring>
#include <map>
#include <mutex>

#include "machine.h"
#include "trace.h"

namespace rehearsal {

// As torch's caching allocator rounds.
constexpr int64_t kBlockBytes = 512;
// Read before it was written, memory is NaN in every floating type, and -1 in every other one.
constexpr int kUnwritten = 0xff;

inline int64_t rounded(int64_t num_bytes) { return (num_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

// What tensors take on one device, now and at the most since the peak was set back.
struct Taken {
  std::atomic<int64_t> now{0};
  std::atomic<int64_t> peak{0};
};
inline std::array<Taken, kMaxGpus> taken;

inline void count(Device device, int64_t num_bytes) {
  Taken& on_device = taken[device.index()];
  const int64_t now = on_device.now += num_bytes;
  int64_t peak = on_device.peak;
  while (now > peak && !on_device.peak.compare_exchange_weak(peak, now)) {
  }
}

// The memory of a device: REHEARSAL_GPU_BYTES, else 80 GiB.
inline int64_t bytes_of_gpu() {
  const char* given = std::getenv("REHEARSAL_GPU_BYTES");
  return given ? std::atoll(given) : int64_t{80} << 30;
}

struct DeviceAllocator final : c10::Allocator {
  struct Block {
    void* memory;
    int64_t num_bytes;
    Device device;
  };

  c10::DataPtr allocate(size_t num_bytes) override {
    initialise();
    const Device device(DeviceType::CUDA, current_device);
    check_index(device.index());
    const int64_t block_bytes = rounded(num_bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, taken[device.index()].now + block_bytes <= bytes_of_gpu(),
                     "CUDA out of memory. Tried to allocate ", num_bytes, " bytes on ", device, ", of whose ",
                     bytes_of_gpu(), " bytes ", taken[device.index()].now.load(), " are taken.");
    void* memory = nullptr;
    if (block_bytes) {
      TORCH_CHECK(posix_memalign(&memory, kBlockBytes, block_bytes) == 0, "the host is out of memory");
      std::memset(memory, kUnwritten, block_bytes);
      count(device, block_bytes);
      trace(&Traced::trace_gpu_memory_allocation, number_of(memory));
    }
    return {memory, new Block{memory, block_bytes, device}, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }

 private:
  static void free_block(void* context) {
    auto* block = static_cast<Block*>(context);
    count(block->device, -block->num_bytes);
    if (block->memory) trace(&Traced::trace_gpu_memory_deallocation, number_of(block->memory));
    std::free(block->memory);
    delete block;
  }
};

inline DeviceAllocator device_allocator;

// Memory of the host that the device can read and write while the host does something else.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    initialise();
    const size_t block_bytes = std::max<size_t>(num_bytes, 1);
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 4096, block_bytes) == 0, "the host is out of memory to pin");
    {
      std::lock_guard<std::mutex> locked(lock());
      blocks()[static_cast<const char*>(memory)] = block_bytes;
    }
    return {memory, memory, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }

  static bool is_pinned(const void* pointer) {
    std::lock_guard<std::mutex> locked(lock());
    auto address = static_cast<const char*>(pointer);
    auto after = blocks().upper_bound(address);
    if (after == blocks().begin()) return false;
    auto [begin, num_bytes] = *std::prev(after);
    return address < begin + num_bytes;
  }

 private:
  static std::mutex& lock() {
    static std::mutex of_blocks;
    return of_blocks;
  }
  static std::map<const char*, size_t>& blocks() {
    static auto* by_begin = new std::map<const char*, size_t>();  // tensors may outlive everything that is destroyed
    return *by_begin;
  }
  static void unpin(void* memory) {
    {
      std::lock_guard<std::mutex> locked(lock());
      blocks().erase(static_cast<const char*>(memory));
    }
    std::free(memory);
  }
};

inline PinnedAllocator pinned_allocator;

}  // namespace rehearsal
