"""Finds the regions of a joint graph, each around a product over many words.

A region grows from its product: it takes in every op that reads a large tensor, then the ops
between its results and its operands. Its rules say what cannot be split.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from .layout import SUM, Rows, Space, args_of, is_static, shape_of
from .region import PRODUCTS, NoRegion, Region, closure, needed, reached
from .rules import Known, apply, factors, numel_of_others

aten = torch.ops.aten
#: a product is worth splitting if its result has this many times the elements of its operand
WIDENS = 2
VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.alias.default,
    aten.detach.default,
)
#: regions below this share of the largest are never looked for
LEAST_SHARE = 1 / 128
#: limit on elements per token of values before the region that are recomputed for a tangent of one
SMALL_PER_TOKEN = 4


@dataclass(eq=False)
class _Order:
    """The nodes of a graph in order, and what else the search for each region needs of them."""

    graph: fx.Graph

    @cached_property
    def at(self) -> dict[fx.Node, int]:
        return {n: i for i, n in enumerate(self.graph.nodes)}

    @cached_property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.nodes)

    @cached_property
    def tangents(self) -> list[fx.Node]:
        return [n for n in self.nodes if n.op == "placeholder" and "tangent" in n.name]

    @cached_property
    def late(self) -> frozenset[fx.Node]:
        """Nodes that depend on a tangent."""
        return frozenset(reached(self.tangents))

    def sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.at.__getitem__)


def find_regions(graph: fx.Graph) -> list[Region]:
    """The regions around products that can be split, in graph order."""
    order = _Order(graph)
    seeds = [n for n in graph.nodes if n.target in PRODUCTS and _widens(n)]
    found: list[Region] = []
    for seed in sorted(seeds, key=lambda n: -n.meta["val"].numel()):
        largest = found[0].seed.meta["val"].numel() if found else 0
        if seed.meta["val"].numel() < LEAST_SHARE * largest:
            break
        if any(seed in region.made for region in found):
            continue
        try:
            region = _region_around(seed, order)
        except NoRegion:
            continue
        if not any(region.made.keys() & other.made.keys() for other in found):
            found.append(region)
    found = sorted(found, key=lambda region: order.at[region.seed])
    _count_beside(found)
    return found


def _count_beside(regions: list[Region]) -> None:
    early = [r.made.keys() - r.late for r in regions]
    after = [reached(nodes) for nodes in early]
    for i, region in enumerate(regions):
        others = [
            j for j in range(len(regions)) if not (early[j] & after[i] or early[i] & after[j])
        ]
        region.beside_bytes = sum(regions[j].nbytes for j in {i, *others})


def _widens(node: fx.Node) -> bool:
    a, b = factors(node)
    if not all(isinstance(n, fx.Node) and is_static(n) for n in (node, a, b)):
        return False
    if len(shape_of(node)) != 2:  # a gradient of the weights of all groups
        return False
    tokens, width = shape_of(a)
    words = shape_of(node)[1]
    return tokens > 1 and words >= WIDENS * width


def _region_around(seed: fx.Node, order: _Order) -> Region:
    """Build the region around a product. Raises `NoRegion` if there is none.

    A region ends where its results lead to large tensors again: with the loss that follows a
    product of words, but with the last product of a chain in the middle of a model.
    """
    try:
        return _region(seed, order, closes=True)
    except NoRegion:
        return _region(seed, order, closes=False)


def _region(seed: fx.Node, order: _Order, closes: bool) -> Region:
    tokens, words = shape_of(seed)
    root = Space(tokens)
    region = Region(seed, tokens, words, space=root)
    made = apply(seed, Known({}, Rows(0, 1, root)))
    if made is None:
        raise NoRegion("the product has no rule")
    region.add(seed, made)
    _grow(region, order)
    region.late = order.late
    if closes:
        _close(region, order)
    _check_spaces(region)
    _check_gain(region)
    _find_unlikely(region, order)
    _choose_way(region, order)
    return region


def _grow(region: Region, order: _Order) -> None:
    """Add all ops that read a large tensor, and the large operands made for them.

    Ops are added in graph order, pass after pass, since a rule may depend on what is known.
    """
    known = set[fx.Node]()

    def readers_of_new() -> set[int]:
        """Positions of ops that read what has just become large."""
        new = [n for n in region.layouts if n not in known]
        known.update(new)
        large = (n for n in new if region.is_large(n))
        return {order.at[user] for n in large for user in n.users}

    later = readers_of_new()
    while later:
        waiting, later = sorted(later), set()
        while waiting:
            at = heapq.heappop(waiting)
            node = order.nodes[at]
            if node in region.made or node.op == "output":
                continue
            made = apply(node, Known(region.layouts))
            if made is None:
                raise NoRegion(f"{node.name} ({node.target}) mixes tokens, or leads outside")
            region.add(node, made)
            for operand, rows in made.operands.items():
                _pull(region, operand, rows)
            for reader in readers_of_new():
                if reader > at:
                    heapq.heappush(waiting, reader)
                else:
                    later.add(reader)
        region.made = {n: region.made[n] for n in order.sorted(region.made)}
    for made in region.made.values():
        for operand, rows in made.operands.items():
            known_rows = region.layouts.get(operand)
            if known_rows is not None and (known_rows.low, known_rows.high, known_rows.space) != (
                rows.low,
                rows.high,
                rows.space,
            ):
                raise NoRegion(f"{operand.name} has its tokens in two places")


def _pull(region: Region, node: fx.Node, rows: Rows) -> None:
    """Add a large operand to the region, to be made piece by piece too, if its rule allows it."""
    if node in region.made or not region.wants(node, rows):
        return
    made = apply(node, Known(region.layouts, rows))
    if made is None:
        return
    region.add(node, made)
    for operand, theirs in made.operands.items():
        _pull(region, operand, theirs)


def _between(region: Region, start: set[fx.Node], end: set[fx.Node], order: _Order) -> set[fx.Node]:
    """The nodes outside on paths from `start` to `end`, both in the region."""
    if not start or not end:
        return set()
    inside, at = region.made.keys(), order.at
    first, last = min(map(at.__getitem__, start)), max(map(at.__getitem__, end))

    def users(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.users if at[n] < last]

    def inputs(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if at[n] > first]

    after = closure(start, inside, users)
    return (after & closure(end, inside, inputs)) - inside


def _close(region: Region, order: _Order) -> None:
    """Add the nodes computed from the region's results for the region, if they have rules."""
    refused: set[fx.Node] = set()
    while True:
        inside = set(region.made)
        path = order.sorted(_between(region, inside, inside, order) - refused)
        if not path:
            return
        for node in path:
            made = apply(node, Known(region.layouts))
            if made is None or made.layout == SUM:
                refused.add(node)
                continue
            if node.target in PRODUCTS:
                raise NoRegion(f"{node.name} belongs to what follows, not to a loss")
            region.add(node, made)
        _grow(region, order)


