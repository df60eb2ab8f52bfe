"""A plan's order, and nothing else, is what the rewritten graphs say and what runs."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured import Attention, Perceptron
from lengths import some
from torch import fx, nn

import offcompile
from offcompile.graph.annotate import Annotated, annotate
from offcompile.graph.costs.op_costs import OpCost
from offcompile.graph.graphs import Graphs, aliased_input, is_getitem
from offcompile.graph.lowering.lower import lower
from offcompile.graph.lowering.rewrite import Rewritten, rewrite
from offcompile.graph.sizes import hint_of
from offcompile.ir import DEVICE, Lane, Machine, Tier
from offcompile.planning.fit_budget import Decided, PlanSearch, fit_budget
from offcompile.planning.floors import floor_of
from offcompile.planning.order import ProgramStep, RunStep, StartStep, WaitStep
from offcompile.planning.replay import worst_case
from offcompile.runtime.base.counters import counters
from offcompile.runtime.moves.registry import RuntimeSettings


def machine(capacity: int) -> Machine:
    tiers = (Tier(DEVICE, capacity), Tier("host"))
    return Machine(tiers, (Lane("h2d", "host", DEVICE, 500), Lane("d2h", DEVICE, "host", 500)))


@dataclass
class Moving:
    """Hooks that plan for a share of the way from the floor to all, and keep what they did."""

    runtime: str
    share: float
    policy: str = "joint:evaluations=20,seconds=30"
    parameters: frozenset[int] = frozenset()
    before: Graphs | None = None
    annotated: Annotated | None = None
    decided: Decided | None = None
    made: Rewritten | None = None
    phases: list[str] = field(default_factory=list)
    no_buffer_reuse: bool = False

    def training(self, forward: fx.GraphModule, backward: fx.GraphModule, n: int, _: Any) -> Any:
        self.plan(Graphs(forward, backward, n, self.parameters))
        assert self.made is not None and self.made.graphs.backward is not None
        return self.made.graphs.forward, self.made.graphs.backward

    def inference(self, graph: fx.GraphModule, _: Any) -> None:
        return None

    def ready(self, phase: str, compiled: Any) -> Any:
        self.phases.append(phase)
        return compiled

    def plan(self, graphs: Graphs) -> None:
        costs = {
            (phase, node.name): OpCost(50.0)
            for phase, module in graphs
            for node in module.graph.nodes
            if node.op == "call_function"
        }
        self.before, self.annotated = graphs, annotate(graphs, costs, hint_of(), 64)
        problem = self.annotated.problem
        least = floor_of(problem, machine)
        usual = PlanSearch(machine, lambda _: 0, "joint")
        plain = fit_budget(problem, usual, 1 << 40).order.peak_bytes
        budget = round(least + self.share * (plain - least))
        self.decided = fit_budget(
            problem, PlanSearch(machine, lambda _: 0, self.policy, 1.0), budget
        )
        self.made = rewrite(
            graphs, self.annotated, self.decided.result.plan, self.decided.order, self.runtime
        )


@pytest.fixture
def runtime(tmp_path: Path) -> str:
    return RuntimeSettings(directories=(str(tmp_path),), arena_bytes=1 << 20).key


def train(model: nn.Module, backend: Any, batches: list[Any]) -> list[torch.Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    losses = []
    for x in batches:
        loss = compiled(x)
        loss.backward()
        losses.append(loss.detach())
    return losses + [p.grad.clone() for p in model.parameters() if p.grad is not None]


def moved(model: nn.Module, hooks: Moving, batches: list[Any]) -> list[torch.Tensor]:
    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return lower(gm, example_inputs, "aot_eager", hooks)

    return train(model, backend, batches)


MODELS = {
    "perceptron": (lambda: Perceptron(64, 4), lambda: torch.randn(512, 64)),
    "attention": (lambda: Attention(32, 2, 3), lambda: torch.randn(16, 64, 32)),
}


JOINT = "joint:evaluations=20,seconds=30"


@pytest.mark.parametrize(
    ("name", "share", "policy"),
    [
        ("perceptron", 0.0, JOINT),
        pytest.param("perceptron", 0.5, JOINT, marks=pytest.mark.soak),
        ("attention", 0.0, JOINT),
        pytest.param("attention", 0.5, JOINT, marks=pytest.mark.soak),
        # recomputation alone has less to choose from
        ("attention", 0.85, "recompute"),
        pytest.param("attention", 0.95, "recompute", marks=pytest.mark.soak),
    ],
)
def test_what_runs_is_bitwise_what_ran_before(
    name: str, share: float, policy: str, runtime: str
) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model, batches = make(), [batch() for _ in range(2)]
    plain = train(model, "aot_eager", batches)
    model.zero_grad()
    hooks = Moving(runtime, share, policy)
    ours = moved(model, hooks, batches)
    assert hooks.decided is not None and not hooks.decided.fits
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)
    gc.collect()
    assert counters()["live_tickets"] == 0


def steps_of(graphs: Graphs, hooks: Moving) -> list[tuple[str, str]]:
    """Movement and compute as the new graphs say: (what, whose), reading only the nodes."""
    found: list[tuple[str, str]] = []
    for _, module in graphs:
        tag_of: dict[fx.Node, str] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder" and node.name.startswith("ticket_"):
                tag_of[node] = node.name
            if node.op != "call_function" or node.target is torch.ops.aten.as_strided.default:
                continue
            kind = str(node.target).removeprefix("offcompile.").removesuffix(".default")
            if kind in ("start_out", "start_load"):
                tag = node.args[1] if kind == "start_out" else node.args[4]
                tag_of[node] = tag
                found.append(("start", tag))
            elif kind in ("wait_out", "wait_load"):
                of = node.args[0] if kind == "wait_out" else node.args[1].args[0]
                tag_of[node] = tag_of[of]
                found.append(("wait", tag_of[of]))
            elif kind == "barrier":
                continue  # it only keeps what a lane still reads
            elif not is_getitem(node) and aliased_input(node) is None:
                found.append(("run", str(node.target)))
    return found


def expected(steps: Sequence[ProgramStep], hooks: Moving) -> list[tuple[str, str]]:
    assert hooks.annotated is not None and hooks.before is not None
    nodes = {(p, n.name): n for p, m in hooks.before for n in m.graph.nodes}
    found = []
    for step in steps:
        if isinstance(step, RunStep):
            of = hooks.annotated.node_of[step.name.partition("@")[0]]
            found += [("run", str(nodes[place].target)) for place in of]
        else:
            found.append(("start" if isinstance(step, StartStep) else "wait", step.move))
    return found


@pytest.mark.parametrize("name", some(MODELS, "perceptron"))
def test_the_graphs_read_back_are_the_order(name: str, runtime: str) -> None:
    make, batch = MODELS[name]
    hooks = Moving(runtime, 0.2)
    moved(make(), hooks, [batch()])
    assert hooks.made is not None and hooks.decided is not None
    order = hooks.decided.order
    assert any(isinstance(s, WaitStep) for s in order.steps)
    got = steps_of(hooks.made.graphs, hooks)
    wanted = expected(order.steps, hooks)
    # a wait in backward for a copy begun in forward knows the storage, not the move
    plan = {m.id: m.tensor for m in hooks.decided.result.plan.moves}
    wanted_names = [
        (k, w if (k, w) == g else f"ticket_{plan.get(w)}") if g[1].startswith("ticket_") else (k, w)
        for (k, w), g in zip(wanted, got, strict=True)
    ]
    assert got == wanted_names


@pytest.mark.parametrize("name", some(MODELS, "perceptron"))
def test_the_order_holds_what_a_second_reckoning_says(name: str, runtime: str) -> None:
    make, batch = MODELS[name]
    for share in (0.0, 0.4, 0.8):
        hooks = Moving(runtime, share)
        moved(make(), hooks, [batch()])
        assert hooks.decided is not None and hooks.annotated is not None
        decided = hooks.decided
        again = worst_case(hooks.annotated.problem, decided.result.plan, decided.order.steps)
        assert again == decided.order.peak_bytes
        capacity = decided.machine.tier[DEVICE].capacity_bytes
        assert capacity is not None and again <= capacity


def test_a_storage_moves_once_however_many_views_are_saved(runtime: str) -> None:
    make, batch = MODELS["attention"]
    hooks = Moving(runtime, 0.0)
    moved(make(), hooks, [batch()])
    assert hooks.decided is not None and hooks.made is not None
    moves = hooks.decided.result.plan.moves
    outs = [m.tensor for m in moves if m.source == DEVICE]
    assert len(outs) == len(set(outs))
    backward = hooks.made.graphs.backward
    assert backward is not None
    assert len(looks_at_loads(backward)) >= 3  # q, k and v out of what came back


def looks_at_loads(module: fx.GraphModule) -> list[fx.Node]:
    """Nodes that look at what came back in other ways than by strides."""
    wait, strided = torch.ops.offcompile.wait_load.default, torch.ops.aten.as_strided.default

    def looks(node: fx.Node) -> bool:
        source = aliased_input(node)
        return source is not None and (source.target is wait or looks(source))

    return [n for n in module.graph.nodes if looks(n) and n.target is not strided]


@torch.library.custom_op("offcompile_tests::rows_last", mutates_args=())
def rows_last(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, laid out otherwise than its traced form says."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


rows_last.register_fake(torch.empty_like)
rows_last.register_autograd(lambda _, gradient: gradient.clone())


class Odd(nn.Module):
    """Attention whose saved q, k and v look at what lies so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            parts = rows_last(layer(x)).view(*x.shape[:2], 3, 2, 16)
            y = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4).unbind(0))
            x = x + torch.cat([y[:, 0], y[:, 1]], -1)
        return x.square().mean()


