"""The watchdog, threads that die or cannot start, and a spread of the fault matrix."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base import watchdog
from offcompile.runtime.base.threads import TaskQueue, side_by_side
from offcompile.runtime.base.watchdog import LOOKS, WARN_AT, Stalled, StallWarning, WatchedWait
from offcompile.runtime.device.interface import Label
from offcompile.runtime.device.lanes import LaneJob, Lanes
from offcompile.runtime.states.update_workers import UpdateWorkers
from trust import faults


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    """Slowness is told once in a process: here once in a test."""
    with watchdog.patience(watchdog.DEFAULT_S):
        yield


# -- the matrix -----------------------------------------------------------------------------------


def test_every_fault_has_a_cell_for_every_phase() -> None:
    assert len(faults.MATRIX) == 13 * len(faults.PHASES)
    assert len({cell.name for cell in faults.MATRIX}) == len(faults.MATRIX)
    for cell in faults.MATRIX:
        assert cell.outcome in faults.OUTCOMES
        assert bool(cell.says) == (cell.outcome.split(",")[0] in ("error", "told", "refused"))
        assert cell.played or cell.why


def test_the_page_has_the_matrix_as_it_is() -> None:
    page = faults.PAGE.read_text()
    assert faults.written_into(page) == page


def test_a_spread_has_every_fault() -> None:
    chosen = faults.spread(25, seed=1)
    assert len(chosen) == len(set(chosen)) == 25
    assert {cell.fault for cell in chosen} == {cell.fault for cell in faults.MATRIX}
    assert faults.spread(25, seed=2) != chosen


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="files of Linux")
def test_a_spread_of_the_matrix_comes_to_what_it_says() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # `test_trust_apart` plays those of processes of their own, which fork from its server
        cells = [c for c in faults.spread(14, seed=0) if c.fault not in faults.IN_CHILDREN]
        assert len({c.fault for c in cells}) == 10
        wrong = faults.played(cells)
        assert not wrong, "\n".join(f"{name}: {said}" for name, said in wrong.items())
    finally:
        torch.set_num_threads(threads)


# -- waits ----------------------------------------------------------------------------------------


def look(wait: WatchedWait, times: int) -> None:
    for _ in range(times):
        wait.look()


def test_a_wait_gives_up_when_one_call_does_not_come_back() -> None:
    hung = watchdog.begun("writing", 4096, "/mnt/far")
    wait = WatchedWait(lambda: "The copy out of act_3")
    with pytest.warns(StallWarning, match="act_3 is waited for longer than usual"):
        look(wait, LOOKS - 1)
    for _ in range(3):  # what other disks do is no excuse
        watchdog.over(watchdog.begun("reading", 4096, "/mnt/near"), 4096)
    with pytest.raises(Stalled) as raised:
        wait.look()
    watchdog.over(hung)
    said = str(raised.value)
    assert "The copy out of act_3 is waited for in vain" in said
    assert "writing 4096 bytes of the file in /mnt/far" in said and "MainThread" in said
    assert f"{watchdog.VARIABLE} seconds (now 120; 0: it never does)" in said


def test_a_slow_disk_is_waited_for_and_told_once() -> None:
    wait = WatchedWait(lambda: "The load of act_3")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4 * LOOKS):
            call = watchdog.begun("reading", 4096, "/mnt/slow")
            wait.look()
            watchdog.over(call, 4096)
    assert len(told) == 1
    assert "something is slow, but it goes on" in str(told[0].message)


def test_without_a_call_under_way_anything_that_ends_is_progress() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wait = WatchedWait(lambda: "An update")
        for _ in range(3 * LOOKS):
            wait.look()
            watchdog.progress()
        with pytest.raises(Stalled, match="No call to a disk is under way"):
            look(wait, LOOKS + 1)


def test_devices_may_take_any_time() -> None:
    with pytest.warns(StallWarning, match="An event is waited for longer"):
        look(WatchedWait(lambda: "An event", disks_only=True), 3 * LOOKS)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_variable_that_says_nothing_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(watchdog.VARIABLE, text)
    monkeypatch.setattr(watchdog._seen, "limit_s", None)
    with pytest.raises(OffloadError, match=f"{watchdog.VARIABLE} is '{text}': write after how"):
        watchdog.limit_s()


@pytest.mark.parametrize(("text", "limit"), [("", 120.0), ("600", 600.0), ("0", None)])
def test_the_variable_is_read(
    text: str, limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(watchdog.VARIABLE, text)
    monkeypatch.setattr(watchdog._seen, "limit_s", None)
    assert watchdog.limit_s() == limit


def test_a_call_on_the_callers_own_thread_is_told() -> None:
    heard = threading.Event()
    with warnings.catch_warnings(record=True) as told, watchdog.patience(0.08):
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_, **__: heard.set()
        with watchdog.told(), watchdog.calling("saving", 9, "/mnt/far"):
            assert heard.wait(30)
    assert told == [] and WARN_AT < LOOKS


# -- threads --------------------------------------------------------------------------------------


class Ended(SystemExit):
    """The error that ends a thread."""


def die() -> None:
    raise Ended("told to")


def submit(lanes: Lanes, tag: str, done: list[str]) -> LaneJob:
    return lanes.submit("d2h", lambda: done.append(tag), (), Label("out", tag))


def test_a_lane_whose_thread_dies_fails_one_job_and_goes_on() -> None:
    lanes, done, deaths = Lanes("test"), list[str](), [die]
    lanes.before = lambda: deaths.pop()() if deaths else None
    jobs = [submit(lanes, tag, done) for tag in "abc"]
    for job in jobs:
        lanes.wait(job)
    assert isinstance(jobs[0].error, OffloadError)
    assert "the thread offcompile-d2h died of Ended (told to)" in str(jobs[0].error)
    assert [job.error for job in jobs[1:]] == [None, None] and done == ["b", "c"]
    assert lanes.close()


def test_who_waits_for_a_job_while_its_thread_dies_is_told() -> None:
    lanes, dying = Lanes("test"), threading.Event()
    lanes.before = die
    over = lanes._over

    def slowly(job: LaneJob) -> None:
        dying.set()
        while not job.awaited:
            time.sleep(0.001)
        over(job)

    with mock.patch.object(lanes, "_over", slowly):
        job = submit(lanes, "a", [])
        assert dying.wait(30)
        lanes.wait(job)
    assert isinstance(job.error, OffloadError)
    lanes.before = None
    assert lanes.close()


def test_a_lane_whose_ends_fail_tells_the_job() -> None:
    lanes, done = Lanes("test"), list[str]()
    job = lanes.submit("d2h", lambda: None, (), Label("out", "a"), on_end=lambda _: die())
    lanes.wait(job)
    assert "died of Ended" in str(job.error)
    lanes.wait(submit(lanes, "b", done))
    assert done == ["b"] and lanes.close()


def test_a_wait_for_a_lane_that_hangs_names_what_it_is_behind() -> None:
    lanes, gone, done = Lanes("test"), threading.Event(), list[str]()
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        gone.wait()

    lanes.submit("d2h", hang, (), Label("out", "first"))
    assert begun.wait(30)
    last = submit(lanes, "last", done)
    with watchdog.patience(0.08), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Stalled, match="copy out of last, queued on lane d2h, behind first"):
            lanes.wait(last)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert not lanes.close()
        assert "The end of lane d2h is waited for in vain" in str(told[-1].message)
    gone.set()


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_threads_that_cannot_start_leave_nothing_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, queue, channels, done = Lanes("test"), TaskQueue("queue"), UpdateWorkers(), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for use in (
            lambda: submit(lanes, "a", done),
            lambda: queue.add(die),
            lambda: channels.submit(die, die, "w"),
        ):
            with pytest.raises(OffloadError, match=r"cannot be started .*ulimit -u"):
                use()
    lanes.wait(submit(lanes, "b", done))
    channels.submit(lambda: None, lambda: done.append("c"), "w")
    channels.settle()
    side_by_side([(queue, [lambda: done.append("d")]), (TaskQueue("other"), [])])
    assert done == ["b", "c", "d"]
    queue.close()
    channels.close()
    assert lanes.close()


def test_what_is_side_by_side_has_ended_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, gone, done = TaskQueue("one"), TaskQueue("two"), threading.Event(), list[str]()
    monkeypatch.setattr(second._worker, "wake", die)

    def late() -> None:
        gone.wait()
        done.append("first")

    timer = threading.Timer(0.05, gone.set)
    timer.start()
    with pytest.raises(Ended):
        side_by_side([(first, [late]), (second, [die]), (TaskQueue("own"), [])])
    assert done == ["first"]
    first.close()


def test_a_disk_queue_whose_thread_dies_fails_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, done = TaskQueue("queue"), list[str]()
    begin = threading.Event()
    at = queue.add(begin.wait)
    monkeypatch.setattr(type(at), "run", lambda task: die() if begin.wait() else None)
    task = queue.add(lambda: None)
    begin.set()
    assert task.wait(30) and "the thread queue died of Ended" in str(task.error)
    monkeypatch.undo()
    assert queue.add(lambda: done.append("a")).wait(30) and done == ["a"]
    queue.close()


def test_a_channel_that_dies_fails_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    channels, line_type = UpdateWorkers(1), type(UpdateWorkers(1)._line)
    with monkeypatch.context() as patch:
        patch.setattr(line_type, "_arrive", lambda line, job: die())
        job = channels.submit(lambda: None, lambda: None, "w")
        with pytest.raises(OffloadError, match="thread offcompile-channel-0 died of Ended"):
            channels.settle()
    assert job.over
    channels.submit(lambda: None, lambda: None, "w").wait()
    channels.close()
