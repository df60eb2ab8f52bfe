"""The recorder of steps gives each run its own moves and waits, on the CPU and on CUDA."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cuda_bench import bench_of

from offcompile.ir import COMPUTE
from offcompile.planning.feedback.measured import MeasuredSpan, MeasuredStep, MeasuredWait
from offcompile.planning.order import RunStep, StartStep, WaitStep
from offcompile.run.step_recorder import STEPS_AT_FIRST, StepRecorder
from offcompile.runtime.base.clock import StepClock
from offcompile.runtime.device.move_events import HeardCopy, MoveListener, listener, listening


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
