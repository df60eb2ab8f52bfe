"""Plans on trial, by made-up measured steps: corrected costs, other plans, going back, warnings."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_report import made
from torch import nn

import offcompile
from offcompile.graph.costs import op_costs as costs
from offcompile.graph.costs.roofline import Overheads
from offcompile.ir import COMPUTE
from offcompile.machine import target
from offcompile.machine.hardware import HardwareProfile
from offcompile.planning.feedback.corrections import Factors
from offcompile.planning.feedback.lane_watch import LaneWatch
from offcompile.planning.feedback.measured import MeasuredSpan, MeasuredStep, MeasuredWait
from offcompile.planning.feedback.profiling import FIRST_STEPS, Profile
from offcompile.planning.timelines import settled_spans
from offcompile.report.figures import RunFigures
from offcompile.report.report import PlanReport
from offcompile.run import trial
from offcompile.run.plan import planner
from offcompile.run.step_recorder import STEPS_KEPT, StepRecorder
from offcompile.run.trial import LEAST_STEP_NS, LOOK_EVERY, LOSES, Trial
from offcompile.run.variants import judging
from offcompile.runtime.base import once
from offcompile.runtime.memory.malloc.fragmentation import Returns

MS = 1_000_000
BEFORE = STEPS_KEPT + 1
FEW = 3
AWAITED = Trial.awaited


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "STEPS_BEFORE", BEFORE)
    monkeypatch.setattr(once, "_done", {})


def step_of(forward_ns: int, backward_ns: int, waiting_ns: int = 0) -> MeasuredStep:
    """Waits lie in backward, beside its computing."""
    end = forward_ns + backward_ns + waiting_ns
    spans = (
        MeasuredSpan("forward", COMPUTE, 0, forward_ns),
        MeasuredSpan("backward", COMPUTE, forward_ns, end),
    )
    waits = (MeasuredWait("", "m", forward_ns, waiting_ns),) if waiting_ns else ()
    return MeasuredStep(spans, waits, end)


# -- one plan --------------------------------------------------------------------------------------


class Seen:
    def __init__(self, *steps: MeasuredStep | None) -> None:
        self.steps = list(steps)

    def median(self) -> MeasuredStep | None:
        return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    def watch(self, steps: int) -> None:
        raise AssertionError("nobody asked for that")


def reported(*steps: MeasuredStep | None) -> PlanReport:
    report = made()
    return PlanReport(
        name=report.name,
        problem=report.problem,
        machine=report.machine,
        result=report.result,
        memory=report.memory,
        running=RunFigures(steps=Seen(*steps)),
    )


def test_a_plan_is_judged_once_when_it_has_run_a_few_steps() -> None:
    step = step_of(30 * MS, 30 * MS)
    report, on_trial = reported(step), Trial()
    assert [on_trial.due(report, n) for n in range(BEFORE)] == [None] * BEFORE
    assert on_trial.due(report, BEFORE) == step
    assert on_trial.due(report, BEFORE + 1) is None
    other = reported(step)
    assert on_trial.due(other, BEFORE) == step


def test_steps_that_are_never_certain_are_not_asked_for_for_ever() -> None:
    seen = Seen(*[None] * 100)
    report, on_trial = reported(), Trial()
    report = replace(report, running=RunFigures(steps=seen))
    assert all(on_trial.due(report, BEFORE + n) is None for n in range(40))
    assert len(seen.steps) == 100 - trial.MOST_ASKED


def test_a_plan_that_loses_is_given_up_once() -> None:
    before, after = reported(step_of(10 * MS, 10 * MS)), reported(None)
    on_trial = Trial()
    on_trial.replaced(before)
    slow = step_of(11 * MS, 12 * MS)
    lost = on_trial.loses_to(after, slow)
    assert lost is not None and lost[0] is before
    assert "takes 23.0" in lost[1] and "20.0" in lost[1] and lost[1].endswith("back to that")
    on_trial.replaced(before)
    assert on_trial.loses_to(after, slow) is None


@pytest.mark.parametrize("forward_ns", [10 * MS, int(20 * MS * LOSES) - 10 * MS])
def test_a_plan_that_is_slower_by_little_stays(forward_ns: int) -> None:
    on_trial = Trial()
    on_trial.replaced(reported(step_of(10 * MS, 10 * MS)))
    assert on_trial.loses_to(reported(None), step_of(forward_ns, 10 * MS)) is None
    assert not on_trial.given_up


def warnings_of(
    caplog: pytest.LogCaptureFixture, *reports: PlanReport, on_trial: Trial | None = None
) -> list[str]:
    on_trial = on_trial or Trial()
    with caplog.at_level(logging.WARNING, "offcompile"):
        for report in reports:
            step = on_trial.due(report, BEFORE)
            assert step is not None
            on_trial.tell(report, step, BEFORE)
    return [r.getMessage() for r in caplog.records if r.name == "offcompile"]


def test_a_plan_far_from_reality_is_warned_of_once_and_with_what_helps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = reported(step_of(30 * MS, 30 * MS))
    (said,) = warnings_of(caplog, slow, reported(step_of(60 * MS, 60 * MS)))
    assert said.startswith("offcompile: g") and "60.000 ms a step" in said
    assert f"{60_000 / slow.planned_us:.2f} × the planned" in said
    assert "compute 60.0, waiting" in said
    assert "Computing is slower" in said and "offcompile doctor --refresh" in said


@pytest.mark.parametrize("leaves_holes", [True, False])
def test_memory_that_goes_back_and_comes_again_is_named_as_the_cause(
    leaves_holes: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "malloc_leaves_holes", lambda environ: leaves_holes)
    trims = [100]
    on_trial = Trial(trims=lambda: trims[0])
    report = reported(step_of(30 * MS, 30 * MS))
    assert on_trial.due(report, 1) is None  # what came before is no step's
    trims[0] += 12 * (BEFORE - 1)
    (said,) = warnings_of(caplog, report, on_trial=on_trial)
    assert "went back to the system 12 times a step" in said and "larger `memory`" in said
    assert ("`offcompile run SCRIPT`" in said) == leaves_holes
    assert "Computing is slower" not in said


def test_waits_point_at_lanes(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = warnings_of(caplog, reported(step_of(3 * MS, 2 * MS, 50 * MS)))
    assert "Lanes are slower" in said and "waiting 50.0" in said


def test_short_steps_and_small_departures_are_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    short = reported(step_of(LEAST_STEP_NS // 2, LEAST_STEP_NS // 2 - 1))
    assert warnings_of(caplog, short) == []


def test_what_becomes_slow_later_is_warned_of_at_the_next_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    usual, slow = step_of(30 * MS, 30 * MS), step_of(60 * MS, 60 * MS)
    report, on_trial = reported(usual, slow), Trial()
    step = on_trial.due(report, BEFORE)
    assert step is not None
    assert on_trial.factors(report, step) is not None
    with caplog.at_level(logging.WARNING, "offcompile"):
        for n in range(LOOK_EVERY):
            on_trial.due(report, BEFORE + n)
        assert not caplog.records
        on_trial.due(report, BEFORE + LOOK_EVERY)
    (record,) = caplog.records
    assert "1.99 × the usual 60.4" in record.getMessage()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_line_a_run_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = step_of(3 * MS, 3 * MS)
    Trial().tell(reported(step), step)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(once, "_done", {})
    terminal = Terminal()
    with monkeypatch.context() as shown:
        shown.setattr("sys.stderr", terminal)
        for _ in range(2):
            Trial().tell(reported(step), step)
    (line,) = terminal.getvalue().splitlines()
    assert line.startswith("offcompile: g") and "a step takes 6.000 ms" in line
    assert "× planned" in line and "above the bound" in line and "peak" in line


def test_reports_tell_the_step_as_corrected() -> None:
    step = step_of(30 * MS, 30 * MS)
    report = reported(step)
    assert report.predicted_us == report.planned_us
    found = Trial().factors(report, step)
    assert found is not None and not found.same
    assert report.predicted_us == pytest.approx(60_000, rel=0.15)
    report.observe("forward", 31_000.0)
    report.observe("backward", 31_000.0)
    assert report.measured_over_predicted == pytest.approx(62_000 / report.predicted_us)
    assert "predicted step" in report.to_text() and "× predicted" in report.to_text()
    assert report.to_json()["predicted_us"] == report.predicted_us


# -- a model whose steps are made up ---------------------------------------------------------------

MADE_UP = HardwareProfile(
    "cpu", "cpu", None, 10.0, 0.5, 0.5, "made up", {"fp32": 0.02}, latency_us=100.0
)
OVERHEADS = Overheads(op_us=4.0, view_us=1.5, fresh_us_per_mib=25.0, touch_us_per_mib=230.0)


class WithLoss(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class Run:
    """A compiled model beside a plain one; `times` makes a measured step of what was planned."""

    def __init__(self, spill: Path, monkeypatch: pytest.MonkeyPatch, **more: object) -> None:
        monkeypatch.setattr(target, "_measured", lambda directories, progress: MADE_UP)
        monkeypatch.setattr(costs, "WORTH_MEASURING_US", float("inf"))
        # a disturbed measurement is made again: two plans would have unlike costs
        monkeypatch.setattr(costs, "measure_overheads", lambda: OVERHEADS)
        monkeypatch.setattr(trial, "LEAST_STEP_NS", 0)
        monkeypatch.setattr(trial, "STEPS_BEFORE", FEW)
        # how fast lanes really are, beside other programs, would bring plans of its own
        monkeypatch.setattr(LaneWatch, "look", lambda watch, machine, totals: None)
        self.times: Callable[[int, PlanReport], MeasuredStep] = lambda n, report: step_of(1, 1)
        self.trims_a_step = self.trims = 0
        monkeypatch.setattr(trial, "heap", lambda: SimpleNamespace(trims=self.trims))
        monkeypatch.setattr(StepRecorder, "median", lambda recorder: self._median(recorder))
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
        self.model, self.plain = WithLoss(*layers), WithLoss(*layers)
        self.before = len(offcompile.reports())
        options = {
            "spill": spill,
            "memory": "7MiB",
            "lowering": "aot_eager",
            "policy": "joint:evaluations=1,seconds=20",
            "seconds": 0.1,
            **more,
        }
        self.run = torch.compile(self.model, backend="offcompile", options=options)

    @property
    def reports(self) -> list[PlanReport]:
        return offcompile.reports()[self.before :]

    def _median(self, recorder: StepRecorder) -> MeasuredStep:
        (n,) = [i for i, r in enumerate(self.reports) if r.running.steps is recorder]
        return self.times(n, self.reports[n])

    def steps(self, count: int) -> None:
        for seed in range(count):
            x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(seed))
            found = []
            for net in (self.run, self.plain):
                net.zero_grad()
                loss = net(x)
                loss.backward()
                found.append((loss.detach(), [p.grad.clone() for p in self.plain.parameters()]))
            assert torch.equal(found[0][0], found[1][0])
            assert all(map(torch.equal, found[0][1], found[1][1]))
            self.trims += self.trims_a_step


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    yield Run(tmp_path, monkeypatch)


def as_planned(report: PlanReport, times: float, waiting_ns: int = 0) -> MeasuredStep:
    """With ops that take so many times what they were planned to."""
    problem, ns = report.problem, {"forward": 0, "backward": 0}
    again = {r.id: r.before for r in report.plan.recomputes}
    for span in settled_spans(report.timeline).values():
        if span.lane == COMPUTE:
            ns[problem.op[again.get(span.id, span.id)].phase] += span.end_ns - span.start_ns
    return step_of(round(times * ns["forward"]), round(times * ns["backward"]), waiting_ns)


def test_ops_faster_than_their_costs_bring_another_plan(run: Run) -> None:
    run.times = lambda n, report: as_planned(report, 0.25 if n == 0 else 1.0)
    run.steps(2 * FEW + 2)
    first, second = run.reports
    assert first.plan.moves
    profile = second.profile
    assert profile is not None and profile.replans == 1
    (said,) = [line for line in profile.said if "it is taken" in line]
    assert "forward takes 0.25 × its costs, backward 0.25 ×" in said
    assert "a plan for these costs gains" in said
    assert second.planned_us < first.predicted_us < first.planned_us
    for before, after in zip(first.problem.ops, second.problem.ops, strict=True):
        assert after.duration_us == pytest.approx(before.duration_us / 4, rel=1e-3)
    assert second.corrected is not None and second.corrected.factors.same
    assert second.predicted_us == pytest.approx(second.planned_us, rel=0.01)


def test_the_plan_before_is_gone_back_to_where_the_new_one_loses(run: Run) -> None:
    lost_ns = 90 * MS
    run.times = lambda n, report: as_planned(report, 0.25, lost_ns if n else 0)
    run.steps(2 * FEW + 8)
    first, second = run.reports
    profile = second.profile
    assert profile is not None and profile.said[-1].endswith("back to that")
    before, after = first.running.steps, second.running.steps
    assert isinstance(before, StepRecorder) and isinstance(after, StepRecorder)
    assert after.recorded == FEW
    assert before.recorded > FEW + 3


def test_costs_that_are_right_but_for_noise_change_nothing(run: Run) -> None:
    run.times = lambda n, report: as_planned(report, 1.1)
    run.steps(FEW + 4)
    (report,) = run.reports
    assert report.corrected is not None and report.corrected.factors == Factors(
        pytest.approx(1.1, rel=1e-3), pytest.approx(1.1, rel=1e-3)
    )
    assert report.profile is not None and report.profile.factors is None
    assert len(report.profile.said) == 1 and "zeros" in report.profile.said[0]


def test_zeros_bring_no_other_plan_before_this_one_is_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Trial, "awaited", AWAITED)
    monkeypatch.setattr(Profile, "due", lambda profile: profile._steps == FIRST_STEPS)
    monkeypatch.setattr(
        judging, "plan_again", lambda planned, *_: asked.append(planned.recorder.recorded)
    )
    run.times = lambda n, report: as_planned(report, 1.0)
    run.steps(FEW + 4)
    (report,) = run.reports
    assert report.plan.moves
    assert asked == [FEW] and FEW > FIRST_STEPS


@pytest.mark.parametrize("trims_a_step", [1, 0])
def test_a_plan_that_spares_too_much_room_for_holes_is_replaced_once(
    trims_a_step: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a simulated heap that does with any room
    monkeypatch.setattr(planner, "planned_returns", lambda *_: Returns(0, 0))
    run.times = lambda n, report: as_planned(report, 1.0)
    run.trims_a_step = trims_a_step
    run.steps(2 * FEW + 4)
    rooms = [report.memory.holes_bytes for report in run.reports]
    wanted = run.reports[0].budget_bytes // 4
    # lanes of a busy machine may bring one more plan
    assert rooms[0] == wanted // 2
    assert rooms[-1] == (wanted if trims_a_step else wanted // 2)
    profile = run.reports[0].profile
    assert profile is not None
    assert sum("planned again with more" in text for text in profile.said) == trims_a_step
