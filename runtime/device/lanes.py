"""Lanes: queues of jobs, each processed in order by one thread that never ends.

Guaranteed orders: a job runs after the jobs that it `needs` (if the first job of a lane may not
start yet, the lane waits for it; nothing overtakes by itself); apart from that, jobs of a lane run
as submitted. `hurry` changes the second order, never the first: it brings a job and everything it
needs to the front of their lanes. That cannot deadlock: there is always one order of all unfinished
jobs in which each job comes after those it needs, and every queue is a subsequence of that order
(initially the order of submission; hurrying puts a job and everything it needs, in that order,
before all the rest).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from offcompile.ir import OffloadError
from offcompile.runtime.base import watchdog
from offcompile.runtime.base.counters import note, now_ns
from offcompile.runtime.base.threads import bare, died, started

from .interface import Copy, How, Label, Waited
from .move_events import HeardCopy


class LaneState(Enum):
    QUEUED = 0
    RUNNING = 1
    ENDED = 2


class Needed(OffloadError):
    """A job was not run because one that it needs had failed."""


class LaneJob(Copy):
    """One job of a lane. `keep` is kept alive until the job ends or is cancelled."""

    __slots__ = (
        *("awaited", "error", "keep", "label", "lane", "needs", "on_end"),
        *("seq", "state", "work"),
    )

    def __init__(
        self,
        lane: LaneWorker,
        seq: int,
        work: Callable[[], None],
        needs: Sequence[LaneJob],
        label: Label,
        on_end: Callable[[Copy], None] | None,
        keep: object,
    ) -> None:
        self.lane = lane
        self.seq = seq
        self.work: Callable[[], None] | None = work
        self.needs = tuple(needs)
        self.label = label
        self.on_end = on_end
        self.keep = keep
        #: True if a thread sleeps until it has ended
        self.awaited = False
        self.state = LaneState.QUEUED
        self.error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self.state is LaneState.ENDED


class LaneWorker:
    """A queue and the condition that its thread sleeps on. A strict lane is never reordered."""

    def __init__(self, name: str, lock: threading.Lock, strict: bool) -> None:
        self.name = name
        self.strict = strict
        self.queue: deque[LaneJob] = deque()
        self.wake = threading.Condition(lock)
        self.thread: threading.Thread | None = None
        #: the job that its thread runs or is about to run
        self.at: LaneJob | None = None

    def ready(self) -> bool:
        return bool(self.queue) and all(need.ended for need in self.queue[0].needs)


class Lanes:
    """All lanes of one device. Threads are daemons and start with the first job of their lane.

    `before` runs on a lane's thread, with no lock held, before it takes a job, so that copies of
    tensors that have died can still be cancelled. `delay_s` gives a pause before each job
    (simulation).
    """

    def __init__(
        self,
        owner: str,
        before: Callable[[], None] | None = None,
        delay_s: Callable[[], float] | None = None,
    ) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._lanes: dict[str, LaneWorker] = {}
        self._seq = 0
        self._unfinished = 0
        self._closed = False
        self._delay_s = delay_s
        self.before = before

    def submit(
        self,
        lane: str,
        work: Callable[[], None],
        needs: Sequence[LaneJob],
        label: Label,
        on_end: Callable[[Copy], None] | None = None,
        keep: object = None,
        strict: bool = False,
    ) -> LaneJob:
        with self._lock:
            if self._closed:
                raise OffloadError(f"The {self._owner} runtime is closed: {label.tag} cannot move.")
            line = self._lanes.get(lane)
            if line is None:
                line = self._lanes[lane] = LaneWorker(lane, self._lock, strict)
            if line.thread is None:
                self._start(line)  # if that fails, nothing has been queued
            self._seq += 1
            job = LaneJob(line, self._seq, work, needs, label, on_end, keep)
            line.queue.append(job)
            self._unfinished += 1
            if line.queue[0] is job:
                line.wake.notify()
        return job

    def _start(self, lane: LaneWorker) -> None:
        lane.thread = started(f"offcompile-{lane.name}", self._run, lane)

    def wait(self, job: LaneJob) -> Waited:
        """Block until `job` has ended, hurrying it if it is queued. Errors stay on the job."""
        if job.state is LaneState.ENDED:
            return Waited(How.READY, 0)
        began_ns = now_ns()
        with self._lock:
            how = How.PROMOTED if job.state is LaneState.QUEUED else How.LATE
            if job.state is LaneState.QUEUED:
                self._hurry(job)
            job.awaited = True
            watchdog.until(self._ended, lambda: job.ended, lambda: _described(job))
        return Waited(how, now_ns() - began_ns)

    def hurry(self, job: LaneJob) -> bool:
        """Bring a queued job, and those it needs, to the front; False if it is not queued."""
        with self._lock:
            if job.state is not LaneState.QUEUED:
                return False
            self._hurry(job)
            return True

    def _hurry(self, job: LaneJob) -> None:
        wanted: dict[int, LaneJob] = {}
        stack = [job]
        while stack:
            one = stack.pop()
            if one.state is LaneState.QUEUED and one.seq not in wanted:
                wanted[one.seq] = one
                stack.extend(one.needs)
        for seq in sorted(wanted, reverse=True):
            one = wanted[seq]
            if not one.lane.strict and one.lane.queue[0] is not one:
                one.lane.queue.remove(one)
                one.lane.queue.appendleft(one)
            one.lane.wake.notify()

    def cancel(self, job: LaneJob) -> bool:
        """Remove a queued job and drop its references; `on_end` is not called for it."""
        with self._lock:
            if job.state is not LaneState.QUEUED:
                return False
            job.lane.queue.remove(job)
            job.error = OffloadError(f"The copy of {job.label.tag} was cancelled.")
            # dropped below, outside the lock: it may be the last reference to a tensor
            dropped = (job.work, job.keep)
            job.work = job.on_end = job.keep = None
            self._end(job)
        del dropped
        return True

    def drain(self) -> None:
        with self._lock:
            owner = f"The end of all copies of the {self._owner} runtime"
            watchdog.until(self._ended, lambda: not self._unfinished, lambda: owner)

    def close(self) -> bool:
        """Cancel queued jobs, let running ones finish, and end the threads.

        Returns False if some threads did not end and were left behind (`watchdog.joined`).
        """
        with self._lock:
            self._closed = True
            queued = [job for lane in self._lanes.values() for job in lane.queue]
        for job in queued:
            self.cancel(job)
        with self._lock:
            lanes = [(lane.name, lane.thread) for lane in self._lanes.values() if lane.thread]
            for lane in self._lanes.values():
                lane.wake.notify_all()
        ended = [
            watchdog.joined(thread, partial("The end of lane {}".format, name))
            for name, thread in lanes
            if thread is not threading.current_thread()
        ]
        return all(ended)

    # -- the lane's own thread -----------------------------------------------------------------

    def _run(self, lane: LaneWorker) -> None:
        try:
            self._work_off(lane)
        except BaseException as error:
            self._died(lane, error)

    def _died(self, lane: LaneWorker, error: BaseException) -> None:
        """Fail the job that the thread ran, or was about to run, and start another thread."""
        with self._lock:
            job, lane.at = lane.at, None
            if job is not None and job.state is LaneState.QUEUED:
                lane.queue.remove(job)
                job.state = LaneState.RUNNING  # callers that wait from now on have nothing to hurry
        try:
            if job is not None and not job.ended:
                job.error = died(f"offcompile-{lane.name}", error)
                self._over(job)
        finally:
            with self._lock:
                lane.thread = None
                if lane.queue:
                    self._start(lane)

    def _work_off(self, lane: LaneWorker) -> None:
        while True:
            with self._lock:
                while not lane.ready():
                    if self._closed and not lane.queue:
                        return
                    lane.wake.wait()
                lane.at = lane.queue[0]
            if self.before is not None:
                self.before()
            if self._delay_s is not None:
                time.sleep(self._delay_s())
            with self._lock:
                if not lane.ready():
                    lane.at = None
                    continue
                job = lane.queue.popleft()
                job.state = LaneState.RUNNING
                lane.at = job
            self._work(job)
            # drop the last job now, not when the next one comes
            del job

    def _work(self, job: LaneJob) -> None:
        label, lane = job.label, job.lane.name
        began_ns = now_ns()
        note(f"begin_{label.direction}", label.tag, lane, began_ns)
        failed = next((need for need in job.needs if need.error is not None), None)
        if failed is not None:
            job.error = Needed(f"{failed.label.tag}: {failed.error}")
            job.error.__cause__ = failed.error
        else:
            try:
                assert job.work is not None
                job.work()
            except BaseException as error:
                job.error = bare(error)
        ended_ns = now_ns()
        note(f"end_{label.direction}", label.tag, lane, ended_ns, ended_ns - began_ns)
        if label.heard is not None and job.error is None:
            label.heard.copies.append(HeardCopy(label.tag, lane, began_ns, ended_ns))
        self._over(job)

    def _over(self, job: LaneJob) -> None:
        on_end, job.on_end = job.on_end, None
        job.work = job.keep = None
        try:
            if on_end is not None:
                on_end(job)
        except BaseException as error:
            job.error = job.error or died(f"offcompile-{job.lane.name}", error)
            raise
        finally:
            with self._lock:
                job.lane.at = None
                self._end(job)

    def _end(self, job: LaneJob) -> None:
        job.needs = ()
        job.state = LaneState.ENDED
        self._unfinished -= 1
        watchdog.progress()
        # a needless wake-up takes time from the start of the next job
        if job.awaited or not self._unfinished:
            self._ended.notify_all()
        for lane in self._lanes.values():
            if lane.ready():
                lane.wake.notify()


def _described(job: LaneJob) -> str:
    """A description for the waiting caller: the tensor, the direction and the state of the copy."""
    nbytes, ahead = getattr(job.keep, "nbytes", None), job.lane.at
    way = "copy out" if job.label.direction == "out" else "load"
    size = "" if nbytes is None else f" ({nbytes} bytes)"
    behind = "" if ahead is None or ahead is job else f", behind {ahead.label.tag}"
    stands = f"{job.state.name.lower()} on lane {job.lane.name}{behind}"
    return f"The {way} of {job.label.tag}{size}, {stands},"
