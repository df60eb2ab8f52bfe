"""Bounds waits: one without progress ends in an error that names the cause instead of a hang.

A wait goes on as long as a slow disk's calls return, with one warning. It gives up when one and the
same disk call has not returned for the whole limit. If no call is in flight, it gives up when
nothing at all has finished meanwhile. The limit is counted in checks, not by the clock, so that a
process that was stopped, or got no CPU time, is not taken for a hung disk.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from offcompile.ir import OffloadError

from . import interrupts, once

VARIABLE = "OFFCOMPILE_STALL_SECONDS"
DEFAULT_S = 120.0
#: number of checks after which a wait gives up, and after which it warns
LOOKS, WARN_AT = 8, 2
_TOPIC = "stall"


class Stalled(OffloadError):
    """Raised after the limit without progress; names the awaited work and the calls in flight."""


class StallWarning(UserWarning):
    """Warns that a wait takes long, or that work which a close waited for does not end."""


class WatchedCall(NamedTuple):
    """A disk call that has not returned."""

    doing: str
    nbytes: int
    where: str
    thread: str
    began_s: float

    def __str__(self) -> str:
        for_s = time.monotonic() - self.began_s
        return (
            f"{self.doing} {self.nbytes} bytes of the file in {self.where}, for {for_s:.3g} s, on "
            f"the thread {self.thread}"
        )


class _Progress:
    """The disk calls in flight, what has finished so far, and how long a wait may see neither."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        #: in the order in which they began
        self.under_way: dict[int, WatchedCall] = {}
        self.ended = self.moved_bytes = 0
        #: None until the environment was read
        self.limit_s: float | None = None


# per process: a wait asks whether anything at all goes on, whoever does it
_seen = _Progress()


def begun(doing: str, nbytes: int, where: object) -> int:
    """Register a disk call that begins on this thread; returns the number to pass to `over`."""
    number = next(_seen.numbers)
    thread = threading.current_thread().name
    _seen.under_way[number] = WatchedCall(doing, nbytes, str(where), thread, time.monotonic())
    return number


def over(number: int, moved_bytes: int = 0) -> None:
    """Note that the call returned, successfully or not."""
    _seen.under_way.pop(number, None)
    _seen.moved_bytes += moved_bytes
    progress()


def progress() -> None:
    """Note that something finished. Racing threads may lose counts, but never all of them."""
    _seen.ended += 1


def limit_s() -> float | None:
    """Returns the longest time without progress, None for no limit; OffloadError if unparsable."""
    if _seen.limit_s is None:
        _seen.limit_s = _read(os.environ.get(VARIABLE, ""))
    return _seen.limit_s or None


