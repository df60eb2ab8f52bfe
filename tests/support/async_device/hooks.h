// The parts of torch's interfaces for a device that its kernels use too.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace queued {

// A seed for one kernel, drawn when it is queued.
uint64_t draw_seed();
c10::Allocator* device_allocator();

}  // namespace queued
