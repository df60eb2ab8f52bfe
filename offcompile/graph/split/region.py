"""The part of a joint graph that is computed token by token, around a product of many words.

A region begins at a product (tokens, words) and takes in all that reads a tensor of that size: ops
along the words, then products and sums that lead back to small tensors. Large operands that are
made for it alone join it. So all that enters and leaves is small: hidden states, labels, losses per
token, gradients. Where a large tensor gets out, as logits that the user sees, there is no region.

A region runs in one of two ways:

    at once       forward and backward of a piece together, with a tangent of one, by which all
                  gradients are multiplied in backward
    in two turns  forward of all pieces, later backward of each, which runs its forward again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from .layout import SUM, Rows, Space, args_of, is_static, shape_of
from .rules import Known, Made, apply, numel_of_others

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
#: a product is worth splitting whose result has so many times the elements of its operand
WIDENS = 2
#: values of backward's start that are made again for a tangent of one have at most so many
#: elements per token
SMALL_PER_TOKEN = 4


class NoRegion(Exception):
    """Says why a product is left alone."""


@dataclass(eq=False)
class Region:
    seed: fx.Node
    tokens: int
    words: int
    made: dict[fx.Node, Made] = field(default_factory=dict)
    layouts: dict[fx.Node, Rows] = field(default_factory=dict)
    #: the smallest set of tokens, for which all is computed
    space: Space = field(default_factory=lambda: Space(0))
    #: nodes that depend on a tangent
    late: set[fx.Node] = field(default_factory=set)
    #: the one tangent by which gradients are multiplied; None: in two turns, or no backward
    tangent: fx.Node | None = None
    at_once: bool = False

    def add(self, node: fx.Node, made: Made) -> None:
        self.made[node] = made
        if made.layout != SUM:
            self.layouts[node] = made.layout

    def is_large(self, node: fx.Node) -> bool:
        rows = self.layouts.get(node)
        return rows is not None and numel_of_others(rows, node) >= self.words

    def outs(self) -> list[fx.Node]:
        """List the nodes that others outside read, in order."""
        return [n for n in self.made if any(user not in self.made for user in n.users)]

    def entering(self) -> dict[fx.Node, Rows]:
        """Find the operands from outside that have tokens."""
        found: dict[fx.Node, Rows] = {}
        for made in self.made.values():
            found |= {n: rows for n, rows in made.operands.items() if n not in self.made}
        return found


def find_regions(graph: fx.Graph) -> list[Region]:
    """Those around the largest products that can be split, in order."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    seeds = [n for n in graph.nodes if n.target in PRODUCTS and _widens(n)]
    found: list[Region] = []
    for seed in sorted(seeds, key=lambda n: -n.meta["val"].numel()):
        largest = found[0].seed.meta["val"].numel() if found else 0
        if 2 * seed.meta["val"].numel() < largest:
            break
        if any(seed in region.made for region in found):
            continue
        try:
            region = region_at(graph, seed)
        except NoRegion:
            continue
        if not any(region.made.keys() & other.made.keys() for other in found):
            found.append(region)
    return sorted(found, key=lambda region: order[region.seed])


def _widens(node: fx.Node) -> bool:
    a, b = args_of(node)[-2:]
    if not all(isinstance(n, fx.Node) and is_static(n) for n in (node, a, b)):
        return False
    tokens, width = shape_of(a)
    words = shape_of(node)[1]
    return tokens > 1 and words >= WIDENS * width


def region_at(graph: fx.Graph, seed: fx.Node) -> Region:
    """Raises `NoRegion`."""
    tokens, words = shape_of(seed)
    root = Space(tokens)
    region = Region(seed, tokens, words, space=root)
    made = apply(seed, Known({}, Rows(0, 1, root)))
    if made is None:
        raise NoRegion("the product has no rule")
    region.add(seed, made)
    order = {n: i for i, n in enumerate(graph.nodes)}
    _grow(region, order)
    region.late = _reached(n for n in order if n.op == "placeholder" and "tangent" in n.name)
    _close(region, order)
    _check_spaces(region)
    _choose_way(region, order)
    return region


