"""Rules for views, permutations, and tensors filled with one value."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from offcompile.graph.split.layout import Rows, args_of, permuted, reshaped, settled, shape_of

from .frame import Known, Made, Piece, rule, viewed
from .pointwise import WHOLE, aligned, fitted

aten = torch.ops.aten


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def view(node: fx.Node, known: Known) -> Made | None:
    source = args_of(node)[0]
    rows, shape = known.of(source), shape_of(node)
    layout: Rows | None
    if rows is None:
        if known.want is None:
            return None
        rows = reshaped(known.want, shape, shape_of(source))
        layout = known.want
    else:
        layout = reshaped(rows, shape_of(source), shape)
    if rows is None or layout is None:
        return None
    layout = Rows(layout.low, layout.high, layout.space, rows.padded)

    def emit(piece: Piece) -> fx.Node:
        return viewed(piece, piece.rows(source), (piece.count, *layout.others(shape)))

    return Made(layout, emit, {source: rows})


@rule(aten.t.default, aten.transpose.int, aten.permute.default)
def permute(node: fx.Node, known: Known) -> Made | None:
    source = args_of(node)[0]
    rank = len(shape_of(source))
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [d % rank for d in args_of(node)[1]]
    else:
        a, b = (0, 1) if node.target is aten.t.default else (d % rank for d in args_of(node)[1:3])
        order[a], order[b] = order[b], order[a]
    rows = known.of(source)
    if rows is None:
        if known.want is None:
            return None
        rows = permuted(known.want, [order.index(d) for d in range(rank)])
    layout = None if rows is None else permuted(rows, order)
    if rows is None or layout is None:
        return None
    layout = settled(layout, shape_of(node))
    if layout is None:
        return None
    others = [p for d in order if (p := rows.other_dim(d, rank)) is not None]
    places = [0, *others]

    def emit(piece: Piece) -> fx.Node:
        found = piece.rows(source)
        if places == sorted(places):
            return viewed(piece, found, (piece.count, *layout.others(shape_of(node))))
        return piece.build(aten.permute.default, found, places)

    return Made(layout, emit, {source: rows})


@rule(aten.expand.default)
def expand(node: fx.Node, known: Known) -> Made | None:
    source, shape = args_of(node)[0], shape_of(node)
    rows = known.of(source)
    layout = known.want
    if rows is not None:
        off = len(shape) - len(shape_of(source))
        layout = settled(Rows(rows.low + off, rows.high + off, rows.space, rows.padded), shape)
    if layout is None:
        return None
    how = aligned(source, layout, shape)
    if how is None:
        return None
    has_rows = how is not WHOLE
    operands = {source: rows or how} if has_rows else {}

    def emit(piece: Piece) -> fx.Node:
        found = fitted(source, layout, shape, piece, has_rows)
        wanted = [piece.count, *layout.others(shape)]
        return piece.build(aten.expand.default, found, wanted)

    return Made(layout, emit, operands)


def fill_of(node: fx.Node) -> Any:
    """The value that a node fills its result with; None if it does not fill it."""
    target, args = node.target, args_of(node)
    if target in (aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default):
        return 0
    if target in (aten.ones_like.default, aten.new_ones.default, aten.ones.default):
        return 1
    if target in (aten.full_like.default, aten.full.default):
        return args[1]
    return args[2] if target is aten.new_full.default else None


@rule(
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.zeros.default,
    aten.ones_like.default,
    aten.new_ones.default,
    aten.ones.default,
    aten.full_like.default,
    aten.full.default,
    aten.new_full.default,
)
def full(node: fx.Node, known: Known) -> Made | None:
    layout, shape = known.want, shape_of(node)
    if layout is None:
        layout = known.of(args_of(node)[0]) if isinstance(args_of(node)[0], fx.Node) else None
        if layout is None or shape != shape_of(args_of(node)[0]):
            return None
    fill = fill_of(node)
    if isinstance(fill, fx.Node):
        return None
    value = node.meta["val"]

    def emit(piece: Piece) -> fx.Node:
        sizes = [piece.count, *layout.others(shape)]
        return piece.build(aten.full.default, sizes, fill, dtype=value.dtype, device=value.device)

    return Made(Rows(layout.low, layout.high, layout.space, fill == 0), emit)
