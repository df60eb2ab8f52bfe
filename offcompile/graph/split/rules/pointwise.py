"""Rules for elementwise ops, with broadcasting."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from offcompile.graph.split.layout import Rows, Shape, args_of, settled, shape_of

from .frame import Known, Made, Piece, rule, viewed

aten = torch.ops.aten


#: op → positions of operands; the result is zero wherever one of these operands is
KEEPS_ZEROS = {
    aten.mul.Tensor: (0, 1),
    aten.div.Tensor: (0,),
    aten.neg.default: (0,),
    aten._to_copy.default: (0,),
    aten.clone.default: (0,),
    aten.tanh_backward.default: (0,),
    aten.sigmoid_backward.default: (0,),
    aten.gelu_backward.default: (0,),
    aten.silu_backward.default: (0,),
    aten.threshold_backward.default: (0,),
    torch.ops.prims.convert_element_type.default: (0,),
}
#: ops whose result is known to be zero only where all operands are
ADDS = (aten.add.Tensor, aten.sub.Tensor)


def pointwise(node: fx.Node, known: Known) -> Made | None:
    shape = shape_of(node)
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    layout = known.want
    for operand in tensors:
        rows = known.of(operand)
        if rows is None:
            continue
        off = len(shape) - len(shape_of(operand))
        found = settled(Rows(rows.low + off, rows.high + off, rows.space), shape)
        if found is None or (layout is not None and not _alike(found, layout)):
            return None
        layout = found
    if layout is None:
        return None
    operands = {}
    for operand in tensors:
        how = aligned(operand, layout, shape)
        if how is None:
            return None
        if how is not WHOLE:
            rows = known.of(operand)
            operands[operand] = rows if rows is not None else how
    padded = _keeps_zeros(node, known)
    layout = Rows(layout.low, layout.high, layout.space, padded)

    def emit(piece: Piece) -> fx.Node:
        def operand(n: fx.Node) -> fx.Node:
            return fitted(n, layout, shape, piece, n in operands)

        args, kwargs = fx.node.map_arg((args_of(node), node.kwargs), operand)
        return piece.build(node.target, *args, **without_layout(kwargs))

    return Made(layout, emit, operands)


def _alike(a: Rows, b: Rows) -> bool:
    return (a.low, a.high, a.space) == (b.low, b.high, b.space)


WHOLE = object()


def aligned(operand: fx.Node, layout: Rows, shape: Shape) -> Any:
    """The layout of an operand that is broadcast to `shape`; WHOLE if it has no tokens, None if it
    has only some of the token dimensions."""
    own = shape_of(operand)
    off = len(shape) - len(own)
    dims = [d for d in range(layout.low, layout.high) if d >= off and own[d - off] != 1]
    full = [d for d in range(layout.low, layout.high) if shape[d] != 1]
    if not dims:
        return WHOLE if full else None
    if dims != full or layout.low < off:
        return None
    return Rows(layout.low - off, layout.high - off, layout.space)


def fitted(node: fx.Node, layout: Rows, shape: Shape, piece: Piece, has_rows: bool) -> fx.Node:
    """An operand of a broadcast, reshaped so that its other dimensions align with those in rows."""
    own = shape_of(node)
    off = len(shape) - len(own)
    dims = [*range(layout.low), *range(layout.high, len(shape))]
    sizes = tuple(own[d - off] if d >= off else 1 for d in dims)
    if has_rows:
        return viewed(piece, piece.rows(node), (piece.count, *sizes))
    found = piece.whole(node)
    if all(d >= layout.high for d in range(off, len(shape))):
        return found  # all its dimensions come after the tokens
    return viewed(piece, found, sizes)


def without_layout(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k != "memory_format"}


def _keeps_zeros(node: fx.Node, known: Known) -> bool:
    def padded(value: object) -> bool:
        rows = known.of(value)
        return rows is not None and rows.padded

    if node.target in KEEPS_ZEROS:
        return any(
            padded(args_of(node)[i]) for i in KEEPS_ZEROS[node.target] if i < len(args_of(node))
        )
    if node.target in ADDS:
        return all(padded(a) for a in args_of(node)[:2])
    if node.target is aten.where.self:
        return all(padded(a) for a in args_of(node)[1:3])
    return False


rule(
    torch.Tag.pointwise,
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
)(pointwise)
rule(aten.contiguous.default)(pointwise)