def _read(text: str) -> float:
    try:
        seconds = float(text) if text.strip() else DEFAULT_S
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < threading.TIMEOUT_MAX:
        raise OffloadError(
            f"{VARIABLE} is {text!r}: write after how many seconds without any progress a wait "
            f"gives up ({DEFAULT_S:g} unless set), or 0 to wait for ever"
        )
    return seconds


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Sets the limit inside the block (0: none) and re-enables the warnings. For tests."""
    before, _seen.limit_s = _seen.limit_s, seconds
    try:
        with once.afresh(_TOPIC):
            yield
    finally:
        _seen.limit_s = before


class WatchedWait:
    """One wait for `what()`. The waiting code calls `look` once every `tick_s`.

    disks_only: warn instead of giving up if no disk call is in flight.
    """

    def __init__(self, what: Callable[[], str], disks_only: bool = False) -> None:
        self._what, self._disks_only = what, disks_only
        self._began_s, self._began_bytes = time.monotonic(), _seen.moved_bytes
        self._looks = self._still = 0
        self._seen: tuple[str, int] | None = None

    def look(self) -> None:
        """Warn after some checks without progress; raise Stalled once the limit is reached."""
        self._looks += 1
        call = next(iter(tuple(_seen.under_way)), None)
        seen = ("ended", _seen.ended) if call is None else ("call", call)
        self._still = self._still + 1 if seen == self._seen else 1
        self._seen = seen
        if self._still >= LOOKS and not (call is None and self._disks_only):
            raise Stalled(self._tale("in vain"))
        if self._still == WARN_AT:
            warn_once("still", self._tale("longer than usual"))
        elif self._looks > WARN_AT and self._still < WARN_AT:
            warn_once("slow", self._tale("longer than usual", slow=True))

    def _tale(self, how: str, slow: bool = False) -> str:
        for_s = time.monotonic() - self._began_s
        moved = _seen.moved_bytes - self._began_bytes
        calls = list(_seen.under_way.copy().values())
        if calls:
            doing = f"Under way for longest: {calls[0]}. "
            cause = "Its disk, or the server that it is on, does not answer"
        else:
            doing = "No call to a disk is under way. "
            cause = "A copy or an update before it does not end, or the machine has no time for it"
        if slow:
            rate = f"{moved / for_s / 1e6:.3g} MB/s"
            cause = f"{moved} bytes were moved meanwhile, {rate}: something is slow, but it goes on"
        limit = limit_s()
        return (
            f"{self._what()} is waited for {how}, for {for_s:.3g} s. {doing}{cause}: look at "
            "`dmesg` and at the mount, or name another directory. A wait in which nothing moves "
            f"ends in an error after {VARIABLE} seconds (now {limit or 0:g}; 0: it never does)"
        )


def warn_once(kind: str, text: str) -> None:
    """Warn once per kind and process."""
    if once.first_time(_TOPIC, kind):
        warnings.warn(text, StallWarning, stacklevel=3)


def until(
    condition: threading.Condition, reached: Callable[[], bool], what: Callable[[], str]
) -> None:
    """Wait on `condition`, whose lock the caller holds, until `reached()`; see `WatchedWait`.

    An interrupt ends it with the lock held, as callers expect.
    """
    if not reached():
        _until(condition, reached, what)


@interrupts.uninterrupted
def _until(
    condition: threading.Condition, reached: Callable[[], bool], what: Callable[[], str]
) -> None:
    tick_s, looked_s = _tick_s() or 0.0, time.monotonic()
    wait: WatchedWait | None = None
    while not reached():
        _wait_once(condition.wait, tick_s or None)
        now_s = time.monotonic()
        if not tick_s or now_s - looked_s < tick_s:
            continue
        if reached():
            return
        looked_s = now_s
        wait = wait or WatchedWait(what)
        # a warning may run arbitrary handlers: do not hold the lock meanwhile
        condition.release()
        try:
            wait.look()
        finally:
            condition.acquire()


def until_set(event: threading.Event, what: Callable[[], str]) -> None:
    """Wait for an event for which a device may take any time; give up only on disk calls."""
    if not event.is_set():
        _until_set(event, what)


@interrupts.uninterrupted
def _until_set(event: threading.Event, what: Callable[[], str]) -> None:
    tick_s, looked_s = _tick_s() or 0.0, time.monotonic()
    wait: WatchedWait | None = None
    while not _wait_once(event.wait, tick_s or None):
        if not tick_s or time.monotonic() - looked_s < tick_s:
            continue
        looked_s = time.monotonic()
        wait = wait or WatchedWait(what, disks_only=True)
        wait.look()


def _wait_once(wait: Callable[[float | None], bool], most_s: float | None) -> bool:
    """Wait once, on the main thread not for longer than an interrupt may be put off."""
    interrupts.check()
    if interrupts.deferred():
        most_s = min(most_s or interrupts.POLL_S, interrupts.POLL_S)
    came = wait(most_s)
    interrupts.check()
    return came


def joined(thread: threading.Thread, what: Callable[[], str]) -> bool:
    """Join a thread; warns and returns False if it makes no progress."""
    wait: WatchedWait | None = None
    while True:
        thread.join(_tick_s())
        if not thread.is_alive():
            return True
        try:
            wait = wait or WatchedWait(what)
            wait.look()
        except Stalled as stalled:
            warnings.warn(f"{stalled}. It is left behind.", StallWarning, stacklevel=2)
            return False


@contextmanager
def told() -> Iterator[None]:
    """Starts a watcher thread that warns if a disk call of this thread takes long.

    Use it for calls that nothing but their caller waits for: only the disk can end them.
    """
    tick_s = _tick_s()
    if tick_s is None:
        yield
        return
    me, is_over = threading.current_thread().name, threading.Event()
    watch = partial(_look_after, me, is_over, tick_s * WARN_AT)
    watcher = threading.Thread(target=watch, name="offcompile-watch", daemon=True)
    with suppress(RuntimeError):  # works without the watcher as well
        watcher.start()
    try:
        yield
    finally:
        is_over.set()


def _look_after(thread: str, is_over: threading.Event, most_s: float) -> None:
    while not is_over.wait(most_s):
        for call in _seen.under_way.copy().values():
            if call.thread == thread and time.monotonic() - call.began_s >= most_s:
                warn_once("call", _call_tale(call))


@contextmanager
def calling(doing: str, nbytes: int, where: object) -> Iterator[None]:
    """Registers one disk call for the duration of the block."""
    number = begun(doing, nbytes, where)
    try:
        yield
    finally:
        over(number, nbytes)


def _call_tale(call: WatchedCall) -> str:
    return (
        f"One call takes longer than usual: {call}. The disk, or the server that it is on, does "
        "not answer, and only it can end the call: look at `dmesg` and at the mount"
    )


def _tick_s() -> float | None:
    limit = limit_s()
    return None if limit is None else limit / LOOKS


if hasattr(os, "register_at_fork"):
    # the calls in flight belong to the parent's threads
    os.register_at_fork(after_in_child=_seen.under_way.clear)
