"""Computes answers in processes beside this one, so that a second core helps.

A forked process knows all that is known so far, and sends its answer back. The answer is that of
this process: if the other one fails, stands still or may not be started, it is computed here.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

#: a process that neither computes nor answers for so long is given up
STILL_SECONDS = 20
LOOKS_PER_SECOND = 2
CHUNK_BYTES = 1 << 20
#: from <linux/prctl.h>
PR_SET_PDEATHSIG = 1
#: positions of the processor time in /proc/PID/stat, behind the name
TIMES = slice(11, 13)


def only_here(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Tell in this process only: after a fork, others would wait for locks of its threads."""
    owner = os.getpid()

    def told(text: str) -> None:
        if os.getpid() == owner:
            tell(text)

    return told


def may_start() -> bool:
    """True if a process can be forked, and there is a core for it."""
    if sys.platform != "linux":
        return False
    on_card = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return len(os.sched_getaffinity(0)) > 1 and not on_card  # CUDA outlives no fork


class Beside(Generic[T]):
    """The answer of `work`, which begins at once in a process beside this one if it can, and
    otherwise when the answer is asked for."""

    def __init__(
        self, work: Callable[[], T], begins: bool, after: Beside[Any] | None = None
    ) -> None:
        """begins: False to wait until the answer is asked for. Callers that do not know all threads
        of this process must: a forked one would wait for ever for locks that these hold.
        after: an answer that the work waits for."""
        self._work = work
        self._known: list[T] = []
        self._process: tuple[int, int] | None = None
        if begins and may_start():
            with suppress(OSError):
                self._process = _started(work)
        #: the processes that work for this answer
        self._pids: tuple[int, ...] = () if after is None else after._pids
        if self._process is not None:
            self._pids = (self._process[0], *self._pids)
            weakref.finalize(self, _ended, *self._process, os.getpid())

    @property
    def begun(self) -> bool:
        """True if a process works on the answer, or has given it."""
        return self._process is not None or bool(self._known)

    def result(self) -> T:
        if not self._known:
            process, self._process = self._process, None
            sent = b"" if process is None else _received(process[1], self._pids)
            try:
                self._known.append(pickle.loads(sent))
            except Exception:  # cut off, or it does not say what this process would
                self._known.append(self._work())
        return self._known[0]


def _started(work: Callable[[], object]) -> tuple[int, int]:
    """Start a process that writes the answer to a pipe; returns its id and the pipe's end."""
    ours, theirs = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        raise
    if pid:
        os.close(theirs)
        return pid, ours
    status = 1
    try:
        os.close(ours)
        _keep_quiet()
        with os.fdopen(theirs, "wb") as pipe:
            pipe.write(pickle.dumps(work()))
        status = 0
    finally:
        os._exit(status)  # without what this process would do at its end


def _keep_quiet() -> None:
    """Print nothing, end with the process that waits, and leave it the first claim on the cores."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    os.nice(10)
    torch.set_num_threads(1)  # other threads are not there after a fork


def _received(pipe: int, pids: Sequence[int]) -> bytes:
    """Return all that the first process sends until it ends, or until all of them stand still."""
    found, still, busy = bytearray(), 0, [*map(_processor_time, pids)]
    while still < STILL_SECONDS * LOOKS_PER_SECOND:
        readable, _, _ = select.select([pipe], [], [], 1 / LOOKS_PER_SECOND)
        if readable:
            sent = os.read(pipe, CHUNK_BYTES)
            if not sent:
                return bytes(found)
            found += sent
        now = [*map(_processor_time, pids)]
        still = 0 if readable or now != busy else still + 1
        busy = now
    return b""


def _processor_time(pid: int) -> object:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[TIMES]


def _ended(pid: int, pipe: int, owner: int) -> None:
    """Stop the process, if it still runs, and forget it. Only who started it may do so."""
    if os.getpid() != owner:
        return
    with suppress(OSError):
        os.close(pipe)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
