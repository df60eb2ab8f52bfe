"""The duration of an op that reads weights on the host in place, or writes a gradient there.

It is the longer of two: modelled from the link to the host, and measured with the whole storage in
host memory (`in_place`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from offcompile.graph.direct_ops import product_rows, touched_bytes, workspace_of, write_of
from offcompile.graph.graphs import Hint, root_of
from offcompile.graph.storages import Place, Storage
from offcompile.ir import Op
from offcompile.machine.in_place import InPlace

from .op_costs import OpCost


@dataclass(frozen=True)
class HostOperands:
    """Times one step's ops on a machine that accesses host memory in place as `in_place` says."""

    in_place: InPlace
    costs: Mapping[Place, OpCost]
    hint: Hint

    def reads(
        self,
        place: Place,
        node: fx.Node,
        duration_us: float,
        weights: Iterable[tuple[fx.Node, Storage]],
    ) -> dict[str, float]:
        """Weight → duration of the op with that weight on the host; `weights`: its operands."""
        found: dict[str, float] = {}
        for operand, storage in weights:
            nbytes = touched_bytes(node, operand, storage.nbytes, self.hint)
            times = self.in_place.times_read(product_rows(node, operand, self.hint))
            took = self._us(place, storage.id, duration_us, round(nbytes * times))
            found[storage.id] = max(took, found.get(storage.id, took))
        return found

    def may_write(self, node: fx.Node, phase: str) -> bool:
        """True if the node's op can write its result into host memory."""
        inputs = [root_of(n) for n in node.all_input_nodes]
        # an input that exists only inside a fused kernel cannot be passed to another kernel
        apart = all(self.costs.get((phase, n.name), OpCost(0.0)).materialises for n in inputs)
        return apart and write_of(node) is not None

    def writing(self, op: Op, node: fx.Node, storage: Storage) -> Op:
        """The op, with its duration and workspace when it writes the storage on the host."""
        duration_us = self._us(storage.base, storage.id, op.duration_us, storage.nbytes, True)
        more = workspace_of(node, self.hint)
        return replace(
            op,
            direct={**op.direct, storage.id: duration_us},
            workspace_bytes=max(op.workspace_bytes, min(more, storage.nbytes)),
        )

    def _us(
        self, place: Place, storage: str, duration_us: float, nbytes: int, writes: bool = False
    ) -> float:
        measured = self.costs.get(place, OpCost(0.0)).in_place.get(storage, 0.0)
        return round(max(self.in_place.us(duration_us, nbytes, writes), measured), 3)
