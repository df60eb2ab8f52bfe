"""The largest batch and the best one, by planning alone: against brute force, and as it runs."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import Perceptron
from lengths import some
from torch import nn

import offcompile
from offcompile.ahead.batches import search as batch_search
from offcompile.ahead.batches.search import BatchReport, _BatchSearch
from offcompile.graph.weight_placement import TRIAL_SHARE
from offcompile.ir import Infeasible, InvalidInput, OffloadError
from offcompile.run.plan.planner import GraphPlanner

WIDTH, DEPTH = 64, 3
ROWS = 192  # of each sample
#: the quickest to plan
PRINTED = "activation_spill:variant=printed"


def inputs(batch: int) -> torch.Tensor:
    return torch.randn(batch * ROWS, WIDTH)


def find(memory: Any, policy: str | None, **more: Any) -> BatchReport:
    model, make = more.pop("model", Perceptron(WIDTH, DEPTH)), more.pop("make", inputs)
    options = {"lowering": "aot_eager", "seconds": 0.1} | more.pop("options", {})
    return offcompile.max_batch(
        model, make, memory, policy=policy, hardware="cpu", options=options, **more
    )


@pytest.fixture(scope="module")
def plain() -> BatchReport:
    return find("2MiB", None)


@pytest.fixture(scope="module")
def moved() -> BatchReport:
    return find("2MiB", PRINTED)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[_BatchSearch]:
    """Every search, to ask it more than it asked itself."""
    made: list[_BatchSearch] = []

    class Kept(_BatchSearch):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(batch_search, "_BatchSearch", Kept)
    return made


@pytest.mark.parametrize("policy", some([None, PRINTED], None))
def test_it_finds_what_trying_every_batch_finds(
    policy: str | None, searches: list[_BatchSearch]
) -> None:
    report = find("2MiB", policy)
    (search,) = searches
    tried = len(search.rows)
    assert report.too_large is not None
    fits = [batch for batch in range(1, report.too_large + 3) if search.try_one(batch)]
    assert report.largest.batch == max(fits) > 4
    best = max(search.rows[b].samples_per_second for b in fits)
    assert report.best.samples_per_second >= 0.99 * best
    assert tried < len(fits)


def test_estimates_take_short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    usual = GraphPlanner.decide

    def noted(self: GraphPlanner, *given: Any, **more: Any) -> Any:
        if estimating:
            shares.append(more.get("share", 1.0))
        return usual(self, *given, **more)

    estimating: list[int] = []
    estimated = _BatchSearch._estimated_us

    def noting(self: _BatchSearch, batch: int, problem: Any) -> float:
        estimating.append(batch)
        try:
            return estimated(self, batch, problem)
        finally:
            estimating.pop()

    monkeypatch.setattr(GraphPlanner, "decide", noted)
    monkeypatch.setattr(_BatchSearch, "_estimated_us", noting)
    find("2MiB", "joint")
    assert shares and set(shares) == {TRIAL_SHARE}


def test_few_batches_are_traced_whatever_the_largest_is(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []

    def counting(model: Any, make: Any, batch: int, lowering: Any) -> Any:
        traced.append(batch)
        return trace(model, make, batch, lowering)

    trace = batch_search.trace
    monkeypatch.setattr(batch_search, "trace", counting)
    report = find("2MiB", None, make=lambda batch: torch.randn(batch, WIDTH))
    assert report.largest.batch > 1000 and report.best is report.largest
    assert report.too_large is not None
    assert report.too_large - report.largest.batch <= 0.01 * report.largest.batch
    assert len(traced) <= 5


def test_batches_that_do_not_line_up_are_all_traced(
    monkeypatch: pytest.MonkeyPatch, plain: BatchReport
) -> None:
    class Uneven(Perceptron):
        """Has one more op with every other batch."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * 2 if x.shape[0] // ROWS % 2 else x)

    report = find("2MiB", None, model=Uneven(WIDTH, DEPTH))
    assert 1 < report.largest.batch <= plain.largest.batch
    assert report.too_large == report.largest.batch + 1


def test_moving_makes_larger_batches_fit_and_a_larger_budget_does(
    plain: BatchReport, moved: BatchReport
) -> None:
    more = find("4MiB", PRINTED)
    assert plain.largest.batch < moved.largest.batch < more.largest.batch
    assert not plain.largest.moves and moved.largest.moves
    for report, limit in ((plain, 2 << 20), (moved, 2 << 20), (more, 4 << 20)):
        assert all(row.peak_bytes <= limit for row in report.rows)


