"""Builds a Problem from graphs: its tensors are the graphs' storages, its ops have costs.

`storages` finds the storages; here ops get their operands, durations and workspace. An op is named
after its node, as a storage is. Gradients of weights may move too, if the step is annotated with
weights that live on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from offcompile.ir import BACKWARD, FORWARD, Op, Problem, Tensor
from offcompile.machine.in_place import InPlace
from offcompile.runtime.states import update_ops

from .costs.host_operands import HostOperands
from .costs.op_costs import OpCost
from .graphs import (
    Graphs,
    Hint,
    aliased_input,
    bookkeeping,
    is_getitem,
    may_leave,
    may_repeat,
    mutated_inputs,
    outputs_of,
    storage_bytes,
    storage_key,
    tensors_in,
)
from .storages import Place, Storage, Storages


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
    storages = Storages(graphs, hint, min_move_bytes, weights_on_host=in_place is not None)
    on_host = None if in_place is None else HostOperands(in_place, costs, hint)
    work = _Work(storages, costs, on_host)
    for phase, module in graphs:
        for node in module.graph.nodes:
            work.visit(phase, node)
    work.mark_outputs()
    return work.result(stays)


class _UnreadArguments:
    """Arguments of forward that nothing but their own new values depends on."""

    def __init__(self, graphs: Graphs) -> None:
        backward = () if graphs.backward is None else graphs.backward.graph.nodes
        self._backward_inputs = frozenset(n.name for n in backward if n.op == "placeholder")
        self._bookkeeping = bookkeeping(graphs.forward.graph)

    def __contains__(self, node: fx.Node) -> bool:
        inside = node.op == "placeholder" and node.name in self._bookkeeping
        return inside and node.name not in self._backward_inputs


class _Work:
    """The ops of a step. on_host: times them with weights on the host; None: weights stay."""

    def __init__(self, storages: Storages, costs: Costs, on_host: HostOperands | None) -> None:
        self.graphs, self.hint = storages.graphs, storages.hint
        self.storages, self.costs, self.on_host = storages, costs, on_host
        #: storage of a value that is never written → storages that its readers read instead
        self.made_of: dict[str, tuple[str, ...]] = {}
        self.ops: list[Op] = []
        self.node_of: dict[str, tuple[Place, ...]] = {}
        self.unread = _UnreadArguments(self.graphs)

    # --- nodes ------------------------------------------------------------------------------

    def visit(self, phase: str, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self.storages.placeholder(phase, node)
        elif node.op == "call_function" and is_getitem(node):
            self.storages.part(phase, node)
        elif node.op == "call_function":
            value = node.meta.get("val")
            source = aliased_input(node)
            if source is not None and not mutated_inputs(node):
                self.storages.alias(phase, node, source)
            elif tensors_in(value) or any(
                tensors_in(n.meta.get("val")) for n in node.all_input_nodes
            ):
                self.op(phase, node)

    def op(self, phase: str, node: fx.Node) -> None:
        storages, storage_of = self.storages, self.storages.of
        name = storages.name(phase, node)
        cost = self.costs.get((phase, node.name), OpCost(0.0, 0))
        mutated = [storage_of.get((phase, n.name)) for n in mutated_inputs(node)]
        for storage in filter(None, mutated):
            storages.by_id[storage].pinned = True
        given = [
            storage_of[phase, n.name] for n in node.all_input_nodes if (phase, n.name) in storage_of
        ]
        reads = dict.fromkeys(s for t in given for s in (t, *self.made_of.get(t, ())))
        writes = dict.fromkeys(filter(None, mutated))
        if writes and isinstance(node.meta.get("val"), torch.Tensor):
            storage_of[phase, node.name] = next(iter(writes))
        if phase == FORWARD:
            # a recomputation may find the new value there, which does not affect its result
            unread = {
                storage_of.get((phase, n.name)) for n in mutated_inputs(node) if n in self.unread
            }
            writes = {t: None for t in writes if t not in unread or t in storages.shared}
        workspace = cost.workspace_bytes
        for value, part in _outputs(node):
            if part is None:  # returned and never used
                if value.device.type == self.graphs.device:
                    workspace += storage_bytes(value, self.hint)
                continue
            made = storages.make(phase, part, value, "activation", materialises=cost.materialises)
            writes[made.id] = None
            if not cost.materialises:
                self.made_of[made.id] = tuple(reads)
        if node.target is update_ops.offer:
            gradient = node.all_input_nodes[1]
            storages.by_id[storage_of[phase, gradient.name]].kind = "gradient"
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
        storages.label(name, node)

    def direct(
        self, phase: str, node: fx.Node, duration_us: float, reads: list[str]
    ) -> dict[str, float]:
        """The op's duration with each weight used in place. `drop_in_place_use` later drops the
        weights that stay on the device."""
        if self.on_host is None:
            return {}
        operands = [(n, self.storages.at(phase, n)) for n in node.all_input_nodes]
        weights = [
            (n, s) for n, s in operands if s is not None and s.kind == "weight" and s.id in reads
        ]
        return self.on_host.reads((phase, node.name), node, duration_us, weights)

    # --- outputs of the graphs ------------------------------------------------------------------

    def mark_outputs(self) -> None:
        seen = outputs_of(self.graphs.forward)[: self.graphs.num_outputs]
        self.storages.keep(FORWARD, seen, "output")
        if self.graphs.backward is not None:
            gradients = outputs_of(self.graphs.backward)
            self.storages.keep(BACKWARD, gradients, "gradient")
            if self.on_host is not None:
                self.release(gradients)

    def release(self, gradients: list[object]) -> None:
        """Let each weight gradient move that is the only output on its storage and is read by no
        op."""
        names = [o.name if isinstance(o, fx.Node) else "" for o in gradients]
        stored = [self.storages.of.get((BACKWARD, name), "") for name in names]
        read = {t for op in self.ops for t in op.reads}
        wanted = list(self.graphs.forward.graph.find_nodes(op="placeholder"))
        times, made_at = Counter(stored), {self.node_of[op.id]: i for i, op in enumerate(self.ops)}
        for of, name in zip(wanted, stored, strict=False):
            storage = self.storages.by_id.get(name)
            if storage is None or not may_leave(of, self.graphs):
                continue
            if times[name] == 1 and storage.home is None and name not in read:
                storage.pinned = not self.storages.may_move(storage)
                self.write_in_place(storage, made_at)

    def write_in_place(self, storage: Storage, made_at: Mapping[tuple[Place, ...], int]) -> None:
        """Let the op that makes a gradient write it to the host, if it can.

        made_at: nodes → position of the op that runs them.
        """
        assert self.on_host is not None
        node = self.storages.nodes[storage.base]
        if self.on_host.may_write(node, storage.base[0]):
            at = made_at[storage.base,]
            self.ops[at] = self.on_host.writing(self.ops[at], node, storage)

    def result(self, stays: frozenset[str]) -> Annotated:
        storages = self.storages
        storages.pin_mixed_types()
        storages.place_weights(stays)
        if self.on_host is not None:
            self.drop_in_place_use()
        used = {t for op in self.ops for t in op.operands}
        tensors = tuple(
            Tensor(s.id, s.nbytes, s.kind, s.home, pinned=s.pinned)
            for s in storages.by_id.values()
            if s.id in used or s.home is not None
        )
        return Annotated(
            problem=Problem(tensors, tuple(self.ops), steady=False),
            storage_of=storages.of,
            base_of={s.id: s.base for s in storages.by_id.values()},
            node_of=self.node_of,
            names=storages.user_names(),
            labels=storages.labels,
            dtypes=storages.dtypes(),
        )

    def drop_in_place_use(self) -> None:
        """Let no op use storages in place that cannot be on the host."""
        may = self.storages.may_be_on_host
        self.ops = [
            replace(op, direct={t: us for t, us in op.direct.items() if may(t)}) for op in self.ops
        ]


def _outputs(node: fx.Node) -> list[tuple[torch.Tensor, fx.Node | None]]:
    """Each tensor that the op makes, with its node (None if the output is never used)."""
    value = node.meta.get("val")
    inputs = [t for n in node.all_input_nodes for t in tensors_in(n.meta.get("val"))]
    known = {storage_key(t) for t in inputs} - {None}
    if isinstance(value, torch.Tensor):
        return [] if storage_key(value) in known else [(value, node)]
    if not isinstance(value, tuple | list):
        return []
    parts = {u.args[1]: u for u in node.users if is_getitem(u)}
    return [
        (v, parts.get(i))
        for i, v in enumerate(value)
        if isinstance(v, torch.Tensor) and storage_key(v) not in known
    ]
