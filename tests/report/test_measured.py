"""Steps as they are measured: each run tells what was its own, in the order in which it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import Perceptron
from test_report import made

import offcompile
from offcompile.ir import COMPUTE, DEVICE, OffloadError
from offcompile.planning.feedback.measured import MeasuredSpan, MeasuredStep, MeasuredWait
from offcompile.report.figures import RunFigures
from offcompile.report.report import PlanReport
from offcompile.report.stalls import stall_line, tensor_name
from offcompile.run.step_recorder import StepRecorder
from offcompile.runtime.device.cpu import CpuDevice
from offcompile.runtime.device.move_events import listener
from offcompile.runtime.moves.registry import close_all, runtimes

OPTIONS = {"hardware": "cpu", "policy": "joint:evaluations=10,seconds=20", "seconds": 0.5}


# --- compiled models ------------------------------------------------------------------------


class Trained:
    """A small model most of whose activations leave, on lanes that are slow to begin."""

    def __init__(self, spill: Path) -> None:
        torch._dynamo.reset()
        close_all()
        self.x = torch.randn(512, 32)
        options = {**OPTIONS, "spill": spill, "lowering": "aot_eager", "memory": "minimum"}
        self.run = torch.compile(Perceptron(32, 4), backend="offcompile", options=options)
        self.run(self.x).backward()
        self.report = offcompile.reports()[-1]
        for runtime in runtimes():
            assert isinstance(runtime.device, CpuDevice)
            runtime.device.lanes._delay_s = lambda: 0.004

    def recorded(self) -> int:
        assert isinstance(self.report.running.steps, StepRecorder)
        return len(self.report.running.steps._kept)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    yield Trained(tmp_path_factory.mktemp("spill"))
    close_all()


def test_a_step_has_every_move_on_its_lane_and_the_waits_for_them(trained: Trained) -> None:
    report = trained.report
    for _ in range(5):
        trained.run(trained.x).backward()
    assert trained.recorded() == 5
    step = report.measured_step
    assert step is not None
    seen = {span.id: span for span in step.spans}
    assert len(seen) == len(step.spans)
    assert {id: s.lane for id, s in seen.items() if s.lane != COMPUTE} == {
        m.id: m.lane for m in report.plan.moves
    }
    forward, backward = seen["forward"], seen["backward"]
    assert (forward.start_ns, forward.end_ns) == (0, backward.start_ns)
    assert backward.end_ns == step.step_ns
    assert all(0 <= s.start_ns <= s.end_ns for s in step.spans)
    out = {m.tensor: seen[m.id] for m in report.plan.moves if m.source == DEVICE}
    for move in report.plan.moves:
        if move.target == DEVICE and move.tensor in out:
            assert out[move.tensor].end_ns <= seen[move.id].start_ns
    assert step.waits and 0 < step.waiting_ns < step.step_ns
    for wait in step.waits:
        assert wait.op.partition("@")[0] in report.problem.op
        assert wait.move in seen
        # it was awaited until it was over
        assert seen[wait.move].end_ns <= wait.start_ns + wait.duration_ns


def test_reports_say_where_the_time_went(trained: Trained, tmp_path: Path) -> None:
    trained.run(trained.x).backward()
    report = trained.report
    step = report.measured_step
    assert step is not None
    (row, *_) = report.stall_rows(step)
    text = report.stalls()
    assert text.startswith("step ") and f"{row.name} {row.direction}" in text
    assert "its time" in report.to_text()
    said = json.loads(json.dumps(report.to_json()))["measured"]
    assert said["step_ns"] == said["compute_ns"] + said["waiting_ns"]
    assert len(said["spans"]) == len(step.spans)
    assert said["waiting_ns"] == sum(r["measured_ns"] for r in said["stalls"])
    report.save_trace(tmp_path / "trace.json")
    check_trace(json.loads((tmp_path / "trace.json").read_text()), measured=True)


def test_what_is_not_certain_is_not_recorded(trained: Trained) -> None:
    assert isinstance(trained.report.running.steps, StepRecorder)
    kept = trained.report.running.steps._kept
    kept.clear()
    first, second = trained.run(trained.x), trained.run(trained.x)
    second.backward()
    first.backward()
    assert not kept
    trained.run(trained.x)  # nobody asks for its backward
    assert not kept
    for _ in range(2):
        trained.run(trained.x).backward()
    assert kept
    kept.clear()
    # one after the other they are as good as any
    for _ in range(2):
        trained.run(trained.x).backward()
    assert len(kept) == 2


def test_a_profiler_sees_halves_and_waits_by_name(trained: Trained) -> None:
    report = trained.report
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        trained.run(trained.x).backward()
    seen = {event.name for event in profiler.events() if event.name.startswith("offcompile ")}
    assert f"offcompile {report.name} forward" in seen
    assert f"offcompile {report.name} backward" in seen
    waits = {name for name in seen if name.startswith("offcompile wait load ")}
    tensors = {m.tensor for m in report.plan.moves if m.target == DEVICE}
    assert waits == {
        f"offcompile wait load {tensor_name(t, report.labels, report.names)}" for t in tensors
    }
    assert listener() is None


def test_a_graph_without_backward_is_a_step(tmp_path: Path) -> None:
    torch._dynamo.reset()
    options = {"spill": tmp_path, "lowering": "aot_eager", "memory": "1GiB", "hardware": "cpu"}
    run = torch.compile(Perceptron(8, 2), backend="offcompile", options=options)
    with torch.no_grad():
        run(torch.randn(4, 8))
    step = offcompile.reports()[-1].measured_step
    assert step is not None
    (span,) = step.spans
    assert (span.id, span.end_ns, step.waits) == ("forward", step.step_ns, ())


# --- what is said of it ---------------------------------------------------------------------


class Fixed:
    def __init__(self, step: MeasuredStep | None) -> None:
        self.step, self.asked = step, 0

    def median(self) -> MeasuredStep | None:
        return self.step

    def watch(self, steps: int) -> None:
        self.asked = steps


MS = 1_000_000
STEP = MeasuredStep(
    (
        MeasuredSpan("forward", COMPUTE, 0, 3 * MS),
        MeasuredSpan("a out", "d2h", 1 * MS, 2 * MS),
        MeasuredSpan("backward", COMPUTE, 3 * MS, 812 * MS),
        MeasuredSpan("a in", "h2d", 3 * MS, 50 * MS),
    ),
    (MeasuredWait("fb", "a out", 1 * MS, 2 * MS), MeasuredWait("ba", "a in", 9 * MS, 41 * MS)),
    812 * MS,
)


def reported(steps: Fixed | None) -> PlanReport:
    labels = {"a": "layers.3.mlp 64×512 float32", "fa": "layers.3.mlp"}
    return made(labels=labels, running=RunFigures(steps=steps))


def test_stalls_stand_planned_beside_measured_the_largest_first() -> None:
    report = reported(Fixed(STEP))
    line, _, head, *rows = report.stalls().splitlines()
    assert line == (
        "step 812 ms: compute 769, waiting 43.0: layers.3.mlp a load 41.0, layers.3.mlp a out 2.00"
    )
    assert head.split() == ["planned", "ms", "measured", "ms"]
    planned_ms = sum(s.duration_ns for s in report.timeline.stalls) / MS
    assert [row.split()[-1] for row in rows] == ["812", "769", "43.0", "41.0", "2.00"]
    assert float(rows[2].split()[1]) == pytest.approx(planned_ms, abs=0.01)
    assert rows[3].split()[:3] == ["layers.3.mlp", "a", "load"]
    assert report.stalls(limit=1).splitlines()[-1].strip() == "… and 1 more"


def test_what_was_not_measured_says_so() -> None:
    for report in (reported(Fixed(None)), reported(None)):
        assert report.measured_step is None
        assert report.to_json()["measured"] is None
        assert "(planned; not yet measured)" in report.stalls()
        assert "its time" not in report.to_text()
        check_trace(report.to_trace(), measured=False)


def test_a_step_without_waits_names_none() -> None:
    report = reported(None)
    step = MeasuredStep(STEP.spans, (), STEP.step_ns)
    rows = report.stall_rows(step)
    line = stall_line(rows, report.timeline, step)
    assert line == "step 812 ms: compute 812, waiting 0.00"
    assert all(row.measured_ns == 0 for row in rows)


def test_watching_is_passed_on() -> None:
    steps = Fixed(None)
    reported(steps).watch(3)
    assert steps.asked == 3
    with pytest.raises(OffloadError, match=r"watch\(steps=0\): at least one step"):
        reported(steps).watch(0)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("blocks.3.qkv 16×256 float32", "blocks.3.qkv t"),
        ("16×s0 float32", "t"),
        (" float32", "t"),
        ("model  float32", "model t"),
        ("", "t"),
    ],
)
def test_tensors_are_named_without_their_shape(label: str, name: str) -> None:
    assert tensor_name("t", {"t": label}, {}) == name


def test_weights_are_named_as_parameters() -> None:
    labels = {"g": "gradient of up.weight 4×4 float32", "w": "up.weight 4×4 float32"}
    names = {"g": "up.weight", "w": "up.weight"}
    assert tensor_name("g", labels, names) == "gradient of up.weight"
    assert tensor_name("w", labels, names) == "up.weight"


# --- traces ---------------------------------------------------------------------------------


def check_trace(trace: dict[str, Any], measured: bool) -> None:
    """By the trace event format that Perfetto reads: types, names of rows, slices that nest."""
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    named: dict[tuple[int, int], str] = {}
    processes = {}
    #: in nanoseconds, to which Perfetto rounds
    slices: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        row = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                named[row] = event["args"]["name"]
            elif event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            continue
        assert event["ph"] == "X" and event["name"]
        assert event["ts"] >= 0 and event["dur"] >= 0
        begin, end = event["ts"] * 1000, (event["ts"] + event["dur"]) * 1000
        slices.setdefault(row, []).append((round(begin), round(end)))
    assert sorted(processes.values()) == (["measured", "planned"] if measured else ["planned"])
    assert set(slices) <= set(named)
    for row, found in slices.items():
        open_ends: list[int] = []
        for begin, end in sorted(found, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], f"{named[row]}: {begin} to {end}"
            open_ends.append(end)


def test_planned_and_measured_are_two_processes_of_one_trace() -> None:
    trace = reported(Fixed(STEP)).to_trace()
    check_trace(trace, measured=True)
    (load,) = [e for e in trace["traceEvents"] if e["name"] == "a in" and e["pid"] == 2]
    assert (load["ts"], load["dur"]) == (3000.0, 47000.0)
    assert load["args"] == {
        "tensor": "a",
        "nbytes": 4 << 20,
        "module": "layers.3.mlp 64×512 float32",
        "direction": "load",
    }
    (wait,) = [e for e in trace["traceEvents"] if e["name"] == "wait before fb" and e["pid"] == 2]
    assert wait["args"]["what"] == ["layers.3.mlp a out"]
    (op,) = [e for e in trace["traceEvents"] if e["name"] == "fa"]
    assert op["args"]["module"] == "layers.3.mlp"
