#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "graphs.h"
#include "queues.h"

namespace queued {
namespace {

constexpr size_t kAddresses = size_t{16} << 30;
constexpr size_t kRound = 512, kSmall = size_t{1} << 20, kMiB = size_t{1} << 20;
// a value that is not a number, and no valid index
constexpr int kPoison = 0xFF;

struct Block {
  size_t offset, nbytes;
  int64_t stream;
  //: of a capture; 0: everybody's
  int64_t pool = 0;
  bool used = false;
  Block *before = nullptr, *after = nullptr;  // of one segment
  std::set<int64_t> others;
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->nbytes != b->nbytes ? a->nbytes < b->nbytes : a->offset < b->offset;
  }
};
using Free = std::set<Block*, BySize>;

// never destroyed: tensors may outlive everything else
struct Heap {
  std::mutex lock;
  char *shown, *real;
  size_t limit_bytes = size_t{1} << 30;
  std::map<size_t, size_t> unused{{0, kAddresses}};
  //: by stream and pool
  std::map<std::pair<int64_t, int64_t>, Free> free;
  std::map<int64_t, int64_t> graphs_of_pool;
  int64_t pools = 0;
  std::unordered_map<size_t, Block*> used;
  std::vector<std::pair<Block*, std::vector<MarkPtr>>> leaving;
  Figures figures;

  Heap() {
    int file = memfd_create("queued device", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kAddresses) != 0)
      throw std::runtime_error("the queued device got no memory file");
    shown = map(file, PROT_NONE);
    real = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  static char* map(int file, int rights) {
    void* at = mmap(nullptr, kAddresses, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (at == MAP_FAILED) throw std::runtime_error("the queued device could not map its memory");
    return static_cast<char*>(at);
  }
};

Heap& heap() {
  static Heap* it = new Heap();
  return *it;
}

// -- segments, under the lock --------------------------------------------------------------------

Block* new_segment(Heap& h, size_t nbytes, int64_t stream, int64_t pool) {
  if (h.figures.reserved + nbytes > h.limit_bytes) return nullptr;
  for (auto [offset, room] : h.unused) {
    if (room < nbytes) continue;
    h.unused.erase(offset);
    if (room > nbytes) h.unused[offset + nbytes] = room - nbytes;
    h.figures.reserved += nbytes;
    h.figures.reserved_peak = std::max(h.figures.reserved_peak, h.figures.reserved);
    return new Block{offset, nbytes, stream, pool};
  }
  return nullptr;
}

void return_segment(Heap& h, Block* block) {
  madvise(h.real + block->offset, block->nbytes, MADV_REMOVE);
  h.figures.reserved -= block->nbytes;
  size_t offset = block->offset, nbytes = block->nbytes;
  auto next = h.unused.lower_bound(offset);
  if (next != h.unused.end() && offset + nbytes == next->first) {
    nbytes += next->second;
    next = h.unused.erase(next);
  }
  if (next != h.unused.begin()) {
    auto last = std::prev(next);
    if (last->first + last->second == offset) {
      offset = last->first;
      nbytes += last->second;
    }
  }
  h.unused[offset] = nbytes;
  delete block;
}

void merge(Heap& h, Block* block) {
  Free& free = h.free[{block->stream, block->pool}];
  if (Block* next = block->after; next && !next->used) {
    free.erase(next);
    block->nbytes += next->nbytes;
    block->after = next->after;
    if (next->after) next->after->before = block;
    delete next;
  }
  if (Block* last = block->before; last && !last->used) {
    free.erase(last);
    last->nbytes += block->nbytes;
    last->after = block->after;
    if (block->after) block->after->before = last;
    delete block;
    block = last;
  }
  free.insert(block);
}

void retire(Heap& h, Block* block) {
  block->used = false;
  char* at = h.real + block->offset;
  auto fill = [at, nbytes = block->nbytes] { std::memset(at, kPoison, nbytes); };
  // a graph's own memory is only its own work's to write, at each replay
  GraphPtr graph = graph_of(block->stream);
  if (block->pool == 0)
    append_outside(block->stream, fill);
  else if (graph && graph->pool == block->pool)
    append(block->stream, fill);
  merge(h, block);
}

void retire_left(Heap& h) {
  auto& leaving = h.leaving;
  for (size_t n = leaving.size(); n-- > 0;) {
    auto& marks = leaving[n].second;
    if (!std::all_of(marks.begin(), marks.end(), passed)) continue;
    Block* block = leaving[n].first;
    leaving.erase(leaving.begin() + n);
    retire(h, block);
  }
}

size_t segment_bytes(size_t nbytes) {
  if (nbytes <= kSmall) return 2 * kMiB;
  if (nbytes < 10 * kMiB) return 20 * kMiB;
  return (nbytes + 2 * kMiB - 1) / (2 * kMiB) * 2 * kMiB;
}

Block* find(Heap& h, size_t nbytes, int64_t stream, int64_t pool) {
  Free& free = h.free[{stream, pool}];
  Block wanted{0, nbytes, stream, pool};
  auto found = free.lower_bound(&wanted);
  if (found != free.end()) {
    Block* block = *found;
    free.erase(found);
    return block;
  }
  if (Block* block = new_segment(h, segment_bytes(nbytes), stream, pool)) return block;
  return new_segment(h, (nbytes + 2 * kMiB - 1) / (2 * kMiB) * 2 * kMiB, stream, pool);
}

void split(Heap& h, Block* block, size_t nbytes) {
  if (block->nbytes == nbytes) return;
  auto* rest = new Block{block->offset + nbytes, block->nbytes - nbytes, block->stream, block->pool};
  rest->before = block;
  rest->after = block->after;
  if (rest->after) rest->after->before = rest;
  block->after = rest;
  block->nbytes = nbytes;
  h.free[{block->stream, block->pool}].insert(rest);
}

}  // namespace

// -- the device's own ----------------------------------------------------------------------------

bool on_device(const void* address) {
  auto* at = static_cast<const char*>(address);
  return heap().shown <= at && at < heap().shown + kAddresses;
}

char* reach(const void* address, size_t nbytes) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  if (on_device(at)) return heap().real + (at - heap().shown);
  if (nbytes == 0 || is_pinned(at, nbytes)) return at;
  throw std::runtime_error("illegal address: neither device memory nor pinned host memory");
}

