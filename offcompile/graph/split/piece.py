"""Makes the nodes of one piece: the rows of tensors from outside, for some of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from offcompile.runtime.moves.ops import barrier
from offcompile.runtime.moves.row_ops import tangent_rows

from .builder import Builder
from .layout import shape_of
from .region import Region

aten = torch.ops.aten


@dataclass
class RowsOf:
    """The tokens from `start` to `end` of a region."""

    region: Region
    build: Builder
    start: int
    end: int
    #: operand from outside, or returned result → its node in rows
    entering: Mapping[fx.Node, fx.Node]
    #: the value of a node outside
    whole: Callable[[fx.Node], fx.Node]
    #: results of the previous piece, or a tangent
    after: list[fx.Node]
    #: True if backward makes the piece again
    again: bool = False
    #: True if graph edges enforce the order of pieces
    ordered: bool = False
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.end - self.start

    def rows(self, node: fx.Node) -> fx.Node:
        if node not in self.made:
            self.made[node] = self._from_outside(node)
        return self.made[node]

    def _from_outside(self, node: fx.Node) -> fx.Node:
        """The rows of a tensor from outside. Those that backward needs to make something again wait
        for a tangent, so that backward makes it, and not forward."""
        build = self.build
        if node in self.region.unlikely:
            value = node.meta["val"]
            sizes = [self.count, *self.region.entering()[node].others(value.shape)]
            ticket = build(barrier, self.whole(node), self.after)
            device = str(value.device)
            return build(tangent_rows, ticket, sizes, self.start, value.dtype, device)
        made = build(aten.slice.Tensor, self.entering[node], 0, self.start, self.end)
        ordered = self.ordered and len(shape_of(made)) > 1
        if self.after and (self.again or ordered):
            made = build(barrier, made, self.after)
        return made
