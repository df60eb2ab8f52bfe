"""Movement ops that only remember, a rewrite that moves all it can, and the order that came of it.

The ops have the schemas of offcompile's own and raise when memory was touched that must not be:
a source before its `wait_out`, a load's buffer before its `wait_load`.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import Scheduler
from torch.fx.node import has_side_effect

from offcompile.graph.lowering.nodes import is_view
from offcompile.graph.lowering.order import MovementOps

_library = torch.library.Library("lowertest", "FRAGMENT")
_ids = itertools.count(1)
_saved: dict[int, tuple[list[Tensor], Tensor]] = {}
_loads: dict[int, tuple[int, int]] = {}


def _start_out(x: Tensor, tag: str, tier: str, lane: str, runtime: str) -> Tensor:
    number = next(_ids)
    _saved[number] = ([x], x.clone())
    return torch.tensor([number])


def _wait_out(ticket: Tensor, x: Tensor | None) -> Tensor:
    source, copy = _saved[int(ticket)]
    assert x is not None and x.data_ptr() == source[0].data_ptr(), "another tensor was kept alive"
    assert torch.equal(source.pop(), copy), "overwritten while it was being copied"
    return ticket


def _start_load(
    ticket: Tensor, size: Any, stride: Any, dtype: Any, tag: str, lane: str, after: Any
) -> tuple[Tensor, Tensor]:
    number = next(_ids)
    copy = _saved[int(ticket)][1]
    buffer = torch.full_like(copy, float("nan"))
    assert list(size) == list(copy.shape)
    wide = [i for i, n in enumerate(size) if n > 1]
    assert [stride[i] for i in wide] == [copy.stride(i) for i in wide], "not the traced strides"
    _loads[number] = int(ticket), buffer.data_ptr()
    return buffer, torch.tensor([number])


def _wait_load(buffer: Tensor, load: Tensor) -> Tensor:
    ticket, address = _loads[int(load)]
    assert buffer.data_ptr() == address, "loaded into other memory"
    assert bool(buffer.isnan().all()), "touched while it was being loaded"
    return buffer.copy_(_saved[ticket][1])


def _first(y: Tensor, other: Any) -> Tensor:
    return y


def _ticket() -> Tensor:
    return torch.empty((1,), dtype=torch.int64)


def _fake_start_load(
    ticket: Tensor, size: Any, stride: Any, dtype: Any, tag: str, lane: str, after: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_strided(size, stride, dtype=dtype), _ticket()


def _alias(y: Tensor, other: Any) -> Tensor:
    return torch.ops.aten.alias.default(y)


for _schema, _kernel, _fake in (
    (
        "start_out(Tensor x, str tag, str tier, str lane, str runtime) -> Tensor",
        _start_out,
        lambda *_: _ticket(),
    ),
    ("wait_out(Tensor(a) ticket, Tensor? x) -> Tensor(a)", _wait_out, _alias),
    (
        "start_load(Tensor ticket, SymInt[] size, SymInt[] stride, ScalarType dtype, str tag,"
        " str lane, Tensor[] after) -> (Tensor, Tensor)",
        _start_load,
        _fake_start_load,
    ),
    ("wait_load(Tensor(a) buffer, Tensor load) -> Tensor(a)", _wait_load, _alias),
    ("barrier(Tensor(a) y, Tensor[] tokens) -> Tensor(a)", _first, _alias),
):
    _name = _schema.split("(")[0]
    _library.define(_schema, tags=(torch.Tag.needs_exact_strides,))
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowertest::{_name}", _fake, lib=_library)
    has_side_effect(getattr(torch.ops.lowertest, _name).default)

OPS = MovementOps.of("lowertest")


@dataclass(frozen=True)
class Kernel:
    """One call that Inductor makes: a movement node, or a kernel and the ops it computes."""

    movement: str | None
    ops: frozenset[str]


@dataclass
class Run:
    """One compiled graph: its kernels in order, and the code that calls them."""

    kernels: list[Kernel]
    code: str = ""

    def reused(self, loads: set[str]) -> list[str]:
        """Buffers of loads, by the tags of their moves, whose memory was given to another."""
        packed = {
            m[1]: m[2] for m in re.finditer(r"(\w+) = .*start_load.*?'(\w+)', 'h2d'", self.code)
        }
        mine = {
            m[1] for m in re.finditer(r"(\w+) = (\w+)\[0\]", self.code) if packed.get(m[2]) in loads
        }
        return [m[0] for m in re.finditer(r"= (\w+).*# reuse", self.code) if m[1] in mine]


@dataclass
class Moves:
    """One rewritten graph before edges are drawn: names in the order in which they stand."""

    order: dict[str, int]
    movement: list[str]
    lines: set[str]
    ops: set[str]
    count: int
    buffers: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, graph: fx.Graph, count: int) -> Moves:
        nodes = list(graph.nodes)
        calls = [n for n in nodes if n.op == "call_function"]
        return cls(
            {n.name: i for i, n in enumerate(nodes)},
            [n.name for n in calls if OPS.among(n)],
            {n.name for n in calls if n.target in (OPS.wait_out, OPS.start_load)},
            {n.name for n in calls if not is_view(n) and not OPS.among(n) and _has_operand(n)},
            count,
            {n.args[4] for n in calls if n.target is OPS.start_load},
        )

    def movement_in(self, kernels: Sequence[Kernel]) -> list[str]:
        return [k.movement for k in kernels if k.movement is not None]

    def strays(self, kernels: Sequence[Kernel], again: bool = True) -> list[str]:
        """Ops on the wrong side of a line (`wait_out`, `start_load`); `again`: also those that are
        on both, computed anew. (Where Inductor copies into another layout, it names the copy after
        everything that was in the original.)"""
        found = []
        for at, line in enumerate(kernels):
            if line.movement in self.lines:
                place = self.order[line.movement]
                early = {o for k in kernels[:at] for o in k.ops & self.ops if self.order[o] > place}
                done = set() if again else {o for k in kernels[:at] for o in k.ops}
                late = {o for k in kernels[at:] for o in k.ops & self.ops if self.order[o] < place}
                late -= done
                found += [f"{o} before {line.movement}" for o in sorted(early)]
                found += [f"{o} after {line.movement}" for o in sorted(late)]
        return found


def _has_operand(node: fx.Node) -> bool:
    return any(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes)


@contextlib.contextmanager
def executed_order() -> Iterator[list[Run]]:
    """The order in which Inductor writes out what it runs, graph by graph."""
    runs: list[Run] = []
    schedule, to_module = Scheduler._codegen, GraphLowering.codegen

    def note(self: Any, nodes: list[Any]) -> Any:
        runs.append(Run([k for n in nodes for k in _kernels_of(n)]))
        return schedule(self, nodes)

    def note_code(self: Any) -> Any:
        made = to_module(self)
        runs[-1].code = made[0].value
        return made

    with (
        mock.patch.object(Scheduler, "_codegen", note),
        mock.patch.object(GraphLowering, "codegen", note_code),
    ):
        yield runs


def _kernels_of(scheduled: Any) -> Iterator[Kernel]:
    ops: set[str] = set()
    for part in scheduled.get_nodes():
        node = part.node
        overload = getattr(node, "op_overload", None)
        if overload in (OPS.start_out, OPS.wait_out, OPS.start_load, OPS.wait_load):
            (origin,) = (o for o in node.origins if o.target is overload)
            yield Kernel(origin.name, frozenset())
        elif overload is not None:
            origin = node.get_origin_node()
            ops |= {origin.name} if origin is not None and overload is not OPS.barrier else set()
        elif type(node).__name__ != "MultiOutput":
            ops |= {o.name for o in node.origins}
    if ops:
        yield Kernel(None, frozenset(ops))


# --- the rewrite ---------------------------------------------------------------------------------


def spill(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> list[Moves]:
    """Every saved activation leaves two nodes after its last use and starts back three before its
    next. In place."""
    f, b = forward.graph, backward.graph
    (out,) = f.find_nodes(op="output")
    outputs = list(out.args[0])
    fs, bs = list(f.nodes), list(b.nodes)
    place = {n: i for nodes in (fs, bs) for i, n in enumerate(nodes)}
    taken = {n.name: n for n in b.find_nodes(op="placeholder")}
    ours = {_storage(n) for n in f.find_nodes(op="placeholder")}
    ours |= {_storage(n) for n in outputs[:num_outputs]}
    groups: dict[int, list[fx.Node]] = {}
    for saved in outputs[num_outputs:]:
        key = _storage(saved)
        if key is not None and key not in ours and saved.meta["val"].is_floating_point():
            groups.setdefault(key, []).append(saved)
    first_taken = next(n for n in bs if _storage(n) is not None)
    tickets: list[fx.Node] = []
    gone: list[fx.Node] = []
    for key, group in groups.items():
        aliases = [n for n in fs if _storage(n) == key]
        root, value = aliases[0], aliases[0].meta["val"]
        if value.untyped_storage().nbytes() != value.numel() * value.itemsize:
            continue
        last = max(place[u] for n in aliases for u in (n, *n.users) if u is not out)
        start = _insert(
            f, root.next, OPS.start_out, (root, root.name, "host", "d2h", "r"), _fake(value)
        )
        end = fs[min(last + 3, len(fs) - 1)]
        tickets.append(_insert(f, end, OPS.wait_out, (start, root), _fake(value)))
        with b.inserting_before(first_taken):
            ticket = b.placeholder(f"ticket_{root.name}")
        ticket.meta["val"] = _fake(value)
        first = min(place[u] for n in group for u in taken[n.name].users)
        begin, need = bs[max(first - 3, len(taken))], bs[first]
        how = (ticket, list(value.shape), list(value.stride()), value.dtype, root.name, "h2d", [])
        load = _insert(b, begin, OPS.start_load, how, (value, _fake(value)))
        buffer = _insert(b, begin, operator.getitem, (load, 0), value)
        token = _insert(b, need, operator.getitem, (load, 1), _fake(value))
        back = _insert(b, need, OPS.wait_load, (buffer, token), value)
        for node in group:
            v = node.meta["val"]
            view = (back, list(v.shape), list(v.stride()), v.storage_offset())
            made = _insert(b, need, torch.ops.aten.as_strided.default, view, v)
            taken[node.name].replace_all_uses_with(made)
        gone += group
    for node in gone:
        b.erase_node(taken[node.name])
    kept = [o for o in outputs[num_outputs:] if o not in gone]
    out.args = ((*outputs[:num_outputs], *tickets, *kept),)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return [Moves.of(f, len(tickets)), Moves.of(b, len(tickets))]


def _insert(graph: fx.Graph, before: fx.Node, target: Any, args: Any, value: Any) -> fx.Node:
    while before.op == "placeholder":
        before = before.next
    with graph.inserting_before(before):
        made = graph.call_function(target, args)
    made.meta["val"] = value
    return made


def _storage(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _fake(like: Any) -> Tensor:
    with like.fake_mode:
        return _ticket()
