"""Which ops may be computed for some tokens alone, and how.

A rule looks at a node of which at least one operand, or the result, has a known layout. It answers
with the layout of the result, with the layouts that the other operands must have, and with how the
node is made for a piece; or with None: the op mixes tokens, or nobody has written its rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import fx

from .builder import Builder
from .layout import SUM, Rows, Shape, args_of, permuted, reshaped, settled, shape_of

aten = torch.ops.aten


class Piece(Protocol):
    """The tokens of one piece, and what has been made for them."""

    build: Builder
    count: int

    def rows(self, node: fx.Node) -> fx.Node:
        """The node's value in rows, of these tokens."""

    def whole(self, node: fx.Node) -> fx.Node:
        """A value without tokens."""


Emit = Callable[[Piece], fx.Node]


@dataclass(frozen=True)
class Made:
    layout: Rows | Literal["sum"]
    emit: Emit
    #: operands with tokens, and where they must have them
    operands: dict[fx.Node, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """What is known when a rule is asked."""

    layouts: dict[fx.Node, Rows]
    #: the layout that the result must have; None: it follows from the operands
    want: Rows | None = None

    def of(self, node: object) -> Rows | None:
        return self.layouts.get(node) if isinstance(node, fx.Node) else None


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
        found = pointwise
    made = None if found is None else found(node, known)
    if made is not None and made.layout != SUM and known.want is not None:
        wanted, got = known.want, made.layout
        if (wanted.low, wanted.high, wanted.space) != (got.low, got.high, got.space):
            return None
    return made


# --- pointwise ------------------------------------------------------------------------------

#: zero wherever one of these operands is
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
#: zero only where all operands are
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
    """Where an operand that is broadcast to `shape` has the tokens: a layout, or WHOLE for one
    without; None: it has some of them."""
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
    """An operand of a broadcast in the form that rows take: its other dimensions in places."""
    own = shape_of(node)
    off = len(shape) - len(own)
    dims = [*range(layout.low), *range(layout.high, len(shape))]
    sizes = tuple(own[d - off] if d >= off else 1 for d in dims)
    if has_rows:
        return viewed(piece, piece.rows(node), (piece.count, *sizes))
    found = piece.whole(node)
    if all(d >= layout.high for d in range(off, len(shape))):
        return found  # it ends where the tokens do
    return viewed(piece, found, sizes)


def viewed(piece: Piece, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    if shape_of(node) == tuple(shape):
        return node
    return piece.build(aten.reshape.default, node, list(shape))


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


rule(aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default)(pointwise)
rule(aten.contiguous.default)(pointwise)


# --- shapes ---------------------------------------------------------------------------------


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


def _filled(node: fx.Node) -> Any:
    """What a node fills its result with; None: it is no such node."""
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
    fill = _filled(node)
    if isinstance(fill, fx.Node):
        return None
    value = node.meta["val"]

    def emit(piece: Piece) -> fx.Node:
        sizes = [piece.count, *layout.others(shape)]
        return piece.build(aten.full.default, sizes, fill, dtype=value.dtype, device=value.device)

    return Made(Rows(layout.low, layout.high, layout.space, fill == 0), emit)


# --- slices ---------------------------------------------------------------------------------


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
    """The layout of a gradient that goes back to where a slice was taken from a tensor of `shape`;
    None: no such slice was taken."""
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
    if rows is None or not isinstance(base, fx.Node) or _filled(base) != 0 or step != 1:
        return None
    dim %= len(shape)
    place = rows.other_dim(dim, len(shape))
    if place is None:
        layout = _widened(rows, shape, dim, start, end)
        if layout is None:
            return None
        return Made(layout, lambda piece: piece.rows(source), {source: rows})

    def emit(piece: Piece) -> fx.Node:
        sizes = [piece.count, *rows.others(shape)]
        args = (piece.rows(source), sizes, place, start, end, step)
        return piece.build(aten.slice_backward.default, *args)

    return Made(rows, emit, {source: rows})


@rule(aten.constant_pad_nd.default)
def pad(node: fx.Node, known: Known) -> Made | None:
    source, pads = args_of(node)[0], args_of(node)[1]
    rows = known.of(source) or known.want
    if rows is None or len(pads) // 2 > len(shape_of(node)) - rows.high:
        return None

    def emit(piece: Piece) -> fx.Node:
        return piece.build(node.target, piece.rows(source), *args_of(node)[1:])

    return Made(rows, emit, {source: rows})


def numel_of_others(rows: Rows, node: fx.Node) -> int:
    return math.prod(rows.others(shape_of(node)))
