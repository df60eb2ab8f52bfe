"""Directories work side by side: each has a thread for what it writes and one for what it reads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

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
        # the thread waits for its next task with this one in hand: it must not hold a tensor
        self.work = None
        self.done.set()


class DiskQueue:
    """Tasks done in order by one daemon thread, which starts with the first and ends at `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: deque[_Task] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._is_open = True

    def add(self, work: Work) -> _Task:
        task = _Task(work)
        with self._changed:
            # closed while a move runs: whoever moves does it by itself
            if self._is_open:
                self._tasks.append(task)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify()
                return task
        task.run()
        return task

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._tasks:
                    if not self._is_open:
                        return
                    self._changed.wait()
                task = self._tasks.popleft()
            task.run()

    def close(self) -> None:
        """Do what is queued and end."""
        with self._changed:
            self._is_open = False
            self._changed.notify()


def side_by_side(works: Sequence[tuple[DiskQueue, Sequence[Work]]]) -> None:
    """Do all of it, the works of a queue in order; returns when nothing runs any more.

    The last one's are done on the calling thread. Raises the first error of them, if there was one.
    """
    if not works:
        return
    *others, (_, own) = works
    tasks = [queue.add(work) for queue, its in others for work in its]
    error: BaseException | None = None
    try:
        for work in own:
            work()
    except BaseException as raised:
        error = raised
    for task in tasks:
        task.done.wait()
        error = error or task.error
    if error is not None:
        raise error
