"""Threads of which one runs at a time, and a seed that says which: one order, again and again.

Inside of `Interleaving.running()` the runtime's modules find this file's locks, conditions, events,
queues and threads in place of Python's. At each of them the next thread is drawn from the seed. A
timeout may strike at any time: it is a choice like the others. Where nobody can go on, the run is
`Stuck`, and says who waits for what.

Vector clocks of what threads know by these orders find accesses (`touch`) that none connects.
"""

from __future__ import annotations

import _thread
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

#: how likely a timeout strikes where somebody could go on
_TIMEOUT_LIKELIHOOD = 0.02
Clock = dict[int, int]


class Stuck(Exception):
    """No thread can go on."""


@dataclass(eq=False)
class Task:
    """One thread. `ready` None: it can go on."""

    number: int
    name: str
    gate: Any = field(default_factory=_thread.allocate_lock)
    ready: Callable[[], bool] | None = None
    waits_for: str = ""
    timeout_s: float | None = None
    #: only where nobody can go on
    timeout_is_last: bool = False
    timed_out: bool = False
    clock: Clock = field(default_factory=dict)
    thread: object = None

    def can_go_on(self) -> bool:
        return self.ready is None or self.ready()


@dataclass(frozen=True)
class _Touch:
    start: int
    stop: int
    task: int
    epoch: int
    writes: bool
    what: str


class Interleaving:
    """`log` tells what was done in which order; `races` what no order connects."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(f"interleaving {seed}")
        self._restless = self._dice.choice((0.03, 0.2, 0.6))
        self.log: list[str] = []
        self.races: list[str] = []
        self.crashed: list[str] = []
        self.now_s = 0.0
        #: raises where a thread that starts now is not to
        self.before_start: Callable[[], None] = _nothing
        self._touched: list[_Touch] = []
        self._numbers = 0
        self.tasks: list[Task] = []
        self.main = self.current = self._task("main")
        self.main.gate.acquire()
        self.main.thread = self.main
        self.is_on = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """The runtime's modules use these threads; at the end all of them must have ended."""
        changed = [
            (module, name, getattr(module, name))
            for module in _runtime_modules()
            for name in ("threading", "queue", "time")
            if getattr(module, name, None) in (threading, queue, time)
        ]
        stand_ins = {"threading": self._threading(), "queue": self._queue(), "time": self._time()}
        for module, name, _ in changed:
            setattr(module, name, stand_ins[name])
        self.is_on = True
        try:
            yield
            self.block(lambda: len(self.tasks) == 1, "the others to end")
        finally:
            self.is_on = False
            for module, name, real in changed:
                setattr(module, name, real)

    # -- whose turn it is ------------------------------------------------------------------------

    def point(self, what: str = "") -> None:
        """Here another thread may go first."""
        if self.is_on and self._dice.random() < self._restless:
            self._pass_on(what)

    def block(
        self,
        ready: Callable[[], bool],
        waits_for: str,
        timeout_s: float | None = None,
        timeout_is_last: bool = False,
    ) -> bool:
        """Let others go on until `ready`; False: the time was over before."""
        if not self.is_on:
            return ready()
        me = self.current
        me.ready, me.waits_for = ready, waits_for
        me.timeout_s, me.timeout_is_last, me.timed_out = timeout_s, timeout_is_last, False
        if not ready():
            self._pass_on(waits_for)
        me.ready, me.timeout_s = None, None
        return not me.timed_out

    def _pass_on(self, what: str) -> None:
        me, chosen = self.current, self._choose()
        self.log.append(f"{me.name}: {what} → {chosen.name}")
        if chosen is not me:
            self.current = chosen
            chosen.gate.release()
            me.gate.acquire()
        if me is self.main and not me.can_go_on() and not me.timed_out:
            waiting = "; ".join(f"{t.name} waits for {t.waits_for}" for t in self.tasks)
            self.is_on = False
            raise Stuck(f"nobody can go on: {waiting}")

    def _choose(self) -> Task:
        able = [task for task in self.tasks if task.can_go_on()]
        timed = [task for task in self.tasks if task.timeout_s is not None and task not in able]
        early = [task for task in timed if not task.timeout_is_last]
        if able and not (early and self._dice.random() < _TIMEOUT_LIKELIHOOD):
            return self._dice.choice(able)
        if not timed:
            return self.main  # which says that it is stuck
        chosen = self._dice.choice(early or timed)
        chosen.timed_out = True
        self.now_s += chosen.timeout_s or 0.0
        return chosen

    def _task(self, name: str) -> Task:
        task = Task(self._numbers, name)
        task.clock = {self._numbers: 1}
        self._numbers += 1
        self.tasks.append(task)
        return task

    def start(self, name: str, work: Callable[[], None], thread: object) -> Task:
        self.before_start()
        task = self._task(name)
        task.thread = thread
        self.learn(task.clock, self.current.clock)
        self.current.clock[self.current.number] += 1
        task.gate.acquire()

        def run() -> None:
            task.gate.acquire()
            try:
                work()
            except BaseException as error:
                self.crashed.append(f"{name}: {error!r}")
            self.tasks.remove(task)
            chosen = self._choose()
            self.log.append(f"{name} ends → {chosen.name}")
            self.current = chosen
            chosen.gate.release()

        _thread.start_new_thread(run, ())
        self.point(f"start {name}")
        return task

    # -- what is known ---------------------------------------------------------------------------

    @staticmethod
    def learn(clock: Clock, other: Clock) -> None:
        for number, epoch in other.items():
            if clock.get(number, 0) < epoch:
                clock[number] = epoch

    def tell(self, clock: Clock) -> None:
        """Put what the thread knows now into `clock`, for whoever learns from it."""
        self.learn(clock, self.current.clock)
        self.current.clock[self.current.number] += 1

    def touch(self, start: int, nbytes: int, writes: bool, what: str) -> None:
        """The thread reads or writes memory."""
        if not self.is_on:
            return
        me, stop = self.current, start + nbytes
        kept = []
        for before in self._touched:
            if before.stop <= start or stop <= before.start:
                kept.append(before)
                continue
            known = me.clock.get(before.task, 0) >= before.epoch
            if not known and (writes or before.writes):
                self.races.append(f"{before.what} and {what}")
            covered = start <= before.start and before.stop <= stop
            if not (known and covered and (writes or not before.writes)):
                kept.append(before)
        epoch = me.clock[me.number]
        kept.append(_Touch(start, stop, me.number, epoch, writes, what))
        self._touched = kept

    # -- what the runtime finds ------------------------------------------------------------------

    def _threading(self) -> Any:
        return SimpleNamespace(
            Lock=lambda: Lock(self),
            RLock=lambda: Lock(self, again=True),
            Condition=lambda lock=None: Condition(self, lock),
            Event=lambda: Event(self),
            Thread=lambda **given: Thread(self, **given),
            local=threading.local,
            TIMEOUT_MAX=threading.TIMEOUT_MAX,
            excepthook=threading.excepthook,
            ExceptHookArgs=threading.ExceptHookArgs,
            current_thread=lambda: self.current.thread,
            main_thread=lambda: self.main.thread,
            get_ident=lambda: self.current.number,
        )

    def _queue(self) -> Any:
        return SimpleNamespace(SimpleQueue=lambda: SimpleQueue(self))

    def _time(self) -> Any:
        real = {name: getattr(time, name) for name in ("perf_counter_ns", "perf_counter")}
        return SimpleNamespace(monotonic=lambda: self.now_s, **real)


