"""Minimum cut of a network (Dinic's algorithm)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

#: capacity of an edge that no cut takes: more than all others together
UNCUTTABLE = 1 << 62
_SOURCE, _SINK = 0, 1


@dataclass(slots=True)
class Network:
    """A flow network. Nodes are hashable, capacities are integers.

    Capacities may be changed and the network cut again.
    """

    _index: dict[Hashable, int] = field(default_factory=dict)
    #: per node: the numbers of its edges; an edge and its reverse differ in the last bit
    _edges: list[list[int]] = field(default_factory=lambda: [[], []])
    #: per edge: its target and its capacity
    _target: list[int] = field(default_factory=list)
    _capacity: list[int] = field(default_factory=list)

    def from_source(self, node: Hashable, capacity: int) -> int:
        return self._add(_SOURCE, self._node(node), capacity)

    def to_sink(self, node: Hashable, capacity: int) -> int:
        return self._add(self._node(node), _SINK, capacity)

    def edge(self, source: Hashable, target: Hashable, capacity: int) -> int:
        """Adds an edge and returns its number."""
        return self._add(self._node(source), self._node(target), capacity)

    def change(self, edge: int, capacity: int) -> None:
        self._capacity[edge] = capacity

    def source_side(self) -> set[Hashable]:
        """Cuts the network at least cost and returns the nodes on the source side."""
        left = list(self._capacity)
        while True:
            levels = self._levels(left)
            if levels[_SINK] < 0:
                return {node for node, i in self._index.items() if levels[i] >= 0}
            self._block(levels, left)

    def _node(self, node: Hashable) -> int:
        found = self._index.get(node)
        if found is None:
            found = self._index[node] = len(self._edges)
            self._edges.append([])
        return found

    def _add(self, source: int, target: int, capacity: int) -> int:
        number = len(self._target)
        self._target += (target, source)
        self._capacity += (capacity, 0)
        self._edges[source].append(number)
        self._edges[target].append(number + 1)
        return number

    def _levels(self, left: list[int]) -> list[int]:
        """Returns each node's distance from the source over residual edges; -1: unreachable."""
        edges, target = self._edges, self._target
        levels = [-1] * len(edges)
        levels[_SOURCE] = level = 0
        reached = [_SOURCE]
        while reached:
            level += 1
            following: list[int] = []
            for node in reached:
                for edge in edges[node]:
                    if left[edge]:
                        to = target[edge]
                        if levels[to] < 0:
                            levels[to] = level
                            following.append(to)
            reached = following
        return levels

    def _block(self, levels: list[int], left: list[int]) -> None:
        """Sends flow along shortest paths until each of them has a saturated edge."""
        edges, target = self._edges, self._target
        # only nodes nearer to the source than the sink lie on a shortest path to it
        last = levels[_SINK]
        todo = [
            [e for e in mine if left[e] and levels[target[e]] == level + 1]
            if 0 <= level < last
            else []
            for mine, level in zip(edges, levels, strict=True)
        ]
        path: list[int] = []
        node = _SOURCE
        while True:
            if node == _SINK:
                sent = min([left[edge] for edge in path])
                full = len(path)
                for at in range(len(path) - 1, -1, -1):
                    edge = path[at]
                    left[edge] -= sent
                    left[edge ^ 1] += sent
                    if not left[edge]:
                        full = at
                node = target[path[full] ^ 1]  # resume before the first saturated edge
                del path[full:]
                continue
            mine = todo[node]
            while mine and not left[mine[-1]]:
                mine.pop()
            if mine:
                edge = mine[-1]
                path.append(edge)
                node = target[edge]
            elif path:
                node = target[path.pop() ^ 1]
                todo[node].pop()
            else:
                return
