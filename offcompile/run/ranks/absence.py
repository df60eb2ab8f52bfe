"""Names the rank whose end made a collective fail.

A process that ends closes its connections, and gloo then fails on the ranks beside it with the
address of a socket. So each rank writes into the store of the group who it is, and at its end why:
the error that nobody caught, or that its program is over. The others look there when a collective
has failed, at the processes of their own machine, and, for a rank that has written nothing yet, at
the connection to it. A rank that has ended because it missed another one says so, and is named only
if no other is gone. A rank that goes on without taking part is not absent: it is noticed by the
timeout of the group alone.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.once import first_time

from .connections import is_closed
from .torch_state import default_store

#: how long a rank looks for the one that is gone, after a collective has failed
LONGEST_S = 10.0
_LOOK_S = 0.1
#: a rank that waits for keys looks so often if the others are still there
_WAIT_S = 2.0
_LONGEST_TEXT = 1000
_KEY = "offcompile/ranks"


@dataclass(frozen=True)
class Ranks:
    """The ranks that meet in collectives, as this one sees them."""

    store: Any
    rank: int
    members: Sequence[int]

    def arrive(self) -> None:
        """Say who this rank is, and from now on why it ends."""
        who = {"host": _host(), "pid": os.getpid()}
        self.store.set(f"{_KEY}/{self.rank}/who", json.dumps(who))
        if first_time("a rank says why it ends", os.getpid()):
            atexit.register(_leave, self, os.getpid())

    def wait(self, keys: Sequence[str], longest_s: float) -> str | None:
        """Return when the keys are in the store, or it is too late; name a rank that has ended."""
        until = time.monotonic() + longest_s
        while True:
            left_s = until - time.monotonic()
            try:
                self.store.wait(list(keys), timedelta(seconds=max(0.001, min(_WAIT_S, left_s))))
            except RuntimeError:  # torch's error of a wait that took too long
                if self.store.check(list(keys)):
                    return None
                ended = next(self.absent(), None)
                if ended is not None or left_s <= _WAIT_S:
                    return ended
            else:
                return None

    def failed(self, error: Exception, lost: str = "Gradients cannot be reduced") -> OffloadError:
        """Explain a collective that has failed with this error. lost: what cannot be done."""
        return self.error(self._explained(error, lost))

    def error(self, text: str) -> OffloadError:
        """Make an error about another rank, and let those who miss this rank next know of it."""
        with suppress(RuntimeError):  # the store may be gone, too
            self.store.set(f"{_KEY}/{self.rank}/raised", text[:_LONGEST_TEXT])
        return OffloadError(text)

    def _explained(self, error: Exception, lost: str) -> str:
        until = time.monotonic() + LONGEST_S
        while True:
            found = next(self.absent(), None)
            if found is not None:
                return f"{found}. {lost} without it"
            if time.monotonic() > until:
                some = ", ".join(str(r) for r in self.members if r != self.rank)
                return f"{lost} with rank {some}, of which none is known to have ended: {error}"
            time.sleep(_LOOK_S)

    def absent(self) -> Iterator[str]:
        """Name the other members that have ended, a sentence each: first those that did not end
        because they missed another one."""
        followed = []
        for rank in self.members:
            if rank == self.rank:
                continue
            try:
                ended = self._ended(rank)
                if ended is None:
                    continue
                if self.store.check([f"{_KEY}/{rank}/raised"]):
                    raised = self.store.get(f"{_KEY}/{rank}/raised").decode()
                    followed.append(f"Rank {rank} has ended, after it had raised: {raised}")
                else:
                    yield ended
            except RuntimeError as error:
                yield f"The rank that keeps the store of the group, usually 0, has ended ({error})"
        yield from followed

    def _ended(self, rank: int) -> str | None:
        """Say how another rank has ended; None if it has not, or that is not known."""
        if self.store.check([f"{_KEY}/{rank}/left"]):
            return f"Rank {rank} has ended: {self.store.get(f'{_KEY}/{rank}/left').decode()}"
        if self.store.check([f"{_KEY}/{rank}/who"]):
            who = json.loads(self.store.get(f"{_KEY}/{rank}/who"))
            if who["host"] == _host() and not lives(who["pid"]):
                return f"Rank {rank} (process {who['pid']} of this machine) has died"
        elif is_closed(rank):
            return f"Rank {rank} has ended before it ran anything of offcompile"
        return None


def announce() -> None:
    """Say who this rank is, if it is one of several: others notice its end even before it has run a
    graph."""
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return
    store, world = default_store(), distributed.get_world_size()
    if store is not None and world > 1:
        Ranks(store, distributed.get_rank(), range(world)).arrive()


def _leave(ranks: Ranks, pid: int) -> None:
    if os.getpid() != pid:  # a forked child
        return
    error = getattr(sys, "last_value", None)
    why = "its program is over" if error is None else f"{type(error).__name__}: {error}"
    with suppress(RuntimeError):  # the store may be gone, and with it all who could read
        ranks.store.set(f"{_KEY}/{ranks.rank}/left", why[:_LONGEST_TEXT])


def _host() -> str:
    # containers may have one name on two machines
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()}"
    return socket.gethostname()


def lives(pid: int) -> bool:
    """True if there is such a process; one that has ended and was not waited for is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
    except OSError:
        return True