class Lock:
    """Stands in for `threading.Lock`, and for `RLock` with `again`."""

    def __init__(self, run: Interleaving, again: bool = False) -> None:
        self._run, self._again = run, again
        self.owner: Task | None = None
        self.depth = 0
        self._clock: Clock = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        run = self._run
        if not (self._again and self.owner is run.current):
            run.point("lock")
            if self.owner is not None:
                most_s = timeout if timeout >= 0 else None
                if not blocking or not run.block(
                    lambda: self.owner is None, "a lock", most_s, True
                ):
                    return False
            self.owner = run.current
            run.learn(run.current.clock, self._clock)
        self.depth += 1
        return True

    def _is_free(self) -> bool:
        return self.owner is None

    def release(self) -> None:
        self.depth -= 1
        if not self.depth:
            self.owner = None
            self._run.tell(self._clock)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(eq=False)
class _Told:
    yet: bool = False


class Condition:
    """Stands in for `threading.Condition`."""

    def __init__(self, run: Interleaving, lock: Lock | None) -> None:
        self._run = run
        self._lock = Lock(run, again=True) if lock is None else lock
        self._waiting: deque[_Told] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        lock, told = self._lock, _Told()
        self._waiting.append(told)
        depth, lock.depth = lock.depth, 1
        lock.release()
        try:
            in_time = self._run.block(lambda: told.yet, "news", timeout)
        finally:
            if told in self._waiting:
                self._waiting.remove(told)
            lock.acquire()
            lock.depth = depth
        return in_time

    def notify(self, count: int = 1) -> None:
        for _ in range(min(count, len(self._waiting))):
            self._waiting.popleft().yet = True

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """Stands in for `threading.Event`."""

    def __init__(self, run: Interleaving) -> None:
        self._run = run
        self._is_set = False
        self._clock: Clock = {}

    def is_set(self) -> bool:
        if self._is_set:
            self._run.learn(self._run.current.clock, self._clock)
        return self._is_set

    def set(self) -> None:
        self._run.tell(self._clock)
        self._is_set = True
        self._run.point("set")

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._run.point("event")
        self._run.block(lambda: self._is_set, "an event", timeout)
        return self.is_set()


class SimpleQueue:
    """Stands in for `queue.SimpleQueue`; `put` goes on at once, also in a finalizer."""

    def __init__(self, run: Interleaving) -> None:
        self._run = run
        self._items: deque[tuple[Any, Clock]] = deque()

    def put(self, item: Any) -> None:
        clock: Clock = {}
        self._run.tell(clock)
        self._items.append((item, clock))

    def get(self) -> Any:
        self._run.point("queue")
        self._run.block(lambda: bool(self._items), "a queue")
        item, clock = self._items.popleft()
        self._run.learn(self._run.current.clock, clock)
        return item


class Thread:
    """Stands in for `threading.Thread`."""

    def __init__(
        self,
        run: Interleaving,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "thread",
        daemon: bool = False,
    ) -> None:
        self._run, self._target, self._args = run, target, args
        self.name, self.daemon = name, daemon
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._run.start(self.name, self._work, self)

    def _work(self) -> None:
        target, args = self._target, self._args
        del self._target, self._args
        target(*args)

    def is_alive(self) -> bool:
        # threads that stood still when the run was over are of no more interest
        return self._run.is_on and self._task is not None and self._task in self._run.tasks

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        if task is None:
            raise RuntimeError("cannot join thread before it is started")
        if self._run.block(lambda: task not in self._run.tasks, f"{self.name} to end", timeout):
            self._run.learn(self._run.current.clock, task.clock)


def _runtime_modules() -> list[Any]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(("offcompile.runtime.", "simulated")) and module is not None
    ]


def _nothing() -> None:
    """All threads start."""