def test_the_largest_batch_runs_within_the_budget_and_the_next_is_refused(tmp_path: Path) -> None:
    report = find("3MiB", PRINTED)
    model = Perceptron(WIDTH, DEPTH)

    def run(batch: int) -> torch.Tensor:
        torch._dynamo.reset()
        options = {"memory": "3MiB", "hardware": "cpu", "policy": PRINTED}
        options |= {"lowering": "aot_eager", "seconds": 0.1, "spill": str(tmp_path)}
        loss: torch.Tensor = torch.compile(model, backend="offcompile", options=options)(
            inputs(batch)
        )
        loss.backward()
        return loss

    assert torch.isfinite(run(report.largest.batch))
    assert offcompile.reports()[-1].planned_peak_bytes <= 3 << 20
    assert report.too_large is not None
    with pytest.raises(Infeasible):
        run(report.too_large)


def test_nothing_is_held_for_batches_that_no_machine_could_hold() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = find("8GiB", None, make=lambda batch: inputs(4096 * batch), most=8)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert report.largest.peak_bytes > 4 << 30
    assert grown * 1024 < 256 << 20


def test_the_model_and_what_is_compiled_of_it_stay_as_they_are() -> None:
    torch._dynamo.reset()
    model = Perceptron(WIDTH, DEPTH)
    calls = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        calls.append(gm)
        return gm.forward

    run = torch.compile(model, backend=backend, dynamic=False)
    run(inputs(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    find("2MiB", None, model=model, most=4)
    run(inputs(2))
    assert len(calls) == 1
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor and torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


def test_other_holders_of_the_device_leave_less(plain: BatchReport) -> None:
    assert find("2MiB", None, held="1MiB").largest.batch < plain.largest.batch


def test_inference_and_functions_of_several_inputs(plain: BatchReport) -> None:
    model = Perceptron(WIDTH, DEPTH).requires_grad_(False)
    most = plain.largest.batch + 1
    assert find("2MiB", None, model=model, most=most).largest.batch == most

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(torch.tanh(x * x), target)

    def two(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(batch, 1000), torch.zeros(batch, 1000)

    assert find("1MiB", None, model=loss, make=two, most=16).largest.batch == 16


def test_a_card_that_is_not_there_can_be_planned_for() -> None:
    report = offcompile.max_batch(
        Perceptron(WIDTH, DEPTH),
        inputs,
        "64MiB",
        hardware="rtx4090",
        most=64,
        options={"seconds": 0.1, "lowering": "aot_eager"},
    )
    assert report.largest.batch > 32


def test_known_zeros_are_planned_with() -> None:
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.ReLU())))
    densities = {"relu": 0.1} | {f"relu_{i}": 0.1 for i in range(1, 3)}
    given = {"model": model, "options": {"seconds": 0.1}}
    plain = find("2MiB", PRINTED, **given)
    packed = find("2MiB", PRINTED, densities=densities, **given)
    at = plain.largest.batch
    step_us = {r.batch: r.step_us for r in packed.rows}
    assert packed.largest.batch >= at and step_us[at] <= plain.largest.step_us


def test_the_table_marks_the_largest_and_the_best(moved: BatchReport) -> None:
    report = moved
    lines = str(report).splitlines()
    assert sum("largest" in line for line in lines) == 1
    assert sum("best" in line for line in lines) == 1
    assert str(report.too_large) in lines[-1] and "does not fit" in lines[-1]
    assert report.to_json()["largest"] == report.largest.batch
    assert len(report.to_json()["rows"]) == len(report.rows)


def test_what_cannot_be_asked_is_refused_in_words() -> None:
    with pytest.raises(Infeasible):
        find("100KiB", PRINTED)
    with pytest.raises(Infeasible, match="a batch of 1 holds"):
        find("100KiB", None)
    with pytest.raises(InvalidInput, match="minimum"):
        find("minimum", None)
    with pytest.raises(InvalidInput, match="most"):
        find("2MiB", None, most=0)
    with pytest.raises(InvalidInput, match="make_inputs returned dict"):
        find("2MiB", None, make=lambda batch: {"x": batch})

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x.square().mean()

    with pytest.raises(OffloadError, match="one graph"):
        find("2MiB", None, model=Broken())
