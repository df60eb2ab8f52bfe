"""Rewrites a joint graph to compute its regions piece by piece.

    logits = hidden @ W                         for each piece of the tokens:
    loss = nll(log_softmax(logits)).sum()           logits_i = hidden[i] @ W
    …                                               row_i = nll(log_softmax(logits_i))
    g = (softmax(logits) - one_hot) · tangent       g_i = softmax(logits_i) - one_hot_i
    d_hidden = g @ Wᵀ; d_W = hiddenᵀ @ g            d_i = g_i @ Wᵀ; s += hidden[i]ᵀ @ g_i
                                                loss = cat(row_i).sum()
                                                d_hidden = cat(d_i) · tangent; d_W = s · tangent

Pieces run one after the other, so at most one piece's logits exist at a time. Results that the user
gets are the exception: their pieces are written into the whole (`put_rows`), and those of a tangent
that is likely zero are read from a ticket (`tangent_rows`).

In two turns, forward keeps nothing for backward. Backward makes each piece again from tensors that
pass through a barrier after a tangent, or after the previous piece, so the partitioner leaves all
of it to backward, in its order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from offcompile.graph.graphs import around
from offcompile.runtime.moves.row_ops import fake_ticket, put_rows

from .builder import Builder
from .layout import SUM, Rows, Space, shape_of
from .piece import RowsOf
from .region import Region, needed

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
#: dtypes whose sums are accumulated in fp32
ROUGH = (torch.float16, torch.bfloat16)
#: id for recomputed regions; torch numbers its own from 0
OURS = 1 << 30


def in_pieces(
    joint: fx.GraphModule, sizes: Mapping[Region, int], ordered: bool = False
) -> fx.GraphModule:
    """The graph with regions in pieces of so many tokens; `joint` is not changed.

    ordered: the matrices that enter a piece pass through a barrier after the previous piece.
    """
    return around(_Rewriting(joint, sizes, ordered).run(), joint)


def bounds(tokens: int, size: int) -> list[tuple[int, int]]:
    """The start and end of each piece: all have the same size, except the last."""
    return [(at, min(at + size, tokens)) for at in range(0, tokens, size)]


class _Rewriting:
    def __init__(self, joint: fx.GraphModule, sizes: Mapping[Region, int], ordered: bool) -> None:
        self.ordered = ordered
        self.old, self.new = joint.graph, fx.Graph()
        self.build = Builder(self.old).on(self.new)
        self.made: dict[fx.Node, fx.Node] = {}
        #: old node outside regions that depends on a tangent → its node for a tangent of one
        self.of_one: dict[fx.Node, fx.Node] = {}
        self.home = {n: r for r in sizes for n in r.made}
        self.unlikely = {n for r in sizes for n in r.unlikely}
        self.turns = {r: _Turns(r, self, size) for r, size in sizes.items()}

    def run(self) -> fx.Graph:
        for node in self.old.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copy(node)
        for node in self.old.nodes:
            if node not in self.home:
                self.of(node)
        return self.new

    def of(self, node: fx.Node) -> fx.Node:
        """The node in the new graph, made along with its operands if it does not exist yet."""
        if node not in self.made:
            if node in self.home:
                self.turns[self.home[node]].make(node)
            else:
                for operand in node.all_input_nodes:
                    self.of(operand)
                self._copy(node)
        return self.made[node]

    def _copy(self, node: fx.Node) -> None:
        self.made[node] = self.new.node_copy(node, self.made.__getitem__)
        if node in self.unlikely:
            assert self.build.mode is not None
            with self.build.mode:
                self.made[node].meta["val"] = fake_ticket()

    def with_tangent_of_one(self, node: fx.Node, late: frozenset[fx.Node]) -> fx.Node:
        if node not in late:
            return self.of(node)
        if node not in self.of_one:
            value = node.meta["val"]
            if node.op == "placeholder":
                made = self.build(aten.full.default, [], 1, dtype=value.dtype, device=value.device)
            else:

                def operand(n: fx.Node) -> fx.Node:
                    return self.with_tangent_of_one(n, late)

                args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
                made = self.build(node.target, *args, **kwargs)
            self.of_one[node] = made
        return self.of_one[node]


@dataclass
class _Turns:
    """One region: its pieces and their results."""

    region: Region
    whole: _Rewriting
    #: number of tokens per piece
    size: int
    #: operand from outside → its node in rows of the smallest space
    entering: dict[fx.Node, fx.Node] = field(default_factory=dict)
    #: results, before multiplication by a tangent
    results: dict[fx.Node, fx.Node] = field(default_factory=dict)
    #: returned result → its rows
    rows_of: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def make(self, out: fx.Node) -> None:
        """Make a result of the region, along with the other results of its turn."""
        if out not in self.results:
            self._run(out in self.region.late)
        result = self.results[out]
        if self.region.tangent is not None and out in self.region.late:
            tangent = self.whole.of(self.region.tangent)
            result = self.whole.build(aten.mul.Tensor, result, tangent)
        self.whole.made[out] = result

    def of(self, node: fx.Node) -> fx.Node:
        if self.region.tangent is None:
            return self.whole.of(node)
        return self.whole.with_tangent_of_one(node, self.region.late)

    def _run(self, late: bool) -> None:
        region, build = self.region, self.whole.build
        again = late and not region.at_once
        turn, rows = region.turn(late), region.entering()
        for node in turn:
            for operand in node.all_input_nodes:
                if operand in region.unlikely or (again and operand in region.returned):
                    self.of(operand)
                elif operand in rows and operand not in self.entering:
                    self.entering[operand] = self._in_rows(operand, rows[operand])
                elif operand not in rows and operand not in region.made:
                    self.of(operand)
        outs = [n for n in region.outs() if n in turn and (not again or n in region.late)]
        parts: dict[fx.Node, list[fx.Node]] = {n: [] for n in outs}
        first = [self._some_tangent()] if again else []
        for start, end in bounds(region.space.count, self.size):
            after = [made[-1] for made in parts.values() if made] or first
            entering = self.entering | self.rows_of
            piece = RowsOf(
                region, build, start, end, entering, self.of, after, again, self.whole.ordered
            )
            for node in turn:
                build.meta = self._notes_of(node, again)
                made = region.made[node].emit(piece)
                if region.made[node].layout == SUM:
                    parts[node] = [self._added(parts[node], made)]
                    continue
                piece.made[node] = made
                if node in region.returned and node in parts:
                    parts[node] = [self._put(parts[node], made, start)]
                elif node in parts:
                    parts[node].append(made)
            build.meta = {}
        for node in outs:
            build.meta = self._notes_of(node, False)
            self.results[node] = kept = self._joined(node, parts[node])
            if node in region.returned:
                (kept,) = parts[node]
                self.rows_of[node] = kept
            if node in region.returned or (region.tangent is not None and node in region.late):
                kept.meta.update(recompute=CheckpointPolicy.MUST_SAVE, ac_graph_id=OURS)
        build.meta = {}

    def _some_tangent(self) -> fx.Node:
        """A tangent: whatever depends on it belongs to backward."""
        before = needed(self.region.late & self.region.made.keys())
        tangents = [n for n in before & self.region.late if n.op == "placeholder"]
        order = list(self.whole.old.nodes)
        return self.whole.of(min(tangents, key=order.index))

    def _put(self, sofar: list[fx.Node], made: fx.Node, start: int) -> fx.Node:
        """Write a piece of a result that exists as a whole into its place."""
        build, value = self.whole.build, made.meta["val"]
        if sofar:
            whole = sofar[0]
        else:
            sizes = [self.region.space.count, *value.shape[1:]]
            whole = build(aten.empty.memory_format, sizes, dtype=value.dtype, device=value.device)
        return build(put_rows, whole, made, start)

    def _notes_of(self, node: fx.Node, again: bool) -> Mapping[str, Any]:
        """The metadata to copy from a node, plus a mark if backward makes it again of nothing."""
        kept = ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten")
        notes = {key: node.meta[key] for key in kept if key in node.meta}
        if again and not self.region.made[node].operands:
            notes |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": OURS}
        return notes

    def _added(self, sofar: list[fx.Node], made: fx.Node) -> fx.Node:
        build, dtype = self.whole.build, made.meta["val"].dtype
        if not sofar:
            if dtype in ROUGH:
                return build(convert, made, torch.float32)
            return made
        if made.target is aten.mm.default and dtype not in ROUGH:
            added = build(aten.addmm.default, sofar[0], *made.args)
            self.whole.new.erase_node(made)
            return added
        # torch's partitioner refuses graphs whose sums are added in place
        return build(aten.add.Tensor, sofar[0], made)

    def _in_rows(self, node: fx.Node, rows: Rows) -> fx.Node:
        """A tensor from outside in rows, for the tokens of the smallest space."""
        build, shape = self.whole.build, shape_of(node)
        found = self.of(node)
        others = rows.others(shape)
        if rows.low:
            front = range(rows.low, rows.high)
            rest = [d for d in range(len(shape)) if d not in front]
            found = build(aten.permute.default, found, [*front, *rest])
        found = self._shaped(found, (rows.space.count, *others))
        for space in self.region.space.steps_from(rows.space):
            found = self._shaped(found, (*space.sizes, *others))
            found = build(aten.slice.Tensor, found, space.dim, space.start, space.end)
            found = self._shaped(found, (space.count, *others))
        return found

    def _shaped(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        if shape_of(node) == shape:
            return node
        return self.whole.build(aten.reshape.default, node, list(shape))

    def _joined(self, node: fx.Node, parts: list[fx.Node]) -> fx.Node:
        """Assemble a result in the form that the rest of the graph expects."""
        build, layout = self.whole.build, self.region.made[node].layout
        value = node.meta["val"]
        if layout == SUM:
            (found,) = parts
            if found.meta["val"].dtype != value.dtype:
                found = build(convert, found, value.dtype)
            return self._shaped(found, shape_of(node))
        found = parts[0] if len(parts) == 1 else build(aten.cat.default, parts)
        others = layout.others(shape_of(node))
        for space in reversed(self.region.space.steps_from(layout.space)):
            found = _put_back(self, found, space, others)
        if layout.low:
            shape = shape_of(node)
            back = list(range(layout.high - layout.low, layout.high))
            tokens = list(range(layout.high - layout.low))
            found = self._shaped(found, (*layout.tokens(shape), *others))
            rest = list(range(layout.high, len(shape)))
            return build(aten.permute.default, found, [*back, *tokens, *rest])
        return self._shaped(found, shape_of(node))


def _put_back(turns: _Turns, found: fx.Node, space: Space, others: tuple[int, ...]) -> fx.Node:
    """Pad a gradient from a space to its parent space, with zeros for the other tokens."""
    sizes = list(space.sizes)
    sizes[space.dim] = space.end - space.start
    found = turns._shaped(found, (*sizes, *others))
    around = (space.start, space.sizes[space.dim] - space.end)
    behind = len(space.sizes) + len(others) - space.dim - 1
    found = turns.whole.build(aten.constant_pad_nd.default, found, [0, 0] * behind + [*around])
    assert space.parent is not None
    return turns._shaped(found, (space.parent.count, *others))
