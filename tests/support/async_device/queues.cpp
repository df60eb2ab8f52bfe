#include "queues.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "graphs.h"
#include "hooks.h"

// of the library that computes: one thread for each kernel
extern "C" void omp_set_num_threads(int count) __attribute__((weak));

namespace queued {
namespace {

constexpr int64_t kMostStreams = 64;

struct Item {
  Work work;
  MarkPtr awaited;
  bool kernel = false;
};

struct Stream {
  std::mutex lock;
  std::condition_variable filled;
  std::deque<Item> items;
  std::mt19937_64 dice;
  // at most so long; `exact`: always
  double longest_us = 0;
  bool exact = false;
  bool ended = false;
  std::thread thread;
};

// never destroyed: threads and finalizers use it until the process ends
struct State {
  std::mutex lock;  // of the list of streams, the delays and the error
  std::vector<std::unique_ptr<Stream>> streams;
  int64_t made = 0;
  uint64_t seed = 0;
  double longest_us = 0;
  std::string error;
  bool ended = false;

  std::mutex marking;
  std::condition_variable marked;
};

State& state() {
  static State* it = new State();
  return *it;
}

double now_us() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(now).count();
}

void finish(const MarkPtr& mark) {
  std::lock_guard<std::mutex> guard(state().marking);
  mark->done = true;
  mark->when_us = now_us();
  state().marked.notify_all();
}

void await(const MarkPtr& mark) {
  std::unique_lock<std::mutex> guard(state().marking);
  state().marked.wait(guard, [&] { return mark->done; });
}

// Under the list's lock.
void pace(Stream& stream, int64_t number) {
  const uint64_t seed = state().seed;
  stream.dice.seed(seed * 1000003 + number);
  const auto kind = seed == 0 ? 0 : stream.dice() % 3;
  stream.longest_us = kind == 0 ? 0 : state().longest_us;
  stream.exact = kind == 1;
}


void delay(Stream& stream) {
  double us = 0;
  {
    std::lock_guard<std::mutex> guard(stream.lock);
    us = stream.longest_us;
    if (us == 0) return;
    if (!stream.exact) us *= static_cast<double>(stream.dice() % 1024) / 1024;
  }
  std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us));
}

void run(Stream& stream) {
  if (omp_set_num_threads) omp_set_num_threads(1);
  while (true) {
    Item item;
    {
      std::unique_lock<std::mutex> guard(stream.lock);
      stream.filled.wait(guard, [&] { return stream.ended || !stream.items.empty(); });
      if (stream.items.empty()) return;
      item = std::move(stream.items.front());
      stream.items.pop_front();
    }
    if (item.awaited) await(item.awaited);
    if (item.kernel) delay(stream);
    if (!item.work) continue;
    try {
      item.work();
    } catch (const std::exception& error) {
      std::string said = error.what();
      std::lock_guard<std::mutex> guard(state().lock);
      if (state().error.empty()) state().error = said.substr(0, said.find('\n'));
    }
  }
}

Stream& stream_of(int64_t number) {
  std::lock_guard<std::mutex> guard(state().lock);
  auto& streams = state().streams;
  while (static_cast<int64_t>(streams.size()) <= number) {
    auto added = std::make_unique<Stream>();
    pace(*added, static_cast<int64_t>(streams.size()));
    if (!state().ended) added->thread = std::thread(run, std::ref(*added));
    added->ended = state().ended;
    streams.push_back(std::move(added));
  }
  return *streams[number];
}

void push_outside(int64_t number, Item item) {
  Stream& stream = stream_of(number);
  std::lock_guard<std::mutex> guard(stream.lock);
  if (stream.ended) return;
  stream.items.push_back(std::move(item));
  stream.filled.notify_one();
}

void push(int64_t number, Item item) {
  GraphPtr graph = graph_of(number);
  if (!graph) return push_outside(number, std::move(item));
  Node node{number};
  node.work = std::make_shared<Work>(std::move(item.work));
  node.kernel = item.kernel;
  add(graph, std::move(node));
}

MarkPtr record_outside(int64_t stream) {
  auto mark = std::make_shared<Mark>();
  {
    Stream& there = stream_of(stream);
    std::lock_guard<std::mutex> guard(there.lock);
    if (there.ended) {
      mark->done = true;
      return mark;
    }
  }
  push_outside(stream, {[mark] { finish(mark); }, nullptr, false});
  return mark;
}

