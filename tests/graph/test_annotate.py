"""Graphs become problems: storages and not views, each once, with kinds, sizes and lifetimes."""

from __future__ import annotations

import pytest
import torch
from captured import Attention, Perceptron, capture
from torch import fx, nn

from offcompile.graph.annotate import Annotated, annotate
from offcompile.graph.costs.op_costs import OpCost
from offcompile.graph.graphs import Graphs, bookkeeping
from offcompile.graph.sizes import hint_of
from offcompile.ir import DEVICE, Machine, Tier
from offcompile.ir.jsonio import problem_from_json, problem_to_json
from offcompile.machine.in_place import InPlace
from offcompile.planning.floors import plain_plan
from offcompile.simulate import simulate


def annotated(graphs: Graphs, small: int = 1) -> Annotated:
    return annotate(graphs, {}, hint_of(), small)


def of_kind(found: Annotated, kind: str) -> list[int]:
    return sorted(t.nbytes for t in found.problem.tensors if t.kind == kind)


def test_a_perceptron_has_its_weights_inputs_activations_and_gradients() -> None:
    (graphs,) = capture(Perceptron(64, 3), torch.randn(8, 64))
    found = annotated(graphs)
    weights = [64 * 64 * 4] * 3 + [64 * 4] * 3
    assert of_kind(found, "weight") == sorted(weights)
    assert of_kind(found, "gradient") == sorted(weights)
    assert of_kind(found, "output") == [4]
    saved = [t for t in found.problem.tensors if not t.pinned]
    assert {t.kind for t in saved} == {"activation"}
    assert len([t for t in saved if t.nbytes == 8 * 64 * 4]) >= 6  # addmm and tanh of each layer
    phases = [op.phase for op in found.problem.ops]
    assert phases == sorted(phases, key=("forward", "backward").index)


def test_views_of_one_storage_are_one_tensor() -> None:
    (graphs,) = capture(Attention(32, 2), torch.randn(2, 16, 32))
    found = annotated(graphs)
    (qkv,) = [t for t in found.problem.tensors if t.nbytes == 2 * 16 * 96 * 4 and not t.pinned][:1]
    looking = [name for (_, name), s in found.storage_of.items() if s == qkv.id]
    assert len([n for n in looking if n.startswith("getitem")]) >= 3
    (attention,) = [o for o in found.problem.ops if "attention" in o.id and o.phase == "forward"]
    assert qkv.id in attention.reads and attention.reads.count(qkv.id) == 1


def test_the_peak_of_the_plain_plan_is_what_a_naive_walk_of_both_graphs_holds() -> None:
    """Liveness by node, storage by storage, with nothing of `annotate` or the simulator."""
    (graphs,) = capture(Perceptron(64, 4), torch.randn(32, 64, requires_grad=True))
    found = annotated(graphs)
    machine = Machine((Tier(DEVICE), Tier("host")))
    peak = simulate(found.problem, machine, plain_plan(found.problem)).peak_bytes[DEVICE]

    nodes = [n for _, m in graphs for n in m.graph.nodes]
    ends: dict[int, int] = {}
    births: dict[int, int] = {}
    size: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for n in (node, *node.all_input_nodes):
            v = n.meta.get("val")
            if isinstance(v, torch.Tensor):
                key = v.untyped_storage()._cdata
                births.setdefault(key, 0 if n.op == "placeholder" else i)
                size[key] = v.untyped_storage().nbytes()
                if node.op != "output" or n in nodes[-1].all_input_nodes:
                    ends[key] = max(ends.get(key, 0), i)
                if n.op == "placeholder":
                    births[key], ends[key] = 0, len(nodes)
    (out,) = graphs.forward.graph.find_nodes(op="output")
    loss = out.args[0][0].meta["val"].untyped_storage()._cdata
    ends[loss] = len(nodes)
    # a saved activation is no input that stands from the start
    names = {n.name for n in graphs.forward.graph.nodes if n.op == "call_function"}
    for node in nodes:
        v = node.meta.get("val")
        if node.op == "placeholder" and node.name in names:
            key = v.untyped_storage()._cdata
            users = [
                j
                for j, n in enumerate(nodes)
                for a in n.all_input_nodes
                if n.op != "output"
                and isinstance(a.meta.get("val"), torch.Tensor)
                and a.meta["val"].untyped_storage()._cdata == key
            ]
            births[key] = next(j for j, n in enumerate(nodes) if n.name == node.name)
            ends[key] = max(users)
    held = [sum(size[k] for k in size if births[k] <= i <= ends[k]) for i in range(len(nodes))]
    assert peak == max(held)


