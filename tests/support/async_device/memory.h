// The device's memory, and the host memory that it may use in place.
//
// One memory file is mapped twice. Tensors carry addresses of a mapping that nobody may touch, so
// the host cannot read them by mistake; kernels use the other one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>

namespace queued {

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Figures {
  int64_t allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, allocations = 0;
};

// Address that a kernel uses for a tensor's address; throws if no kernel may reach it.
char* reach(const void* address, size_t nbytes);

// True if the address is one of the device's own.
bool on_device(const void* address);

// Caching allocator: a freed block goes back to the stream that it was allocated on and is handed
// out again at once, while work queued there before may still use it.
void* allocate(size_t nbytes, int64_t stream);
void release(void* address);
// A release waits for work that the stream has queued by then.
void use_on(void* address, int64_t stream);
void give_back_cached();
// Memory of captures: each pool belongs to graphs, and to nobody else while one of them is there.
int64_t new_pool();
void hold_pool(int64_t pool);
void drop_pool(int64_t pool);
Figures figures();
void reset_peaks();
void limit(size_t nbytes);
size_t limit();

// Host memory that kernels and asynchronous copies may use.
void pin(const void* address, size_t nbytes);
void unpin(const void* address);
bool is_pinned(const void* address, size_t nbytes);
void* pinned_room(size_t nbytes);
void release_pinned(void* address);

}  // namespace queued
