// Streams are threads with queues, and events are marks in them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

namespace queued {

using Work = std::function<void()>;
// A kernel that takes the seed of its random numbers.
using DrawingWork = std::function<void(uint64_t)>;
struct Graph;

// A point in a queue; `done` once its stream has passed it. In a capture: `graph`, and what comes
// before it there.
struct Mark {
  bool done = false;
  double when_us = 0;
  bool captured = false;
  std::weak_ptr<Graph> graph;
  std::map<int64_t, size_t> known;
};
using MarkPtr = std::shared_ptr<Mark>;

int64_t new_stream();
int64_t current_stream();
int64_t exchange_stream(int64_t stream);

// Queue a kernel; a delay drawn by the seed precedes it.
void launch(int64_t stream, Work kernel);
// One that draws random numbers: at each replay, others.
void launch_drawing(int64_t stream, DrawingWork kernel);
// Queue work of the device itself: no delay.
void append(int64_t stream, Work work);
// The same, whether or not the stream is captured.
void append_outside(int64_t stream, Work work);
// Queue `work` behind everything that any stream has queued by now.
void append_everywhere(Work work);

MarkPtr record(int64_t stream);
void wait(int64_t stream, const MarkPtr& mark);
bool passed(const MarkPtr& mark);
// Block the calling thread; throw the error of a kernel that failed meanwhile.
void synchronize(const MarkPtr& mark);
void synchronize_stream(int64_t stream);
void synchronize_all();
void throw_error();

// Let the stream stop until the mark is released.
MarkPtr stall(int64_t stream);
void resume(const MarkPtr& mark);

// 0: no delays. Others: each stream is quick, slow, or either at random.
void seed_delays(uint64_t seed, double longest_us);
// Delay each kernel of one stream by as much, whatever the seed; until the next seed.
void slow_down(int64_t stream, double us);
// End the threads; work that comes later is dropped.
void end_streams();

}  // namespace queued