thread_local int64_t current = 0;

}  // namespace

int64_t new_stream() {
  std::lock_guard<std::mutex> guard(state().lock);
  return 1 + state().made++ % (kMostStreams - 1);
}

int64_t current_stream() { return current; }

int64_t exchange_stream(int64_t stream) { return std::exchange(current, stream); }

void launch(int64_t stream, Work kernel) { push(stream, {std::move(kernel), nullptr, true}); }

void launch_drawing(int64_t stream, DrawingWork kernel) {
  GraphPtr graph = graph_of(stream);
  if (!graph) {
    launch(stream, [kernel = std::move(kernel), seed = draw_seed()] { kernel(seed); });
    return;
  }
  Node node{stream};
  node.drawing = std::make_shared<DrawingWork>(std::move(kernel));
  add(graph, std::move(node));
}

void append(int64_t stream, Work work) { push(stream, {std::move(work), nullptr, false}); }

void append_outside(int64_t stream, Work work) {
  push_outside(stream, {std::move(work), nullptr, false});
}

void append_everywhere(Work work) {
  size_t count;
  {
    std::lock_guard<std::mutex> guard(state().lock);
    count = state().streams.size();
  }
  // the last stream that drops its part runs the work
  std::shared_ptr<void> shared(nullptr, [work = std::move(work)](void*) { work(); });
  for (size_t number = 0; number < count; number++) append_outside(number, [shared] {});
}

MarkPtr record(int64_t stream) {
  GraphPtr graph = graph_of(stream);
  return graph ? record_in(graph, stream) : record_outside(stream);
}

void wait(int64_t stream, const MarkPtr& mark) {
  if (mark->captured) return follow(stream, mark);
  if (GraphPtr graph = graph_of(stream)) forbid(graph, "it waits for work outside of the capture");
  push_outside(stream, {nullptr, mark, false});
}

void check_host_may_ask(const MarkPtr& mark) {
  if (!mark->captured) return;
  if (GraphPtr graph = mark->graph.lock(); graph && !graph->over)
    forbid(graph, "the host asks for its event, or waits for it");
  throw std::runtime_error("the host asks for an event of a capture");
}

bool passed(const MarkPtr& mark) {
  check_host_may_ask(mark);
  std::lock_guard<std::mutex> guard(state().marking);
  return mark->done;
}

void synchronize(const MarkPtr& mark) {
  check_host_may_ask(mark);
  await(mark);
  throw_error();
}

void synchronize_stream(int64_t stream) { synchronize(record(stream)); }

void synchronize_all() {
  size_t count;
  {
    std::lock_guard<std::mutex> guard(state().lock);
    count = state().streams.size();
  }
  for (size_t number = 0; number < count; number++) await(record_outside(number));
  throw_error();
}

void throw_error() {
  std::string error;
  {
    std::lock_guard<std::mutex> guard(state().lock);
    error.swap(state().error);
  }
  if (!error.empty()) throw std::runtime_error("a kernel of the queued device failed: " + error);
}

MarkPtr stall(int64_t stream) {
  auto mark = std::make_shared<Mark>();
  wait(stream, mark);
  return mark;
}

void resume(const MarkPtr& mark) { finish(mark); }

void seed_delays(uint64_t seed, double longest_us) {
  std::lock_guard<std::mutex> guard(state().lock);
  state().seed = seed;
  state().longest_us = longest_us;
  for (size_t number = 0; number < state().streams.size(); number++) {
    Stream& stream = *state().streams[number];
    std::lock_guard<std::mutex> inner(stream.lock);
    pace(stream, static_cast<int64_t>(number));
  }
}

void slow_down(int64_t number, double us) {
  Stream& stream = stream_of(number);
  std::lock_guard<std::mutex> guard(stream.lock);
  stream.longest_us = us;
  stream.exact = true;
}

void end_streams() {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> guard(state().lock);
    state().ended = true;
    for (auto& stream : state().streams) all.push_back(stream.get());
  }
  for (Stream* stream : all) {
    std::lock_guard<std::mutex> guard(stream->lock);
    stream->ended = true;
    stream->filled.notify_one();
  }
  for (Stream* stream : all) {
    if (stream->thread.joinable()) stream->thread.join();
  }
}

}  // namespace queued
