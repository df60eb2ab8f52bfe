"""Different graphs that share a budget: what they hold together stays within it, by the usage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offcompile
from offcompile.ir import BACKWARD, HOST
from offcompile.planning.footprint import Footprint, bytes_of, standing_in
from offcompile.run.accounts.graph_runs import GraphRuns, Room
from offcompile.run.accounts.live_outputs import LiveOutputs
from offcompile.run.running_step import RunningHalf
from offcompile.runtime.base.counters import reset_counters
from offcompile.runtime.memory.malloc.heap import Heap
from offcompile.runtime.moves.registry import close_all
from offcompile.runtime.moves.weights import is_on_host

MIB = 1 << 20
WIDTHS = (128, 192, 256, 128)


class Stage(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(before, 4 * before), nn.Linear(4 * before, after)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Seen:
    """Bytes of each run and of all others held meanwhile, and the runs' peaks at each size."""

    def __init__(self) -> None:
        self.together: list[int] = []
        self.peaks: dict[tuple[int, ...], set[int]] = {}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    torch._dynamo.reset()
    reset_counters()
    found, running = Seen(), GraphRuns.running

    @contextmanager
    def watched(
        self: GraphRuns,
        phase: str,
        arguments: Sequence[Any],
        needs_at: Callable[[tuple[int, ...]], Footprint],
        *how: bool,
    ) -> Iterator[Room | None]:
        with running(self, phase, arguments, needs_at, *how) as room:
            sizes = self.sizes if room is None else room.sizes
            peak = needs_at(sizes).peak_bytes
            binding = self.forward_of(arguments)[0] if phase == BACKWARD else self.binding
            beside = self.usage.held_beside(self.entry, binding).now
            if phase == BACKWARD:  # its own plan counts what its forward left
                beside -= self.entry.left_by(binding)
            kept = 0 if room is None else room.kept_limit_bytes
            found.together.append(beside + peak + kept)
            found.peaks.setdefault(sizes, set()).add(peak)
            yield room

    monkeypatch.setattr(GraphRuns, "running", watched)
    yield found
    torch._dynamo.reset()
    close_all()


def options(memory: int, spill: Path) -> dict[str, object]:
    return {
        "memory": memory,
        "lowering": "aot_eager",
        "spill": str(spill),
        "seconds": 0.05,
        "hardware": "cpu",
    }


def train(stages: nn.ModuleList, lengths: Sequence[int], seen: Seen | None = None) -> list[str]:
    """Losses and gradients, as exact text. The bytes of the first step are forgotten: until it is
    over, nobody knows how many graphs there are."""
    found, stem = [], torch.ones(stages[0].up.in_features, requires_grad=True)
    for step, length in enumerate(lengths):
        dice = torch.Generator().manual_seed(step)
        y = stem * torch.randn(length, len(stem), generator=dice)
        for stage in stages:
            y = stage(y)
        loss = y.square().mean()
        loss.backward()
        found.append(float(loss.detach()).hex())
        with torch.no_grad():
            for p in stages.parameters():
                assert p.grad is not None
                found.append(float(p.grad.double().sum()).hex())
                p.sub_(p.grad, alpha=0.1)
                p.grad = None
        if seen is not None and step == 0:
            seen.together.clear()
    return found


def fresh(widths: Sequence[int]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Stage(a, b) for a, b in pairwise(widths))


@pytest.mark.parametrize(
    ("memory", "hosting"), [pytest.param(4 * MIB, 1, marks=pytest.mark.soak), (2 * MIB, 2)]
)
def test_graphs_of_different_width_leave_the_device_to_one_another(
    tmp_path: Path, seen: Seen, memory: int, hosting: int
) -> None:
    wanted, stages = train(fresh(WIDTHS), [16] * 3), fresh(WIDTHS)
    assert 2 * sum(p.nbytes for p in stages.parameters()) > memory
    for stage in stages:
        stage.compile(backend="offcompile", options=options(memory, tmp_path))
    before = {id(r) for r in offcompile.reports()}
    assert train(stages, [16] * 3, seen) == wanted
    mine = [r for r in offcompile.reports() if id(r) not in before]
    found = [r for r in mine if any(t.home == HOST for t in r.problem.tensors)]
    assert len({r.name.partition(",")[0] for r in found}) == hosting
    assert seen.together and max(seen.together) <= memory


