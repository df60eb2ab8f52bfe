"""The storages of a step: the node that makes each, its size and kind, and whether it may move.

Autograd often saves views, but memory is taken and moved by storage. A storage is named after the
node that made it. Storages that cannot move (inputs, outputs, those written in place or too small
to matter) are pinned; so are weights, unless the step is annotated with weights that live on the
host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import sympy
import torch
from torch import fx

from offcompile.ir import BACKWARD, DEVICE, FORWARD, HOST
from offcompile.runtime.states import update_ops

from .graphs import (
    Graphs,
    Hint,
    aliased_input,
    covers_its_storage,
    is_parameter,
    may_leave,
    storage_bytes,
    storage_key,
)
from .names import tensor_names
from .sizes import symbols_in

Place = tuple[str, str]  # (phase, node name)


@dataclass
class Storage:
    """One allocation, made by one node."""

    id: str
    nbytes: int
    kind: str
    #: the node that made it; its value spans the whole storage if the storage may move
    base: Place
    pinned: bool = False
    home: str | None = None


class Storages:
    """Finds the storage of each node's value; nodes must be visited in the order of the graphs.

    weights_on_host: weights may leave the device, as far as nothing else forbids it.
    """

    def __init__(
        self, graphs: Graphs, hint: Hint, min_move_bytes: int, weights_on_host: bool
    ) -> None:
        self.graphs, self.hint = graphs, hint
        self.min_move_bytes, self.weights_on_host = min_move_bytes, weights_on_host
        self.by_id: dict[str, Storage] = {}
        #: node → id of the storage that holds its value
        self.of: dict[Place, str] = {}
        #: id of a storage or an op → module path and shape of its node
        self.labels: dict[str, str] = {}
        #: storages that several arguments share
        self.shared: set[str] = set()
        self._inputs: dict[int, str] = {}  # storage key of a placeholder → storage id
        self._forward_names = frozenset(n.name for n in graphs.forward.graph.nodes)

    def at(self, phase: str, node: fx.Node) -> Storage | None:
        """The storage of the node's value, if it has one."""
        return self.by_id.get(self.of.get((phase, node.name), ""))

    def name(self, phase: str, node: fx.Node) -> str:
        """The node's name; a backward node gets the suffix `.bw` if forward has one of its name."""
        if phase == BACKWARD and node.name in self._forward_names:
            return f"{node.name}.bw"
        return node.name

    # --- nodes ------------------------------------------------------------------------------

    def placeholder(self, phase: str, node: fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        if phase == BACKWARD and (FORWARD, node.name) in self.of:
            self.of[phase, node.name] = self.of[FORWARD, node.name]
            return
        key = storage_key(value)
        if key is not None and key in self._inputs:
            shared = self.by_id[self._inputs[key]]
            self.of[phase, node.name] = shared.id
            self.shared.add(shared.id)
            if phase == FORWARD:  # two arguments share one storage
                shared.pinned = True
            return
        kind = "weight" if is_parameter(node, self.graphs) else "input"
        made = self.make(phase, node, value, kind)
        made.pinned |= not self.weights_on_host or phase != FORWARD
        made.pinned |= not may_leave(node, self.graphs)
        made.home = DEVICE
        if key is not None:
            self._inputs[key] = made.id

    def alias(self, phase: str, node: fx.Node, source: fx.Node) -> None:
        place = (phase, source.name)
        if place in self.of:
            self.of[phase, node.name] = self.of[place]

    def part(self, phase: str, node: fx.Node) -> None:
        """Visit one of an op's outputs: its op has registered it, unless it is an alias, such as
        a part of a split."""
        if (phase, node.name) in self.of:
            return
        source = aliased_input(node)
        if source is not None:
            self.alias(phase, node, source)

    def make(
        self,
        phase: str,
        node: fx.Node,
        value: torch.Tensor,
        kind: str,
        materialises: bool = True,
    ) -> Storage:
        name = self.name(phase, node)
        here = materialises and value.device.type == self.graphs.device
        nbytes = storage_bytes(value, self.hint) if here else 0
        may_move = (
            nbytes >= self.min_move_bytes
            and storage_key(value) is not None
            and covers_its_storage(value, self.hint)
            and symbols_in(value.untyped_storage().nbytes()) <= self._symbols
        )
        made = Storage(name, nbytes, kind, (phase, node.name), pinned=not may_move)
        self.by_id[name] = made
        self.of[phase, node.name] = name
        self.label(name, node)
        return made

    def label(self, name: str, node: fx.Node) -> None:
        self.labels[name] = _label(node)

    # --- once all nodes are known ---------------------------------------------------------------

    def keep(self, phase: str, outputs: list[object], kind: str) -> None:
        """Pin the outputs of a graph, which are of this kind."""
        for out in outputs:
            if not isinstance(out, fx.Node):
                continue
            storage = self.at(phase, out)
            if storage is not None:
                storage.pinned = True
                if storage.home is None and out.target is not update_ops.offer:
                    storage.kind = kind

    def may_move(self, storage: Storage) -> bool:
        """True if the storage is large enough and its base spans it."""
        value = self.values[storage.base]
        assert isinstance(value, torch.Tensor)
        return storage.nbytes >= self.min_move_bytes and covers_its_storage(value, self.hint)

    def pin_mixed_types(self) -> None:
        """Pin storages that are viewed as another dtype, or that are complex."""
        for phase, module in self.graphs:
            for node in module.graph.nodes:
                storage = self.at(phase, node)
                value = node.meta.get("val")
                if storage is None or not isinstance(value, torch.Tensor):
                    continue
                base = self.values[storage.base]
                assert isinstance(base, torch.Tensor)
                if base.dtype != value.dtype or base.is_complex():
                    storage.pinned = True

    def place_weights(self, stays: frozenset[str]) -> None:
        """Place movable weights on the host, except those in `stays`."""
        for storage in self.by_id.values():
            if storage.kind == "weight" and not storage.pinned:
                storage.pinned = storage.id in stays
                storage.home = DEVICE if storage.pinned else HOST

    def may_be_on_host(self, storage: str) -> bool:
        """True if a storage may be on the host, where ops can use it in place."""
        found = self.by_id[storage]
        return found.home == HOST or (found.home is None and not found.pinned)

    def user_names(self) -> Mapping[str, str]:
        """Storage of an argument or gradient → the user's name for it; labels show it too."""
        names = tensor_names(self.graphs, self.of)
        for t, name in names.items():
            about = f"{name} {_shape(self.values[self.by_id[t].base])}"
            gradient = self.by_id[t].kind == "gradient"
            self.labels[t] = f"gradient of {about}" if gradient else about
        return names

    def dtypes(self) -> dict[str, torch.dtype]:
        """Storage → dtype of its elements."""
        return {
            s.id: value.dtype
            for s in self.by_id.values()
            if isinstance(value := self.values[s.base], torch.Tensor)
        }

    @cached_property
    def _symbols(self) -> frozenset[sympy.Symbol]:
        """The symbols that forward's arguments or nodes determine. Torch gives random states a
        size symbol of their own, which no node in the graphs could supply."""
        nodes = self.graphs.forward.graph.nodes
        values = [n.meta.get("val") for n in nodes]
        arguments = [n.meta.get("val") for n in nodes if n.op == "placeholder"]
        shapes = [v.shape for v in arguments if isinstance(v, torch.Tensor)]
        sizes = [*values, *(size for shape in shapes for size in shape)]
        symbolic = (size for size in sizes if isinstance(size, torch.SymInt))
        return frozenset(symbol for size in symbolic for symbol in symbols_in(size))

    @cached_property
    def nodes(self) -> dict[Place, fx.Node]:
        return {(p, n.name): n for p, m in self.graphs for n in m.graph.nodes}

    @cached_property
    def values(self) -> dict[Place, object]:
        return {place: n.meta.get("val") for place, n in self.nodes.items()}


def _label(node: fx.Node) -> str:
    """The node's module path in the user's model, and its shape."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = str(entry[0]) or path
    path = re.sub(r"^L\['\w+'\](\.(?=.)|$)", "", path) or ("model" if path else "")
    return " ".join(filter(None, (path, _shape(node.meta.get("val")))))


def _shape(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    sizes = "×".join(str(s) for s in value.shape)
    return f"{sizes} {str(value.dtype).removeprefix('torch.')}"
