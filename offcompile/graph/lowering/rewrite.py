"""Writes the moves of a plan into the graphs as nodes, in the plan's static order.

Walks the order and builds both graphs anew. Before → after, for an activation `x` that forward
makes, backward needs, and the plan offloads to the host in between:

    forward    x = op(a)            x = op(a)
               return y, x          ticket = start_out(x); …; sent = wait_out(ticket, x)
                                    return y, sent
    backward   (x)                  (sent)
               g = op_b(x)          buffer, load = start_load(sent); …
                                    x_1 = wait_load(buffer, load); g = op_b(x_1)

Views move with their storage: they are rebuilt from the reloaded tensor. An op that the plan
recomputes is copied to the place of the recomputation.

A weight that lives on the host enters the graph as its host tensor: an op that uses it in place
gets that tensor, others get the copy that `start_fetch` loads. An offloaded gradient is returned as
the host memory that `start_store` filled, or that the op's in-place variant wrote directly.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from offcompile.graph.annotate import Annotated
from offcompile.graph.direct_ops import is_store, reader_of, write_of
from offcompile.graph.graphs import (
    Graphs,
    aliased_input,
    is_getitem,
    outputs_of,
)
from offcompile.graph.storages import Place
from offcompile.ir import BACKWARD, DEVICE, FORWARD, HOST, BrokenPlan, Move, Plan
from offcompile.planning.order import Order, ProgramStep, RunStep, StartStep
from offcompile.runtime.device import tickets
from offcompile.runtime.moves import ops

from .resave import Resaved, finish_backward, finish_forward
from .values import Tables, Values


@dataclass(frozen=True)
class Rewritten:
    """The new graphs, and the graph and node that each step of the order became."""

    graphs: Graphs
    nodes: Mapping[ProgramStep, Place]
    #: for each output that forward saves for backward, its device storage; None if it has none
    saved: tuple[str | None, ...] = ()


def rewrite(
    graphs: Graphs,
    annotated: Annotated,
    plan: Plan,
    order: Order,
    runtime: str,
    exact: bool = True,
) -> Rewritten:
    """Build new graphs for the plan's order; the given ones are not changed.

    `runtime` names the runtime that the movement nodes will run on. `exact`: results must stay
    the same to the last bit.
    """
    moves = {m.id: m for m in plan.moves}
    directs = frozenset((d.op, d.tensor) for d in plan.directs)
    tables = Tables(graphs, annotated, moves, runtime, directs, exact)
    forward = _RewrittenHalf(tables, FORWARD, graphs.forward, None)
    forward.walk(order.forward())
    if graphs.backward is None:
        forward.walk(order.backward())
        module = finish_forward(forward, graphs, None)
        return Rewritten(Graphs(module, None, graphs.num_outputs), forward.nodes)
    backward = _RewrittenHalf(tables, BACKWARD, graphs.backward, forward)
    backward.walk(order.backward())
    module_b = finish_backward(backward)
    module_f = finish_forward(forward, graphs, backward)
    nodes = {**forward.nodes, **backward.nodes}
    made = Graphs(module_f, module_b, graphs.num_outputs)
    old = {new: name for name, new in forward.values.new.items()}
    saved = (
        annotated.storage_of.get((FORWARD, old.get(out, ""))) if isinstance(out, fx.Node) else None
        for out in outputs_of(module_f)[graphs.num_outputs :]
    )
    return Rewritten(made, nodes, tuple(saved))


class _RewrittenHalf:
    """One graph under construction: the ops and moves of an order become nodes."""

    def __init__(
        self, tables: Tables, phase: str, module: fx.GraphModule, forward: _RewrittenHalf | None
    ) -> None:
        self.tables, self.phase, self.module, self.forward = tables, phase, module, forward
        self.values = Values(tables, phase, module)
        self.graph, self.sizes = self.values.graph, self.values.sizes
        self.nodes: dict[ProgramStep, Place] = {}
        #: (storage, tier) → the ticket for the bytes there
        self.tickets: dict[tuple[str, str], fx.Node] = {}
        self.loads: dict[str, tuple[fx.Node, fx.Node]] = {}
        #: weight → its host tensor (`host`), and its copy on the device (`device`)
        self.host = {t: node for t, node in self.values.base.items() if t in tables.hosted}
        self.device: dict[str, fx.Node] = {}

    def walk(self, steps: tuple[ProgramStep, ...]) -> None:
        for step in steps:
            if isinstance(step, RunStep):
                made = self.run(step.name)
            else:
                move = self.tables.moves[step.move]
                begins = isinstance(step, StartStep)
                if move.source == DEVICE:
                    made = self.start_out(move) if begins else self.wait_out(move)
                elif move.target == DEVICE:
                    made = self.start_load(move) if begins else self.wait_load(move)
                else:
                    raise BrokenPlan(
                        f"move {move.id} goes from {move.source} to {move.target}, which the"
                        " runtime cannot do in one step. Please report this plan."
                    )
            self.nodes[step] = (self.phase, made.name)
        self.finish_stores()
        self.hold_unawaited()
        for storage in self.host:  # outputs refer to the weight itself
            self.look_at(storage, self.host[storage])

    # --- weights on the host --------------------------------------------------------------------

    def on_host(self, storage: str) -> fx.Node:
        if storage not in self.host:
            name = self.tables.annotated.base_of[storage][1]
            self.host[storage] = self.values.take(Resaved(node=name), self.tables.base(storage))
        return self.host[storage]

    def on_device(self, storage: str) -> fx.Node:
        """The weight's copy on the device, taken from forward if this graph has fetched none."""
        if storage not in self.device:
            like = self.tables.base(storage)
            self.device[storage] = self.values.take(Resaved(copy_of=storage), like)
        return self.device[storage]

    def look_at(self, storage: str, node: fx.Node) -> None:
        if self.values.base.get(storage) is not node:
            self.values.rebase(storage, node)

    def finish_stores(self) -> None:
        """Replace offloaded gradients by their host tensors from here on."""
        for (storage, tier), ticket in list(self.tickets.items()):
            start = ticket
            while start.target is ops.wait_out:
                start = start.args[0]  # type: ignore[assignment]
            stored = is_store(start)
            if start.target is not ops.start_store and not stored:
                continue
            if ticket is start and not stored:
                ticket = self.graph.call_function(ops.wait_out, (start, start.args[0]))
                ticket.meta["val"] = start.meta["val"]
                self.tickets[storage, tier] = ticket
            like = self.tables.base(storage).meta["val"]
            args: tuple[Any, ...] = (ticket, *self.laid_out(like))
            if like.device.type != "cpu":
                args += (str(like.device),)
            kept = self.graph.call_function(ops.host_of, args)
            kept.meta["val"] = like.new_empty_strided(like.shape, like.stride())
            self.values.rebase(storage, kept)

    def laid_out(self, like: torch.Tensor) -> tuple[Any, ...]:
        size, stride = self.sizes.make(like.shape), self.sizes.make(like.stride())
        return size, stride, like.dtype

    # --- ops ------------------------------------------------------------------------------------

    def run(self, name: str) -> fx.Node:
        op = name.partition("@")[0]
        for storage in self.tables.annotated.problem.op[op].operands:
            if storage in self.tables.hosted:
                in_place = (op, storage) in self.tables.directs
                used = self.on_host(storage) if in_place else self.on_device(storage)
                self.look_at(storage, used)
        made = [
            self.run_node(op, phase, self.tables.old[phase][node])
            for phase, node in self.tables.annotated.node_of[op]
            if phase == self.phase or node not in self.tables.bookkeeping
        ]
        return made[-1]

    def run_node(self, op: str, phase: str, node: fx.Node) -> fx.Node:
        made_there = self.tables.annotated.storage_of.get((phase, node.name), "")
        is_base = self.tables.annotated.base_of.get(made_there) == (phase, node.name)
        if is_base and (op, made_there) in self.tables.directs:
            return self.store(made_there, node)
        if phase == self.phase:
            new = self.values.copy(node)
            self.values.new[node.name] = new
        else:
            new = self.graph.node_copy(node, self.values.from_forward)
            self.values.again[node.name] = new
        new.target = self.reader(op, phase, node) or node.target
        for made in _made_by(node):
            storage = self.tables.annotated.storage_of.get((phase, made.name))
            if storage is None or self.tables.annotated.base_of[storage] != (phase, made.name):
                continue
            base = new if made is node else self.graph.node_copy(made, lambda _: new)
            self.values.rebase(storage, base)
        return new

    def reader(self, op: str, phase: str, node: fx.Node) -> Any:
        """The variant of the op that reads in-place operands well; None if it has none."""
        storage_of, directs = self.tables.annotated.storage_of, self.tables.directs
        hosted = frozenset(
            i
            for i, given in enumerate(node.args)
            if isinstance(given, fx.Node) and (op, storage_of.get((phase, given.name))) in directs
        )
        if not hosted:
            return None
        return reader_of(node, hosted, self.tables.graphs.device, self.tables.exact)

    def store(self, storage: str, node: fx.Node) -> fx.Node:
        """Add the op that makes the storage on the host."""
        write = write_of(node)
        assert write is not None, f"{node.name} cannot write in place"
        like = self.tables.base(storage).meta["val"]
        args = fx.node.map_arg(write.args, self.values.value)
        args += (*self.laid_out(like), storage, self.tables.runtime)
        ticket = self.graph.call_function(write.target, args)
        ticket.meta["val"] = _like_ticket(like)
        self.tickets[storage, HOST] = ticket
        return ticket

    # --- moves ----------------------------------------------------------------------------------

    def start_out(self, move: Move) -> fx.Node:
        source = self.values.span(move.tensor)
        args: tuple[Any, ...] = (source, move.id, move.target, move.lane, self.tables.runtime)
        stays = self.tables.annotated.problem.tensor[move.tensor].kind == "gradient"
        if move.codec is not None:
            if stays:
                raise BrokenPlan(
                    f"move {move.id} packs the gradient {move.tensor} with {move.codec}: a gradient"
                    " on the host is used in place there. Please report this plan."
                )
            args += (move.codec,)
        ticket = self.graph.call_function(ops.start_store if stays else ops.start_out, args)
        ticket.meta["val"] = _like_ticket(source.meta["val"])
        self.tickets[move.tensor, move.target] = ticket
        return ticket

    def wait_out(self, move: Move) -> fx.Node:
        ticket = self.ticket(move.tensor, move.target)
        # if it was started in forward and awaited in backward, only the lane keeps the source alive
        begun_here = ticket.op != "placeholder"
        args = (ticket, self.values.span(move.tensor) if begun_here else None)
        waited = self.graph.call_function(ops.wait_out, args)
        waited.meta["val"] = ticket.meta["val"]
        self.tickets[move.tensor, move.target] = waited
        return waited

    def hold_unawaited(self) -> None:
        """Keep the sources of copies out that this graph does not await alive to its end;
        otherwise a compiler that reuses memory would consider them free."""
        for (storage, tier), ticket in self.tickets.items():
            if ticket.target is ops.start_out:
                held = self.graph.call_function(ops.barrier, (ticket, [ticket.args[0]]))
                held.meta["val"] = ticket.meta["val"]
                self.tickets[storage, tier] = held

    def ticket(self, storage: str, tier: str) -> fx.Node:
        found = self.tickets.get((storage, tier))
        if found is None:
            assert self.forward is not None, f"{storage} never went to {tier}"
            like = self.forward.tickets[storage, tier]
            found = self.values.take(Resaved(ticket_of=storage, tier=tier), like)
            self.tickets[storage, tier] = found
        return found

    def start_load(self, move: Move) -> fx.Node:
        like = self.tables.base(move.tensor).meta["val"]
        hosted = move.tensor in self.tables.hosted
        ticket = None if hosted else self.ticket(move.tensor, move.source)
        source = self.on_host(move.tensor) if ticket is None else ticket
        args: tuple[Any, ...] = (source, *self.laid_out(like), move.id, move.lane, [])
        if hosted:
            args += (self.tables.runtime,)
        if like.device.type != "cpu":
            args += (str(like.device),)
        both = self.graph.call_function(ops.start_fetch if hosted else ops.start_load, args)
        buffer = self.graph.call_function(operator.getitem, (both, 0))
        load = self.graph.call_function(operator.getitem, (both, 1))
        buffer.meta["val"] = like.new_empty_strided(like.shape, like.stride())
        load.meta["val"] = _like_ticket(like)
        both.meta["val"] = (buffer.meta["val"], load.meta["val"])
        self.loads[move.id] = (buffer, load)
        return both

    def wait_load(self, move: Move) -> fx.Node:
        args = self.loads.pop(move.id)
        here = self.graph.call_function(ops.wait_load, args)
        here.meta["val"] = args[0].meta["val"]
        if move.tensor in self.tables.hosted:
            self.device[move.tensor] = here
        else:
            self.values.rebase(move.tensor, here)
        return here


def _made_by(node: fx.Node) -> list[fx.Node]:
    """The nodes that hold an op's results: its parts, or the op itself."""
    parts = [u for u in node.users if is_getitem(u) and aliased_input(u) is None]
    return parts or [node]


def _like_ticket(like: torch.Tensor) -> torch.Tensor:
    """A fake tensor for a ticket, in the fake mode of `like`."""
    assert isinstance(like, FakeTensor)
    with like.fake_mode:
        return tickets.fake_ticket()
