"""Steps as they are measured: each run tells what was its own, in the order in which it was."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import Perceptron
from cuda_bench import bench_of
from test_report import made

import offcompile
from offcompile.ir import COMPUTE, DEVICE, OffloadError
from offcompile.planning.feedback.measured import MeasuredSpan, MeasuredStep, MeasuredWait
from offcompile.planning.order import RunStep, StartStep, WaitStep
from offcompile.report.figures import RunFigures
from offcompile.report.report import PlanReport
from offcompile.report.stalls import stall_line, tensor_name
from offcompile.run.step_recorder import STEPS_AT_FIRST, StepRecorder
from offcompile.runtime.base.clock import StepClock
from offcompile.runtime.device.cpu import CpuDevice
from offcompile.runtime.device.move_events import HeardCopy, MoveListener, listener, listening
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


# --- the recorder ---------------------------------------------------------------------------


class Ticking(StepClock):
    """Each question takes 10 ns."""

    def __init__(self, free: bool = True, known: bool = True) -> None:
        self.free, self.known, self.now_ns = free, known, 0

    def start(self) -> int:
        self.now_ns += 10
        return self.now_ns

    def between_ns(self, first: int, last: int) -> int | None:
        return last - first if self.known else None

    def stop(self, started: int, tell: Callable[[float], None]) -> None:
        tell((self.start() - started) / 1000)

    def settle(self) -> None:
        """Nothing is ever outstanding."""


class Graph:
    """Runs halves as the backend does."""

    def __init__(self, clock: Ticking, *steps: RunStep | StartStep | WaitStep) -> None:
        self.clock, self.waiting = clock, 0
        self.recorder = StepRecorder("graph 0", clock, lambda: self.waiting, steps)

    @contextmanager
    def forward(self) -> Iterator[MoveListener | None]:
        with self.recorder.running("forward"):
            yield listener()
        self.waiting += 1

    @contextmanager
    def backward(self) -> Iterator[MoveListener | None]:
        with self.recorder.running("backward"):
            yield listener()
        self.waiting -= 1

    def step(self) -> None:
        with self.forward():
            pass
        with self.backward():
            pass


def test_time_between_the_halves_is_cut_out() -> None:
    clock = Ticking()
    steps = (
        RunStep("f"),
        StartStep("a"),
        RunStep("g"),
        WaitStep("a"),
        StartStep("b"),
        RunStep("h"),
        WaitStep("b"),
    )
    graph = Graph(clock, *steps)
    with graph.forward() as heard:  # from 10
        assert heard is not None
        heard.waited("a", clock.start(), starting=True)  # 20 to 30
    turn_ns = clock.now_ns - 10
    clock.now_ns = 1000
    with graph.backward() as second:  # from 1010
        assert second is not None and second is not heard
        second.waited("b", clock.start())  # 1020 to 1030
    heard.copies.append(HeardCopy("a", "d2h", 25, 1025))
    second.copies.append(HeardCopy("b", "h2d", 500, 600))  # in the caller's time
    assert graph.recorder.median() == MeasuredStep(
        (
            MeasuredSpan("forward", COMPUTE, 0, turn_ns),
            MeasuredSpan("a", "d2h", 15, turn_ns + 15),
            MeasuredSpan("b", "h2d", turn_ns, turn_ns),
            MeasuredSpan("backward", COMPUTE, turn_ns, turn_ns + 30),
        ),
        (MeasuredWait("g", "a", 10, 10), MeasuredWait("", "b", turn_ns + 10, 10)),
        turn_ns + 30,
    )


def test_the_median_of_the_last_steps_is_shown() -> None:
    clock = Ticking()
    graph = Graph(clock)
    assert graph.recorder.median() is None
    for slow_ns in (9000, 500, 100, 400, 200, 300):
        with graph.forward():
            clock.now_ns += slow_ns
        with graph.backward():
            pass
    step = graph.recorder.median()
    assert step is not None
    assert step.step_ns == 300 + 20
    clock.known = False  # the device is not there yet
    assert graph.recorder.median() is None


def test_where_recording_costs_it_ends_until_it_is_asked_for() -> None:
    graph = Graph(Ticking(free=False))
    for _ in range(STEPS_AT_FIRST):
        with graph.forward() as heard:
            assert heard is not None
        with graph.backward():
            pass
    for asked in (0, 2):
        graph.recorder.watch(asked)
        heard_by = []
        for _ in range(4):
            with graph.forward() as heard:
                heard_by.append(heard is not None)
            with graph.backward():
                pass
        assert sum(heard_by) == asked


def test_a_forward_that_failed_belongs_to_no_step() -> None:
    graph = Graph(Ticking())
    with pytest.raises(ZeroDivisionError), graph.forward():
        raise ZeroDivisionError
    assert listener() is None
    graph.step()  # it may be the failed one's, for all that is known
    assert graph.recorder.median() is None
    graph.step()
    assert graph.recorder.median() is not None


def test_forwards_on_two_threads_are_nobodys() -> None:
    graph = Graph(Ticking())
    begun, over = threading.Event(), threading.Event()

    def first() -> None:
        with graph.forward():
            begun.set()
            over.wait()

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait()
    with graph.forward() as heard:
        assert heard is None
    over.set()
    thread.join()
    for _ in range(2):
        with graph.backward() as heard:
            assert heard is None
    assert graph.recorder.median() is None
    graph.step()
    assert graph.recorder.median() is not None


def test_runs_hear_their_own_moves_alone() -> None:
    one, other = MoveListener(Ticking().start), MoveListener(Ticking().start)
    with listening(one):
        with listening(other):
            assert listener() is other
        assert listener() is one
        found: list[MoveListener | None] = []
        thread = threading.Thread(target=lambda: found.append(listener()))
        thread.start()
        thread.join()
    assert found == [None]
    assert listener() is None


# --- on CUDA, simulated ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_on_cuda_events_in_the_streams_tell(seed: int) -> None:
    bench = bench_of(seed)
    streams = bench.streams

    def now() -> Any:
        return streams.record(streams.compute(), timing=True)

    heard = MoveListener(now)
    x = bench.full(64, 1)
    with listening(heard):
        began = now()
        ticket = bench.out(x, "a out")
        bench.wait_out(ticket)
        buffer, load = bench.load(ticket, "a in")
        bench.wait_load(load)
        ended = now()
    del x, buffer, load, ticket
    bench.settle()
    assert [(c.move, c.lane) for c in heard.copies] == [("a out", "d2h"), ("a in", "h2d")]
    for copy in heard.copies:
        assert streams.elapsed_us(began, copy.began) >= 0
        assert streams.elapsed_us(copy.began, copy.ended) >= 0
        assert streams.elapsed_us(copy.ended, ended) >= 0
    assert {w.move for w in heard.waits} <= {"a out", "a in"}
    for wait in heard.waits:
        (copy,) = [c for c in heard.copies if c.move == wait.move]
        assert streams.elapsed_us(copy.ended, wait.ended) >= 0
    bench.close()


def test_a_move_that_waits_for_room_is_heard() -> None:
    bench = bench_of(0, in_flight_bytes=100)
    heard = MoveListener(Ticking().start)
    sent: list[torch.Tensor] = []

    def send() -> None:
        with listening(heard):
            sent.append(bench.out(bench.full(64, 2), "second"))

    thread = threading.Thread(target=send)
    with bench.unseen():
        sent.append(bench.out(bench.full(64, 1), "first"))
        thread.start()
        waiters = bench.mover._accounts.ledger._drained._waiters  # type: ignore[attr-defined]
        while not waiters and thread.is_alive():
            time.sleep(0.001)
    thread.join()
    assert [(w.move, w.starting) for w in heard.waits] == [("second", True)]
    sent.clear()
    bench.settle()
    bench.close()


def test_a_fetch_that_waits_for_the_host_is_heard() -> None:
    bench = bench_of(0)
    heard = MoveListener(Ticking().start)
    (host,) = bench.device.addressable([64])
    called: list[int] = []
    bench.device.hold(host, lambda: called.append(1))
    with listening(heard):
        loads = bench.mover.start_fetch(host, "w in", "h2d")
    assert called == [1]
    assert [(w.move, w.starting) for w in heard.waits] == [("w in", True)]
    del loads, host
    bench.settle()
    bench.close()


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
