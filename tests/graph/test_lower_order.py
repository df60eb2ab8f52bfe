"""Movement ops run where they stand under Inductor, and what leaves is the memory that is read."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
import torch
from lower_moves import OPS, Moves, executed_order, spill
from lowered import NETS, Hooks, backend, fresh, step
from torch import Tensor, fx
from torch._inductor import config as inductor_config

from offcompile.graph.lowering.lower import pin_order


class Moving(Hooks):
    """Lets every saved activation leave and come back, with the stand-in ops."""

    def __init__(self, pin: bool) -> None:
        super().__init__()
        self.pin = pin
        self.moves: list[Moves] = []

    def training(self, forward: Any, backward: Any, num_outputs: int, inputs: Any) -> Any:
        self.asked.append("training")
        self.moves = spill(forward, backward, num_outputs)
        if self.pin:
            for half in (forward, backward):
                pin_order(half, OPS)
        return forward, backward


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "net" else pytest.mark.soak) for n in NETS]
)
def test_movement_runs_where_it_stands(name: str) -> None:
    expected = step(*fresh(name), "inductor")
    hooks = Moving(pin=True)
    with inductor_config.patch(fx_graph_cache=False), executed_order() as runs:
        found = step(*fresh(name), backend("inductor", hooks))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(runs) == len(hooks.moves) == 2
    for moves, run in zip(hooks.moves, runs, strict=True):
        assert moves.count > 0
        assert moves.movement_in(run.kernels) == moves.movement
        assert moves.strays(run.kernels, again=name != "conv") == []
        assert not run.reused(moves.buffers)


#: `test_movement_runs_where_it_stands` always runs, with edges
@pytest.mark.soak
def test_without_edges_inductor_has_its_own_order() -> None:
    """Why `pin_order` is needed: take it away when this fails on all supported versions."""
    hooks = Moving(pin=False)
    with inductor_config.patch(fx_graph_cache=False), executed_order() as runs:
        step(*fresh("net"), backend("inductor", hooks))
    assert any(m.strays(r.kernels) for m, r in zip(hooks.moves, runs, strict=True))


class Sketch:
    """A graph by hand, of 2 × 2 tensors and tickets."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        with torch._subclasses.FakeTensorMode():
            self.x, self.ticket = torch.empty(2, 2), torch.empty(1, dtype=torch.int64)

    def given(self, name: str, value: Tensor) -> fx.Node:
        made = self.graph.placeholder(name)
        made.meta["val"] = value
        return made

    def node(self, target: Any, *args: Any, value: Any = None) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.meta["val"] = self.x if value is None else value
        return made


@pytest.mark.parametrize("early", [True, False])
def test_products_read_the_memory_that_leaves(early: bool) -> None:
    """Through views too, wherever they stand; what may fuse with its maker keeps reading that."""
    sketch = Sketch()
    graph, node, ticket = sketch.graph, sketch.node, sketch.ticket
    px, aten = sketch.given("x", sketch.x), torch.ops.aten
    a = node(aten.relu.default, px)
    views = [node(aten.view.default, a, [2, 2])] if early else []
    start = node(OPS.start_out, a, "a", "host", "d2h", "r", value=ticket)
    views = views or [node(aten.view.default, a, [2, 2])]
    product = node(aten.mm.default, views[0], px)
    fusible = node(aten.neg.default, a)
    graph.output((start, product, fusible))
    pin_order(fx.GraphModule({}, graph), OPS)
    fixed = start.args[0]
    assert isinstance(fixed, fx.Node) and fixed.target == OPS.barrier and fixed.args[0] is a
    assert views[0].args[0] is fixed and fusible.args[0] is a


