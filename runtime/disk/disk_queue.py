"""Runs the I/O of several directories in parallel; each has a writer and a reader thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from offcompile.runtime.base.threads import died, started

Work = Callable[[], None]


class _Task:
    __slots__ = ("done", "error", "work")

    def __init__(self, work: Work) -> None:
        self.work: Work | None = work
        self.done = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        assert self.work is not None
        try:
            self.work()
        except BaseException as error:
            self.error = error
        # the thread keeps this task while it waits for the next: the task must not hold a tensor
        self.work = None
        self.done.set()

    def fail(self, error: BaseException) -> None:
        self.work = None
        self.error = self.error or error
        self.done.set()


class DiskQueue:
    """Runs tasks in order on one daemon thread, which starts with the first and ends at `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: deque[_Task] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._at: _Task | None = None
        self._is_open = True

    def add(self, work: Work) -> _Task:
        task = _Task(work)
        with self._changed:
            # closed while a move runs: run the task on the caller's thread
            if self._is_open:
                if self._thread is None:
                    self._start()  # nothing is queued if that fails
                self._tasks.append(task)
                self._changed.notify()
                return task
        task.run()
        return task

    def _start(self) -> None:
        self._thread = started(self._name, self._run)

    def _run(self) -> None:
        try:
            self._work_off()
        except BaseException as error:
            with self._changed:
                self._thread = None
                left = [task for task in (self._at, *self._tasks) if task is not None]
                self._tasks.clear()
                self._at = None
            for task in left:
                task.fail(died(self._name, error))

    def _work_off(self) -> None:
        while True:
            with self._changed:
                while not self._tasks:
                    if not self._is_open:
                        return
                    self._changed.wait()
                task = self._at = self._tasks.popleft()
            task.run()
            self._at = None

    def close(self) -> None:
        """Let the thread finish the queued tasks and end."""
        with self._changed:
            self._is_open = False
            self._changed.notify()


def side_by_side(works: Sequence[tuple[DiskQueue, Sequence[Work]]]) -> None:
    """Run all works, those of each queue in order; returns when none runs any more.

    Those of the last queue run on the calling thread. Raises the first error, if there was one.
    """
    if not works:
        return
    *others, (_, own) = works
    tasks: list[_Task] = []
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
        task.done.wait()
        error = error or task.error
    if error is not None:
        raise error