def test_views_of_what_lies_otherwise_than_traced_see_the_same(runtime: str) -> None:
    torch.manual_seed(0)
    model, batch = Odd(), torch.randn(16, 64, 32)
    plain = train(model, "aot_eager", [batch])
    model.zero_grad()
    hooks = Moving(runtime, 0.0)
    for mine, theirs in zip(moved(model, hooks, [batch]), plain, strict=True):
        assert torch.equal(mine, theirs)
    assert hooks.made is not None and hooks.made.graphs.backward is not None
    assert looks_at_loads(hooks.made.graphs.backward)


def test_the_graphs_given_are_left_as_they_are(runtime: str) -> None:
    hooks = Moving(runtime, 0.0)
    seen: list[list[str]] = []
    plan = hooks.plan

    def watch(graphs: Graphs) -> None:
        seen.append([str(n.format_node()) for _, m in graphs for n in m.graph.nodes])
        plan(graphs)
        seen.append([str(n.format_node()) for _, m in graphs for n in m.graph.nodes])

    hooks.plan = watch  # type: ignore[method-assign]
    moved(Perceptron(64, 3), hooks, [torch.randn(512, 64)])
    assert seen[0] == seen[1]


def test_what_a_lane_still_reads_when_forward_ends_is_held_until_then(runtime: str) -> None:
    hooks = Moving(runtime, 0.9)
    moved(Perceptron(64, 6), hooks, [torch.randn(512, 64)])
    assert hooks.made is not None and hooks.decided is not None
    order = hooks.decided.order
    begun = {s.move for s in order.forward() if isinstance(s, StartStep)}
    awaited = {s.move for s in order.forward() if isinstance(s, WaitStep)}
    forward = hooks.made.graphs.forward.graph
    barriers = forward.find_nodes(op="call_function", target=torch.ops.offcompile.barrier.default)
    assert begun - awaited, "the plan leaves nothing under way: choose another share"
    assert len(barriers) == len(begun - awaited)
    (out,) = forward.find_nodes(op="output")
    for barrier in barriers:
        (source,) = barrier.args[1]
        assert barrier.args[0].args[0] is source
        assert barrier in out.all_input_nodes


