"""Defines the inputs and results of a rule.

A rule gets a node with a known layout for its result or at least one operand. It returns the layout
of the result, the layouts that the other operands must have, and a function that makes the node
for a piece. It returns None if the op mixes tokens, or if the rule does not cover it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import fx

from offcompile.graph.split.builder import Builder
from offcompile.graph.split.layout import SUM, Rows, args_of, settled, shape_of

aten = torch.ops.aten


class Piece(Protocol):
    """The tokens of one piece, and the nodes made for them."""

    build: Builder

    @property
    def start(self) -> int:
        """The number of tokens in the pieces before."""

    @property
    def count(self) -> int:
        """The number of tokens."""

    def rows(self, node: fx.Node) -> fx.Node:
        """The node's value in rows, for these tokens."""

    def whole(self, node: fx.Node) -> fx.Node:
        """The value of a node without tokens."""


Emit = Callable[[Piece], fx.Node]


@dataclass(frozen=True)
class Made:
    layout: Rows | Literal["sum"]
    emit: Emit
    #: operand with tokens → the layout that it must have
    operands: dict[fx.Node, Rows] = field(default_factory=dict)
    #: True if `emit` asks which tokens a piece has, and not only how many
    counts_tokens: bool = False


@dataclass(frozen=True)
class Known:
    """The layouts known so far, for rules to look up."""

    layouts: dict[fx.Node, Rows]
    #: the layout that the result must have; None if it follows from the operands
    want: Rows | None = None

    def of(self, node: object) -> Rows | None:
        return self.layouts.get(node) if isinstance(node, fx.Node) else None

    def first(self, nodes: Iterable[object]) -> Rows | None:
        """The layout of the first operand that has one, or else the one that is wanted."""
        return next((rows for n in nodes if (rows := self.of(n)) is not None), self.want)


Rule = Callable[[fx.Node, Known], Made | None]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    def add(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, found))
        return found

    return add


def apply(node: fx.Node, known: Known) -> Made | None:
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return None
    if known.want is None and not any(n in known.layouts for n in node.all_input_nodes):
        return None
    found = RULES.get(node.target)
    if found is None and torch.Tag.pointwise in tags:
        found = RULES[torch.Tag.pointwise]
    made = None if found is None else found(node, known)
    if made is not None and made.layout != SUM and known.want is not None:
        wanted, got = known.want, made.layout
        if (wanted.low, wanted.high, wanted.space) != (got.low, got.high, got.space):
            return None
    return made


def factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The two factors of a product."""
    grouped = node.target is aten._grouped_mm.default
    a, b = args_of(node)[:2] if grouped else args_of(node)[-2:]
    return a, b


def numel_of_others(rows: Rows, node: fx.Node) -> int:
    return math.prod(rows.others(shape_of(node)))


def viewed(piece: Piece, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    if shape_of(node) == tuple(shape):
        return node
    return piece.build(aten.reshape.default, node, list(shape))


def same_places(rows: Rows, *nodes: fx.Node, known: Known) -> dict[fx.Node, Rows] | None:
    """Operand → its layout, with tokens in the same dimensions; None if they cannot all match."""
    found = {}
    for node in nodes:
        own = known.of(node) or Rows(rows.low, rows.high, rows.space)
        if (own.low, own.high, own.space) != (rows.low, rows.high, rows.space):
            return None
        if settled(own, shape_of(node)) is None:
            return None
        found[node] = own
    return found
