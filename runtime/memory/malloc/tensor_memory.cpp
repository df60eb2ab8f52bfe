// Memory for torch's tensors on the CPU, from malloc's plain call, within a limit.
//
// torch wants each block on a border of 64 bytes. An aligned allocation of glibc before 2.39 cuts it
// out of a longer block and frees both ends, so what a freed tensor leaves is too short for the next
// one of its size. Here the ends stay with the block: the address to free lies just before the data.
//
// Steps repeat themselves. Once one was recorded and laid out, each of its large blocks gets the place
// that was found for it, so that there are no holes between them. Any other block comes from malloc.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

constexpr std::uintptr_t kBorder = 64;          // as torch's own allocator has it
constexpr std::uintptr_t kBefore = sizeof(void*);
constexpr std::size_t kBeside = kBorder + kBefore;
constexpr std::size_t kAddresses = std::size_t{1} << 47;
constexpr std::size_t kLarge = 256 << 10;       // smaller blocks are left to who looks now and then
constexpr std::int64_t kWorth = 1 << 20;        // that much has to have come since free pages went
constexpr std::size_t kPlaced = 64 << 10;       // smaller blocks get no place
constexpr std::uintptr_t kHuge = 2 << 20;
constexpr std::size_t kMostEvents = 1 << 20;    // steps that are longer get no places
constexpr std::int64_t kNone = -1;
constexpr double kFastest = 4e9;                // bytes a second that a process may touch anew
constexpr double kShortest = 2e-3;              // seconds between two looks
const std::int64_t kPage = sysconf(_SC_PAGESIZE);
constexpr std::int64_t kMargin = 4 << 20;       // goes with what has to: not every block looks then
constexpr std::int64_t kSeldom = 16;            // trims between two of malloc's
constexpr std::int64_t kAll = std::int64_t{1} << 62;

// Bytes of pages in [begin, end) that nobody has touched yet.
std::int64_t untouched_bytes(std::uintptr_t begin, std::uintptr_t end) {
  const auto page = static_cast<std::uintptr_t>(kPage);
  end = (end + page - 1) & ~(page - 1);
  unsigned char there[4096];
  std::int64_t found = 0;
  for (auto at = begin & ~(page - 1); at < end;) {
    const auto pages = std::min<std::uintptr_t>((end - at) / page, sizeof(there));
    if (mincore(reinterpret_cast<void*>(at), pages * page, there) != 0) {
      return static_cast<std::int64_t>(end - begin);
    }
    found += kPage * std::count_if(there, there + pages, [](auto is) { return (is & 1) == 0; });
    at += pages * page;
  }
  return found;
}

// What a step allocates and frees, in order: `nbytes` are 0 for what is freed, and for the border
// between two steps, which has no address.
struct Event {
  std::int64_t nbytes, address, thread;
};

// Places for the large blocks of a step, told apart by their size and by how many of that size came
// before in the step.
class Places {
 public:
  // Returns nullptr if the block has no place, or if its place is still taken.
  void* take(std::size_t nbytes) {
    if (!placing_ || nbytes < kPlaced) return nullptr;
    std::lock_guard<std::mutex> alone(lock_);
    if (regions_.empty() || !placing_) return nullptr;
    const auto found = offsets_.find(nbytes);
    if (found == offsets_.end()) return nullptr;
    auto& [offsets, next] = found->second;
    if (next >= offsets.size()) return nullptr;
    const std::int64_t offset = offsets[next++];
    if (offset == kNone) return nullptr;
    Region& region = regions_.back();
    const std::uintptr_t begin = region.begin + offset, end = begin + nbytes;
    auto after = region.taken.lower_bound(begin);
    const bool free = (after == region.taken.end() || after->first >= end) &&
                      (after == region.taken.begin() || std::prev(after)->second <= begin);
    if (!free) {
      missed_bytes_ += static_cast<std::int64_t>(nbytes);
      return nullptr;
    }
    region.taken.emplace_hint(after, begin, end);
    live_bytes_ += static_cast<std::int64_t>(nbytes);
    return reinterpret_cast<void*>(begin);
  }

