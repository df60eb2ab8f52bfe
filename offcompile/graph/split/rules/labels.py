"""Rules for ops that pick a word of each token by its label, and for their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from offcompile.graph.split.layout import SUM, Rows, args_of, shape_of

from .frame import Known, Made, Piece, rule, same_places
from .shapes import fill_of

aten = torch.ops.aten


@rule(aten.gather.default)
def gather(node: fx.Node, known: Known) -> Made | None:
    source, dim, index = args_of(node)[:3]
    rows = known.first((source, index))
    place = None if rows is None else rows.other_dim(dim, len(shape_of(source)))
    operands = None if rows is None else same_places(rows, source, index, known=known)
    if rows is None or place is None or operands is None:
        return None

    def emit(piece: Piece) -> fx.Node:
        return piece.build(node.target, piece.rows(source), place, piece.rows(index))

    return Made(Rows(rows.low, rows.high, rows.space), emit, operands)


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def scatter(node: fx.Node, known: Known) -> Made | None:
    base, dim, index, source = args_of(node)[:4]
    nodes = [n for n in (base, index, source) if isinstance(n, fx.Node)]
    rows = known.first(nodes)
    place = None if rows is None else rows.other_dim(dim, len(shape_of(node)))
    operands = None if rows is None else same_places(rows, *nodes, known=known)
    if rows is None or place is None or operands is None:
        return None

    def emit(piece: Piece) -> fx.Node:
        value = piece.rows(source) if isinstance(source, fx.Node) else source
        return piece.build(node.target, piece.rows(base), place, piece.rows(index), value)

    return Made(Rows(rows.low, rows.high, rows.space), emit, operands)


@rule(aten.index.Tensor)
def pick(node: fx.Node, known: Known) -> Made | None:
    """The rule for `scores[arange(tokens), labels]`, which is a gather, and for `table[labels]`."""
    source, indices = args_of(node)[:2]
    if known.of(source) is None:
        return _looked_up(node, known)
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
    """The rule for the gradient of `pick`: a scatter, or a sum over the tokens of each label."""
    base, indices, values = args_of(node)[:3]
    if known.of(base) is None and known.of(values) is not None and len(indices) == 1:
        return _counted_up(node, known)
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


def _looked_up(node: fx.Node, known: Known) -> Made | None:
    table, indices = args_of(node)[:2]
    if len(indices) != 1 or indices[0] is None:
        return None
    rows = known.of(indices[0]) or known.want
    if rows is None or rows.low or rows.high != len(shape_of(indices[0])):
        return None
    layout = Rows(0, rows.high, rows.space)

    def emit(piece: Piece) -> fx.Node:
        return piece.build(node.target, piece.whole(table), [piece.rows(indices[0])])

    return Made(layout, emit, {indices[0]: layout})


def _counted_up(node: fx.Node, known: Known) -> Made | None:
    table, (labels,), values = args_of(node)[:3]
    adds = len(args_of(node)) > 3 and bool(args_of(node)[3])
    rows = known.of(values)
    if not adds or fill_of(table) != 0 or rows is None:
        return None
    if rows.low or rows.high != len(shape_of(labels)):
        return None
    layout = known.of(labels) or Rows(0, rows.high, rows.space)
    if (layout.low, layout.high, layout.space) != (rows.low, rows.high, rows.space):
        return None

    def emit(piece: Piece) -> fx.Node:
        return piece.build(
            node.target, piece.whole(table), [piece.rows(labels)], piece.rows(values), True
        )

    return Made(SUM, emit, {labels: layout, values: rows})


def _labels_of(node: fx.Node, indices: Any, rows: Rows | None) -> fx.Node | None:
    """The second of two indices, if the first one enumerates the tokens; else None."""
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