def test_an_image_that_a_convolution_reads_leaves_as_it_was_traced() -> None:
    """Inductor may lay the shared one out by channels; then the other is a copy of it, which the
    wait keeps alive."""
    sketch = Sketch()
    with torch._subclasses.FakeTensorMode():
        image, kernel = torch.empty(1, 2, 4, 4), torch.empty(2, 2, 1, 1)
    graph, node, aten = sketch.graph, sketch.node, torch.ops.aten
    px, pw = sketch.given("x", image), sketch.given("w", kernel)
    a = node(aten.relu.default, px, value=image)
    start = node(OPS.start_out, a, "a", "host", "d2h", "r", value=sketch.ticket)
    read = (a, pw, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    convolved = node(aten.convolution.default, *read, value=image)
    wait = node(OPS.wait_out, start, a, value=sketch.ticket)
    graph.output((wait, convolved))
    pin_order(fx.GraphModule({}, graph), OPS)
    exact, shared = start.args[0], convolved.args[0]
    assert isinstance(exact, fx.Node) and exact.target == OPS.barrier and exact.args[0] is shared
    assert isinstance(shared, fx.Node) and shared.target == OPS.barrier and shared.args[0] is a
    assert exact.meta["eager_input_vals"][0][0].stride() == image.stride()
    assert wait.args[1] is exact


@pytest.mark.parametrize("early", [True, False])
def test_behind_a_line_what_leaves_is_the_memory_that_it_leaves_from(early: bool) -> None:
    """The line does not have it written twice, and ops behind it do not compute it again."""
    sketch = Sketch()
    graph, node, ticket = sketch.graph, sketch.node, sketch.ticket
    px, aten = sketch.given("x", sketch.x), torch.ops.aten
    a = node(aten.relu.default, px)
    views = [node(aten.t.default, a)] if early else []
    start = node(OPS.start_out, a, "a", "host", "d2h", "r", value=ticket)
    views = views or [node(aten.t.default, a)]
    again = node(aten.view.default, views[0], [2, 2])
    before = node(aten.neg.default, again)
    wait = node(OPS.wait_out, start, a, value=ticket)
    direct, through = node(aten.neg.default, a), node(aten.neg.default, again)
    end = node(OPS.barrier, start, [a], value=ticket)
    graph.output((wait, before, direct, through, end))
    pin_order(fx.GraphModule({}, graph), OPS)
    fixed, held = start.args[0], wait.args[0]
    assert isinstance(fixed, fx.Node) and fixed.target == OPS.barrier and fixed.args[0] is a
    assert isinstance(held, fx.Node) and fixed in held.args[1] and a not in held.args[1]
    assert end.args[1] == [fixed]
    assert before.args[0] is again and again.args[0] is views[0] and views[0].args[0] is a

    def origin(n: fx.Node) -> fx.Node:
        """List what an op behind the line reads, below barriers that hold it back and views."""
        while n is not fixed and n is not a:
            n = n.all_input_nodes[0]
        return n

    assert origin(direct.all_input_nodes[0]) is origin(through.all_input_nodes[0]) is fixed


def test_lines_hold_the_view_that_alone_is_read() -> None:
    """Inductor gives a library call memory of that view, and its base would be another copy."""
    sketch = Sketch()
    graph, node, ticket = sketch.graph, sketch.node, sketch.ticket
    px, aten = sketch.given("x", sketch.x), torch.ops.aten
    a, b, c = (node(op.default, px) for op in (aten.relu, aten.neg, aten.exp))
    start = node(OPS.start_out, px, "x", "host", "d2h", "r", value=ticket)
    seen = node(aten.view.default, a, [4])
    part = node(aten.slice.Tensor, b, 0, 0, 1)
    uses = [node(aten.sum.default, v) for v in (seen, part, node(aten.t.default, c), c)]
    wait = node(OPS.wait_out, start, px, value=ticket)
    uses += [node(aten.sum.default, v) for v in (seen, part, c)]
    graph.output((wait, *uses))
    pin_order(fx.GraphModule({}, graph), OPS)
    held = wait.args[0]
    assert isinstance(held, fx.Node)
    assert {seen, b, c} < set(held.args[1]) and not {a, part} & set(held.args[1])


def test_edges_in_print() -> None:
    """One line each way: what is alive goes to the movement node, what follows waits for it."""
    sketch = Sketch()
    graph, node, x, ticket = sketch.graph, sketch.node, sketch.x, sketch.ticket
    px, pw, pt = (sketch.given(n, v) for n, v in (("x", x), ("w", x), ("t", ticket)))
    aten = torch.ops.aten
    a = node(aten.relu.default, px)
    start = node(OPS.start_out, a, "a", "host", "d2h", "r", value=ticket)
    b = node(aten.mm.default, a, pw)
    wait = node(OPS.wait_out, start, a, value=ticket)
    c = node(aten.mm.default, pw, pw)
    load = node(OPS.start_load, pt, [2, 2], [2, 1], x.dtype, "l", "h2d", [], value=(x, ticket))
    buffer = node(operator.getitem, load, 0)
    token = node(operator.getitem, load, 1, value=ticket)
    back = node(OPS.wait_load, buffer, token)
    d = node(aten.add.Tensor, back, c)
    graph.output((wait, b, d))
    module = fx.GraphModule({}, graph)
    assert pin_order(module, OPS) == 3
    lines = [
        re.sub(r"lowertest\.(\w+)\.default", r"\1", ln) for ln in str(module.graph).split("\n")
    ]
    shown = [
        re.sub(
            r" : \[num_users=\d\] = call_function\[target=(torch\.ops\.)?([\w.]+)\]", r" = \2", ln
        )
        for ln in lines
        if "call_function" in ln
    ]
    assert [s.replace("    ", "").replace(", kwargs = {}", "") for s in shown] == [
        "%relu_default = aten.relu.default(args = (%x,))",
        "%barrier_default = barrier(args = (%relu_default, []))",
        "%start_out_default = start_out(args = (%barrier_default, a, host, d2h, r))",
        "%mm_default = aten.mm.default(args = (%barrier_default, %w))",
        "%barrier_default_1 = barrier(args = (%start_out_default, [%mm_default]))",
        "%wait_out_default = wait_out(args = (%barrier_default_1, %barrier_default))",
        "%barrier_default_2 = barrier(args = (%w, [%wait_out_default]))",
        "%mm_default_1 = aten.mm.default(args = (%barrier_default_2, %barrier_default_2))",
        "%start_load_default = start_load(args = (%t, [2, 2], [2, 1], torch.float32, l, h2d, "
        "[%mm_default_1, %wait_out_default, %start_out_default]))",
        "%getitem_1 = operator.getitem(args = (%start_load_default, 1))",
        "%getitem = operator.getitem(args = (%start_load_default, 0))",
        "%wait_load_default = wait_load(args = (%getitem, %getitem_1))",
        "%add_tensor = aten.add.Tensor(args = (%wait_load_default, %mm_default_1))",
    ]