  // Returns the bytes of the block, 0 if it is one of malloc's.
  std::int64_t give(void* data) {
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    if (begin < lowest_ || begin >= highest_) return 0;
    std::lock_guard<std::mutex> alone(lock_);
    for (auto region = regions_.begin(); region != regions_.end(); ++region) {
      const auto found = region->taken.find(begin);
      if (found == region->taken.end()) continue;
      const auto nbytes = static_cast<std::int64_t>(found->second - begin);
      live_bytes_ -= nbytes;
      region->taken.erase(found);
      if (region->taken.empty() && (!placing_ || &*region != &regions_.back())) {
        munmap(reinterpret_cast<void*>(region->begin), region->nbytes);
        regions_.erase(region);
      }
      return nbytes;
    }
    return 0;
  }

  // Gives blocks these places from now on, kNone for none; blocks of one size are in the order of
  // their coming. Without any, all blocks come from malloc.
  bool lay_out(const std::int64_t* sizes, const std::int64_t* offsets, std::int64_t count,
               std::int64_t extent_bytes) {
    std::lock_guard<std::mutex> alone(lock_);
    if (!regions_.empty() && regions_.back().taken.empty()) {
      munmap(reinterpret_cast<void*>(regions_.back().begin), regions_.back().nbytes);
      regions_.pop_back();
    }
    offsets_.clear();
    placing_ = false;
    if (count == 0) return true;
    const std::size_t nbytes = (extent_bytes + 2 * kHuge - 1) & ~(kHuge - 1);
    void* mapped = mmap(nullptr, nbytes + kHuge, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return false;
    const auto from = reinterpret_cast<std::uintptr_t>(mapped);
    const auto begin = (from + kHuge - 1) & ~(kHuge - 1);
    if (begin > from) munmap(mapped, begin - from);
    if (from + kHuge > begin) munmap(reinterpret_cast<void*>(begin + nbytes), from + kHuge - begin);
    madvise(reinterpret_cast<void*>(begin), nbytes, MADV_HUGEPAGE);  // refused where there are none
    regions_.push_back({begin, nbytes, {}});
    lowest_ = std::min<std::uintptr_t>(lowest_, begin);
    highest_ = std::max<std::uintptr_t>(highest_, begin + nbytes);
    for (std::int64_t i = 0; i < count; ++i) offsets_[sizes[i]].first.push_back(offsets[i]);
    missed_bytes_ = 0;
    placing_ = true;
    return true;
  }

  // A step begins: blocks are counted anew.
  void begin_step() {
    std::lock_guard<std::mutex> alone(lock_);
    for (auto& [size, places] : offsets_) places.second = 0;
    if (recording_) events_.push_back({0, 0, 0});
  }

  void record(bool on) {
    std::lock_guard<std::mutex> alone(lock_);
    events_.clear();
    recording_ = on;
  }

  void note(std::size_t nbytes, void* data) {
    if (!recording_ || (nbytes != 0 && nbytes < kPlaced)) return;
    std::lock_guard<std::mutex> alone(lock_);
    const auto address = reinterpret_cast<std::int64_t>(data);
    if (recording_ && events_.size() < kMostEvents) events_.push_back({static_cast<std::int64_t>(nbytes), address, gettid()});
  }

  std::int64_t events(Event* to, std::int64_t most) {
    std::lock_guard<std::mutex> alone(lock_);
    const auto count = std::min<std::int64_t>(most, static_cast<std::int64_t>(events_.size()));
    if (to != nullptr) std::copy_n(events_.begin(), count, to);
    return static_cast<std::int64_t>(events_.size());
  }

  // Gives back pages of free places, the highest first, until `nbytes` of them have gone. They come
  // back when a block is placed there again, so no more of them go than have to; and in huge pages,
  // if `border` is theirs, since a huge page that has lost one of its pages is slower from then on.
  std::int64_t trim(std::int64_t nbytes, std::uintptr_t border) {
    std::lock_guard<std::mutex> alone(lock_);
    std::int64_t gone = 0;
    for (const Region& region : regions_) {
      std::uintptr_t to = region.begin + region.nbytes;
      for (auto at = region.taken.rbegin(); at != region.taken.rend() && gone < nbytes; ++at) {
        gone += give_pages(at->second, to, nbytes - gone, border);
        to = at->first;
      }
      if (gone < nbytes) gone += give_pages(region.begin, to, nbytes - gone, border);
    }
    return gone;
  }

  std::mutex& lock() { return lock_; }
  std::int64_t live_bytes() const { return live_bytes_; }
  std::int64_t missed_bytes() const { return missed_bytes_; }

 private:
  struct Region {
    std::uintptr_t begin;
    std::size_t nbytes;
    std::map<std::uintptr_t, std::uintptr_t> taken;
  };

  static std::int64_t give_pages(std::uintptr_t begin, std::uintptr_t end, std::int64_t nbytes,
                                 std::uintptr_t border) {
    begin = (begin + border - 1) & ~(border - 1);
    end &= ~(border - 1);
    std::int64_t gone = 0;
    while (begin < end && gone < nbytes) {
      const std::uintptr_t from = std::max(begin, (end - 1) & ~(kHuge - 1));
      const auto there = static_cast<std::int64_t>(end - from) - untouched_bytes(from, end);
      if (there > 0) madvise(reinterpret_cast<void*>(from), end - from, MADV_DONTNEED);
      gone += there;
      end = from;
    }
    return gone;
  }

  std::mutex lock_;
  std::vector<Region> regions_;  // the last one is in use, others are until their last block is free
  std::unordered_map<std::size_t, std::pair<std::vector<std::int64_t>, std::size_t>> offsets_;
  std::vector<Event> events_;
  std::atomic<bool> placing_{false}, recording_{false};
  std::atomic<std::uintptr_t> lowest_{~std::uintptr_t{0}}, highest_{0};
  std::atomic<std::int64_t> live_bytes_{0}, missed_bytes_{0};
};

Places& places() {
  static Places* only = new Places();  // outlives every tensor
  return *only;
}

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
    const auto begin = reinterpret_cast<std::uintptr_t>(block);
    const std::int64_t more = untouched_bytes(begin, begin + nbytes);
    std::int64_t held = resident();
    if (held + more > std::max(limit, left_ + kWorth)) {
      trim(limit - more, held);
      left_ = held = resident();
    }
    spare_ = limit - held - more;
  }

  // Gives back pages until the process holds no more than `most_bytes`, as before a block.
  void keep_within(std::int64_t most_bytes) {
    std::lock_guard<std::mutex> alone(looking_);
    const std::int64_t held = resident();
    if (held <= most_bytes) return;
    trim(most_bytes, held);
    left_ = resident();
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

  std::mutex& lock() { return looking_; }
  std::atomic<std::int64_t> trims{0}, trim_ns{0};

 private:
  // Gives pages back until the process holds no more than `most_bytes`; now it holds `held_bytes`.
  // malloc gives back all that it has free, or nothing: it is asked if places do not do, and now
  // and then, for what nobody takes again.
  void trim(std::int64_t most_bytes, std::int64_t held_bytes) {
    const auto began = std::chrono::steady_clock::now();
    const std::int64_t aim = most_bytes - kMargin;
    if (trims % kSeldom == 0) malloc_trim(0), held_bytes = resident();
    if (held_bytes > most_bytes) held_bytes -= places().trim(held_bytes - aim, kHuge);
    if (held_bytes > most_bytes) malloc_trim(0), held_bytes = resident();
    if (held_bytes > most_bytes) places().trim(held_bytes - aim, static_cast<std::uintptr_t>(kPage));
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

  std::atomic<std::int64_t> limit_{kNone}, spare_{0}, left_{0};
  std::atomic<int> statm_{-1}, pid_{0};
  std::mutex looking_;
};

Limit& limit() {
  static Limit* only = new Limit();  // outlives every tensor
  return *only;
}

// The bytes that this thread has taken since it began to count, less those that it has given back,
// and the most that this came to.
struct Count {
  std::int64_t now_bytes = 0, most_bytes = 0;

  void add(std::int64_t nbytes) {
    now_bytes += nbytes;
    most_bytes = std::max(most_bytes, now_bytes);
  }
};

thread_local Count count;

void*& block_of(void* data) {
  return *reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(data) - kBefore);
}