def _grow(region: Region, order: dict[fx.Node, int]) -> None:
    """Take in all that reads a large tensor, and what is large and made for it."""
    waiting = True
    while waiting:
        waiting = False
        for node in order:
            if node in region.made or not any(region.is_large(n) for n in node.all_input_nodes):
                continue
            made = apply(node, Known(region.layouts))
            if made is None:
                raise NoRegion(f"{node.name} ({node.target}) mixes tokens, or leads outside")
            region.add(node, made)
            waiting = True
            for operand, rows in made.operands.items():
                _pull(region, operand, rows)
        region.made = {n: region.made[n] for n in sorted(region.made, key=order.__getitem__)}
    for made in region.made.values():
        for operand, rows in made.operands.items():
            known = region.layouts.get(operand)
            if known is not None and (known.low, known.high, known.space) != (
                rows.low,
                rows.high,
                rows.space,
            ):
                raise NoRegion(f"{operand.name} has its tokens in two places")


def _pull(region: Region, node: fx.Node, rows: Rows) -> None:
    """Have a large operand made piece by piece too, if it can be."""
    if node in region.made or numel_of_others(rows, node) < region.words:
        return
    made = apply(node, Known(region.layouts, rows))
    if made is None:
        return
    region.add(node, made)
    for operand, theirs in made.operands.items():
        _pull(region, operand, theirs)


# --- what lies between ----------------------------------------------------------------------


def _reached(nodes: Iterable[fx.Node], without: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """The nodes, and all that depend on them by a way that leads through none of `without`."""
    return _closure(nodes, without, lambda node: node.users)


def _needed(nodes: Iterable[fx.Node], without: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """The nodes, and all that they depend on by a way that leads through none of `without`."""
    return _closure(nodes, without, lambda node: node.all_input_nodes)


def _closure(
    nodes: Iterable[fx.Node],
    without: Iterable[fx.Node],
    next_of: Callable[[fx.Node], Iterable[fx.Node]],
) -> set[fx.Node]:
    closed, found, waiting = set(without), set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [n for n in next_of(node) if n not in closed]
    return found


def _between(region: Region, start: set[fx.Node], end: set[fx.Node]) -> set[fx.Node]:
    """Find the nodes outside that lie between some nodes of the region and others."""
    inside = region.made.keys()
    return (_reached(start, inside) & _needed(end, inside)) - inside


def _close(region: Region, order: dict[fx.Node, int]) -> None:
    """Take in what is computed of the region's results for the region, where it has rules."""
    refused: set[fx.Node] = set()
    while True:
        inside = set(region.made)
        path = sorted(_between(region, inside, inside) - refused, key=order.__getitem__)
        if not path:
            return
        for node in path:
            made = apply(node, Known(region.layouts))
            if made is None or made.layout == SUM:
                refused.add(node)
                continue
            region.add(node, made)
        _grow(region, order)


def _check_spaces(region: Region) -> None:
    """All is computed for the smallest space: for others that must be enough."""
    spaces = {rows.space for rows in region.layouts.values()}
    region.space = max(spaces, key=lambda s: s.depth)
    for space in spaces:
        if not region.space.within(space):
            raise NoRegion("tokens are chosen in two ways")
    for node in region.outs():
        made = region.made[node]
        if made.layout != SUM:
            if made.layout.space != region.space and not made.layout.padded:
                raise NoRegion(f"{node.name} is needed for tokens that the loss leaves out")
            if region.is_large(node) and any(u not in region.made for u in node.users):
                raise NoRegion(f"{node.name} is read outside")
            continue
        layouts = [region.layouts.get(n, rows) for n, rows in made.operands.items()]
        if layouts[0].space != region.space and not any(rows.padded for rows in layouts):
            raise NoRegion(f"{node.name} sums over tokens that the loss leaves out")


def _choose_way(region: Region, order: dict[fx.Node, int]) -> None:
    inside = set(region.made)
    late = inside & region.late
    early = inside - late
    if not _between(region, inside, inside):
        if not late:
            region.at_once = True
            return
        tangent = _only_tangent(region, late)
        if tangent is not None:
            region.at_once, region.tangent = True, tangent
            return
    if _between(region, early, early) or _between(region, late, late):
        raise NoRegion("pieces would depend on results of other pieces")


def _only_tangent(region: Region, late: set[fx.Node]) -> fx.Node | None:
    """The one number that all gradients of the region are proportional to."""
    before = _needed(late, region.made.keys() - late) & region.late
    tangents = [n for n in before if n.op == "placeholder"]
    if len(tangents) != 1 or shape_of(tangents[0]) != ():
        return None
    outside = before - region.made.keys()
    most = SMALL_PER_TOKEN * region.tokens
    if any(not is_static(n) or n.meta["val"].numel() > most for n in outside):
        return None
    # with a tangent of one, gradients that a scaled loss lifts would vanish in half precision
    dtypes = {n.meta["val"].dtype for n in region.made}
    return None if torch.float16 in dtypes else tangents[0]
