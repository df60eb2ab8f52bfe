"""A minimum cut between two ends of a network (Dinic's algorithm)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

#: an edge that no cut takes: dearer than all others together
UNCUTTABLE = 1 << 62
_SOURCE, _SINK = 0, 1


@dataclass(slots=True)
class Network:
    """Nodes are named by anything hashable; edges have whole capacities."""

    _index: dict[Hashable, int] = field(default_factory=dict)
    #: per node: its edges as [target, capacity left, place of the reverse edge]
    _edges: list[list[list[int]]] = field(default_factory=lambda: [[], []])

    def from_source(self, node: Hashable, capacity: int) -> None:
        self._add(_SOURCE, self._node(node), capacity)

    def to_sink(self, node: Hashable, capacity: int) -> None:
        self._add(self._node(node), _SINK, capacity)

    def edge(self, source: Hashable, target: Hashable, capacity: int) -> None:
        self._add(self._node(source), self._node(target), capacity)

    def source_side(self) -> set[Hashable]:
        """Cut the network at least cost; the nodes that stay with the source."""
        while True:
            levels = self._levels()
            if levels[_SINK] < 0:
                return {node for node, i in self._index.items() if levels[i] >= 0}
            self._block(levels)

    def _node(self, node: Hashable) -> int:
        found = self._index.get(node)
        if found is None:
            found = self._index[node] = len(self._edges)
            self._edges.append([])
        return found

    def _add(self, source: int, target: int, capacity: int) -> None:
        forth, back = self._edges[source], self._edges[target]
        forth.append([target, capacity, len(back)])
        back.append([source, 0, len(forth) - 1])

    def _levels(self) -> list[int]:
        """Edges from the source to each node over what capacity is left; -1: it is cut off."""
        levels = [-1] * len(self._edges)
        levels[_SOURCE] = 0
        queue = deque([_SOURCE])
        while queue:
            node = queue.popleft()
            for target, left, _ in self._edges[node]:
                if left > 0 and levels[target] < 0:
                    levels[target] = levels[node] + 1
                    queue.append(target)
        return levels

    def _block(self, levels: list[int]) -> None:
        """Send flow along shortest paths until each of them has an edge that is full."""
        edges, at = self._edges, [0] * len(self._edges)
        path: list[list[int]] = []
        node = _SOURCE
        while True:
            if node == _SINK:
                sent = min(edge[1] for edge in path)
                for edge in path:
                    edge[1] -= sent
                    edges[edge[0]][edge[2]][1] += sent
                path, node = [], _SOURCE
                continue
            while at[node] < len(edges[node]):
                edge = edges[node][at[node]]
                if edge[1] > 0 and levels[edge[0]] == levels[node] + 1:
                    path.append(edge)
                    node = edge[0]
                    break
                at[node] += 1
            else:
                if not path:
                    return
                edge = path.pop()
                node = edges[edge[0]][edge[2]][0]
                at[node] += 1
