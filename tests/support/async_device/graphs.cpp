#include "graphs.h"

#include <mutex>
#include <stdexcept>

#include "hooks.h"
#include "memory.h"

namespace queued {
namespace {

// streams of replays: none that anybody else gives work to
constexpr int64_t kBranches = 64;

struct Captures {
  std::mutex lock;
  std::map<int64_t, GraphPtr> by_stream;
};

Captures& captures() {
  static auto* it = new Captures();
  return *it;
}

void learn(Known& mine, const Known& more) {
  for (auto [stream, count] : more) mine[stream] = std::max(mine[stream], count);
}

}  // namespace

Graph::~Graph() { drop_pool(pool); }

GraphPtr graph_of(int64_t stream) {
  std::lock_guard<std::mutex> guard(captures().lock);
  auto found = captures().by_stream.find(stream);
  return found == captures().by_stream.end() ? nullptr : found->second;
}

void add(const GraphPtr& graph, Node node) {
  std::lock_guard<std::mutex> guard(captures().lock);
  graph->known[node.stream][node.stream]++;
  graph->nodes.push_back(std::move(node));
}

MarkPtr record_in(const GraphPtr& graph, int64_t stream) {
  auto mark = std::make_shared<Mark>();
  Node node{stream};
  node.recorded = mark;
  add(graph, std::move(node));
  mark->captured = true;
  mark->graph = graph;
  mark->known = graph->known[stream];
  return mark;
}

void follow(int64_t stream, const MarkPtr& mark) {
  GraphPtr graph = mark->graph.lock(), mine = graph_of(stream);
  if (!graph || graph->over)
    throw std::runtime_error("a stream waits for an event of a capture that is over");
  if (mine && mine != graph) forbid(mine, "it waits for another capture");
  {
    std::lock_guard<std::mutex> guard(captures().lock);
    captures().by_stream[stream] = graph;
    learn(graph->known[stream], mark->known);
  }
  Node node{stream};
  node.awaited = mark;
  add(graph, std::move(node));
}

void forbid(const GraphPtr& graph, const std::string& why) {
  graph->broken = "operation not permitted when stream is capturing: " + why;
  throw std::runtime_error(graph->broken);
}

GraphPtr begin_capture(int64_t stream, int64_t pool) {
  if (graph_of(stream)) throw std::runtime_error("the stream is captured already");
  auto graph = std::make_shared<Graph>();
  graph->origin = stream;
  graph->pool = pool;
  hold_pool(pool);
  std::lock_guard<std::mutex> guard(captures().lock);
  graph->known[stream];
  captures().by_stream[stream] = graph;
  return graph;
}

void end_capture(const GraphPtr& graph) {
  std::lock_guard<std::mutex> guard(captures().lock);
  std::erase_if(captures().by_stream, [&](const auto& one) { return one.second == graph; });
  graph->over = true;
  if (!graph->broken.empty()) throw std::runtime_error(graph->broken);
  Known& seen = graph->known[graph->origin];
  for (auto& [stream, known] : graph->known)
    if (stream != graph->origin && seen[stream] < known[stream])
      throw std::runtime_error("capturing stream has unjoined work: stream " +
                               std::to_string(stream));
}

void replay(const Graph& graph, int64_t stream) {
  std::map<Mark*, MarkPtr> marks;
  for (const Node& node : graph.nodes) {
    const int64_t onto = node.stream == graph.origin ? stream : kBranches + node.stream;
    if (node.recorded) {
      marks[node.recorded.get()] = record(onto);
    } else if (node.awaited) {
      wait(onto, marks.at(node.awaited.get()));
    } else if (node.drawing) {
      launch(onto, [work = node.drawing, seed = draw_seed()] { (*work)(seed); });
    } else if (node.kernel) {
      launch(onto, [work = node.work] { (*work)(); });
    } else {
      append(onto, [work = node.work] { (*work)(); });
    }
  }
}

}  // namespace queued
