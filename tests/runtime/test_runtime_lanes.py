"""Lanes: order, needs, hurrying, cancelling, failing, closing."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest

from offcompile.ir import OffloadError
from offcompile.runtime.base.counters import record
from offcompile.runtime.device.interface import Copy, How, Label
from offcompile.runtime.device.lanes import LaneJob, Lanes, Needed


class Yard:
    """Lanes with a log of what ran, and gates that hold jobs up."""

    def __init__(self) -> None:
        self.lanes = Lanes("test")
        self.log: list[str] = []
        self.gates: list[threading.Event] = []

    def job(self, name: str, lane: str = "a", needs: tuple[LaneJob, ...] = ()) -> LaneJob:
        return self.lanes.submit(lane, lambda: self.log.append(name), needs, Label("out", name))

    def gate(self, lane: str = "a") -> threading.Event:
        """A job that holds its lane, already running, until the event is set."""
        running, opened = threading.Event(), threading.Event()

        def work() -> None:
            running.set()
            opened.wait()

        self.lanes.submit(lane, work, (), Label("out", "gate"))
        running.wait()
        self.gates.append(opened)
        return opened

    def finish(self) -> list[str]:
        for gate in self.gates:
            gate.set()
        self.lanes.drain()
        return self.log


@pytest.fixture
def yard() -> Iterator[Yard]:
    yard = Yard()
    yield yard
    yard.finish()
    yard.lanes.close()


def test_jobs_of_a_lane_run_in_order(yard: Yard) -> None:
    yard.gate()
    for name in "123":
        yard.job(name)
    assert yard.finish() == ["1", "2", "3"]


def test_lanes_do_not_wait_for_each_other(yard: Yard) -> None:
    yard.gate("a")
    yard.job("1", "a")
    yard.lanes.wait(yard.job("2", "b"))
    assert yard.log == ["2"]


def test_a_lane_waits_for_what_its_first_job_needs(yard: Yard) -> None:
    yard.gate("a")
    out = yard.job("out", "a")
    yard.job("load", "b", (out,))
    yard.job("behind", "b")
    assert yard.log == []
    assert yard.finish() == ["out", "load", "behind"]


def test_a_wait_hurries_the_job_and_what_it_needs(yard: Yard) -> None:
    first, second = yard.gate("a"), yard.gate("b")
    yard.job("other out", "a")
    out = yard.job("out", "a")
    yard.job("other load", "b")
    load = yard.job("load", "b", (out,))
    assert yard.lanes.hurry(load)
    first.set()
    second.set()
    assert yard.lanes.wait(load).how is not How.READY
    log = yard.finish()
    assert log.index("out") < log.index("other out")
    assert log.index("load") < log.index("other load")


def test_hurrying_within_one_lane_keeps_the_need_in_front(yard: Yard) -> None:
    yard.gate("a")
    yard.job("1")
    out = yard.job("out")
    load = yard.job("load", needs=(out,))
    assert yard.lanes.hurry(load)
    assert yard.finish() == ["out", "load", "1"]


def test_crossed_hurrying_ends(yard: Yard) -> None:
    yard.gate("a")
    yard.gate("b")
    outs = {lane: [yard.job(f"{lane}{i}", lane) for i in range(4)] for lane in "ab"}
    # each lane's loads need the other's outs
    loads = [yard.job("lb", "b", (outs["a"][3],)), yard.job("la", "a", (outs["b"][3],))]
    for job in (*loads, outs["a"][1], outs["b"][2], *reversed(loads)):
        yard.lanes.hurry(job)
    log = yard.finish()
    assert len(log) == 10
    assert log.index("a3") < log.index("lb")
    assert log.index("b3") < log.index("la")


def test_how_a_wait_found_its_job(yard: Yard) -> None:
    done = yard.job("done")
    yard.lanes.drain()
    assert yard.lanes.wait(done).how is How.READY
    gate = yard.gate()
    late = yard.job("late")
    threading.Timer(0.01, gate.set).start()
    waited = yard.lanes.wait(late)
    assert waited.how is How.PROMOTED
    assert waited.duration_ns > 0


def test_a_strict_lane_is_not_reordered(yard: Yard) -> None:
    first = threading.Event()
    jobs = [
        yard.lanes.submit(
            "s",
            lambda i=i: (first.wait(), yard.log.append(str(i))),
            (),
            Label("x", "s"),
            None,
            None,
            True,
        )
        for i in range(3)
    ]
    yard.lanes.hurry(jobs[2])
    first.set()
    assert yard.finish() == ["0", "1", "2"]


def test_a_cancelled_job_does_not_run_and_lets_go(yard: Yard) -> None:
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    ends: list[Copy] = []
    yard.gate()
    job = yard.lanes.submit(
        "a", lambda: yard.log.append("x"), (), Label("out", "x"), ends.append, thing
    )
    del thing
    assert yard.lanes.cancel(job)
    assert gone() is None
    assert not yard.lanes.cancel(job)
    assert yard.finish() == []
    assert ends == []
    assert isinstance(job.error, OffloadError)


def test_what_a_job_keeps_is_gone_before_its_wait_returns(yard: Yard) -> None:
    class Thing:
        pass

    gone = []
    for _ in range(50):
        thing = Thing()
        watch = weakref.ref(thing)
        job = yard.lanes.submit("a", lambda: None, (), Label("out", "x"), None, thing)
        del thing
        yard.lanes.wait(job)
        gone.append(watch() is None)
    assert all(gone)


def test_a_failure_stays_with_its_job_and_those_that_need_it(yard: Yard) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    ends: list[Copy] = []
    bad = yard.lanes.submit("a", fail, (), Label("out", "bad"), ends.append)
    load = yard.job("load", "b", (bad,))
    yard.job("fine")
    yard.lanes.wait(load)
    assert yard.finish() == ["fine"]
    assert isinstance(bad.error, OSError)
    assert bad.error.__traceback__ is None
    assert isinstance(load.error, Needed)
    assert load.error.__cause__ is bad.error
    assert ends == [bad]


def test_before_runs_ahead_of_each_job(yard: Yard) -> None:
    yard.lanes.before = lambda: yard.log.append("before")
    yard.lanes.wait(yard.job("1"))
    assert yard.log == ["before", "1"]


def test_the_recorder_sees_jobs_begin_and_end(yard: Yard) -> None:
    with record() as recording:
        yard.lanes.wait(yard.job("1"))
    yard.lanes.wait(yard.job("2"))
    assert [(e.kind, e.tag, e.lane) for e in recording.events] == [
        ("begin_out", "1", "a"),
        ("end_out", "1", "a"),
    ]


def test_closing_cancels_what_is_queued_and_ends_the_threads(yard: Yard) -> None:
    gate = yard.gate()
    queued = yard.job("queued")
    thread = queued.lane.thread
    closing = threading.Thread(target=yard.lanes.close)
    closing.start()
    yard.lanes.wait(queued)
    gate.set()
    closing.join()
    assert thread is not None
    assert not thread.is_alive()
    assert yard.log == []
    with pytest.raises(OffloadError, match="closed"):
        yard.job("late")