def test_batch_norm_runs_again_without_its_running_statistics() -> None:
    """Its kernel also makes them, and forward has written them down by the time it runs again.

    In float64, in which Inductor's kernels are as near eager ones as another order of adding is.
    """
    torch.manual_seed(0)
    convolution = functools.partial(nn.Conv2d, 8, 8, 3, padding=1, bias=False)
    layers = [m for _ in range(5) for m in (convolution(), nn.BatchNorm2d(8), nn.ReLU())]
    plain = nn.Sequential(*layers).double()
    ours = copy.deepcopy(plain)
    options = {"lowering": "inductor", "memory": "minimum", "policy": "recompute"}
    compiled = torch.compile(ours, backend="offcompile", options=options | {"hardware": "cpu"})
    x = torch.randn(8, 8, 32, 32, dtype=torch.float64)
    for _ in range(2):
        for model in (plain, compiled):
            model(x).square().mean().backward()
    again = [r.op for r in offcompile.reports()[-1].plan.recomputes]
    kernels = {op.id for op in offcompile.reports()[-1].problem.ops if len(op.writes) > 2}
    assert kernels.intersection(again)
    for a, b in zip(
        (*plain.parameters(), *plain.buffers()), (*ours.parameters(), *ours.buffers()), strict=True
    ):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a.grad, b.grad)