def _check_spaces(region: Region) -> None:
    """Set the region's smallest space. Raises `NoRegion` if tensors are needed outside it."""
    spaces = {rows.space for rows in region.layouts.values()}
    region.space = max(spaces, key=lambda s: s.depth)
    if region.space.parent is not None and any(m.counts_tokens for m in region.made.values()):
        raise NoRegion("groups of tokens are cut otherwise than the tokens")
    for space in spaces:
        if not region.space.within(space):
            raise NoRegion("tokens are chosen in two ways")
    for node in region.outs():
        made = region.made[node]
        if made.layout != SUM:
            if made.layout.space != region.space and not made.layout.padded:
                raise NoRegion(f"{node.name} is needed for tokens that the loss leaves out")
            if region.is_large(node):
                _return(region, node)
            continue
        layouts = [region.layouts.get(n, rows) for n, rows in made.operands.items()]
        if layouts[0].space != region.space and not any(rows.padded for rows in layouts):
            raise NoRegion(f"{node.name} sums over tokens that the loss leaves out")


def _return(region: Region, node: fx.Node) -> None:
    """Let the user have a large result. Raises `NoRegion` if that is not all that reads it."""
    layout = region.layouts[node]
    outside = [u for u in node.users if u not in region.made]
    if node in region.late or any(u.op != "output" for u in outside):
        raise NoRegion(f"{node.name} is read outside")
    if layout.space != region.space or layout.low:
        raise NoRegion(f"{node.name} is returned with its tokens in other places")
    region.returned.add(node)


def _check_gain(region: Region) -> None:
    """Raise `NoRegion` if all large tensors exist as a whole anyway, or their parts do."""
    if not region.returned:
        if _leaving(region) >= region.words:
            raise NoRegion("as much leaves as there is")
        return
    whole = {_viewed(n) for n in region.returned} | {region.seed}
    if all(_viewed(n) in whole for n in region.made if region.is_large(n) and n not in region.late):
        raise NoRegion("the user gets everything that is large")


def _leaving(region: Region) -> int:
    """Elements per token that forward leaves behind, such as queries, keys and values."""
    outs = [n for n in region.outs() if n not in region.late and n in region.layouts]
    once = {_viewed(n): n for n in outs}.values()
    return sum(numel_of_others(region.layouts[n], n) for n in once)


def _viewed(node: fx.Node) -> fx.Node:
    while node.target in VIEWS:
        node = args_of(node)[0]
    return node


def _find_unlikely(region: Region, order: _Order) -> None:
    """Find the tangents of returned results for which a ticket can stand in."""
    tangents = order.tangents
    if not region.returned or not all(is_static(n) for n in tangents):
        return
    for node, rows in region.entering().items():
        inside = all(user in region.made for user in node.users)
        places = (rows.low, rows.space) == (0, region.space)
        if node in tangents and inside and places and region.wants(node, rows):
            region.unlikely.add(node)


def _choose_way(region: Region, order: _Order) -> None:
    inside = set(region.made)
    late = inside & region.late
    early = inside - late
    if not _between(region, inside, inside, order):
        if not late:
            region.at_once = True
            return
        # the gradient of a returned result is known only in backward
        tangent = None if region.returned else _only_tangent(region, late)
        if tangent is not None:
            region.at_once, region.tangent = True, tangent
            return
    if _between(region, early, early, order) or _between(region, late, late, order):
        raise NoRegion("pieces would depend on results of other pieces")


def _only_tangent(region: Region, late: set[fx.Node]) -> fx.Node | None:
    """The scalar tangent that all gradients of the region are proportional to; None if there is no
    such tangent."""
    before = needed(late, region.made.keys() - late) & region.late
    tangents = [n for n in before if n.op == "placeholder"]
    if len(tangents) != 1 or shape_of(tangents[0]) != ():
        return None
    outside = before - region.made.keys()
    most = SMALL_PER_TOKEN * region.tokens
    if any(not is_static(n) or n.meta["val"].numel() > most for n in outside):
        return None
    # with a tangent of one, half-precision gradients that rely on loss scaling would underflow
    dtypes = {n.meta["val"].dtype for n in region.made}
    return None if torch.float16 in dtypes else tangents[0]
