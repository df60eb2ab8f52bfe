// Graphs: what streams are given while they are captured, and replays of it.
//
// By CUDA's rules: a stream takes part once it waits for a mark of the capture; what takes part
// waits for nothing outside, and is waited for before the end; the host may not ask for its marks.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "queues.h"

namespace queued {

// Counts the nodes of each stream that come before.
using Known = std::map<int64_t, size_t>;

struct Node {
  int64_t stream;
  std::shared_ptr<Work> work;
  std::shared_ptr<DrawingWork> drawing;
  MarkPtr awaited, recorded;
  bool kernel = false;
};

struct Graph {
  int64_t origin, pool;
  bool over = false;
  // why it cannot be used
  std::string broken;
  std::vector<Node> nodes;
  std::map<int64_t, Known> known;

  ~Graph();
};
using GraphPtr = std::shared_ptr<Graph>;

// The graph that captures a stream, if any does.
GraphPtr graph_of(int64_t stream);
void add(const GraphPtr& graph, Node node);
MarkPtr record_in(const GraphPtr& graph, int64_t stream);
// Let a stream wait for a mark of a capture; it takes part from now on.
void follow(int64_t stream, const MarkPtr& mark);
// Throw, and let the capture fail.
[[noreturn]] void forbid(const GraphPtr& graph, const std::string& why);

GraphPtr begin_capture(int64_t stream, int64_t pool);
// Throws if the graph is broken, or a stream was not joined.
void end_capture(const GraphPtr& graph);
void replay(const Graph& graph, int64_t stream);

}  // namespace queued
