"""Rules for products: of tokens with a weight, and along the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from offcompile.graph.split.layout import SUM, Rows, args_of, shape_of

from .frame import Known, Made, Piece, rule
from .pointwise import aligned

aten = torch.ops.aten


@rule(aten.mm.default, aten.addmm.default)
def product(node: fx.Node, known: Known) -> Made | None:
    bias = args_of(node)[0] if node.target is aten.addmm.default else None
    a, b = args_of(node)[-2:]
    left, right = known.of(a), known.of(b)
    first, second = (0, 1), (1, 2)

    def at(rows: Rows | None) -> tuple[int, int] | None:
        return None if rows is None else (rows.low, rows.high)

    if bias is None and (at(left) == second or at(right) == first):
        return _contracted(node, a, b, left, right)
    rows = left or (known.want if known.want is not None and known.want.low == 0 else None)
    if rows is not None and at(rows) == first and right is None:
        return _times(node, bias, a, b, rows)
    if bias is None and right is not None and at(right) == second and left is None:
        return _times_from_left(node, a, b, right)
    return None


def _times(node: fx.Node, bias: Any, a: fx.Node, b: fx.Node, rows: Rows) -> Made | None:
    layout = Rows(0, 1, rows.space, rows.padded and bias is None)
    if bias is not None and (node.kwargs or aligned(bias, layout, shape_of(node)) is None):
        return None

    def emit(piece: Piece) -> fx.Node:
        if bias is None:
            return piece.build(node.target, piece.rows(a), piece.whole(b))
        return piece.build(node.target, piece.whole(bias), piece.rows(a), piece.whole(b))

    return Made(layout, emit, {a: Rows(0, 1, rows.space, rows.padded)})


def _times_from_left(node: fx.Node, a: fx.Node, b: fx.Node, rows: Rows) -> Made:
    """The rule for (others, words) @ (words, tokens): in rows, the transposes in reverse order."""

    def emit(piece: Piece) -> fx.Node:
        return piece.build(aten.mm.default, piece.rows(b), turned(piece, piece.whole(a)))

    return Made(Rows(1, 2, rows.space, rows.padded), emit, {b: rows})


def _contracted(
    node: fx.Node, a: fx.Node, b: fx.Node, left: Rows | None, right: Rows | None
) -> Made | None:
    """The rule for a product along the tokens, such as a weight's gradient: a sum."""
    known = left or right
    assert known is not None
    space = known.space
    left, right = left or Rows(1, 2, space), right or Rows(0, 1, space)
    if (left.low, right.low, left.space) != (1, 0, right.space):
        return None

    def emit(piece: Piece) -> fx.Node:
        return piece.build(aten.mm.default, turned(piece, piece.rows(a)), piece.rows(b))

    return Made(SUM, emit, {a: left, b: right})


def turned(piece: Piece, node: fx.Node) -> fx.Node:
    return piece.build(aten.permute.default, node, [1, 0])