def test_a_product_of_many_rows_reads_a_weight_on_the_host_again_and_again() -> None:
    size, us_per_byte = 32, 0.001
    took = {}
    for rows in (8, 64, 640):
        (graphs,) = capture(nn.Linear(size, size, bias=False), torch.randn(rows, size))
        how = InPlace(us_per_byte, us_per_byte, rows_a_read=64)
        found = annotate(graphs, {}, hint_of(), 1, how)
        op = next(op for op in found.problem.ops if op.phase == "forward" and op.direct)
        took[rows] = next(iter(op.direct.values())) - op.duration_us
    once = size * size * 4 * us_per_byte
    assert [took[rows] / once for rows in took] == pytest.approx([1, 1, 10], rel=1e-3)


def test_what_is_small_written_in_place_or_seen_by_the_user_is_pinned() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = torch.tanh(self.a(x))
            return hidden, self.b(hidden).sum()

    (graphs,) = capture(Both(), torch.randn(4, 32))
    found = annotated(graphs)
    by_id = found.problem.tensor
    assert by_id["tanh"].pinned and by_id["tanh"].kind == "output"
    everything_small = annotated(graphs, small=1 << 20)
    assert all(t.pinned for t in everything_small.problem.tensors)


def test_random_ops_and_ops_with_effects_do_not_run_twice() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.norm(self.a(x)), 0.5).square().mean()

    (graphs,) = capture(Dropping(), torch.randn(16, 32))
    ops = annotated(graphs).problem.ops
    random = [o for o in ops if "bernoulli" in o.id or "rand" in o.id or "dropout" in o.id]
    assert random and not any(o.recompute for o in random)
    assert not any(o.recompute for o in ops if o.id.startswith("copy"))
    assert any(o.recompute for o in ops if o.id.startswith("addmm"))
    assert not any(o.recompute for o in ops if o.phase == "backward")


def test_costs_become_durations_workspaces_and_sizes() -> None:
    (graphs,) = capture(Perceptron(64, 2), torch.randn(8, 64))
    costs = {
        ("forward", "addmm"): OpCost(123.4567, 999),
        ("forward", "tanh"): OpCost(1.0, 0, False),
    }
    found = annotate(graphs, costs, hint_of(), 1)
    assert found.problem.op["addmm"].duration_us == 123.457
    assert found.problem.op["addmm"].workspace_bytes == 999
    assert found.problem.tensor["tanh"].nbytes == 0  # fused away


def test_symbolic_sizes_follow_the_hint() -> None:
    x = torch.randn(8, 64)
    torch._dynamo.mark_dynamic(x, 0)
    (graphs,) = capture(Perceptron(64, 2), x)
    traced = annotated(graphs).problem.tensor["tanh"].nbytes
    (symbol,) = {
        s
        for n in graphs.forward.graph.find_nodes(op="placeholder")
        if isinstance(n.meta["val"], torch.SymInt)
        for s in n.meta["val"].node.expr.free_symbols
    }
    larger = annotate(graphs, {}, hint_of({symbol: 24}), 1)
    assert traced == 8 * 64 * 4
    assert larger.problem.tensor["tanh"].nbytes == 24 * 64 * 4


def test_inference_is_one_phase() -> None:
    with torch.no_grad():
        (graphs,) = capture(Perceptron(64, 2), torch.randn(8, 64))
    found = annotated(graphs)
    assert {op.phase for op in found.problem.ops} == {"forward"}
    assert of_kind(found, "gradient") == []


def test_labels_say_where_in_the_model_a_tensor_comes_from() -> None:
    (graphs,) = capture(Perceptron(64, 2), torch.randn(8, 64))
    assert annotated(graphs).labels["addmm"] == "layers.0 8×64 float32"


def test_what_annotate_makes_is_a_problem_that_can_be_written_and_read() -> None:
    (graphs,) = capture(Attention(32, 2), torch.randn(2, 16, 32))
    problem = annotated(graphs).problem
    assert problem_from_json(problem_to_json(problem)) == problem


def statistics(shown: bool = False) -> fx.Graph:
    """A mean that is taken off, and that a running mean remembers."""
    graph = fx.Graph()
    x, running = graph.placeholder("x"), graph.placeholder("running")
    mean = graph.call_function(torch.ops.aten.mean.default, (x,))
    centred = graph.call_function(torch.ops.aten.sub.Tensor, (x, mean))
    kept = graph.call_function(torch.ops.aten.mul.Tensor, (running, 0.9))
    later = graph.call_function(torch.ops.aten.add.Tensor, (kept, mean))
    graph.call_function(torch.ops.aten.copy_.default, (running, later))
    graph.output((centred, later) if shown else (centred,))
    return graph


def test_what_only_new_values_of_inputs_come_of_is_bookkeeping() -> None:
    assert bookkeeping(statistics()) == {
        "running",
        "mul_tensor",
        "add_tensor",
        "copy__default",
    }
    assert bookkeeping(statistics(shown=True)) == {"copy__default"}