void give_back(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  places().note(0, data);
  const std::int64_t placed_bytes = places().give(data);
  if (placed_bytes != 0) return count.add(-placed_bytes);
  void* block = block_of(data);
  count.add(-static_cast<std::int64_t>(malloc_usable_size(block)));
  std::free(block);
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
    if (void* placed = places().take(nbytes)) {
      limit().taken(placed, nbytes);
      places().note(nbytes, placed);
      count.add(static_cast<std::int64_t>(nbytes));
      c10::profiledCPUMemoryReporter().New(placed, nbytes);
      return placed;
    }
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
    places().note(nbytes, data);
    count.add(static_cast<std::int64_t>(malloc_usable_size(block)));
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    return data;
  }
};

}  // namespace

extern "C" void offcompile_use_plain_blocks() {
  static PlainBlocks* blocks = new PlainBlocks();  // outlives every tensor
  // a fork while another thread looks for a place, or gives pages back, would leave the child a lock
  // that nobody opens
  static const int once = pthread_atfork(
      [] { limit().lock().lock(), places().lock().lock(); },
      [] { places().lock().unlock(), limit().lock().unlock(); },
      [] { places().lock().unlock(), limit().lock().unlock(); });
  static_cast<void>(once);
  c10::SetCPUAllocator(blocks, 255);
}

