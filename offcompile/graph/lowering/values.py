"""The new graph's nodes for the values of an old one.

Views move with their storage: once a storage has been reloaded or recomputed, its views are rebuilt
from the node that spans it then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from offcompile.graph.annotate import Annotated
from offcompile.graph.graphs import (
    Graphs,
    aliased_input,
    bookkeeping,
    mutated_inputs,
    tensors_in,
)
from offcompile.graph.sizes import SizeMaker
from offcompile.ir import BACKWARD, FORWARD, HOST, BrokenPlan, Move

from .resave import Resaved, new_placeholder


@dataclass
class Tables:
    """The plan and the old graphs, from which both new graphs of a step are built."""

    graphs: Graphs
    annotated: Annotated
    moves: Mapping[str, Move]
    runtime: str
    #: (op, storage) pairs: the op uses or makes the storage in place on the host
    directs: frozenset[tuple[str, str]] = frozenset()
    exact: bool = True
    #: weights that live on the host
    hosted: frozenset[str] = frozenset()
    #: (phase, storage) → names of the nodes whose values it holds
    viewers: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    old: dict[str, dict[str, fx.Node]] = field(default_factory=dict)
    #: nodes of forward that a recomputation of their op may skip
    bookkeeping: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.bookkeeping = bookkeeping(self.graphs.forward.graph)
        for (phase, name), storage in self.annotated.storage_of.items():
            self.viewers.setdefault((phase, storage), []).append(name)
        self.old = {p: {n.name: n for n in m.graph.nodes} for p, m in self.graphs}
        tensors = self.annotated.problem.tensors
        self.hosted = frozenset(t.id for t in tensors if t.home == HOST)

    def base(self, storage: str) -> fx.Node:
        """The old node that made the storage."""
        phase, name = self.annotated.base_of[storage]
        return self.old[phase][name]


class Values:
    """The values of one graph under construction. `old` nodes are those of the original graph."""

    def __init__(self, tables: Tables, phase: str, module: fx.GraphModule) -> None:
        self.tables, self.phase = tables, phase
        self.old = tables.old[phase]
        self.graph = fx.Graph()
        self.sizes = SizeMaker(self.graph)
        #: old node of this graph → its current new node
        self.new: dict[str, fx.Node] = {}
        #: old node of forward → the node that recomputes it in backward
        self.again: dict[str, fx.Node] = {}
        #: storage → the node that currently spans it
        self.base: dict[str, fx.Node] = {}
        #: placeholder of backward → the value that forward must pass to it
        self.saved: dict[fx.Node, Resaved] = {}
        for node in module.graph.find_nodes(op="placeholder"):
            self.placeholder(node)
        self.sizes.learn_dims(map(self.new.__getitem__, filter(self.stands, self.new)))

    def stands(self, placeholder: str) -> bool:
        """True if the plan never frees the placeholder's memory."""
        storage = self.tables.annotated.storage_of.get((self.phase, placeholder))
        return storage is None or self.tables.annotated.problem.tensor[storage].pinned

    def placeholder(self, node: fx.Node) -> None:
        new = self.graph.node_copy(node)
        self.new[node.name] = new
        self.sizes.learn(new)
        storage = self.tables.annotated.storage_of.get((self.phase, node.name))
        if storage is not None and self.tables.annotated.base_of[storage][1] == node.name:
            self.base[storage] = new
        if self.phase == BACKWARD and node.name in self.tables.old[FORWARD]:
            self.saved[new] = Resaved(node=node.name)

    def value(self, node: fx.Node) -> fx.Node:
        """The current new node for an old one of this graph."""
        found = self.new.get(node.name)
        if found is not None:
            return found
        if node.op == "placeholder":  # its storage has been reloaded or recomputed
            storage = self.tables.annotated.storage_of[self.phase, node.name]
            new = self.view(node, storage)
        else:
            new = self.copy(node)
        self.new[node.name] = new
        return new

    def copy(self, node: fx.Node) -> fx.Node:
        new = self.graph.node_copy(node, self.value)
        self.sizes.learn(new)
        return new

    def view(self, like: fx.Node, storage: str) -> fx.Node:
        """The value of `like` as a view of the node that currently spans its storage."""
        base = self.base[storage]
        value, whole = like.meta["val"], base.meta["val"]
        if _same_place(value, whole):
            return base
        replayed = self.replayed(self.tables.old[FORWARD].get(like.name, like), storage)
        if replayed is not None:
            return replayed
        size, stride = self.sizes.make(value.shape), self.sizes.make(value.stride())
        offset = self.sizes.node(value.storage_offset())
        new = self.graph.call_function(
            torch.ops.aten.as_strided.default, (base, size, stride, offset)
        )
        new.meta = {k: v for k, v in like.meta.items() if k in ("val", "tensor_meta")}
        return new

    def replayed(self, node: fx.Node, storage: str) -> fx.Node | None:
        """Rebuild a node of forward by replaying its views on the node that now spans its storage.

        The views hold for any layout, and an op may lay out its result differently than traced.
        None if the node is no chain of views of that storage.
        """
        if (FORWARD, node.name) == self.tables.annotated.base_of[storage]:
            return self.base[storage]
        if aliased_input(node) is None or mutated_inputs(node):
            return None
        source, *rest = node.args
        sizes = [n for n in node.all_input_nodes if n is not source]
        if not isinstance(source, fx.Node) or any(tensors_in(n.meta["val"]) for n in sizes):
            return None
        viewed = self.replayed(source, storage)
        if viewed is None:
            return None
        args, kwargs = fx.node.map_arg(
            ((viewed, *rest), node.kwargs),
            lambda n: n if n is viewed else self.sizes.node(n.meta["val"]),
        )
        new = self.graph.call_function(cast(Any, node.target), args, kwargs)
        new.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
        return new

    def rebase(self, storage: str, base: fx.Node) -> None:
        """Make `base` span the storage from here on; earlier views of it will be rebuilt."""
        for name in self.tables.viewers.get((self.phase, storage), ()):
            self.new.pop(name, None)
        for name in self.tables.viewers.get((FORWARD, storage), ()):
            self.again.pop(name, None)
        self.base[storage] = base
        phase, name = self.tables.annotated.base_of[storage]
        (self.new if phase == self.phase else self.again)[name] = base

    def span(self, storage: str) -> fx.Node:
        """The node that spans a storage on the device."""
        if storage not in self.base:
            phase, name = self.tables.annotated.base_of[storage]
            if phase == self.phase:
                self.base[storage] = self.value(self.old[name])
            else:
                self.base[storage] = self.take(Resaved(node=name), self.tables.base(storage))
        return self.base[storage]

    def take(self, what: Resaved, like: fx.Node) -> fx.Node:
        """The placeholder of backward for a value that forward passes; created if missing."""
        for new, known in self.saved.items():
            if known == what:
                return new
        new = new_placeholder(self.graph, what.name, like.meta["val"])
        self.saved[new] = what
        return new

    def from_forward(self, node: fx.Node) -> fx.Node:
        """The node in backward for a value of forward."""
        found = self.again.get(node.name)
        if found is not None:
            return found
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            new = self.sizes.node(value)
            if isinstance(new, fx.Node):
                return new
        storage = self.tables.annotated.storage_of.get((FORWARD, node.name))
        if storage is None:
            raise BrokenPlan(
                f"the plan computes again what needs {node.name}, which has no storage."
                " Please report this model."
            )
        self.span(storage)
        self.again[node.name] = self.view(node, storage)
        return self.again[node.name]


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    )
