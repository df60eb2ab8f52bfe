"""Turns the order that the memory budget relies on into data edges, the only order Inductor keeps.

Two kinds of movement node enforce the budget: `wait_out` (ops after it may allocate the memory that
it frees) and `start_load` (it allocates after the ops before it have freed their memory). A third,
`offer`, frees a gradient and writes to a weight that ops before it have read. At each of them
`pin_order` draws a line across the graph, in node order:

    a = f(x)                          a = f(x)
    sent = wait_out(ticket, x)        t = barrier(ticket, [a]); sent = wait_out(t, x)
    b = g(w)                          w_1 = barrier(w, [sent]); b = g(w_1)
    c = h(a, b)                       c = h(a, b)

Every value computed before the line and still needed after it is passed to the movement node, so
it has been realized in memory by then: Inductor neither computes it later nor keeps its operands
alive instead. After the line, an op with no operand from after the line gets one operand passed
through a `barrier`; the other ops follow by their data. Starts are chained in their order the same
way. Between two lines Inductor may fuse freely.
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

#: tensors of images: Inductor may lay these out by channels
IMAGE_DIMS = 4


@dataclass(frozen=True)
class MovementOps:
    """The movement ops, as overloads. `barrier` takes (y, tokens) and returns y."""

    start_out: Any
    wait_out: Any
    start_load: Any
    wait_load: Any
    barrier: Any
    #: like start_out and start_load, to and from host memory that ops use in place
    start_store: Any = None
    start_fetch: Any = None
    #: consumes a gradient and updates its weight
    offer: Any = None

    @classmethod
    def of(cls, namespace: str) -> MovementOps:
        """The ops registered under a namespace."""
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
        """True if the node starts a copy off the device."""
        return node.target in (self.start_out, self.start_store)

    def comes(self, node: fx.Node) -> bool:
        """True if the node starts a copy onto the device."""
        return node.target in (self.start_load, self.start_fetch)


def pin_order(module: fx.GraphModule, ops: MovementOps | None = None) -> int:
    """Add edges so that Inductor runs `module`'s movement nodes in node order.

    Changes the graph in place and returns the number of barriers added. aot_eager does not need
    this, since it runs nodes in order. `ops` defaults to offcompile's own.
    """
    ops = MovementOps.of("offcompile") if ops is None else ops
    if not any(ops.among(n) for n in module.graph.nodes):
        return 0
    _gather_parts(module.graph)
    walk = _OrderWalk(module.graph, ops, last_uses(module.graph))
    for node in list(module.graph.nodes):
        if node.op == "call_function":
            walk.at(node)
    module.graph.lint()
    module.recompile()
    return walk.barriers


@dataclass
class _OrderWalk:
    graph: fx.Graph
    ops: MovementOps
    last_use: dict[fx.Node, int]
    #: position of the current node
    now: int = 0
    #: the last line: nodes after it run after these
    line: list[fx.Node] = field(default_factory=list)
    #: the last start, as a list of at most one node; the next start runs after it
    started: list[fx.Node] = field(default_factory=list)
    #: nodes computed since the line, in order
    since: list[fx.Node] = field(default_factory=list)
    #: nodes known to run after the line
    behind: set[fx.Node] = field(default_factory=set)
    #: node → its barrier, for nodes passed through one since the line
    passed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    #: start_out → the node that it copies from
    leaving: dict[fx.Node, fx.Node] = field(default_factory=dict)
    #: evicted node → its realized form, and the position from which that exists
    fixed: dict[fx.Node, tuple[fx.Node, int]] = field(default_factory=dict)
    #: nodes computed from no real operand: the plan does not account for their memory
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
            # its schema has an argument for the nodes that it runs after
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
        elif node.target is ops.barrier:  # keeps sources of unfinished copies alive to the end
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
        """Prefer an operand that is passed already, then a graph input; avoid those written to."""
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
        """Make Inductor pass the tensor with its traced strides, from which backward rebuilds the
        views. Inductor copies the tensor if its layout differs; the wait keeps the copied tensor
        alive, so it must be given the same node. Where a convolution reads it too, Inductor may lay
        out what they share by channels; then the tensor that leaves is a copy as traced."""
        held = start_out.args[0]
        assert isinstance(held, fx.Node)
        fixed = exact = self._exact(start_out, held, self.started)
        if self._share(held, fixed) and held.meta["val"].dim() >= IMAGE_DIMS:
            exact = self._exact(start_out, fixed, [])
        start_out.update_arg(0, exact)
        self.leaving[start_out] = exact
        self.fixed[held] = fixed, self.now

    def _exact(self, before: fx.Node, held: fx.Node, tokens: list[fx.Node]) -> fx.Node:
        made = self._barrier(before, held, tokens)
        # Inductor honours an op's exact-strides tag only if this entry is present.
        values = fx.node.map_arg(made.args, lambda n: n.meta["val"])
        made.meta["eager_input_vals"] = (values, {})
        return made

    def _share(self, held: fx.Node, fixed: fx.Node) -> bool:
        """Make library calls after a start read the memory being evicted; True if there are any.
        Inductor treats an earlier view as a separate expression, which it would realize in memory
        of its own."""
        shared = False
        for user in list(held.users):
            readers = list(user.users) if is_view(user) else [user]
            if user is fixed or not readers:
                continue
            if all(is_extern_op(n) and self.position.get(n, -1) > self.now for n in readers):
                user.replace_input_with(held, fixed)
                shared = True
                if self.position[user] < self.now:
                    fixed.append(user)
        return shared

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
        """The smaller of a load's two results: it represents the load without holding memory."""
        for user in start_load.users:
            if user.args[1] == 1:
                return user
        with self.graph.inserting_after(start_load):
            part = self.graph.call_function(operator.getitem, (start_load, 1))
        part.meta["val"] = start_load.meta["val"][1]
        return part

    def _alive(self) -> list[fx.Node]:
        """The values computed since the line that are needed later."""
        needed = (part for node in self.since for part in self._needed(node))
        return [self._as_memory(part) for part in needed]

    def _as_memory(self, made: fx.Node) -> fx.Node:
        """The realized form of a value. Readers of an evicted value get the memory being evicted
        from here on: Inductor would realize the expression a second time, or recompute it from
        operands that have been freed by then."""
        if made not in self.fixed or any(user.op == "output" for user in made.users):
            return self._as_read(made)
        fixed, there = self.fixed[made]
        self._hand_over(made, fixed, there)
        return fixed

    def _as_read(self, made: fx.Node) -> fx.Node:
        """The only view that reads a value, if there is just one: library calls realize that."""
        while len(made.users) == 1:
            (view,) = made.users
            if packet_of(view) not in WHOLE_VIEWS or self.position.get(view, self.now) >= self.now:
                break
            made = view
        return made

    def _hand_over(self, old: fx.Node, new: fx.Node, there: int) -> None:
        """Make nodes after `now` read `new`, through views too. `new` exists from `there` on."""
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
        """The results to order before a wait, so that it does not stall the ops before it: those
        that library calls realize anyway and, if the last such call has none left, the results of
        the ops after it."""
        extern = [i for i, n in enumerate(self.since) if is_extern_op(n)]
        if not extern:
            return []
        tokens = [t for i in extern for t in self._needed(self.since[i])]
        if not any(True for _ in self._needed(self.since[extern[-1]])):
            tokens += [t for n in self.since[extern[-1] + 1 :] for t in self._needed(n)]
        return tokens


def _gather_parts(graph: fx.Graph) -> None:
    """Move the getitems of each op that returns several results right after it."""
    for node in list(graph.nodes):
        if node.target is operator.getitem:
            node.args[0].append(node)


def _nodes(value: Any) -> list[fx.Node]:
    return [v for v in value if isinstance(v, fx.Node)]
