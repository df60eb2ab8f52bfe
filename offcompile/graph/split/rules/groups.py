"""Rules for products of groups of tokens, each with a weight of its own, as in mixtures of experts.

    _grouped_mm(x, weights, ends): tokens ends[e - 1] up to ends[e] times weights[e]

A piece of the tokens has a part of each group: the ends move by the tokens before, and those of
groups in other pieces stop at its borders.
"""

from __future__ import annotations

import torch
from torch import fx

from offcompile.graph.split.layout import SUM, Rows, args_of, shape_of

from .frame import Known, Made, Piece, rule
from .products import turned

aten = torch.ops.aten


@rule(aten._grouped_mm.default)
def grouped(node: fx.Node, known: Known) -> Made | None:
    a, b, ends, bias, dtype = (*args_of(node), None, None, None)[:5]
    if ends is None or bias is not None or node.kwargs or len(shape_of(a)) != 2:
        return None
    left, right = known.of(a), known.of(b)
    if len(shape_of(b)) == 2:
        return _contracted(node, left, right)
    rows = left or known.want
    if rows is None or (rows.low, rows.high) != (0, 1) or right is not None:
        return None

    def emit(piece: Piece) -> fx.Node:
        rest = (_ends_in(piece, ends), None, dtype)
        return piece.build(node.target, piece.rows(a), piece.whole(b), *rest)

    layout = Rows(0, 1, rows.space)
    return Made(layout, emit, {a: layout}, counts_tokens=True)


def _contracted(node: fx.Node, left: Rows | None, right: Rows | None) -> Made | None:
    """The rule for the gradient of the weights: for each group a product along its tokens."""
    a, b, ends, _, dtype = (*args_of(node), None, None)[:5]
    known = left or right
    if known is None:
        return None
    left, right = left or Rows(1, 2, known.space), right or Rows(0, 1, known.space)
    if (left.low, left.high, right.low, right.high, left.space) != (1, 2, 0, 1, right.space):
        return None

    def emit(piece: Piece) -> fx.Node:
        rest = (_ends_in(piece, ends), None, dtype)
        return piece.build(node.target, turned(piece, piece.rows(a)), piece.rows(b), *rest)

    return Made(SUM, emit, {a: left, b: right}, counts_tokens=True)


def _ends_in(piece: Piece, ends: fx.Node) -> fx.Node:
    moved = piece.whole(ends)
    if piece.start:
        moved = piece.build(aten.sub.Tensor, moved, piece.start)
    return piece.build(aten.clamp.default, moved, 0, piece.count)
