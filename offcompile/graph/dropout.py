"""Splits dropout into two ops, so that the one that draws no random numbers can be recomputed.

    y, keep = native_dropout(x, p, True)    keep = bernoulli(empty_like(x, bool), 1 - p)
                                            y = native_dropout_backward(x, keep, scale)

On the CPU the single op takes these same steps, down to rounding the scale to the dtype of x, so
random numbers and results are the same to the last bit. Kernels of other devices draw numbers
differently and are not split.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .graphs import Graphs, around, closed, is_getitem

aten = torch.ops.aten


def in_two_parts(graphs: Graphs) -> Graphs:
    """Split each dropout of forward; the given graphs are not changed."""
    whole = {node for node in graphs.forward.graph.nodes if _divisible(node)}
    if not whole:
        return graphs
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graphs.forward.graph.nodes:
        if node in whole:
            made.update(_parts(node, made[node.args[0]], graph))
        elif node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    (output,) = graph.find_nodes(op="output")
    (old,) = graphs.forward.graph.find_nodes(op="output")
    output.meta.update(old.meta)
    return replace(graphs, forward=closed(around(graph, graphs.forward)))


def _divisible(node: fx.Node) -> bool:
    if node.target is not aten.native_dropout.default:
        return False
    given, share, trains = node.args
    value = given.meta.get("val") if isinstance(given, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    if trains is False or not isinstance(share, float) or not 0 < share < 1:
        return False
    # bernoulli fills elements in index order, native_dropout in its input's memory order
    return value.is_contiguous() and all(is_getitem(user) for user in node.users)


def _parts(node: fx.Node, given: fx.Node, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Part of a dropout → the node that makes it. The node keeps the part's name, by which backward
    finds the saved tensor."""
    share = node.args[1]
    assert isinstance(share, float)
    values: dict[object, torch.Tensor] = dict(enumerate(node.meta["val"]))
    names: dict[object, str | None] = {0: None, 1: None}
    for part in node.users:
        names[part.args[1]] = part.name
        values[part.args[1]] = part.meta["val"]  # its views share this storage
    with values[1].fake_mode:  # type: ignore[attr-defined]
        blank = torch.empty_like(values[1])
    scale = float(torch.tensor(1.0 / (1.0 - share), dtype=values[0].dtype))

    def add(value: torch.Tensor, name: str | None, target: Any, *args: Any, **more: Any) -> fx.Node:
        made = graph.create_node("call_function", target, args, more, name)
        made.meta = {k: v for k, v in node.meta.items() if k != "tensor_meta"} | {"val": value}
        return made

    like = add(blank, None, aten.empty_like.default, given, dtype=torch.bool)
    keep = add(values[1], names[1], aten.bernoulli.p, like, 1.0 - share)
    made = add(values[0], names[0], aten.native_dropout_backward.default, given, keep, scale)
    return {part: made if part.args[1] == 0 else keep for part in node.users}
