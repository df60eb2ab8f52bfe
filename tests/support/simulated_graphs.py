"""Graphs on simulated streams, by CUDA's rules of capture.

A stream takes part in a capture once it waits for an event of it. Then it must wait for nothing
outside, and be waited for before the end; nobody may ask for an event of a capture. A replay
queues everything anew, so that clocks find races between replays and other work.
Memory that was allocated inside stays the graph's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from simulated_streams import SimulatedEvent, SimulatedStream, SimulatedStreams

from offcompile.runtime.device.graphs import StreamGraph

#: the nodes of other streams that a stream knows to come before: stream → their number
Known = dict[SimulatedStream, int]


class Illegal(RuntimeError):
    """A call that CUDA forbids while, or because, a stream is captured."""


@dataclass(eq=False)
class CapturedEvent(SimulatedEvent):
    graph: SimulatedGraph | None = None
    known: Known = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """One thing that was queued. `what`: launch, copy, record or wait."""

    what: str
    stream: SimulatedStream
    name: str = ""
    event: CapturedEvent | None = None
    again: Callable[[], None] | None = None


class SimulatedGraph(StreamGraph):
    def __init__(self, streams: GraphStreams) -> None:
        self.streams = streams
        self.nodes: list[Node] = []
        self.origin = SimulatedStream("captures")
        #: the streams that take part, and what they know
        self.known: dict[SimulatedStream, Known] = {self.origin: {}}
        self.memory: list[torch.Tensor] = []
        self.over = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with self.streams.captured_by(self), self.streams.on(self.origin):
            yield
        self.over = True
        for stream, known in self.known.items():
            mine = known.get(stream, 0)
            if stream is not self.origin and self.known[self.origin].get(stream, 0) < mine:
                raise Illegal(f"{stream.name} was not joined when the capture ended")

    def add(self, node: Node) -> None:
        known = self.known[node.stream]
        known[node.stream] = known.get(node.stream, 0) + 1
        self.nodes.append(node)

    def replay(self) -> None:
        streams = self.streams
        onto, events = streams.compute(), dict[CapturedEvent, SimulatedEvent]()
        for node in self.nodes:
            stream = onto if node.stream is self.origin else node.stream
            if node.again is not None:
                with streams.on(stream):
                    node.again()
            elif node.what == "record":
                assert node.event is not None
                events[node.event] = streams.record(stream)
            else:
                assert node.event is not None
                streams.wait(stream, events[node.event])

    def release(self) -> None:
        self.nodes.clear()
        self.memory.clear()


class GraphStreams(SimulatedStreams):
    """`log`: every order given to streams that run, as (what, stream, kernel or awaited stream),
    while it is a list."""

    log: list[tuple[str, str, str]] | None = None

    def __init__(self, *asked: Any) -> None:
        super().__init__(*asked)
        self._recorded_on = weakref.WeakKeyDictionary[SimulatedEvent, str]()

    # -- graphs ------------------------------------------------------------------------------------

    def why_no_graphs(self) -> str | None:
        return None

    def pool(self) -> object:
        return object()

    def graph(self, pool: object) -> SimulatedGraph:
        return SimulatedGraph(self)

    @contextmanager
    def captured_by(self, graph: SimulatedGraph) -> Iterator[None]:
        self._thread.graph = graph
        try:
            yield
        finally:
            self._thread.graph = None

    def _graph_of(self, stream: SimulatedStream) -> SimulatedGraph | None:
        graph: SimulatedGraph | None = getattr(self._thread, "graph", None)
        return graph if graph is not None and stream in graph.known else None

    # -- what streams are given --------------------------------------------------------------------

    def record(self, stream: SimulatedStream, timing: bool = False) -> SimulatedEvent:
        graph = self._graph_of(stream)
        if graph is None:
            self._note("record", stream, "")
            made = super().record(stream, timing)
            self._recorded_on[made] = stream.name
            return made
        event = CapturedEvent(0, graph=graph)
        graph.add(Node("record", stream, event=event))
        event.known = dict(graph.known[stream])
        return event

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        graph = getattr(self._thread, "graph", None)
        if isinstance(event, CapturedEvent):
            if event.graph is not graph or graph.over:
                raise Illegal(f"{stream.name} waits for an event of another capture")
            mine = graph.known.setdefault(stream, {})
            for one, count in event.known.items():
                mine[one] = max(mine.get(one, 0), count)
            graph.add(Node("wait", stream, event=event))
            return
        if self._graph_of(stream) is not None:
            raise Illegal(f"{stream.name} is captured and waits for an event outside")
        self._note("wait", stream, self._recorded_on.get(event, ""))
        super().wait(stream, event)

    def ended(self, event: SimulatedEvent) -> bool:
        self._check(event)
        return super().ended(event)

    def synchronize(self, event: SimulatedEvent) -> None:
        self._check(event)
        super().synchronize(event)

    def _check(self, event: SimulatedEvent) -> None:
        if isinstance(event, CapturedEvent):
            raise Illegal("the host asks for an event of a capture")

    def copy(self, stream: SimulatedStream, target: torch.Tensor, source: torch.Tensor) -> None:
        def again() -> None:
            self._note("copy", self.compute(), "")
            SimulatedStreams.copy(self, self.compute(), target, source)

        self._put(Node("copy", stream, again=again))

    def launch(
        self,
        work: Callable[..., None],
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        tag: str = "kernel",
    ) -> None:
        def again() -> None:
            self._note("launch", self.compute(), tag)
            SimulatedStreams.launch(self, work, reads, writes, tag)

        self._put(Node("launch", self.compute(), tag, again=again))

    def _put(self, node: Node) -> None:
        graph = self._graph_of(node.stream)
        if graph is not None:
            graph.add(node)
            return
        assert node.again is not None
        with self.on(node.stream):
            node.again()

    def empty(self, nbytes: int) -> torch.Tensor:
        made = super().empty(nbytes)
        graph = self._graph_of(self.compute())
        if graph is not None:
            graph.memory.append(made)
        return made

    def _note(self, what: str, stream: SimulatedStream, name: str) -> None:
        if self.log is not None:
            self.log.append((what, stream.name, name))
