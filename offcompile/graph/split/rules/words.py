"""Rules for ops along the words of each token: reductions, softmax, sums over all elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from offcompile.graph.split.layout import SUM, Rows, args_of, settled, shape_of

from .frame import Known, Made, Piece, rule, same_places, viewed

aten = torch.ops.aten


@rule(
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.logsumexp.default,
    aten.any.dim,
    aten.argmax.default,
)
def reduce(node: fx.Node, known: Known) -> Made | None:
    source = args_of(node)[0]
    rows, shape = known.of(source), shape_of(source)
    if rows is None or len(args_of(node)) < 2 or args_of(node)[1] in (None, []):
        return None
    dims = args_of(node)[1] if isinstance(args_of(node)[1], list | tuple) else [args_of(node)[1]]
    dims = [d % len(shape) for d in dims]
    keeps = (
        bool(args_of(node)[2])
        if len(args_of(node)) > 2
        else bool(node.kwargs.get("keepdim", False))
    )
    places: list[int] = [p for d in dims if (p := rows.other_dim(d, len(shape))) is not None]
    if len(places) < len(dims):
        return _summed(node, source, rows, dims, places)
    one = node.target in (aten.any.dim, aten.argmax.default)
    inner: Any = places[0] if one else places
    before = 0 if keeps else sum(d < rows.low for d in dims)
    moved = Rows(rows.low - before, rows.high - before, rows.space)
    layout = settled(moved, shape_of(node))
    if layout is None:
        return None

    def emit(piece: Piece) -> fx.Node:
        made = piece.build(
            node.target,
            piece.rows(source),
            inner,
            keeps,
            **{k: v for k, v in node.kwargs.items() if k != "keepdim"},
        )
        return viewed(piece, made, (piece.count, *layout.others(shape_of(node))))

    return Made(layout, emit, {source: rows})


def _summed(
    node: fx.Node, source: fx.Node, rows: Rows, dims: list[int], places: list[int]
) -> Made | None:
    """The rule for a sum over the tokens, such as a bias's gradient."""
    shape = shape_of(source)
    wide = {d for d in range(rows.low, rows.high) if shape[d] != 1}
    if node.target is not aten.sum.dim_IntList or not wide <= set(dims):
        return None

    def emit(piece: Piece) -> fx.Node:
        dtype = _exact(node)
        made = piece.build(aten.sum.dim_IntList, piece.rows(source), [0, *places], dtype=dtype)
        return viewed(piece, made, shape_of(node))

    return Made(SUM, emit, {source: rows})


def _exact(node: fx.Node) -> torch.dtype:
    """The dtype to sum in."""
    dtype: torch.dtype = node.meta["val"].dtype
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@rule(aten.sum.default, aten.mean.default)
def sum_of_all(node: fx.Node, known: Known) -> Made | None:
    source = args_of(node)[0]
    rows = known.of(source)
    if rows is None:
        return None

    def emit(piece: Piece) -> fx.Node:
        made = piece.build(aten.sum.default, piece.rows(source), dtype=_exact(node))
        if node.target is aten.mean.default:
            made = piece.build(aten.div.Tensor, made, source.meta["val"].numel())
        return made

    return Made(SUM, emit, {source: rows})


@rule(aten._log_softmax.default, aten._softmax.default)
def softmax(node: fx.Node, known: Known) -> Made | None:
    source = args_of(node)[0]
    rows = known.of(source) or known.want
    place = None if rows is None else rows.other_dim(args_of(node)[1], len(shape_of(node)))
    if rows is None or place is None:
        return None
    layout = Rows(rows.low, rows.high, rows.space)

    def emit(piece: Piece) -> fx.Node:
        return piece.build(node.target, piece.rows(source), place, *args_of(node)[2:])

    return Made(layout, emit, {source: rows})


@rule(aten._log_softmax_backward_data.default, aten._softmax_backward_data.default)
def softmax_backward(node: fx.Node, known: Known) -> Made | None:
    gradient, output = args_of(node)[:2]
    rows = known.first((gradient, output))
    place = None if rows is None else rows.other_dim(args_of(node)[2], len(shape_of(node)))
    if rows is None or place is None:
        return None
    given = known.of(gradient)
    layout = Rows(rows.low, rows.high, rows.space, given is not None and given.padded)
    operands = same_places(rows, gradient, output, known=known)
    if operands is None:
        return None

    def emit(piece: Piece) -> fx.Node:
        return piece.build(
            node.target, piece.rows(gradient), piece.rows(output), place, *args_of(node)[3:]
        )

    return Made(layout, emit, operands)
