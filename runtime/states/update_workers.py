"""Channels: threads that update weights while backward still computes gradients.

They take jobs in turn: while one thread waits for its gradient to arrive, another updates. Updates
run one at a time, in the order of submission, so their results do not depend on timing.
"""

from __future__ import annotations

import atexit
import queue
import threading
import warnings
import weakref
from collections.abc import Callable
from enum import Enum
from functools import partial

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base import posix, watchdog
from offcompile.runtime.base.threads import died, started


class WorkerState(Enum):
    QUEUED = "queued"
    ARRIVING = "arriving"
    UPDATING = "updating"
    DONE = "done"
    FAILED = "failed"
    #: not run, because an earlier job failed or the process was ending
    SKIPPED = "skipped"


_OVER = frozenset({WorkerState.DONE, WorkerState.FAILED, WorkerState.SKIPPED})


class UpdateJob:
    """One update. `error` is set if its arrival or its work failed."""

    __slots__ = ("_arrive", "_line", "_work", "error", "label", "number", "state")

    def __init__(
        self,
        line: _Line,
        arrive: Callable[[], None],
        work: Callable[[], None],
        label: str,
        number: int,
    ) -> None:
        self._line = line
        self._arrive: Callable[[], None] | None = arrive
        self._work: Callable[[], None] | None = work
        self.label = label
        self.number = number
        self.state = WorkerState.QUEUED
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.state in _OVER

    def wait(self) -> None:
        """Block until it is over; OffloadError unless it is done. `settle` reports failures too."""
        self.until_over()
        if self.state is not WorkerState.DONE:
            raise OffloadError(
                f"The update of {self.label} was {self.state.value}: {self.error or _SKIPPED}"
            ) from self.error

    def until_over(self) -> None:
        """Block until it is over, with any outcome."""
        self._line.wait(lambda: self.over)


_SKIPPED = "an update before it had failed, or the process was ending"


class UpdateWorkers:
    """`count` daemon threads that start with the first job and end with their owner.

    threads: torch's intra-op threads in an update. None: as many as elsewhere, which is right if
    the device computes and the processor has nothing else to do; use fewer if the cores are busy.
    Each channel has its own pool, and only one pool works at a time.
    """

    def __init__(self, count: int = 2, threads: int | None = None) -> None:
        if count < 1 or (threads is not None and threads < 1):
            raise OffloadError(f"There is no work with {count} channels of {threads} threads.")
        self._line = _Line(count, threads)
        _lines.add(self._line)
        # `end` takes no lock: garbage collection runs on any thread, between any two lines
        self._ended = weakref.finalize(self, self._line.end)
        self._ended.atexit = False

    def submit(self, arrive: Callable[[], None], work: Callable[[], None], label: str) -> UpdateJob:
        """Queue an update. It keeps the references of its functions until it is over.

        arrive: blocks until the gradient is there; channels run this concurrently.
        work: the update; runs on one channel at a time, in the order of submission, and only if
        every update since the last `settle` has succeeded.
        """
        if not self._ended.alive:
            raise OffloadError(f"The channels are closed: {label} cannot be updated.")
        return self._line.submit(arrive, work, label)

    def settle(self) -> None:
        """Return when all jobs are over; OffloadError reports the first failure, once.

        An interrupt during the wait changes nothing: call it again.
        """
        failed = self._line.settle()
        if failed is not None:
            raise OffloadError(
                f"The update of {failed.label} failed, and those after it were not made: "
                f"{failed.error or type(failed.error).__name__}"
            ) from failed.error

    def close(self) -> None:
        """Finish submitted jobs and end the threads; warns of a failure that was never reported."""
        if not self._ended.alive:
            return
        failed = self._line.settle()
        self._ended()
        self._line.join()
        if failed is not None:
            warnings.warn(f"The update of {failed.label} had failed: {failed.error}", stacklevel=2)


