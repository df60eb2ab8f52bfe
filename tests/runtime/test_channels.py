"""Channels: in turn, in order, with the first failure told; they end, and survive forks."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import warm
from hypothesis import given, settings
from hypothesis import strategies as st

from offcompile.ir import OffloadError
from offcompile.runtime.states.update_workers import UpdateJob, UpdateWorkers, WorkerState


def nothing() -> None:
    """A gradient that is there; an update of nothing."""


@pytest.fixture
def channels() -> Iterator[UpdateWorkers]:
    made = UpdateWorkers()
    yield made
    made.close()


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_one_receives_while_the_other_updates(channels: UpdateWorkers) -> None:
    receiving, updated = threading.Event(), threading.Event()
    seen: list[str] = []

    def update_first() -> None:
        # would never end if nobody received in the meantime
        receiving.wait()
        seen.append("first")
        updated.set()

    def receive_second() -> None:
        receiving.set()
        updated.wait()

    first = channels.submit(nothing, update_first, "first")
    second = channels.submit(receive_second, lambda: seen.append("second"), "second")
    channels.settle()
    assert seen == ["first", "second"]
    assert (first.state, second.state) == (WorkerState.DONE, WorkerState.DONE)


def test_updates_keep_their_order_whatever_arrives_first(channels: UpdateWorkers) -> None:
    late, there = threading.Event(), threading.Event()
    seen: list[int] = []
    channels.submit(late.wait, lambda: seen.append(0), "late")
    early = channels.submit(there.set, lambda: seen.append(1), "early")
    there.wait()
    assert seen == [] and not early.over
    late.set()
    channels.settle()
    assert seen == [0, 1]


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(1, 4),
    jobs=st.lists(st.sampled_from(["well", "arrive", "work"]), max_size=12),
    settled=st.sets(st.integers(0, 12)),
)
def test_any_jobs_run_once_in_order_up_to_the_first_failure(
    count: int, jobs: list[str], settled: set[int]
) -> None:
    channels = UpdateWorkers(count)
    updating = threading.Lock()
    ran: list[int] = []
    arrived: list[int] = []
    submitted: list[UpdateJob] = []
    told: list[str | None] = []
    expected_ran: list[int] = []
    expected_told: list[str | None] = []
    first: str | None = None

    def arrive(number: int) -> None:
        arrived.append(number)
        if jobs[number] == "arrive":
            raise ValueError(f"{number} is lost")

    def work(number: int) -> None:
        assert updating.acquire(blocking=False), "two updates at a time"
        ran.append(number)
        updating.release()
        if jobs[number] == "work":
            raise ValueError(f"{number} is broken")

    def settle() -> None:
        nonlocal first
        try:
            channels.settle()
            told.append(None)
        except OffloadError as error:
            told.append(str(error).split()[3])
        expected_told.append(first)
        first = None

    states = []
    for number, kind in enumerate(jobs):
        if number in settled:
            settle()
        submitted.append(
            channels.submit(lambda n=number: arrive(n), lambda n=number: work(n), f"w{number}")
        )
        if first is not None:
            states.append(WorkerState.SKIPPED)
            continue
        if kind != "arrive":
            expected_ran.append(number)
        states.append(WorkerState.DONE if kind == "well" else WorkerState.FAILED)
        if kind != "well":
            first = f"w{number}"
    settle()
    channels.close()
    assert ran == expected_ran
    assert told == expected_told
    assert [job.state for job in submitted] == states
    assert len(arrived) == len(set(arrived))


def test_a_failure_is_told_once_with_its_cause_and_the_next_period_is_clean(
    channels: UpdateWorkers,
) -> None:
    channels.submit(nothing, failing(ValueError("no such block")), "layer.3.weight")
    after = channels.submit(nothing, nothing, "layer.2.weight")
    with pytest.raises(OffloadError, match=r"layer\.3\.weight failed.*no such block") as found:
        channels.settle()
    assert isinstance(found.value.__cause__, ValueError)
    assert after.state is WorkerState.SKIPPED
    with pytest.raises(OffloadError, match=r"layer\.2\.weight was skipped"):
        after.wait()
    channels.settle()
    again = channels.submit(nothing, nothing, "layer.2.weight")
    again.wait()
    assert again.state is WorkerState.DONE


def test_one_job_can_be_waited_for(channels: UpdateWorkers) -> None:
    held = threading.Event()
    first = channels.submit(nothing, nothing, "first")
    second = channels.submit(held.wait, nothing, "second")
    first.wait()
    assert first.over and not second.over
    held.set()
    channels.settle()


def test_an_update_that_waits_for_updates_is_refused(channels: UpdateWorkers) -> None:
    channels.submit(nothing, channels.settle, "loop")
    with pytest.raises(OffloadError, match=r"loop failed.*it is one of them"):
        channels.settle()


def test_an_interrupted_settle_can_be_called_again(channels: UpdateWorkers) -> None:
    held, entered = threading.Event(), threading.Event()
    job = channels.submit(held.wait, nothing, "slow")
    wait, interrupted = channels._line._moved.wait, []

    def interrupt(*asked: float) -> bool:
        if threading.current_thread() is threading.main_thread() and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        entered.set()
        return wait(*asked)

    channels._line._moved.wait = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        channels.settle()
    assert not job.over
    held.set()
    channels.settle()
    assert job.state is WorkerState.DONE


def test_what_a_job_holds_is_let_go_before_it_is_over(channels: UpdateWorkers) -> None:
    gradient = torch.ones(3)
    gone = weakref.ref(gradient)
    channels.submit(gradient.sum, gradient.zero_, "w")
    failing_one = channels.submit(nothing, lambda g=gradient: g[5], "v")
    skipped = channels.submit(nothing, lambda g=gradient: g.sum(), "u")
    del gradient
    with pytest.raises(OffloadError, match="update of v failed"):
        channels.settle()
    assert gone() is None
    assert (failing_one.state, skipped.state) == (WorkerState.FAILED, WorkerState.SKIPPED)


def test_threads_start_with_the_first_job_and_end_with_their_owner() -> None:
    made = UpdateWorkers(3)
    assert made._line._workers == []
    made.submit(nothing, nothing, "w")
    made.settle()
    workers = tuple(made._line._workers)
    assert len(workers) == 3 and all(worker.daemon for worker in workers)
    del made
    gc.collect()
    for worker in workers:
        worker.join()
    assert not any(worker.is_alive() for worker in workers)


def test_close_finishes_the_jobs_and_warns_of_what_nobody_was_told() -> None:
    made, seen = UpdateWorkers(), list[int]()
    for number in range(5):
        made.submit(nothing, lambda n=number: seen.append(n), "w")
    made.submit(nothing, failing(ValueError("broken")), "bad")
    with pytest.warns(UserWarning, match="bad had failed: broken"):
        made.close()
    made.close()
    assert seen == [0, 1, 2, 3, 4]
    assert not any(worker.is_alive() for worker in made._line._workers)
    with pytest.raises(OffloadError, match="closed: late"):
        made.submit(nothing, nothing, "late")


@pytest.mark.parametrize(("count", "threads"), [(0, None), (2, 0)])
def test_channels_without_anyone_to_work_are_refused(count: int, threads: int | None) -> None:
    with pytest.raises(OffloadError, match=f"with {count} channels of {threads} threads"):
        UpdateWorkers(count, threads)


def test_threads_of_an_update_are_nobody_else_s() -> None:
    here = torch.get_num_threads()
    made, found = UpdateWorkers(threads=here + 2), list[int]()
    for _ in range(2):
        made.submit(nothing, lambda: found.append(torch.get_num_threads()), "w")
    made.close()
    elsewhere = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    elsewhere.start()
    elsewhere.join()
    assert found == [here + 2, here + 2, here]
    assert torch.get_num_threads() == here


def test_a_child_has_none_of_it_and_can_start_its_own(channels: UpdateWorkers) -> None:
    held, seen = threading.Event(), list[str]()
    channels.submit(held.wait, lambda: seen.append("parent"), "w")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            channels.settle()
            channels.submit(nothing, lambda: seen.append("child"), "v")
            channels.settle()
            code = 0 if seen == ["child"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held.set()
    channels.settle()
    assert seen == ["parent"]


EXIT = """
import threading
from offcompile.runtime.states.update_workers import UpdateWorkers
made, began, seen = UpdateWorkers(), threading.Event(), []
def work():
    began.set()
    # ends only once the interpreter is going down
    threading.main_thread().join()
    print("whole")
made.submit(lambda: None, work, "w")
made.submit(lambda: None, lambda: print("never"), "v")
began.wait()
"""


def test_at_exit_what_runs_is_finished_and_the_rest_is_not_begun() -> None:
    done = warm.run([sys.executable, "-c", EXIT])
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["whole"], "")
