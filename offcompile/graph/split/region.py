"""Describes regions: parts of a joint graph computed token by token, around a large product.

A region starts at a product (tokens, words) and takes in every op that reads a tensor of that size,
or of half of it: ops along the words, then products and sums that lead back to small tensors. Large
operands made only for the region join it. So its inputs and outputs are small: hidden states,
labels, losses per token, gradients. The only large ones are forward's results that the user gets,
such as logits (`returned`), and their tangents. If a large tensor is read elsewhere, there is no
region.

A region runs in one of two ways:

    at once       forward and backward of a piece run together, with a tangent of one; backward
                  multiplies all gradients by the real tangent
    in two turns  forward of all pieces, later backward of each, which reruns its forward from the
                  nearest results that the user gets, else from the start
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from .layout import SUM, Rows, Space, shape_of
from .rules import Made, factors, numel_of_others

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten._grouped_mm.default)


class NoRegion(Exception):
    """No region can be built around a product; the message gives the reason."""


@dataclass(eq=False)
class Region:
    seed: fx.Node
    tokens: int
    words: int
    made: dict[fx.Node, Made] = field(default_factory=dict)
    layouts: dict[fx.Node, Rows] = field(default_factory=dict)
    #: bytes of the largest tensors of all regions of which none waits for another, such as parts of
    #: one loss
    beside_bytes: int = 0
    #: the smallest set of tokens, for which the whole region is computed
    space: Space = field(default_factory=lambda: Space(0))
    #: nodes that depend on a tangent
    late: frozenset[fx.Node] = frozenset()
    #: the only tangent, which multiplies the gradients; None if in two turns or without backward
    tangent: fx.Node | None = None
    at_once: bool = False
    #: large results of forward that the user gets: they exist as a whole
    returned: set[fx.Node] = field(default_factory=set)
    #: tangents of `returned` that only this region reads; each is zero unless the user uses the
    #: result
    unlikely: set[fx.Node] = field(default_factory=set)
    #: halves of large tensors, such as the gate of an MLP whose two products are one, and what is
    #: computed of them; they may be no larger than the product's operand
    halves: set[fx.Node] = field(default_factory=set)

    def add(self, node: fx.Node, made: Made) -> None:
        self.made[node] = made
        if made.layout == SUM:
            return
        self.layouts[node] = made.layout
        computed = node.target not in PRODUCTS and self.has_half(made.layout, node)
        if computed and any(self.is_large(n) for n in node.all_input_nodes):
            self.halves.add(node)

    def has_half(self, rows: Rows, node: fx.Node) -> bool:
        """True if it has at least half the elements of the product's result."""
        return 2 * numel_of_others(rows, node) >= self.words

    def is_large(self, node: fx.Node) -> bool:
        rows = self.layouts.get(node)
        if rows is None or not self.has_half(rows, node):
            return False
        return node in self.halves or numel_of_others(rows, node) > self.width

    @cached_property
    def width(self) -> int:
        """Elements per token of the product's operand."""
        return shape_of(factors(self.seed)[0])[1]

    def wants(self, node: fx.Node, rows: Rows) -> bool:
        """True if an operand of a large tensor is to be made piece by piece, too."""
        return self.has_half(rows, node) and (
            node.target in PRODUCTS or numel_of_others(rows, node) > self.width
        )

    @cached_property
    def row_bytes(self) -> int:
        """Bytes per token of the largest tensor."""
        large = [n for n in self.made if self.is_large(n)]
        sizes: list[int] = [
            numel_of_others(self.layouts[n], n) * n.meta["val"].element_size() for n in large
        ]
        return max(sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the largest tensor."""
        return self.space.count * self.row_bytes

    @cached_property
    def is_chain(self) -> bool:
        """True if a product follows on the large tensors in forward, as in an MLP."""
        early = [n for n in self.made if n not in self.late and n.target in PRODUCTS]
        return any(self.is_large(factors(n)[0]) for n in early)

    def outs(self) -> list[fx.Node]:
        """The nodes that are read outside the region, in order."""
        return [n for n in self.made if any(user not in self.made for user in n.users)]

    def turn(self, late: bool) -> list[fx.Node]:
        """The nodes that a turn computes, in order; the late turn reruns early ones."""
        if self.at_once:
            return list(self.made)
        ends = [n for n in self.outs() if (n in self.late) == late]
        whole = {n for n, made in self.made.items() if made.layout == SUM and n not in ends}
        closed = whole | (self.returned if late else set())
        found = closure(
            ends,
            (),
            lambda node: [n for n in node.all_input_nodes if n in self.made.keys() - closed],
        )
        return [n for n in self.made if n in found]

    @property
    def reruns(self) -> bool:
        """True if backward multiplies by the weight again."""
        return not self.at_once and self.seed in self.turn(True)

    def entering(self) -> dict[fx.Node, Rows]:
        """The operands from outside that have tokens."""
        found: dict[fx.Node, Rows] = {}
        for made in self.made.values():
            found |= {n: rows for n, rows in made.operands.items() if n not in self.made}
        return found


def reached(nodes: Iterable[fx.Node], without: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """The nodes, and all that depend on them by a path that avoids `without`."""
    return closure(nodes, without, lambda node: node.users)


def needed(nodes: Iterable[fx.Node], without: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """The nodes, and all that they depend on by a path that avoids `without`."""
    return closure(nodes, without, lambda node: node.all_input_nodes)


def closure(
    nodes: Iterable[fx.Node],
    without: Iterable[fx.Node],
    next_of: Callable[[fx.Node], Iterable[fx.Node]],
) -> set[fx.Node]:
    closed, found, waiting = set(without), set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [n for n in next_of(node) if n not in closed]
    return found