// The most that the process may hold; -1: no limit. `statm`: its /proc/self/statm, opened.
extern "C" void offcompile_limit(std::int64_t nbytes, int statm) { limit().set(nbytes, statm); }

extern "C" std::int64_t offcompile_watch(std::int64_t limit_bytes, std::int64_t beyond_bytes,
                                         double seconds) {
  return limit().watch(limit_bytes, beyond_bytes, seconds);
}

extern "C" void offcompile_keep_within(std::int64_t most_bytes) { limit().keep_within(most_bytes); }

extern "C" std::int64_t offcompile_trims() { return limit().trims; }
extern "C" std::int64_t offcompile_trim_ns() { return limit().trim_ns; }

// Has this thread count from now on, and tells the most that it has counted.
extern "C" void offcompile_count() { count = Count(); }
extern "C" std::int64_t offcompile_most_counted() { return count.most_bytes; }

// Blocks of a step: what was recorded of them, and the places that they get (`Places`).
extern "C" void offcompile_begin_step() { places().begin_step(); }
extern "C" void offcompile_record(int on) { places().record(on != 0); }
extern "C" std::int64_t offcompile_events(Event* to, std::int64_t most) {
  return places().events(to, most);
}
extern "C" int offcompile_lay_out(const std::int64_t* sizes, const std::int64_t* offsets,
                                  std::int64_t count, std::int64_t extent_bytes) {
  return places().lay_out(sizes, offsets, count, extent_bytes) ? 1 : 0;
}
extern "C" std::int64_t offcompile_placed_bytes() { return places().live_bytes(); }
extern "C" std::int64_t offcompile_missed_bytes() { return places().missed_bytes(); }
extern "C" void offcompile_give_back_places() {
  places().trim(kAll, static_cast<std::uintptr_t>(kPage));
}