class _Line:
    """The state that the threads share; it does not keep its Channels alive."""

    def __init__(self, count: int, threads: int | None) -> None:
        self.count, self.threads = count, threads
        self._abandoned = False
        self._start_afresh()
        posix.watch(self)

    def _start_afresh(self) -> None:
        self._moved = threading.Condition(threading.Lock())
        # its `put` may be called in a finalizer
        self._queue: queue.SimpleQueue[UpdateJob | None] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._at: set[UpdateJob | None] = set()
        self._submitted = self._over = 0
        self._failed: UpdateJob | None = None

    # -- the submitter's side ----------------------------------------------------------------------

    def submit(self, arrive: Callable[[], None], work: Callable[[], None], label: str) -> UpdateJob:
        with self._moved:
            if not self._workers:
                self._start()  # if that fails, nothing has been queued
            job = UpdateJob(self, arrive, work, label, self._submitted)
            self._submitted += 1
            self._queue.put(job)
        return job

    def _start(self) -> None:
        elsewhere = torch.get_num_threads()
        for number in range(self.count):
            name = f"offcompile-channel-{number}"
            try:
                worker = started(name, self._run, self._queue, elsewhere)
            except OffloadError:
                if not self._workers:
                    raise
                break  # one channel can do all the work
            self._workers.append(worker)

    def wait(self, reached: Callable[[], bool]) -> None:
        if threading.current_thread() in self._workers:
            raise OffloadError("An update cannot wait for updates: it is one of them.")
        with self._moved:
            watchdog.until(self._moved, reached, self._described)

    def _described(self) -> str:
        at = [job for job in tuple(self._at) if job is not None and not job.over]
        left = self._submitted - self._over
        first = min(at, key=lambda job: job.number, default=None)
        named = "" if first is None else f", of which {first.label} is {first.state.value}"
        return f"The end of {left} updates{named},"

    def settle(self) -> UpdateJob | None:
        """The first job that failed since the last call, once all are over."""
        self.wait(lambda: self._over == self._submitted)
        with self._moved:
            failed, self._failed = self._failed, None
        return failed

    def end(self) -> None:
        for _ in range(self.count):
            self._queue.put(None)

    def join(self) -> None:
        for worker in tuple(self._workers):
            if worker is not threading.current_thread():
                watchdog.joined(worker, partial("The end of {}".format, worker.name))

    def abandon(self) -> None:
        """Skip jobs that have not begun; returns when nothing runs."""
        self._abandoned = True
        self.end()
        self.join()

    # -- on a channel ------------------------------------------------------------------------------

    def _run(self, jobs: queue.SimpleQueue[UpdateJob | None], elsewhere: int) -> None:
        if self.threads is not None:
            _compute_with(self.threads, elsewhere)
        job: UpdateJob | None = None
        while True:
            try:
                job = jobs.get()
                if job is None:
                    return
                self._at.add(job)
                self._arrive(job)
                self._update(job)
            except BaseException as error:
                # waiters of the job must hear of any error (mostly a lack of memory)
                if job is not None and not job.over:
                    job.error = died(threading.current_thread().name, error)
                    self._update(job)
            # drop the last job now, not when the next one comes
            self._at.discard(job)
            job = None

    def _skips(self) -> bool:
        return self._failed is not None or self._abandoned

    def _arrive(self, job: UpdateJob) -> None:
        arrive, job._arrive = job._arrive, None
        if self._skips():
            return
        job.state = WorkerState.ARRIVING
        assert arrive is not None
        try:
            arrive()
        except BaseException as error:
            # its turn decides whether it is the first failure
            job.error = error.with_traceback(None)

    def _update(self, job: UpdateJob) -> None:
        work, job._work = job._work, None
        with self._moved:
            while self._over != job.number:
                self._moved.wait()
            skipped = self._skips()
        state = WorkerState.SKIPPED
        if not skipped and job.error is None:
            job.state = WorkerState.UPDATING
            assert work is not None
            try:
                work()
                state = WorkerState.DONE
            except BaseException as error:
                job.error = error.with_traceback(None)
        # outside the lock: it may hold the last reference to a tensor
        work = None
        with self._moved:
            if not skipped and job.error is not None:
                state, self._failed = WorkerState.FAILED, job
            job.state = state
            self._over += 1
            watchdog.progress()
            self._moved.notify_all()

    # -- forks -------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        self._moved.acquire()

    def after_fork(self, in_child: bool) -> None:
        self._moved.release()
        if in_child:
            # queued jobs are left to the parent
            self._start_afresh()


def _compute_with(threads: int, elsewhere: int) -> None:
    """Make torch use this many threads for computations of the calling thread only."""
    # torch reads the default when a thread first asks: let that happen now, not later
    torch.get_num_threads()
    torch.set_num_threads(threads)
    # the number is also the default of new threads: let another thread restore that default
    teller = threading.Thread(target=torch.set_num_threads, args=(elsewhere,))
    teller.start()
    teller.join()


# per process: at its end no thread may write weights any more
_lines: weakref.WeakSet[_Line] = weakref.WeakSet()


def _at_exit() -> None:
    # a thread that writes weights during interpreter shutdown would crash the process
    for line in tuple(_lines):
        line.abandon()


atexit.register(_at_exit)
