"""Adds nodes to a graph, with the fake values that the rest of the compiler expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode


class Builder:
    """Calling it adds a node at the graph's insertion point and traces the node's value."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.mode = detect_fake_mode([n.meta.get("val") for n in graph.nodes])
        #: metadata copied to every new node
        self.meta: Mapping[str, Any] = {}

    def on(self, graph: fx.Graph) -> Builder:
        """A builder for another graph of the same trace."""
        made = Builder.__new__(Builder)
        made.graph, made.mode, made.meta = graph, self.mode, {}
        return made

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        assert self.mode is not None
        made = self.graph.call_function(target, args, kwargs)
        values, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            made.meta["val"] = target(*values, **named)
        made.meta.update(self.meta)
        return made

    @staticmethod
    def device(like: fx.Node) -> torch.device:
        return like.meta["val"].device  # type: ignore[no-any-return]
