"""Threads that take work from what others share with them, and queues of tasks on such threads.

A thread that cannot start, or that dies, is an error for those who wait for its work.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from offcompile.ir import OffloadError

from . import watchdog

#: a thread for intermittent work ends by itself after this time without any
LINGER_S = 0.2

Result = TypeVar("Result")
Item = TypeVar("Item")
Work = Callable[[], None]


def started(name: str, run: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=run, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OffloadError(
            f"the thread {name} cannot be started ({error}): raise what bounds this process "
            "(ulimit -u, ulimit -d, ulimit -s)"
        ) from error
    return thread


def apart(run: Callable[[], Result]) -> Result:
    """Run on a thread of its own, free of the caller's modes: fake tensors, default device."""
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(run).result()


def died(name: str, error: BaseException) -> OffloadError:
    """Returns the error for callers that wait for the work of a thread that died."""
    # `error` is not set as the cause: code that reports failures reports only the cause
    return OffloadError(
        f"the thread {name} died of {type(error).__name__} ({error}); another takes its place for "
        "what comes. Unless the process was out of memory this is a defect: please report it"
    )


def bare(error: BaseException) -> BaseException:
    """Strip the tracebacks from the error: their frames would keep tensors alive."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error


class Worker(Generic[Item]):
    """A daemon thread, alive while needed, that takes items with the lock and works without it.

    `take` is called with the condition's lock held, whenever something changed, and returns the
    next item or None; `work` must not raise. If either raises anyway, the thread ends, `failed` is
    called with the lock held, and the next `wake` starts another thread.
    linger_s: the thread ends after this time without an item; None: only after `end`.
    finishes: after `end` it still takes the items that there are.
    """

    def __init__(
        self,
        name: str,
        changed: threading.Condition,
        take: Callable[[], Item | None],
        work: Callable[[Item], None],
        failed: Callable[[Item | None, OffloadError], None],
        linger_s: float | None = LINGER_S,
        finishes: bool = False,
    ) -> None:
        self._name, self._changed = name, changed
        self._take, self._work, self._failed = take, work, failed
        self._linger_s, self._finishes = linger_s, finishes
        self.thread: threading.Thread | None = None
        self.is_open = True

    def wake(self) -> None:
        """Note that there may be an item to take; call it with the lock held."""
        if self.thread is None and self.is_open:
            self.thread = started(self._name, self._run)
        self._changed.notify_all()

    def end(self) -> None:
        """Make the thread end after its current item; needs no lock, and takes none."""
        self.is_open = False

    def is_this_thread(self) -> bool:
        return self.thread is threading.current_thread()

    def join(self) -> bool:
        """Wait, without the lock, until the thread has ended. False if it was left behind."""
        with self._changed:
            thread = self.thread
            self._changed.notify_all()
        return thread is None or watchdog.joined(thread, lambda: f"The end of {self._name}")

    def _run(self) -> None:
        item: Item | None = None
        try:
            while True:
                with self._changed:
                    item = self._next()
                    if item is None:
                        self.thread = None
                        return
                self._work(item)
                item = None  # otherwise the last item would be held until the next one comes
        except BaseException as error:
            with self._changed:
                self.thread = None
                self._failed(item, died(self._name, error))
                self._changed.notify_all()

    def _next(self) -> Item | None:
        until = None if self._linger_s is None else time.monotonic() + self._linger_s
        while self.is_open or self._finishes:
            item = self._take()
            left_s = None if until is None else until - time.monotonic()
            over = not self.is_open or (left_s is not None and left_s <= 0)
            if item is not None or over:
                return item
            self._changed.wait(left_s)
        return None


class QueuedTask:
    """Work that was queued. `error` is set, if it failed, once it is over."""

    __slots__ = ("_over", "awaited", "error", "work")

    def __init__(self, work: Work, awaited: bool = True) -> None:
        self.work: Work | None = work
        self.awaited = awaited
        # an event takes longer to make than all the rest
        self._over = threading.Event() if awaited else None
        self.error: BaseException | None = None

    def run(self) -> None:
        assert self.work is not None
        try:
            self.work()
        except BaseException as error:
            self.error = error
            if not self.awaited:
                here = threading.current_thread()
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), here)))
        # the thread may keep this task until the next comes: the task must not hold a tensor
        self._end()

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self._end()

    def _end(self) -> None:
        self.work = None
        if self._over is not None:
            self._over.set()

    def wait(self, most_s: float | None = None) -> bool:
        """Wait until it is over; False: it takes longer. The task must be `awaited`."""
        assert self._over is not None, "nobody was to wait for this task"
        return self._over.wait(most_s)

    def result(self) -> None:
        """Return when it is over; raises its error."""
        self.wait()
        if self.error is not None:
            raise self.error


class TaskQueue:
    """Runs tasks in order on one daemon thread, which starts with the first and ends at `close`."""

    def __init__(self, name: str) -> None:
        self._tasks: deque[QueuedTask] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._worker = Worker(
            *(name, self._changed, self._next, lambda task: task.run(), self._died),
            linger_s=None,
            finishes=True,
        )

    def start(self) -> None:
        """Start the thread now, so that no later `add` fails for want of one."""
        if self._worker.thread is None:
            with self._changed:
                self._worker.wake()

    def add(self, work: Work, awaited: bool = True) -> QueuedTask:
        """Queue a task. Unless it is `awaited`, its error is shown like any uncaught one."""
        task = QueuedTask(work, awaited)
        with self._changed:
            # closed while a move runs: run the task on the caller's thread
            if self._worker.is_open:
                self._worker.wake()  # nothing is queued if that fails
                self._tasks.append(task)
                return task
        task.run()
        return task

    def _next(self) -> QueuedTask | None:
        return self._tasks.popleft() if self._tasks else None

    def _died(self, task: QueuedTask | None, error: OffloadError) -> None:
        left = [one for one in (task, *self._tasks) if one is not None]
        self._tasks.clear()
        for one in left:
            one.fail(error)

    def close(self) -> None:
        """Let the thread finish the queued tasks and end."""
        with self._changed:
            self._worker.end()
            self._changed.notify_all()

    def join(self) -> None:
        """Return when the closed queue's thread has ended, unless this is that thread."""
        thread = self._worker.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def side_by_side(works: Sequence[tuple[TaskQueue, Sequence[Work]]]) -> None:
    """Run all works, those of each queue in order; returns when none runs any more.

    Those of the last queue run on the calling thread. Raises the first error, if there was one.
    """
    if not works:
        return
    *others, (_, own) = works
    tasks: list[QueuedTask] = []
    error: BaseException | None = None
    try:
        for queue, its in others:
            for work in its:
                tasks.append(queue.add(work))  # if one fails, those queued before are still awaited
        for work in own:
            work()
    except BaseException as raised:
        error = raised
    for task in tasks:
        task.wait()
        error = error or task.error
    if error is not None:
        raise error
