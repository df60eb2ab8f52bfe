"""Names the rank whose end made a collective fail.

A process that ends closes its connections, and gloo then fails on the ranks beside it with the
address of a socket. So each rank writes into the store of the group who it is, and at its end why:
the error that nobody caught, or that its program is over. The others look there when a collective
has failed, and at the processes of their own machine. A rank that goes on without taking part is
not absent: it is noticed by the timeout of the group alone.
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
from typing import Any

from offcompile.ir import OffloadError
from offcompile.runtime.base.once import first_time

#: how long a rank looks for the one that is gone, after a collective has failed
LONGEST_S = 10.0
_LOOK_S = 0.1
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

    def failed(self, error: Exception, lost: str = "Gradients cannot be reduced") -> OffloadError:
        """Explain a collective that has failed with this error. lost: what cannot be done."""
        until = time.monotonic() + LONGEST_S
        while True:
            found = next(self.absent(), None)
            if found is not None:
                return OffloadError(f"{found}. {lost} without it")
            if time.monotonic() > until:
                some = ", ".join(str(r) for r in self.members if r != self.rank)
                return OffloadError(
                    f"{lost} with rank {some}, of which none is known to have ended: {error}"
                )
            time.sleep(_LOOK_S)

    def absent(self) -> Iterator[str]:
        """Name the other members that have ended, a sentence each."""
        for rank in self.members:
            if rank == self.rank:
                continue
            try:
                if self.store.check([f"{_KEY}/{rank}/left"]):
                    why = self.store.get(f"{_KEY}/{rank}/left").decode()
                    yield f"Rank {rank} has ended: {why}"
                elif self.store.check([f"{_KEY}/{rank}/who"]):
                    who = json.loads(self.store.get(f"{_KEY}/{rank}/who"))
                    if who["host"] == _host() and not _lives(who["pid"]):
                        yield f"Rank {rank} (process {who['pid']} of this machine) has died"
            except RuntimeError as error:
                yield f"The rank that keeps the store of the group, usually 0, has ended ({error})"


def _leave(ranks: Ranks, pid: int) -> None:
    if os.getpid() != pid:  # a forked child
        return
    error = getattr(sys, "last_value", None)
    why = "its program is over" if error is None else f"{type(error).__name__}: {error}"
    with suppress(RuntimeError):  # the store may be gone, and with it all who could read
        ranks.store.set(f"{_KEY}/{ranks.rank}/left", why[:1000])


def _host() -> str:
    # containers may have one name on two machines
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()}"
    return socket.gethostname()


def _lives(pid: int) -> bool:
    """True if there is such a process; one that has ended and was not waited for is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
    except OSError:
        return True
