"""Rules of ops that look along the words of each token: reductions, softmax, picking labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .layout import SUM, Rows, args_of, settled, shape_of
from .rules import Known, Made, Piece, aligned, rule, viewed

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
    """A sum over the tokens, as a bias gets its gradient."""
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
    """The type to sum in."""
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
    rows = known.of(gradient) or known.of(output) or known.want
    place = None if rows is None else rows.other_dim(args_of(node)[2], len(shape_of(node)))
    if rows is None or place is None:
        return None
    given = known.of(gradient)
    layout = Rows(rows.low, rows.high, rows.space, given is not None and given.padded)
    operands = _same(rows, gradient, output, known=known)
    if operands is None:
        return None

    def emit(piece: Piece) -> fx.Node:
        return piece.build(
            node.target, piece.rows(gradient), piece.rows(output), place, *args_of(node)[3:]
        )

    return Made(layout, emit, operands)


def _same(rows: Rows, *nodes: fx.Node, known: Known) -> dict[fx.Node, Rows] | None:
    """The operands, all with tokens at the same places; None: not all of them can be so."""
    found = {}
    for node in nodes:
        own = known.of(node) or Rows(rows.low, rows.high, rows.space)
        if (own.low, own.high, own.space) != (rows.low, rows.high, rows.space):
            return None
        if settled(own, shape_of(node)) is None:
            return None
        found[node] = own
    return found


@rule(aten.gather.default)
def gather(node: fx.Node, known: Known) -> Made | None:
    source, dim, index = args_of(node)[:3]
    rows = known.of(source) or known.of(index) or known.want
    place = None if rows is None else rows.other_dim(dim, len(shape_of(source)))
    operands = None if rows is None else _same(rows, source, index, known=known)
    if rows is None or place is None or operands is None:
        return None

    def emit(piece: Piece) -> fx.Node:
        return piece.build(node.target, piece.rows(source), place, piece.rows(index))

    return Made(Rows(rows.low, rows.high, rows.space), emit, operands)


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def scatter(node: fx.Node, known: Known) -> Made | None:
    base, dim, index, source = args_of(node)[:4]
    nodes = [n for n in (base, index, source) if isinstance(n, fx.Node)]
    rows = next((r for n in nodes if (r := known.of(n)) is not None), known.want)
    place = None if rows is None else rows.other_dim(dim, len(shape_of(node)))
    operands = None if rows is None else _same(rows, *nodes, known=known)
    if rows is None or place is None or operands is None:
        return None

    def emit(piece: Piece) -> fx.Node:
        value = piece.rows(source) if isinstance(source, fx.Node) else source
        return piece.build(node.target, piece.rows(base), place, piece.rows(index), value)

    return Made(Rows(rows.low, rows.high, rows.space), emit, operands)


# --- labels as indices ----------------------------------------------------------------------


@rule(aten.index.Tensor)
def pick(node: fx.Node, known: Known) -> Made | None:
    """`scores[arange(tokens), labels]`, which is a gather."""
    source, indices = args_of(node)[:2]
    labels = _labels_of(source, indices, known.of(source))
    if labels is None:
        return None
    rows = known.of(source)
    assert rows is not None

    def emit(piece: Piece) -> fx.Node:
        index = piece.build(aten.unsqueeze.default, piece.rows(labels), 1)
        found = piece.build(aten.gather.default, piece.rows(source), 1, index)
        return piece.build(aten.squeeze.dim, found, 1)

    return Made(Rows(0, 1, rows.space), emit, {source: rows, labels: Rows(0, 1, rows.space)})


@rule(aten.index_put.default)
def put(node: fx.Node, known: Known) -> Made | None:
    """The gradient of the same, which is a scatter."""
    base, indices, values = args_of(node)[:3]
    rows = known.of(base) or known.want
    labels = _labels_of(node, indices, rows)
    if rows is None or labels is None or shape_of(values) != shape_of(labels):
        return None
    adds = len(args_of(node)) > 3 and bool(args_of(node)[3])

    def emit(piece: Piece) -> fx.Node:
        index = piece.build(aten.unsqueeze.default, piece.rows(labels), 1)
        value = piece.build(aten.unsqueeze.default, piece.rows(values), 1)
        target = aten.scatter_add.default if adds else aten.scatter.src
        return piece.build(target, piece.rows(base), 1, index, value)

    flat = Rows(0, 1, rows.space)
    return Made(flat, emit, {base: rows, labels: flat, values: flat})


def _labels_of(node: fx.Node, indices: Any, rows: Rows | None) -> fx.Node | None:
    """The second of two indices, where the first one counts the tokens."""
    if rows is None or (rows.low, rows.high) != (0, 1) or len(shape_of(node)) != 2:
        return None
    if not isinstance(indices, list | tuple) or len(indices) != 2 or None in indices:
        return None
    first: fx.Node = indices[0]
    labels: fx.Node = indices[1]
    counts = first.target in (aten.arange.default, torch.ops.prims.iota.default)
    if not counts or args_of(first) != (shape_of(node)[0],) or shape_of(labels) != shape_of(first):
        return None
    if first.kwargs.get("start", 0) != 0 or first.kwargs.get("step", 1) != 1:
        return None
    return labels


# --- products -------------------------------------------------------------------------------


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
    """(others, words) @ (words, tokens): in rows the transposes, the other way round."""

    def emit(piece: Piece) -> fx.Node:
        return piece.build(
            aten.mm.default, piece.rows(b), piece.build(aten.t.default, piece.whole(a))
        )

    return Made(Rows(1, 2, rows.space, rows.padded), emit, {b: rows})


def _contracted(
    node: fx.Node, a: fx.Node, b: fx.Node, left: Rows | None, right: Rows | None
) -> Made | None:
    """A product along the tokens, as a weight gets its gradient: a sum."""
    known = left or right
    assert known is not None
    space = known.space
    left, right = left or Rows(1, 2, space), right or Rows(0, 1, space)
    if (left.low, right.low, left.space) != (1, 0, right.space):
        return None

    def emit(piece: Piece) -> fx.Node:
        return piece.build(
            aten.mm.default, piece.build(aten.t.default, piece.rows(a)), piece.rows(b)
        )

    return Made(SUM, emit, {a: left, b: right})
