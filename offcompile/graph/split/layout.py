"""Where the tokens are in a tensor's shape, and which of them a tensor has.

Inside a region every tensor is computed in *rows*: its token dimensions flattened into one, in
front of all its other dimensions.

    shape (batch, length, words)   tokens (0, 2)   in rows (batch · length, words)
    shape (words, tokens)          tokens (1, 2)   in rows (tokens, words)

A slice along tokens, as the shift of labels makes one, leads to a smaller *space*. All of a region
is computed for the rows of its smallest space: a tensor of a larger one is needed there alone, and
gradients that `slice_backward` brought back are zero elsewhere (`padded`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

Shape = tuple[int, ...]
#: a sum over tokens: pieces of it are added
SUM: Literal["sum"] = "sum"


@dataclass(frozen=True)
class Space:
    """A set of tokens: all of them, or a slice of another set along one of its dimensions."""

    count: int
    parent: Space | None = None
    #: token dimensions of the parent where it was sliced
    sizes: Shape = ()
    dim: int = 0
    start: int = 0
    end: int = 0

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else 1 + self.parent.depth

    def sliced(self, sizes: Shape, dim: int, start: int, end: int) -> Space:
        count = self.count // sizes[dim] * (end - start)
        return Space(count, self, sizes, dim, start, end)

    def within(self, other: Space) -> bool:
        """True if these are tokens of `other`, all or some."""
        return self == other or (self.parent is not None and self.parent.within(other))

    def steps_from(self, other: Space) -> list[Space]:
        """The slices that lead from `other` to this space, in order."""
        if self == other:
            return []
        assert self.parent is not None
        return [*self.parent.steps_from(other), self]


@dataclass(frozen=True)
class Rows:
    """The layout of a tensor that has tokens: dimensions `low` up to `high` are theirs."""

    low: int
    high: int
    space: Space
    #: zero for all tokens that the smallest space lacks
    padded: bool = False

    def others(self, shape: Sequence[int]) -> Shape:
        return (*shape[: self.low], *shape[self.high :])

    def tokens(self, shape: Sequence[int]) -> Shape:
        return tuple(shape[self.low : self.high])

    def other_dim(self, dim: int, rank: int) -> int | None:
        """In rows, the place of a dimension; None: it is one of the tokens'."""
        dim = dim % rank
        if dim < self.low:
            return dim + 1
        return dim - (self.high - self.low) + 1 if dim >= self.high else None


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node, whose types its op's schema tells, not torch's annotations."""
    return node.args


def shape_of(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def is_static(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in value.shape)


def settled(rows: Rows, shape: Shape) -> Rows | None:
    """The layout with sizes of 1 in front counted as tokens; None: it does not match the shape."""
    if math.prod(rows.tokens(shape)) != rows.space.count:
        return None
    if rows.low and math.prod(shape[: rows.low]) == 1:
        return Rows(0, rows.high, rows.space, rows.padded)
    return rows


def reshaped(rows: Rows, old: Shape, new: Shape) -> Rows | None:
    """The layout after a view of another shape; None: it mixes tokens with the rest."""
    before, count = math.prod(old[: rows.low]), rows.space.count
    for low in range(len(new)):
        if math.prod(new[:low]) != before:
            continue
        for high in range(low + 1, len(new) + 1):
            if math.prod(new[low:high]) == count:
                return settled(Rows(low, high, rows.space, rows.padded), new)
    return None


def permuted(rows: Rows, order: Sequence[int]) -> Rows | None:
    """The layout after a permutation; None: it tears the tokens apart."""
    places = [order.index(dim) for dim in range(rows.low, rows.high)]
    if places != list(range(places[0], places[0] + len(places))):
        return None
    return Rows(places[0], places[-1] + 1, rows.space, rows.padded)
