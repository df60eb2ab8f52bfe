// Memory for torch's tensors on the CPU, from malloc's plain call, within a limit.
//
// torch wants each block on a border of 64 bytes. An aligned allocation of glibc before 2.39 cuts it
// out of a longer block and frees both ends, so what a freed tensor leaves is too short for the next
// one of its size. Here the ends stay with the block: the address to free lies just before the data.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace {

constexpr std::uintptr_t kBorder = 64;          // as torch's own allocator has it
constexpr std::uintptr_t kBefore = sizeof(void*);
constexpr std::size_t kBeside = kBorder + kBefore;
constexpr std::size_t kAddresses = std::size_t{1} << 47;
constexpr std::size_t kLarge = 256 << 10;       // smaller blocks are left to who looks now and then
constexpr std::int64_t kWorth = 1 << 20;        // that much has to have come since free pages went
constexpr std::int64_t kNone = -1;
constexpr double kFastest = 4e9;                // bytes a second that a process may touch anew
constexpr double kShortest = 2e-3;              // seconds between two looks
const std::int64_t kPage = sysconf(_SC_PAGESIZE);

// The most that the process may hold. A block that was just taken is not touched yet, so this is
// the time to give back the pages of free blocks, if the block's own would be too many.
class Limit {
 public:
  void set(std::int64_t limit_bytes, int statm) {
    statm_ = statm;
    pid_ = getpid();
    spare_ = left_ = 0;
    limit_ = limit_bytes;
  }

  void taken(void* block, std::size_t nbytes) {
    if (nbytes < kLarge || limit_ == kNone) return;
    const auto n = static_cast<std::int64_t>(nbytes);
    if (spare_.fetch_sub(n) >= n) return;  // even if all of it is new
    std::unique_lock<std::mutex> alone(looking_, std::try_to_lock);
    if (!alone.owns_lock()) return;
    if (getpid() != pid_) limit_ = kNone;  // forked: `statm` is another process's
    const std::int64_t limit = limit_;
    if (limit == kNone) return;
    const std::int64_t more = untouched(block, nbytes);
    std::int64_t held = resident();
    if (held + more > std::max(limit, left_ + kWorth)) {
      trim();
      left_ = held = resident();
    }
    spare_ = limit - held - more;
  }

  // Looks for at most `seconds`, until the process holds more than `beyond_bytes`, or the heap has
  // another end, or the limit is no longer `limit_bytes`. Returns the most that the process held.
  std::int64_t watch(std::int64_t limit_bytes, std::int64_t beyond_bytes, double seconds) const {
    const void* end = sbrk(0);
    std::int64_t most = 0;
    while (seconds > 0 && limit_ == limit_bytes && sbrk(0) == end) {
      most = std::max(most, resident());
      if (most > beyond_bytes) break;
      const double room = static_cast<double>(beyond_bytes - most);
      const double look = std::min(std::max(room / kFastest, kShortest), seconds);
      std::this_thread::sleep_for(std::chrono::duration<double>(look));
      seconds -= look;
    }
    return most;
  }

  std::atomic<std::int64_t> trims{0}, trim_ns{0};

 private:
  void trim() {
    const auto began = std::chrono::steady_clock::now();
    malloc_trim(0);
    const auto taken = std::chrono::steady_clock::now() - began;
    trim_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(taken).count();
    ++trims;
  }

  // pages of the process's own
  std::int64_t resident() const {
    char text[128] = {};
    long all = 0, there = 0, shared = 0;
    const bool read = pread(statm_, text, sizeof(text) - 1, 0) > 0;
    if (!read || std::sscanf(text, "%ld %ld %ld", &all, &there, &shared) != 3) return 0;
    return (there - shared) * kPage;
  }

  static std::int64_t untouched(void* block, std::size_t nbytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(block);
    const auto page = static_cast<std::uintptr_t>(kPage);
    const auto end = (begin + nbytes + page - 1) & ~(page - 1);
    unsigned char there[4096];
    std::int64_t found = 0;
    for (auto at = begin & ~(page - 1); at < end;) {
      const auto pages = std::min<std::uintptr_t>((end - at) / page, sizeof(there));
      if (mincore(reinterpret_cast<void*>(at), pages * page, there) != 0) {
        return static_cast<std::int64_t>(nbytes);
      }
      found += kPage * std::count_if(there, there + pages, [](auto is) { return (is & 1) == 0; });
      at += pages * page;
    }
    return found;
  }

  std::atomic<std::int64_t> limit_{kNone}, spare_{0}, left_{0};
  std::atomic<int> statm_{-1}, pid_{0};
  std::mutex looking_;
};

Limit& limit() {
  static Limit* only = new Limit();  // outlives every tensor
  return *only;
}

void*& block_of(void* data) {
  return *reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(data) - kBefore);
}

void give_back(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  std::free(block_of(data));
}

class PlainBlocks final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    void* data = nbytes == 0 ? nullptr : take(nbytes);
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

 private:
  static void* take(std::size_t nbytes) {
    // malloc is not even asked for what no address reaches: when it fails, glibc moves the thread
    // to another arena for good, whose memory it does not give back
    void* block = nbytes > kAddresses ? nullptr : std::malloc(nbytes + kBeside);
    if (block == nullptr) c10::profiledCPUMemoryReporter().OutOfMemory(nbytes);
    // the words of torch's own allocator: people and libraries look for them
    TORCH_CHECK(block != nullptr, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ",
                nbytes, " bytes. Error code 12 (Cannot allocate memory)");
    limit().taken(block, nbytes + kBeside);
    const auto first = reinterpret_cast<std::uintptr_t>(block) + kBefore;
    void* data = reinterpret_cast<void*>((first + kBorder - 1) & ~(kBorder - 1));
    block_of(data) = block;
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    return data;
  }
};

}  // namespace

extern "C" void offcompile_use_plain_blocks() {
  static PlainBlocks* blocks = new PlainBlocks();  // outlives every tensor
  c10::SetCPUAllocator(blocks, 255);
}

// The most that the process may hold; -1: no limit. `statm`: its /proc/self/statm, opened.
extern "C" void offcompile_limit(std::int64_t nbytes, int statm) { limit().set(nbytes, statm); }

extern "C" std::int64_t offcompile_watch(std::int64_t limit_bytes, std::int64_t beyond_bytes,
                                         double seconds) {
  return limit().watch(limit_bytes, beyond_bytes, seconds);
}

extern "C" std::int64_t offcompile_trims() { return limit().trims; }
extern "C" std::int64_t offcompile_trim_ns() { return limit().trim_ns; }
