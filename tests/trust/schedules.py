"""Plans drawn by hypothesis for real graphs, run on the real CPU runtime: bit for bit the same."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import hypothesis
import torch
from captured import Attention, Perceptron, capture
from hypothesis import HealthCheck, Phase, settings
from torch import fx, nn

from offcompile.graph.annotate import Annotated, annotate
from offcompile.graph.costs.op_costs import OpCost
from offcompile.graph.graphs import Graphs
from offcompile.graph.lowering.rewrite import rewrite
from offcompile.graph.sizes import hint_of
from offcompile.ir import DEVICE, Lane, Machine, Tier
from offcompile.planning.order import static_order
from offcompile.planning.planner import check_plan
from offcompile.runtime.base.counters import counters
from offcompile.runtime.disk import spill
from offcompile.runtime.moves.registry import RuntimeSettings, close_all
from offcompile.testing import plans

from .interleaving import Interleaving
from .rows import Row
from .simulated_disk import SimulatedDisk
from .simulation import quiet

#: plans of a run of full length, over all models
PLANS = 2000
MACHINE = Machine(
    (Tier(DEVICE), Tier("host")),
    (
        Lane("h2d", "host", DEVICE, 500),
        Lane("d2h", DEVICE, "host", 500),
        Lane("d2h_second", DEVICE, "host", 300, 2),
    ),
)


class Branches(nn.Module):
    """Convolutions whose outputs are used more than once, and a view that outlives its maker."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.first(x))
        b = a.flatten(2).transpose(1, 2)
        c = a + torch.sigmoid(self.second(a)) * a
        return self.norm(b).square().mean() + (c * b.mean()).sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: Perceptron(32, 4), (64, 32)),
    "attention": (lambda: Attention(16, 2, 2), (2, 8, 16)),
    "branches": (Branches, (2, 3, 8, 8)),
}


@dataclass
class Counts:
    drawn: int = 0
    ran: int = 0
    equal: int = 0
    #: plans that ran on simulated threads and a simulated disk
    simulated: int = 0
    moves: int = 0
    recomputes: int = 0


@dataclass(frozen=True)
class Case:
    """A model's graphs, the problem that they are, what goes in and what comes out."""

    graphs: Graphs
    annotated: Annotated
    inputs: tuple[Any, ...]
    tangents: tuple[Any, ...]
    plain: tuple[torch.Tensor, ...]


@cache
def case_of(name: str) -> Case:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    (graphs,) = capture(make(), torch.randn(shape))
    costs = {
        (phase, node.name): OpCost(20.0)
        for phase, module in graphs
        for node in module.graph.nodes
        if node.op == "call_function"
    }
    annotated = annotate(graphs, costs, hint_of(), 64)
    assert graphs.backward is not None
    inputs = _made_up(graphs.forward.graph.find_nodes(op="placeholder"))
    saved = len(_outputs(graphs.forward)) - graphs.num_outputs
    tangents = _made_up(graphs.backward.graph.find_nodes(op="placeholder")[saved:])
    plain = run(graphs, inputs, tangents)
    return Case(graphs, annotated, inputs, tangents, plain)


def run(graphs: Graphs, inputs: Sequence[Any], tangents: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """One step: what the user sees of forward, and the gradients."""
    assert graphs.backward is not None
    with torch.no_grad():
        out = list(fx.Interpreter(graphs.forward).boxed_run(list(inputs)))
        seen, saved = out[: graphs.num_outputs], out[graphs.num_outputs :]
        del out
        arguments = [*saved, *tangents]
        del saved
        gradients = fx.Interpreter(graphs.backward).boxed_run(arguments)
    return tuple(t for t in (*seen, *gradients) if isinstance(t, torch.Tensor))


def run_simulated(graphs: Graphs, case: Case, seed: int) -> tuple[torch.Tensor, ...]:
    """Do as `run` does, with threads in an order drawn from the seed and the disk in memory."""
    turns = Interleaving(seed)
    disk = SimulatedDisk("disk", turns.point, turns.touch)
    close_all()  # what there is has threads of its own
    with quiet(), mock.patch.object(spill, "Files", lambda: disk.files), turns.running():
        found = run(graphs, case.inputs, case.tangents)
        close_all()
    assert not turns.crashed, f"seed {seed}: {turns.crashed}"
    assert not turns.races, f"seed {seed}: {turns.races}"
    return found


def play(name: str, examples: int, seed: int, runtime: str, counts: Counts) -> None:
    """Draw so many plans for a model and run them; AssertionError shows the plan."""
    case = case_of(name)
    problem = case.annotated.problem

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(plans(problem, MACHINE, sensible=True))
    def one(plan: Any) -> None:
        counts.drawn += 1
        checked = check_plan(problem, MACHINE, plan)
        if not checked.valid or checked.timeline is None:
            return
        order = static_order(problem, MACHINE, plan, checked.timeline)
        made = rewrite(case.graphs, case.annotated, plan, order, runtime)
        if counts.drawn % 3:
            found = run(made.graphs, case.inputs, case.tangents)
        else:
            found = run_simulated(made.graphs, case, seed + counts.drawn)
            counts.simulated += 1
        counts.ran += 1
        counts.moves += len(plan.moves)
        counts.recomputes += len(plan.recomputes)
        same = [torch.equal(a, b) for a, b in zip(found, case.plain, strict=True)]
        assert all(same), f"{name}, seed {seed}: outputs {same} under {plan}"
        counts.equal += 1

    one()


def all_plays(examples: int, seed: int) -> Counts:
    counts = Counts()
    with tempfile.TemporaryDirectory() as place:
        runtime = RuntimeSettings(directories=(place,), arena_bytes=1 << 20).key
        for name in MODELS:
            play(name, max(1, examples // len(MODELS)), seed, runtime, counts)
        gc.collect()
        live = counters()["live_tickets"]
        assert not live, f"{live} tickets are left after plans of seed {seed}"
        close_all()
    return counts


def rows(scale: float, seed: int) -> list[Row]:
    counts = all_plays(max(3, round(PLANS * scale)), seed)
    figures = (
        ("on simulated threads and disk", f"{counts.simulated:,}"),
        ("drawn", f"{counts.drawn:,}"),
        ("moves", f"{counts.moves:,}"),
        ("ops run again", f"{counts.recomputes:,}"),
    )
    what = "drawn plans run on the CPU runtime, bit for bit the plain run"
    return [Row(what, counts.equal, counts.ran, figures=figures)]


def _outputs(module: fx.GraphModule) -> Sequence[Any]:
    (out,) = module.graph.find_nodes(op="output")
    found: Sequence[Any] = out.args[0]
    return found


def _made_up(placeholders: Sequence[fx.Node]) -> tuple[Any, ...]:
    numbers = torch.Generator().manual_seed(1)
    made = []
    for node in placeholders:
        like = node.meta["val"]
        flat = torch.randn(like.untyped_storage().nbytes() // like.itemsize, generator=numbers)
        flat = flat.to(like.dtype)
        made.append(torch.as_strided(flat, like.shape, like.stride(), like.storage_offset()))
    return tuple(made)