void* allocate(size_t nbytes, int64_t stream) {
  if (nbytes == 0) return nullptr;
  nbytes = (nbytes + kRound - 1) / kRound * kRound;
  Heap& h = heap();
  std::unique_lock<std::mutex> guard(h.lock);
  retire_left(h);
  GraphPtr graph = graph_of(stream);
  const int64_t pool = graph ? graph->pool : 0;
  Block* block = find(h, nbytes, stream, pool);
  if (!block) {
    guard.unlock();
    give_back_cached();
    guard.lock();
    block = find(h, nbytes, stream, pool);
  }
  if (!block)
    throw OutOfMemory(
        "The queued device is out of memory. Tried to allocate " + std::to_string(nbytes) +
        " bytes; " + std::to_string(h.figures.allocated) + " of " + std::to_string(h.limit_bytes) +
        " bytes are allocated.");
  split(h, block, nbytes);
  block->used = true;
  h.used[block->offset] = block;
  h.figures.allocations++;
  h.figures.allocated += nbytes;
  h.figures.peak = std::max(h.figures.peak, h.figures.allocated);
  return h.shown + block->offset;
}

void release(void* address) {
  if (!address) return;
  Heap& h = heap();
  std::lock_guard<std::mutex> guard(h.lock);
  auto found = h.used.find(static_cast<char*>(address) - h.shown);
  Block* block = found->second;
  h.used.erase(found);
  h.figures.allocated -= block->nbytes;
  if (block->others.empty()) return retire(h, block);
  std::vector<MarkPtr> marks;
  for (int64_t other : block->others) marks.push_back(record(other));
  block->others.clear();
  h.leaving.emplace_back(block, std::move(marks));
}

void use_on(void* address, int64_t stream) {
  Heap& h = heap();
  std::lock_guard<std::mutex> guard(h.lock);
  if (!on_device(address)) return;
  auto found = h.used.find(static_cast<char*>(address) - h.shown);
  if (found != h.used.end() && found->second->stream != stream)
    found->second->others.insert(stream);
}

void give_back_cached() {
  synchronize_all();
  Heap& h = heap();
  std::lock_guard<std::mutex> guard(h.lock);
  retire_left(h);
  for (auto& [whose, free] : h.free) {
    const auto [stream, pool] = whose;
    if (pool && h.graphs_of_pool[pool]) continue;
    for (auto at = free.begin(); at != free.end();) {
      Block* block = *at;
      bool whole = !block->before && !block->after;
      at = whole ? free.erase(at) : std::next(at);
      // the fill that `retire` queued must not hit the next owner
      if (whole) {
        synchronize_all();
        return_segment(h, block);
      }
    }
  }
}

int64_t new_pool() {
  std::lock_guard<std::mutex> guard(heap().lock);
  return ++heap().pools;
}

void hold_pool(int64_t pool) {
  std::lock_guard<std::mutex> guard(heap().lock);
  heap().graphs_of_pool[pool]++;
}

void drop_pool(int64_t pool) {
  std::lock_guard<std::mutex> guard(heap().lock);
  heap().graphs_of_pool[pool]--;
}

Figures figures() {
  std::lock_guard<std::mutex> guard(heap().lock);
  return heap().figures;
}

void reset_peaks() {
  std::lock_guard<std::mutex> guard(heap().lock);
  heap().figures.peak = heap().figures.allocated;
  heap().figures.reserved_peak = heap().figures.reserved;
}

void limit(size_t nbytes) {
  std::lock_guard<std::mutex> guard(heap().lock);
  heap().limit_bytes = std::min(nbytes, kAddresses);
}

size_t limit() {
  std::lock_guard<std::mutex> guard(heap().lock);
  return heap().limit_bytes;
}

// -- the host's ----------------------------------------------------------------------------------

namespace {

struct Pinned {
  std::mutex lock;
  std::map<const char*, size_t> ranges;
};

Pinned& pinned() {
  static Pinned* it = new Pinned();
  return *it;
}

}  // namespace

void pin(const void* address, size_t nbytes) {
  std::lock_guard<std::mutex> guard(pinned().lock);
  pinned().ranges[static_cast<const char*>(address)] = nbytes;
}

void unpin(const void* address) {
  std::lock_guard<std::mutex> guard(pinned().lock);
  pinned().ranges.erase(static_cast<const char*>(address));
}

bool is_pinned(const void* address, size_t nbytes) {
  auto* at = static_cast<const char*>(address);
  std::lock_guard<std::mutex> guard(pinned().lock);
  auto found = pinned().ranges.upper_bound(at);
  if (found == pinned().ranges.begin()) return false;
  --found;
  return at + nbytes <= found->first + found->second;
}

void* pinned_room(size_t nbytes) {
  void* room = std::aligned_alloc(4096, (std::max(nbytes, size_t{1}) + 4095) / 4096 * 4096);
  pin(room, (std::max(nbytes, size_t{1}) + 4095) / 4096 * 4096);
  return room;
}

void release_pinned(void* room) {
  if (!room) return;
  // copies that were queued may still use it
  append_everywhere([room] {
    unpin(room);
    std::free(room);
  });
}

}  // namespace queued
