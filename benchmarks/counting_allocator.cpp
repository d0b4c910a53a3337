// Counts what torch's CPU allocator hands out and gets back, whichever thread does it.

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex mutex;
auto& sizes = *new std::unordered_map<void*, int64_t>;  // never destroyed: the last tensors die after it
int64_t live_bytes = 0;
int64_t peak_bytes = 0;

void release(void* memory) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = sizes.find(memory);
    if (found != sizes.end()) {  // convolutions give back here what was not taken here
      live_bytes -= found->second;
      sizes.erase(found);
    }
  }
  c10::GetDefaultCPUAllocator()->raw_deleter()(memory);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* memory = c10::GetDefaultCPUAllocator()->raw_allocate(num_bytes);
    if (memory == nullptr) {  // of nothing
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    }
    std::lock_guard<std::mutex> guard(mutex);
    sizes[memory] = static_cast<int64_t>(num_bytes);
    live_bytes += static_cast<int64_t>(num_bytes);
    peak_bytes = std::max(peak_bytes, live_bytes);
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    default_copy_data(target, source, num_bytes);
  }
};

CountingAllocator counting_allocator;

}  // namespace

// Memory handed out before this is not counted, nor that it is given back.
extern "C" void start_counting() {
  c10::SetCPUAllocator(&counting_allocator);
}

extern "C" int64_t read_live_bytes() {
  std::lock_guard<std::mutex> guard(mutex);
  return live_bytes;
}

// The most that was live at once since the last call.
extern "C" int64_t take_peak_bytes() {
  std::lock_guard<std::mutex> guard(mutex);
  const int64_t peak = peak_bytes;
  peak_bytes = live_bytes;
  return peak;
}
