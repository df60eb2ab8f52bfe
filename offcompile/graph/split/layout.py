"""Describes the position of tokens in a tensor's shape, and the subset of tokens it has.

Inside a region every tensor is computed in *rows*: its token dimensions are flattened into one, in
front of all other dimensions.

    shape (batch, length, words)   tokens (0, 2)   in rows (batch · length, words)
    shape (words, tokens)          tokens (1, 2)   in rows (tokens, words)

A slice along tokens, such as the shift of labels, gives a smaller *space*. A region is computed
only for the rows of its smallest space: tensors of a larger space are needed only there, and
gradients that `slice_backward` mapped back are zero elsewhere (`padded`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

Shape = tuple[int, ...]
#: layout of a sum over tokens, whose pieces are added
SUM: Literal["sum"] = "sum"


@dataclass(frozen=True)
class Space:
    """A set of tokens: all of them, or a slice of another set along one of its dimensions."""

    count: int
    parent: Space | None = None
    #: sizes of the token dimensions of the tensor that was sliced
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
        """True if this space is `other` or a part of it."""
        return self == other or (self.parent is not None and self.parent.within(other))

    def steps_from(self, other: Space) -> list[Space]:
        """The slices from `other` to this space, in order."""
        if self == other:
            return []
        assert self.parent is not None
        return [*self.parent.steps_from(other), self]


@dataclass(frozen=True)
class Rows:
    """The layout of a tensor with tokens: dimensions `low` up to `high` hold them."""

    low: int
    high: int
    space: Space
    #: True if the tensor is zero for all tokens outside the smallest space
    padded: bool = False

    def others(self, shape: Sequence[int]) -> Shape:
        return (*shape[: self.low], *shape[self.high :])

    def tokens(self, shape: Sequence[int]) -> Shape:
        return tuple(shape[self.low : self.high])

    def other_dim(self, dim: int, rank: int) -> int | None:
        """The position of a dimension in rows; None if it is a token dimension."""
        dim = dim % rank
        if dim < self.low:
            return dim + 1
        return dim - (self.high - self.low) + 1 if dim >= self.high else None


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments, typed Any: their types follow from the op's schema, not torch's hints."""
    return node.args


def shape_of(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def is_static(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in value.shape)


def settled(rows: Rows, shape: Shape) -> Rows | None:
    """The layout with leading dimensions of size 1 counted as tokens; None if it does not match the
    shape."""
    if math.prod(rows.tokens(shape)) != rows.space.count:
        return None
    if rows.low and math.prod(shape[: rows.low]) == 1:
        return Rows(0, rows.high, rows.space, rows.padded)
    return rows


def reshaped(rows: Rows, old: Shape, new: Shape) -> Rows | None:
    """The layout after a view of another shape; None if that mixes tokens with other dimensions."""
    before, count = math.prod(old[: rows.low]), rows.space.count
    for low in range(len(new)):
        if math.prod(new[:low]) != before:
            continue
        for high in range(low + 1, len(new) + 1):
            if math.prod(new[low:high]) == count:
                return settled(Rows(low, high, rows.space, rows.padded), new)
    return None


def permuted(rows: Rows, order: Sequence[int]) -> Rows | None:
    """The layout after a permutation; None if that separates the token dimensions."""
    places = [order.index(dim) for dim in range(rows.low, rows.high)]
    if places != list(range(places[0], places[0] + len(places))):
        return None
    return Rows(places[0], places[-1] + 1, rows.space, rows.padded)
