"""Inductor keeps no order but that of data, so the order that memory rests on becomes data.

Two kinds of movement node hold the budget: `wait_out` (an op behind it may allocate what it frees)
and `start_load` (it allocates, once the ops before it have freed theirs). A third, `offer`, frees a
gradient and writes to a weight that ops before it have read. At each of them `pin_order` draws a
line across the graph, in the order in which the nodes stand:

    a = f(x)                          a = f(x)
    sent = wait_out(ticket, x)        t = barrier(ticket, [a]); sent = wait_out(t, x)
    b = g(w)                          w_1 = barrier(w, [sent]); b = g(w_1)
    c = h(a, b)                       c = h(a, b)

Everything computed before the line that is still needed behind it is handed to the movement node,
so it exists by then, as memory of its own: Inductor neither computes it later nor keeps its
operands in its place. Behind the line, an op none of whose operands comes from behind it has one
operand passed through a `barrier`; the others follow by their data. Starts are chained in their
order the same way. Between two lines Inductor fuses as it likes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import fx

from .nodes import (
    IN_PIECES,
    MAIN_OPERAND,
    SHAPE_ONLY,
    WHOLE_VIEWS,
    is_extern_op,
    is_tensor,
    is_view,
    last_uses,
    makes_tensor,
    packet_of,
    passes_on,
    root_of,
    written_by,
)


@dataclass(frozen=True)
class MovementOps:
    """The movement ops, as overloads. `barrier` takes (y, tokens) and returns y."""

    start_out: Any
    wait_out: Any
    start_load: Any
    wait_load: Any
    barrier: Any
    #: as start_out and start_load, to and from host memory that ops use in place
    start_store: Any = None
    start_fetch: Any = None
    #: uses a gradient up, and writes to its weight
    offer: Any = None

    @classmethod
    def of(cls, namespace: str) -> MovementOps:
        """The ops that are registered under a namespace."""
        packets = getattr(torch.ops, namespace)
        found = {f.name: getattr(packets, f.name, None) for f in fields(cls)}
        return cls(**{name: packet.default for name, packet in found.items() if packet})

    def among(self, node: fx.Node) -> bool:
        return node.op == "call_function" and (
            node.target in (self.wait_out, self.wait_load, self.offer)
            or self.leaves(node)
            or self.comes(node)
        )

    def leaves(self, node: fx.Node) -> bool:
        """Whether the node starts a copy off the device."""
        return node.target in (self.start_out, self.start_store)

    def comes(self, node: fx.Node) -> bool:
        """Whether the node starts a copy onto the device."""
        return node.target in (self.start_load, self.start_fetch)


def pin_order(module: fx.GraphModule, ops: MovementOps | None = None) -> int:
    """Add edges so that Inductor runs `module`'s movement nodes where they stand.

    Changes the graph in place and returns how many barriers it took. For aot_eager, which runs
    nodes as they stand, there is no need of it. `ops` are offcompile's own unless given.
    """
    ops = MovementOps.of("offcompile") if ops is None else ops
    if not any(ops.among(n) for n in module.graph.nodes):
        return 0
    _gather_parts(module.graph)
    walk = _Walk(module.graph, ops, last_uses(module.graph))
    for node in list(module.graph.nodes):
        if node.op == "call_function":
            walk.at(node)
    module.graph.lint()
    module.recompile()
    return walk.barriers


@dataclass
class _Walk:
    graph: fx.Graph
    ops: MovementOps
    last_use: dict[fx.Node, int]
    #: position of the node at hand
    now: int = 0
    #: the last line: what is behind it runs after these
    line: list[fx.Node] = field(default_factory=list)
    #: the last move that was started, as a chain of one
    started: list[fx.Node] = field(default_factory=list)
    #: computed since the line, in order
    since: list[fx.Node] = field(default_factory=list)
    #: known to run behind the line
    behind: set[fx.Node] = field(default_factory=set)
    #: what was passed through a barrier since the line
    passed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    #: start_out → what it copies from
    leaving: dict[fx.Node, fx.Node] = field(default_factory=dict)
    #: what leaves → the same as memory, and from where on it is there
    fixed: dict[fx.Node, tuple[fx.Node, int]] = field(default_factory=dict)
    #: made from nothing, or from such: costs no memory that is ours to time
    free: set[fx.Node] = field(default_factory=set)
    barriers: int = 0

    def __post_init__(self) -> None:
        self.position = {n: i for i, n in enumerate(self.graph.nodes)}

    def at(self, node: fx.Node) -> None:
        self.now = self.position[node]
        ops = self.ops
        if ops.leaves(node):
            self._fix(node)
            self.started = [node]
        elif ops.comes(node):
            # its schema has a place for what it comes after
            after = [*_nodes(node.args[6]), *self._alive(), *self.line, *self.started]
            node.update_arg(6, list(dict.fromkeys(after)))
            self.started = [self._token(node)]
            self._draw(self.started)
        elif node.target is ops.wait_out:
            self._wait_out(node)
        elif node.target is ops.wait_load:
            self._wait_load(node)
        elif node.target is ops.offer:
            self._hold(node, 1, [*self._alive(), *self.line])
            self._draw([node])
        elif node.target is ops.barrier:  # holds to the end what is still being copied
            node.update_arg(1, [self.fixed.get(n, (n,))[0] for n in _nodes(node.args[1])])
        elif not is_view(node):
            self._compute(node)

    def _wait_out(self, node: fx.Node) -> None:
        ticket = node.args[0]
        assert isinstance(ticket, fx.Node)
        if node.args[1] is not None:
            node.update_arg(1, self.leaving[root_of(ticket)])
        if self.since:
            self._hold(node, 0, [*self._alive(), *self.line])
            self._draw([node])
        else:
            self._draw([*self.line, node])

    def _wait_load(self, node: fx.Node) -> None:
        load = node.args[1]
        if self.since:
            self._hold(node, 1, [*self._done_anyway(), *self.line])
        if self.since or set(self.line) <= {load}:
            self.behind.add(node)

    def _compute(self, node: fx.Node) -> None:
        if not makes_tensor(node):
            return
        operands = [n for n in node.all_input_nodes if is_tensor(n)]
        packet = packet_of(node)
        real = [n for n in operands if root_of(n) not in self.free]
        if not real or packet in SHAPE_ONLY:
            self.free.add(node)
            return
        self.since.append(node)
        if not self.line:
            return
        loose = [n for n in real if not self._is_behind(n)]
        if packet in IN_PIECES:
            for operand in loose:
                self._pass(node, operand)
        elif len(loose) == len(real):
            self._pass(node, self._choose(node, loose))
        self.behind.add(node)

    def _is_behind(self, node: fx.Node) -> bool:
        while node not in self.behind:
            if not passes_on(node):
                return False
            node = node.all_input_nodes[0]
        return True

    def _choose(self, node: fx.Node, operands: list[fx.Node]) -> fx.Node:
        """What is passed already, else an input of the graph, else any; never what is written."""
        written = set(written_by(node))
        fit = [n for n in operands if n not in written] or operands
        main = MAIN_OPERAND.get(packet_of(node))
        if main is not None:
            return node.args[main]  # type: ignore[return-value]
        return min(fit, key=lambda n: (n not in self.passed, root_of(n).op != "placeholder"))

    def _pass(self, node: fx.Node, operand: fx.Node) -> None:
        through = self.passed.get(operand)
        if through is None:
            through = self._barrier(node, operand, self.line)
            self.passed[operand] = through
            self.behind.add(through)
        node.replace_input_with(operand, through)

    def _hold(self, node: fx.Node, index: int, tokens: list[fx.Node]) -> None:
        """Run `node` after `tokens`."""
        held = node.args[index]
        assert isinstance(held, fx.Node)
        tokens = [t for t in dict.fromkeys(tokens) if t is not held]
        if tokens:
            node.update_arg(index, self._barrier(node, held, tokens))

    def _fix(self, start_out: fx.Node) -> None:
        """Have Inductor hand over the tensor in the strides that were traced, by which backward
        rebuilds its views. If it laid the tensor out otherwise it makes a copy; the wait keeps
        alive what is being copied, so it has to be given the same."""
        held = start_out.args[0]
        assert isinstance(held, fx.Node)
        fixed = self._barrier(start_out, held, self.started)
        # Of an op's tag for exact strides Inductor takes notice only beside this entry.
        values = fx.node.map_arg(fixed.args, lambda n: n.meta["val"])
        fixed.meta["eager_input_vals"] = (values, {})
        start_out.update_arg(0, fixed)
        self.leaving[start_out] = fixed
        self.fixed[held] = fixed, self.now
        self._share(held, fixed)

    def _share(self, held: fx.Node, fixed: fx.Node) -> None:
        """Have library calls behind a start read the memory that leaves. A view from before is to
        Inductor an expression of its own, which it would write to memory of its own for them."""
        for user in list(held.users):
            readers = list(user.users) if is_view(user) else [user]
            if user is fixed or not readers:
                continue
            if all(is_extern_op(n) and self.position.get(n, -1) > self.now for n in readers):
                user.replace_input_with(held, fixed)
                if self.position[user] < self.now:
                    fixed.append(user)

    def _barrier(self, before: fx.Node, held: fx.Node, tokens: list[fx.Node]) -> fx.Node:
        with self.graph.inserting_before(before):
            made = self.graph.call_function(self.ops.barrier, (held, list(tokens)))
        made.meta["val"] = held.meta["val"]
        self.barriers += 1
        return made

    def _draw(self, line: list[fx.Node]) -> None:
        self.line = line
        self.since.clear()
        self.behind.clear()
        self.passed.clear()

    def _token(self, start_load: fx.Node) -> fx.Node:
        """The small one of a load's two results: it stands for the load without holding memory."""
        for user in start_load.users:
            if user.args[1] == 1:
                return user
        with self.graph.inserting_after(start_load):
            part = self.graph.call_function(operator.getitem, (start_load, 1))
        part.meta["val"] = start_load.meta["val"][1]
        return part

    def _alive(self) -> list[fx.Node]:
        """What was computed since the line and is needed later."""
        needed = (part for node in self.since for part in self._needed(node))
        return [self._as_memory(part) for part in needed]

    def _as_memory(self, made: fx.Node) -> fx.Node:
        """Of what leaves, the memory that it leaves from, which is also what readers from here on
        get: the expression Inductor would write a second time, or compute again from operands that
        are gone by then."""
        if made not in self.fixed or any(user.op == "output" for user in made.users):
            return self._as_read(made)
        fixed, there = self.fixed[made]
        self._hand_over(made, fixed, there)
        return fixed

    def _as_read(self, made: fx.Node) -> fx.Node:
        """The view by which alone something is read: library calls have memory of that view."""
        while len(made.users) == 1:
            (view,) = made.users
            if packet_of(view) not in WHOLE_VIEWS or self.position.get(view, self.now) >= self.now:
                break
            made = view
        return made

    def _hand_over(self, old: fx.Node, new: fx.Node, there: int) -> None:
        """Have what stands behind `now` read `new`, of views too; it is there from `there` on."""
        for user in list(old.users):
            if user is new or self.ops.among(user):
                continue
            if self.position.get(user, -1) > self.now:
                user.replace_input_with(old, new)
            elif is_view(user) and self.last_use.get(user, -1) > self.now:
                with self.graph.inserting_after(user if self.position[user] > there else new):
                    copy = self.graph.node_copy(user, lambda n: new if n is old else n)
                self._hand_over(user, copy, there)

    def _needed(self, node: fx.Node) -> Iterator[fx.Node]:
        if is_tensor(node):
            if self.last_use[node] > self.now:
                yield node
            return
        for user in node.users:
            if is_tensor(user) and self.last_use[user] > self.now:
                yield user

    def _done_anyway(self) -> list[fx.Node]:
        """What to put before a wait so that it does not stall ops that stand before it: results
        that exist as memory in any case; if none is left of the last such op, what followed it."""
        extern = [i for i, n in enumerate(self.since) if is_extern_op(n)]
        if not extern:
            return []
        tokens = [t for i in extern for t in self._needed(self.since[i])]
        if not any(True for _ in self._needed(self.since[extern[-1]])):
            tokens += [t for n in self.since[extern[-1] + 1 :] for t in self._needed(n)]
        return tokens


def _gather_parts(graph: fx.Graph) -> None:
    """Take the results of each op that returns several right behind it."""
    for node in list(graph.nodes):
        if node.target is operator.getitem:
            node.args[0].append(node)


def _nodes(value: Any) -> list[fx.Node]:
    return [v for v in value if isinstance(v, fx.Node)]
