"""Builds a Problem from graphs: each storage's size, kind and lifetime, and each op's cost.

Autograd often saves views, but memory is taken and moved by storage, so tensors here are storages.
A storage is named after the node that made it, an op after its node (a backward node gets the
suffix `.bw` if forward has a node of that name). Storages that cannot move (inputs, outputs, those
written in place or too small to matter) are pinned; so are weights and their gradients, unless the
step is annotated with weights that live on the host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import sympy
import torch
from torch import fx

from offcompile.ir import BACKWARD, DEVICE, FORWARD, HOST, Op, Problem, Tensor
from offcompile.machine.in_place import InPlace
from offcompile.runtime.states import update_ops

from .costs.op_costs import OpCost
from .direct_ops import product_rows, touched_bytes, workspace_of, write_of
from .graphs import (
    Graphs,
    Hint,
    aliased_input,
    bookkeeping,
    covers_its_storage,
    is_getitem,
    is_parameter,
    may_leave,
    may_repeat,
    mutated_inputs,
    outputs_of,
    root_of,
    storage_bytes,
    storage_key,
    tensors_in,
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


@dataclass(frozen=True)
class Annotated:
    problem: Problem
    #: (phase, node name) → id of the storage that holds the node's value
    storage_of: Mapping[Place, str]
    #: storage id → the node that makes it
    base_of: Mapping[str, Place]
    #: op id → its node, or its nodes if it is a fused kernel
    node_of: Mapping[str, tuple[Place, ...]]
    #: tensor or op id → module path and shape, for display
    labels: Mapping[str, str] = field(default_factory=dict)
    #: weight, input or gradient → the user's name for that argument (a gradient has its argument's)
    names: Mapping[str, str] = field(default_factory=dict)
    #: storage → dtype of its elements
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)


Costs = Mapping[Place, OpCost]


def annotate(
    graphs: Graphs,
    costs: Costs,
    hint: Hint,
    min_move_bytes: int = 4096,
    in_place: InPlace | None = None,
    stays: frozenset[str] = frozenset(),
) -> Annotated:
    """Build one Problem for the whole step, for the sizes that `hint` returns.

    With `in_place`, all weights except those in `stays` live on the host, and the gradients of
    all weights may move there.
    """
    work = _Work(graphs, costs, hint, min_move_bytes, in_place, stays)
    for phase, module in graphs:
        for node in module.graph.nodes:
            work.visit(phase, node)
    work.mark_outputs()
    return work.result()


@dataclass(frozen=True)
class _NodeNames:
    """Names of nodes, by the part that they have in a step."""

    forward: frozenset[str]
    backward_inputs: frozenset[str]
    #: nodes of forward whose values are only written back to inputs
    bookkeeping: frozenset[str]

    @classmethod
    def of(cls, graphs: Graphs) -> _NodeNames:
        backward = () if graphs.backward is None else graphs.backward.graph.nodes
        return cls(
            forward=frozenset(n.name for n in graphs.forward.graph.nodes),
            backward_inputs=frozenset(n.name for n in backward if n.op == "placeholder"),
            bookkeeping=frozenset(bookkeeping(graphs.forward.graph)),
        )

    def unread(self, argument: fx.Node) -> bool:
        """True if only new values of arguments depend on this one."""
        inside = argument.op == "placeholder" and argument.name in self.bookkeeping
        return inside and argument.name not in self.backward_inputs


class _Work:
    def __init__(
        self,
        graphs: Graphs,
        costs: Costs,
        hint: Hint,
        min_move_bytes: int,
        in_place: InPlace | None,
        stays: frozenset[str],
    ) -> None:
        self.graphs, self.costs, self.hint = graphs, costs, hint
        self.min_move_bytes, self.in_place, self.stays = min_move_bytes, in_place, stays
        self.storages: dict[str, Storage] = {}
        self.storage_of: dict[Place, str] = {}
        #: storage of a value that is never written → storages that its readers read instead
        self.made_of: dict[str, tuple[str, ...]] = {}
        self.ops: list[Op] = []
        self.node_of: dict[str, tuple[Place, ...]] = {}
        self.labels: dict[str, str] = {}
        self.inputs: dict[int, str] = {}  # storage key of a placeholder → storage id
        self.node_names = _NodeNames.of(graphs)
        #: storages that several arguments share
        self.shared: set[str] = set()

    # --- nodes ------------------------------------------------------------------------------

    def visit(self, phase: str, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self.placeholder(phase, node)
        elif node.op == "call_function" and is_getitem(node):
            self.part(phase, node)
        elif node.op == "call_function":
            value = node.meta.get("val")
            source = aliased_input(node)
            if source is not None and not mutated_inputs(node):
                self.alias(phase, node, source)
            elif tensors_in(value) or any(
                tensors_in(n.meta.get("val")) for n in node.all_input_nodes
            ):
                self.op(phase, node)

    def placeholder(self, phase: str, node: fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        if phase == BACKWARD and (FORWARD, node.name) in self.storage_of:
            self.storage_of[phase, node.name] = self.storage_of[FORWARD, node.name]
            return
        key = storage_key(value)
        if key is not None and key in self.inputs:
            shared = self.storages[self.inputs[key]]
            self.storage_of[phase, node.name] = shared.id
            self.shared.add(shared.id)
            if phase == FORWARD:  # two arguments share one storage
                shared.pinned = True
            return
        kind = "weight" if is_parameter(node, self.graphs) else "input"
        made = self.make(phase, node, value, kind)
        made.pinned |= self.in_place is None or phase != FORWARD
        made.pinned |= not may_leave(node, self.graphs)
        made.home = DEVICE
        if key is not None:
            self.inputs[key] = made.id

    def alias(self, phase: str, node: fx.Node, source: fx.Node) -> None:
        place = (phase, source.name)
        if place in self.storage_of:
            self.storage_of[phase, node.name] = self.storage_of[place]

    def part(self, phase: str, node: fx.Node) -> None:
        """Visit one of an op's outputs: its op has registered it, unless it is an alias, such as
        a part of a split."""
        if (phase, node.name) in self.storage_of:
            return
        source = aliased_input(node)
        if source is not None:
            self.alias(phase, node, source)

    def op(self, phase: str, node: fx.Node) -> None:
        name = self.name(phase, node)
        cost = self.costs.get((phase, node.name), OpCost(0.0, 0))
        mutated = [self.storage_of.get((phase, n.name)) for n in mutated_inputs(node)]
        for storage in filter(None, mutated):
            self.storages[storage].pinned = True
        given = [
            self.storage_of[phase, n.name]
            for n in node.all_input_nodes
            if (phase, n.name) in self.storage_of
        ]
        reads = dict.fromkeys(s for t in given for s in (t, *self.made_of.get(t, ())))
        writes = dict.fromkeys(filter(None, mutated))
        if writes and isinstance(node.meta.get("val"), torch.Tensor):
            self.storage_of[phase, node.name] = next(iter(writes))
        if phase == FORWARD:
            # a recomputation may find the new value there, which does not affect its result
            unread = {
                self.storage_of.get((phase, n.name))
                for n in mutated_inputs(node)
                if self.node_names.unread(n)
            }
            writes = {t: None for t in writes if t not in unread or t in self.shared}
        workspace = cost.workspace_bytes
        for value, part in self.outputs(node):
            if part is None:  # returned and never used
                if value.device.type == self.graphs.device:
                    workspace += storage_bytes(value, self.hint)
                continue
            made = self.make(phase, part, value, "activation", materialises=cost.materialises)
            writes[made.id] = None
            if not cost.materialises:
                self.made_of[made.id] = tuple(reads)
        if node.target is update_ops.offer:
            gradient = node.all_input_nodes[1]
            self.storages[self.storage_of[phase, gradient.name]].kind = "gradient"
        self.node_of[name] = ((phase, node.name),)
        self.ops.append(
            Op(
                id=name,
                phase=phase,
                duration_us=round(cost.duration_us, 3),
                reads=tuple(reads),
                writes=tuple(writes),
                workspace_bytes=workspace,
                direct=self.direct(
                    phase, node, cost.duration_us, [t for t in reads if t not in writes]
                ),
                recompute=phase == FORWARD and not any(mutated) and may_repeat(node),
            )
        )
        self.labels[name] = _label(node)

    def direct(
        self, phase: str, node: fx.Node, duration_us: float, reads: list[str]
    ) -> dict[str, float]:
        """The op's duration with each weight used in place. `settle_weights` later drops the
        weights that stay on the device."""
        found: dict[str, float] = {}
        if self.in_place is None:
            return found
        for operand in node.all_input_nodes:
            storage = self.storages.get(self.storage_of.get((phase, operand.name), ""))
            if storage is not None and storage.kind == "weight" and storage.id in reads:
                nbytes = touched_bytes(node, operand, storage.nbytes, self.hint)
                times = self.in_place.times_read(product_rows(node, operand, self.hint))
                nbytes = round(nbytes * times)
                took = self.time_in_place((phase, node.name), storage.id, duration_us, nbytes)
                found[storage.id] = max(took, found.get(storage.id, took))
        return found

    def time_in_place(
        self, place: Place, storage: str, duration_us: float, nbytes: int, writes: bool = False
    ) -> float:
        """The longer of two durations: modelled from the link to the host, and measured with the
        whole storage in host memory."""
        assert self.in_place is not None
        measured = self.costs.get(place, OpCost(0.0)).in_place.get(storage, 0.0)
        return round(max(self.in_place.us(duration_us, nbytes, writes), measured), 3)

    def outputs(self, node: fx.Node) -> list[tuple[torch.Tensor, fx.Node | None]]:
        """Each tensor that the op makes, with its node (None if the output is never used)."""
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return [] if storage_key(value) in self.keys_in(node) else [(value, node)]
        if not isinstance(value, tuple | list):
            return []
        parts = {u.args[1]: u for u in node.users if is_getitem(u)}
        return [
            (v, parts.get(i))
            for i, v in enumerate(value)
            if isinstance(v, torch.Tensor) and storage_key(v) not in self.keys_in(node)
        ]

    def keys_in(self, node: fx.Node) -> set[int | None]:
        values = [t for n in node.all_input_nodes for t in tensors_in(n.meta.get("val"))]
        return {storage_key(t) for t in values} - {None}

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
            and symbols_in(value.untyped_storage().nbytes()) <= self.symbols
        )
        made = Storage(name, nbytes, kind, (phase, node.name), pinned=not may_move)
        self.storages[name] = made
        self.storage_of[phase, node.name] = name
        self.labels[name] = _label(node)
        return made

    def name(self, phase: str, node: fx.Node) -> str:
        if phase == BACKWARD and node.name in self.node_names.forward:
            return f"{node.name}.bw"
        return node.name

    # --- outputs of the graphs ------------------------------------------------------------------

    def mark_outputs(self) -> None:
        seen = outputs_of(self.graphs.forward)[: self.graphs.num_outputs]
        self.keep(FORWARD, seen, "output")
        if self.graphs.backward is not None:
            self.keep(BACKWARD, outputs_of(self.graphs.backward), "gradient")
            if self.in_place is not None:
                self.release_gradients()

    def keep(self, phase: str, outputs: list[object], kind: str) -> None:
        for out in outputs:
            if not isinstance(out, fx.Node):
                continue
            storage = self.storages.get(self.storage_of.get((phase, out.name), ""))
            if storage is not None:
                storage.pinned = True
                if storage.home is None and out.target is not update_ops.offer:
                    storage.kind = kind

    def release_gradients(self) -> None:
        """Let each weight gradient move that is the only output on its storage and is read by no
        op."""
        assert self.graphs.backward is not None
        outputs = outputs_of(self.graphs.backward)
        names = [o.name if isinstance(o, fx.Node) else "" for o in outputs]
        stored = [self.storage_of.get((BACKWARD, name), "") for name in names]
        read = {t for op in self.ops for t in op.reads}
        wanted = list(self.graphs.forward.graph.find_nodes(op="placeholder"))
        for of, name in zip(wanted, stored, strict=False):
            storage = self.storages.get(name)
            if storage is None or not may_leave(of, self.graphs):
                continue
            if stored.count(name) == 1 and storage.home is None and name not in read:
                storage.pinned = not self.may_move(storage)
                self.write_in_place(storage)

    def write_in_place(self, storage: Storage) -> None:
        """Record the duration and workspace of a gradient's op when it writes to the host."""
        place = storage.base
        inputs = [root_of(n) for n in self.nodes[place].all_input_nodes]
        # an input that exists only inside a fused kernel cannot be passed to another kernel
        apart = all(self.costs.get((place[0], n.name), OpCost(0.0)).materialises for n in inputs)
        if not apart or write_of(self.nodes[place]) is None:
            return
        (at,) = (i for i, op in enumerate(self.ops) if self.node_of[op.id] == (place,))
        op, more = self.ops[at], workspace_of(self.nodes[place], self.hint)
        duration_us = self.time_in_place(place, storage.id, op.duration_us, storage.nbytes, True)
        self.ops[at] = replace(
            op,
            direct={**op.direct, storage.id: duration_us},
            workspace_bytes=max(op.workspace_bytes, min(more, storage.nbytes)),
        )

    def may_move(self, storage: Storage) -> bool:
        value = self.values[storage.base]
        assert isinstance(value, torch.Tensor)
        return storage.nbytes >= self.min_move_bytes and covers_its_storage(value, self.hint)

    def result(self) -> Annotated:
        self.pin_mixed_types()
        self.settle_weights()
        used = {t for op in self.ops for t in op.operands}
        tensors = tuple(
            Tensor(s.id, s.nbytes, s.kind, s.home, pinned=s.pinned)
            for s in self.storages.values()
            if s.id in used or s.home is not None
        )
        names = tensor_names(self.graphs, self.storage_of)
        for t, name in names.items():
            about = f"{name} {_shape(self.values[self.storages[t].base])}"
            gradient = self.storages[t].kind == "gradient"
            self.labels[t] = f"gradient of {about}" if gradient else about
        return Annotated(
            problem=Problem(tensors, tuple(self.ops), steady=False),
            storage_of=self.storage_of,
            base_of={s.id: s.base for s in self.storages.values()},
            node_of=self.node_of,
            labels=self.labels,
            names=names,
            dtypes={
                s.id: value.dtype
                for s in self.storages.values()
                if isinstance(value := self.values[s.base], torch.Tensor)
            },
        )

    def settle_weights(self) -> None:
        """Place movable weights on the host and drop in-place use of all other weights."""
        for storage in self.storages.values():
            if storage.kind == "weight" and not storage.pinned:
                storage.pinned = storage.id in self.stays
                storage.home = DEVICE if storage.pinned else HOST
        if self.in_place is not None:
            self.ops = [
                replace(op, direct={t: us for t, us in op.direct.items() if self.may_be_used(t)})
                for op in self.ops
            ]

    def may_be_used(self, storage: str) -> bool:
        """True if a storage may be on the host, where ops can use it in place."""
        found = self.storages[storage]
        return found.home == HOST or (found.home is None and not found.pinned)

    def pin_mixed_types(self) -> None:
        """Pin storages that are viewed as another dtype, or that are complex."""
        for phase, module in self.graphs:
            for node in module.graph.nodes:
                storage = self.storages.get(self.storage_of.get((phase, node.name), ""))
                value = node.meta.get("val")
                if storage is None or not isinstance(value, torch.Tensor):
                    continue
                base = self.values[storage.base]
                assert isinstance(base, torch.Tensor)
                if base.dtype != value.dtype or base.is_complex():
                    storage.pinned = True

    @cached_property
    def symbols(self) -> frozenset[sympy.Symbol]:
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
