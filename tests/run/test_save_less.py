"""Graphs of a step save less for backward if moves take longer than running cheap ops again."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_regions_step import LAYERS, USUAL, fresh, train  # noqa: F401
from test_step import RUN_US, Steps, machine

import offcompile
from offcompile.graph.costs import op_costs
from offcompile.ir import BACKWARD, DEVICE, FORWARD
from offcompile.machine import target
from offcompile.machine.hardware import HardwareProfile
from offcompile.passes import turnover
from offcompile.passes.step.lighter import Lighter
from offcompile.passes.step.record import RecordedStep, StepRecord
from offcompile.report.report import PlanReport
from offcompile.run.accounts import step_plan
from offcompile.run.accounts.step_plan import StepPlanner
from offcompile.run.accounts.usage import ParameterSet
from offcompile.run.variants.plans import Plans, Variant
from offcompile.runtime.moves.registry import runtimes

#: for each layer: what is cheap to compute again, and what is not
CHEAP, DEAR = 300, 100
ALMOST_FREE = Lighter(0.1, (("dear", DEAR),), 2.0, 0)
NOTHING_SAVED = Lighter(9.0, (), 2 * RUN_US, 0)


def step_of(room: int, *ways: Lighter) -> tuple[RecordedStep, list[ParameterSet]]:
    """A step of graphs that could save less in these ways, each with so much room."""
    weights = [ParameterSet((layer,)) for layer in range(LAYERS)]
    for parameters in weights:
        parameters.lighter = lambda: lambda: ways
    steps = Steps(None, [room] * LAYERS, sizes=(CHEAP, DEAR))  # type: ignore[arg-type]
    record = steps.heard = StepRecord(steps.clock)
    steps.step(range(LAYERS))
    done = record.enter("next", 0, False, True)
    assert done is not None
    runs = tuple(
        replace(run, name=("graph", BACKWARD if back else FORWARD, weights[layer], ()))
        for run in done.executions
        for side, layer in [run.name]  # type: ignore[misc]
        for back in [side == "B"]
    )
    return replace(done, executions=runs), weights


def prices(weights: Sequence[ParameterSet]) -> list[float]:
    return [parameters.ns_per_byte for parameters in weights]


def test_cheap_ops_run_again_if_links_are_too_slow() -> None:
    step, weights = step_of(0, ALMOST_FREE, NOTHING_SAVED)
    StepPlanner(machine).save_less(step)
    chosen = prices(weights)
    assert set(chosen[:-2]) == {ALMOST_FREE.ns_per_byte}
    assert set(chosen[-2:]) <= {0.0, ALMOST_FREE.ns_per_byte}


def test_the_graphs_whose_tensors_stay_save_all_of_them() -> None:
    step, weights = step_of((LAYERS - 4) * (CHEAP + DEAR), replace(ALMOST_FREE, added_us=60.0))
    StepPlanner(machine).save_less(step)
    chosen = prices(weights)
    assert chosen[0] and not chosen[-1]
    assert chosen == sorted(chosen, reverse=True)


def test_nothing_runs_again_if_moves_cost_nothing() -> None:
    step, weights = step_of(LAYERS * (CHEAP + DEAR), ALMOST_FREE)
    StepPlanner(machine).save_less(step)
    assert not any(prices(weights))


def test_ops_that_take_longer_than_the_moves_do_not_run_again() -> None:
    step, weights = step_of(0, replace(NOTHING_SAVED, added_us=20 * RUN_US))
    StepPlanner(machine).save_less(step)
    assert not any(prices(weights))


def test_it_is_decided_once() -> None:
    step, weights = step_of(0, ALMOST_FREE)
    weights[0].ns_per_byte = 5.0
    StepPlanner(machine).save_less(step)
    assert prices(weights) == [5.0] + [0.0] * (LAYERS - 1)


@pytest.mark.parametrize(("step_us", "stays"), [(105.0, True), (120.0, False)])
def test_graphs_go_back_if_steps_take_longer(step_us: float, stays: bool) -> None:
    step, weights = step_of(0, ALMOST_FREE)
    planner = StepPlanner(machine)
    now_us, kept = 0.0, 0

    def run(steps: int, each_us: float, keeps: bool = True) -> None:
        nonlocal now_us, kept
        for _ in range(steps):
            now_us, kept = now_us + each_us, kept + keeps
            planner.step_over(now_us, kept)

    run(4, 100.0)
    planner.save_less(step)
    run(3, 1000.0, keeps=False)  # graphs are compiled, and their order is learnt
    run(step_plan.TIMED_STEPS - 1, step_us)
    assert any(prices(weights))
    run(1, step_us)
    assert any(prices(weights)) is stays
    planner.save_less(step)
    assert any(prices(weights)) is stays, "that is decided once"


# ---- blocks compiled one by one ------------------------------------------------------------------

MAKE = Plans.make
#: the rooms of graphs settle, they are planned again, and that step comes twice
STEPS = 16
SLOW = HardwareProfile(
    "cpu", "cpu", None, 10.0, 2.0, 2.0, "made up", {"fp32": 0.001}, latency_us=20.0
)


def in_order(step: int) -> Sequence[int]:
    return USUAL


def test_records_of_steps_keep_no_compiled_graph_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Variant]] = []

    def noted(plans: Plans, *args: Any, **kwargs: Any) -> Variant:
        variant = MAKE(plans, *args, **kwargs)
        made.append(weakref.ref(variant))
        return variant

    monkeypatch.setattr(Plans, "make", noted)
    train(tmp_path, 5, in_order)
    gc.collect()
    (keeper,) = (r.mover.keeper for r in runtimes() if r.mover.keeper is not None)
    assert keeper.steps.newest is not None
    assert made and not any(ref() for ref in made)


def saved_by(report: PlanReport) -> int:
    loads = (m for m in report.plan.moves if m.target == DEVICE)
    return sum(report.problem.tensor[m.tensor].nbytes for m in loads)


def test_blocks_are_planned_again_and_give_the_plain_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(target, "_measured", lambda directories, progress: SLOW)
    # ops cost what the profile says, and how fast this machine runs them decides nothing
    monkeypatch.setattr(op_costs, "WORTH_MEASURING_US", float("inf"))
    monkeypatch.setattr(turnover, "PRICES", (1.0,))
    monkeypatch.setattr(step_plan, "LIGHTER_GAIN", -1.0)
    monkeypatch.setattr(step_plan, "LOSES", float("inf"))  # nor how long steps take on it
    before = len(offcompile.reports())
    wanted = train(None, STEPS, in_order)
    with caplog.at_level(logging.INFO, "offcompile.run.accounts.step_plan"):
        assert train(tmp_path, STEPS, in_order) == wanted
    assert "save less for backward" in caplog.text
    made = offcompile.reports()[before:]
    again = [r for r in made if r.result.policy.startswith("turnover:ns_per_byte=")]
    assert again and all(r.plan.recomputes for r in again), [r.result.policy for r in made]
    (table,) = (r.mover.keeper.steps.newest for r in runtimes() if r.mover.keeper is not None)
    assert table is not None, "the graphs planned again are a step that is planned as one"
    saved_bytes = sum(map(table.step.nbytes, table.step.wanted))
    (usual,) = (r for r in made if r.result.policy == "turnover")
    assert LAYERS * saved_by(again[0]) <= saved_bytes < LAYERS * saved_by(usual)
