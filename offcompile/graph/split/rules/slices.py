"""Rules for slices and pads, along tokens and other dimensions, and for their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from offcompile.graph.split.layout import Rows, Shape, args_of, shape_of

from .frame import Known, Made, Piece, rule, same_places
from .shapes import fill_of

aten = torch.ops.aten


def _bounds(start: Any, end: Any, size: int) -> tuple[int, int]:
    start = 0 if start is None else start
    end = size if end is None else end
    start, end = (max(0, n + size) if n < 0 else min(n, size) for n in (start, end))
    return start, max(start, end)


def _slice_args(args: Sequence[Any], first: int) -> tuple[int, Any, Any, int]:
    rest = [*args[first:], *[None] * 4][:4]
    return rest[0] or 0, rest[1], rest[2], 1 if rest[3] is None else rest[3]


@rule(aten.slice.Tensor)
def slices(node: fx.Node, known: Known) -> Made | None:
    source = args_of(node)[0]
    dim, start, end, step = _slice_args(args_of(node), 1)
    shape, rank = shape_of(source), len(shape_of(source))
    dim %= rank
    rows = known.of(source)
    if rows is None:
        if known.want is None:
            return None
        rows = known.want if known.want.other_dim(dim, rank) is not None else None
    if rows is None:
        return None
    place = rows.other_dim(dim, rank)
    if place is not None:

        def cut(piece: Piece) -> fx.Node:
            return piece.build(aten.slice.Tensor, piece.rows(source), place, start, end, step)

        return Made(rows, cut, {source: rows})
    if step != 1:
        return None
    start, end = _bounds(start, end, shape[dim])
    space = rows.space
    if (start, end) != (0, shape[dim]):
        space = space.sliced(rows.tokens(shape), dim - rows.low, start, end)
    layout = Rows(rows.low, rows.high, space)
    return Made(layout, lambda piece: piece.rows(source), {source: rows})


def _widened(rows: Rows | None, shape: Shape, dim: int, start: Any, end: Any) -> Rows | None:
    """The layout of a gradient mapped back to the sliced tensor of `shape`; None if there was no
    such slice."""
    if rows is None or rows.space.parent is None:
        return None
    space = rows.space
    parent = space.parent
    assert parent is not None
    begin, stop = _bounds(start, end, shape[dim])
    asked = (rows.tokens(shape), dim - rows.low, begin, stop)
    if asked != (space.sizes, space.dim, space.start, space.end):
        return None
    return Rows(rows.low, rows.high, parent, padded=True)


@rule(aten.slice_backward.default)
def slice_backward(node: fx.Node, known: Known) -> Made | None:
    source, shape = args_of(node)[0], tuple(args_of(node)[1])
    dim, start, end, step = _slice_args(args_of(node), 2)
    dim %= len(shape)
    rows = known.of(source)
    if rows is None:
        return None
    place = rows.other_dim(dim, len(shape))
    if place is None:
        layout = _widened(rows, shape, dim, start, end) if step == 1 else None
        if layout is None and _bounds(start, end, shape[dim]) == (0, shape[dim]):
            layout = rows
        if layout is None:
            return None
        return Made(layout, lambda piece: piece.rows(source), {source: rows})

    def emit(piece: Piece) -> fx.Node:
        sizes = [piece.count, *rows.others(shape)]
        return piece.build(node.target, piece.rows(source), sizes, place, start, end, step)

    return Made(rows, emit, {source: rows})


@rule(aten.slice_scatter.default)
def slice_scatter(node: fx.Node, known: Known) -> Made | None:
    base, source, shape = args_of(node)[0], args_of(node)[1], shape_of(node)
    dim, start, end, step = _slice_args(args_of(node), 2)
    rows = known.of(source)
    if rows is None or not isinstance(base, fx.Node) or fill_of(base) != 0 or step != 1:
        return None
    dim %= len(shape)
    place = rows.other_dim(dim, len(shape))
    if place is None:
        layout = _widened(rows, shape, dim, start, end)
        if layout is None:
            return None
        return Made(layout, lambda piece: piece.rows(source), {source: rows})

    begin, stop = _bounds(start, end, shape[dim])
    pads = [0, 0] * (len(rows.others(shape)) - place) + [begin, shape[dim] - stop]

    def emit(piece: Piece) -> fx.Node:
        return piece.build(aten.constant_pad_nd.default, piece.rows(source), pads)

    return Made(rows, emit, {source: rows})


@rule(aten.cat.default)
def cat(node: fx.Node, known: Known) -> Made | None:
    parts, dim = (*args_of(node), 0)[:2]
    rows = known.first(parts)
    place = None if rows is None else rows.other_dim(dim, len(shape_of(node)))
    operands = None if rows is None else same_places(rows, *parts, known=known)
    if rows is None or place is None or operands is None:
        return None

    def emit(piece: Piece) -> fx.Node:
        return piece.build(node.target, [piece.rows(n) for n in parts], place)

    return Made(Rows(rows.low, rows.high, rows.space), emit, operands)


@rule(aten.constant_pad_nd.default)
def pad(node: fx.Node, known: Known) -> Made | None:
    source, pads = args_of(node)[0], args_of(node)[1]
    rows = known.of(source) or known.want
    if rows is None or len(pads) // 2 > len(shape_of(node)) - rows.high:
        return None

    def emit(piece: Piece) -> fx.Node:
        return piece.build(node.target, piece.rows(source), *args_of(node)[1:])

    return Made(rows, emit, {source: rows})
