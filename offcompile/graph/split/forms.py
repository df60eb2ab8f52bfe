"""Rewrites ops in forms that rules know.

    a, b = split(x, …)              a = x[:, :n]; b = x[:, n:]
    table = new_zeros(x, sizes)     table = full(sizes, 0)

Rules know ops with one result only, and have to follow the tokens of a large tensor into all that
reads it: a tensor that takes no more than its dtype has none. Models that compute the gate of an
MLP and what it gates in one product take them apart by the first; the second begins the gradient of
a table, such as the biases of experts.
"""

from __future__ import annotations

import operator
from itertools import accumulate

import torch
from torch import fx

from .builder import Builder
from .layout import args_of, is_static, shape_of
from .rules import fill_of

aten = torch.ops.aten
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
FILLED = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)


def into_known_forms(graph: fx.Graph, build: Builder) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        if node.target in SPLITS and is_static(node.args[0]):
            _slice(node, build)
        elif node.target in FILLED and is_static(node):
            _fill(node, build)
    graph.eliminate_dead_code()


def _slice(node: fx.Node, build: Builder) -> None:
    source, _, dim = (*args_of(node), 0)[:3]
    sizes = [part.shape[dim] for part in node.meta["val"]]
    ends = list(accumulate(sizes))
    for user in list(node.users):
        assert user.target is operator.getitem
        at = args_of(user)[1]
        with node.graph.inserting_before(user):
            part = build(aten.slice.Tensor, source, dim, ends[at] - sizes[at], ends[at])
        user.replace_all_uses_with(part)


def _fill(node: fx.Node, build: Builder) -> None:
    sizes, value = shape_of(node), node.meta["val"]
    if sizes == shape_of(args_of(node)[0]) or isinstance(fill := fill_of(node), fx.Node):
        return
    with node.graph.inserting_before(node):
        made = build(aten.full.default, list(sizes), fill, dtype=value.dtype, device=value.device)
    node.replace_all_uses_with(made)