@pytest.mark.parametrize(
    ("share", "most"),
    [
        (0.63, 4),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((0.94, 1), (0.88, 2))),
    ],
)
def test_no_more_weights_leave_than_need_be(
    tmp_path: Path, seen: Seen, share: float, most: int
) -> None:
    """Eight blocks share a plan; a block is an eighth of all weights and gradients."""
    wanted, stages = train(fresh((256,) * 9), [8] * 4), fresh((256,) * 9)
    weights = sum(p.nbytes for p in stages.parameters())
    memory = int(share * 2 * weights)
    for stage in stages:
        stage.compile(backend="offcompile", options=options(memory, tmp_path))
    assert train(stages, [8] * 4, seen) == wanted
    hosted = [any(is_on_host(p) for p in stage.parameters()) for stage in stages]
    assert 0 < sum(hosted) <= most
    assert seen.together and max(seen.together) <= memory


def test_the_room_beside_a_run_is_that_of_its_own_sizes(tmp_path: Path, seen: Seen) -> None:
    widths = (64,) * 5
    lengths, memory = [256, 96, 160, 128, 256], 3 * MIB
    wanted, stages = train(fresh(widths), lengths), fresh(widths)
    for stage in stages:
        stage.compile(backend="offcompile", options=options(memory, tmp_path), dynamic=True)
    assert train(stages, lengths, seen) == wanted
    assert seen.together and max(seen.together) <= memory
    most = {sizes: max(peaks) for sizes, peaks in seen.peaks.items()}
    assert most[(256,)] > most[(160,)] > most[(96,)]
    report = offcompile.reports()[-1]
    assert standing_in(report.problem) > 0
    assert bytes_of(report.problem, frozenset(t.id for t in report.problem.tensors[:1])) > 0


def test_the_heap_gives_a_backward_no_room_for_what_its_forward_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four stages whose saved tensors fit, so that plans without moves leave them on the device."""
    memory, together, left = 7 * MIB, [], 0
    begin, begin_heap = Heap.begin, RunningHalf._begin_heap

    def watched(half: RunningHalf, room: Room | None) -> None:
        nonlocal left
        told = []

        def note(heap: Heap, planned: int, budget: int, *rest: Any, **more: Any) -> None:
            told.append(budget - planned)
            begin(heap, planned, budget, *rest, **more)

        with monkeypatch.context() as patched:
            patched.setattr(Heap, "begin", note)
            begin_heap(half, room)
        if room is not None and half.phase == BACKWARD:
            runs = half.facts.runs
            (binding,) = runs.entry.bound()
            weights = sum(runs.usage.holdings.weight.get(key, 0) for key in binding.ids)
            held = runs.usage.held_beside(runs.entry, binding).now + weights
            left = max(left, runs.entry.left_by(binding))
            spare = min(room.kept_limit_bytes, runs.reserve.free_bytes)
            together.append(told[-1] + held + spare)

    monkeypatch.setattr(RunningHalf, "_begin_heap", watched)
    wanted, stages = train(fresh(WIDTHS), [256] * 4), fresh(WIDTHS)
    for stage in stages:
        stage.compile(backend="offcompile", options=options(memory, tmp_path))
    assert train(stages, [256] * 4) == wanted
    torch._dynamo.reset()
    close_all()
    assert left > MIB // 4
    assert together and max(together) <= memory


def test_a_result_counts_from_when_another_graph_has_got_it_until_it_dies() -> None:
    results = LiveOutputs()
    first, second = torch.zeros(64), torch.zeros(32)
    results.given([])
    results.made([first, first.view(8, 8)])
    assert results.standing_bytes() == 0  # a prediction that the program collects
    results.given([first[:4], 3])
    assert results.standing_bytes() == 0  # in the plan of who has it
    results.made([second, first])
    results.given([second])
    assert results.standing_bytes() == first.nbytes
    results.given([torch.zeros(1)])
    assert results.standing_bytes() == first.nbytes + second.nbytes
    del first
    assert results.standing_bytes() == second.nbytes
    del second
    assert results.standing_bytes() == 0
