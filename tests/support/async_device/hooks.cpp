// Gives torch what it asks of a device: allocator, generator, streams and events; and a C interface.
#include "hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "graphs.h"
#include "memory.h"
#include "queues.h"

namespace queued {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr auto kType = DeviceType::PrivateUse1;
const Device kDevice(kType, 0);

void check_index(DeviceIndex index) {
  TORCH_CHECK(index <= 0, "there is one queued device, 0, and no queued:", int(index));
}

// -- memory --------------------------------------------------------------------------------------

void free_device(void* address) { release(address); }
void free_pinned(void* address) { release_pinned(address); }

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* at = nullptr;
    try {
      at = queued::allocate(nbytes, current_stream());
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
    return {at, at, &free_device, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    char *target = reach(to, nbytes), *source = reach(from, nbytes);
    launch(current_stream(), [=] { std::memcpy(target, source, nbytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { give_back_cached(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    use_on(data.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    Figures now = figures();
    c10::CachingDeviceAllocator::DeviceStats told;
    told.allocated_bytes[0].current = now.allocated;
    told.allocated_bytes[0].peak = now.peak;
    told.reserved_bytes[0].current = now.reserved;
    told.reserved_bytes[0].peak = now.reserved_peak;
    told.allocation[0].allocated = now.allocations;
    return told;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { reset_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override {
    return {limit() - figures().reserved, limit()};
  }
};

Allocator& allocator() {
  static auto* it = new Allocator();
  return *it;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* at = pinned_room(nbytes);
    return {at, at, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};

// -- random numbers ------------------------------------------------------------------------------

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed = c10::detail::getNonDeterministicRandom())
      : at::CPUGeneratorImpl(seed) {
    device_ = kDevice;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  static DeviceType device_type() { return kType; }

 private:
  at::CPUGeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(0);
    copy->set_state(*get_state());
    return copy;
  }
};

const at::Generator& default_generator() {
  static auto* it = new at::Generator(at::make_generator<Generator>());
  return *it;
}

// -- hooks ---------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex index) const override { check_index(index); }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data, 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* it = new PinnedAllocator();
    return it;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto fresh = allocator().allocate(nbytes);
    size_t kept = std::min(nbytes, storage.nbytes());
    if (kept) allocator().copy_data(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(nbytes);
  }
};

// -- streams and events --------------------------------------------------------------------------

c10::Stream stream_of(int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, number);
}

MarkPtr& mark_of(void* event) { return *static_cast<MarkPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    check_index(device.index());
    return kDevice;
  }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device device) const override { check_index(device.index()); }
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(Device) const override { return stream_of(current_stream()); }
  c10::Stream getDefaultStream(Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(Device, bool) const override {
    return stream_of(new_stream());
  }
  c10::Stream getNewStream(Device, int) const override { return stream_of(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(exchange_stream(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    throw_error();
    return passed(queued::record(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream.id());
  }
  void synchronizeDevice(const DeviceIndex) const override { synchronize_all(); }

  void record(void** event, const c10::Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr();
    mark_of(*event) = queued::record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) queued::wait(stream.id(), mark_of(event));
  }
  bool queryEvent(void* event) const override {
    throw_error();
    return !event || passed(mark_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(mark_of(event));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  double elapsedTime(void* first, void* last, const DeviceIndex) const override {
    return (mark_of(last)->when_us - mark_of(first)->when_us) / 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_on(data.get(), stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

uint64_t draw_seed() {
  auto generator = default_generator();
  std::lock_guard<std::mutex> guard(generator.mutex());
  return static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl())->random64();
}

c10::Allocator* device_allocator() { return &allocator(); }

}  // namespace queued

// -- for Python ----------------------------------------------------------------------------------

using namespace queued;

namespace {
std::mutex stalling;
std::map<int64_t, MarkPtr> stalled;
int64_t last_stall = 0;
}  // namespace

extern "C" {

void queued_start() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kType, &allocator(), 1);
  // only then does torch ask whether memory is pinned
  at::globalContext().lazyInitDevice(kType);
}
void queued_end() { end_streams(); }
void queued_seed(uint64_t seed, double longest_us) { seed_delays(seed, longest_us); }
void queued_slow(int64_t stream, double us) { slow_down(stream, us); }
void queued_manual_seed(uint64_t seed) {
  auto generator = default_generator();
  std::lock_guard<std::mutex> guard(generator.mutex());
  generator.set_current_seed(seed);
}
// The state of the default generator, there or from there; returns its length.
int64_t queued_random_state(uint8_t* state, bool write) {
  auto generator = default_generator();
  std::lock_guard<std::mutex> guard(generator.mutex());
  at::Tensor now = generator.get_state();
  const auto nbytes = static_cast<int64_t>(now.nbytes());
  if (state && !write) std::memcpy(state, now.data_ptr(), nbytes);
  if (state && write) {
    std::memcpy(now.data_ptr(), state, nbytes);
    generator.set_state(now);
  }
  return nbytes;
}
void queued_limit(size_t nbytes) { limit(nbytes); }
int64_t queued_pin(const void* at, size_t nbytes) {
  pin(at, nbytes);
  return 0;
}
int64_t queued_unpin(const void* at) {
  unpin(at);
  return 0;
}
// A kernel that takes this long on the current stream.
void queued_sleep(double us) {
  launch(current_stream(),
         [us] { std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us)); });
}
// Hold a stream up; the number is for `queued_resume`.
int64_t queued_stall(int64_t stream) {
  std::lock_guard<std::mutex> guard(stalling);
  stalled[++last_stall] = stall(stream);
  return last_stall;
}
void queued_resume(int64_t number) {
  std::lock_guard<std::mutex> guard(stalling);
  resume(stalled.at(number));
  stalled.erase(number);
}

}  // extern "C"

// -- graphs: each call returns 0 or a number, or -1 and says why ---------------------------------

namespace {
std::mutex graphing;
std::map<int64_t, GraphPtr> graphs;
int64_t last_graph = 0;

GraphPtr graph_at(int64_t number) {
  std::lock_guard<std::mutex> guard(graphing);
  return graphs.at(number);
}

template <typename F>
int64_t told(char* said, int64_t room, const F& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    std::strncpy(said, error.what(), room - 1);
    return -1;
  }
}
}  // namespace

extern "C" {

int64_t queued_pool() { return new_pool(); }
int64_t queued_begin_capture(int64_t stream, int64_t pool, char* said, int64_t room) {
  return told(said, room, [&] {
    GraphPtr graph = begin_capture(stream, pool);
    std::lock_guard<std::mutex> guard(graphing);
    graphs[++last_graph] = graph;
    return last_graph;
  });
}
int64_t queued_end_capture(int64_t number, char* said, int64_t room) {
  return told(said, room, [&] {
    end_capture(graph_at(number));
    return int64_t{0};
  });
}
int64_t queued_replay(int64_t number, int64_t stream, char* said, int64_t room) {
  return told(said, room, [&] {
    replay(*graph_at(number), stream);
    return int64_t{0};
  });
}
void queued_forget(int64_t number) {
  std::lock_guard<std::mutex> guard(graphing);
  graphs.erase(number);
}

}  // extern "C"
