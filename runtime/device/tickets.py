"""Tickets: one-element int64 tensors whose storage owns an object, found by the ticket's number.

Autograd keeps a ticket for as long as it may need the saved tensor, so the death of the storage is
exactly when the slot is no longer needed: after backward, after a dropped loss, after an exception;
not before the second backward of `retain_graph`.
"""

from __future__ import annotations

import atexit
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

import numpy as np
import torch

from offcompile.ir import OffloadError

Entry = TypeVar("Entry")


class _Watched(np.ndarray[tuple[int], np.dtype[np.generic]]):
    """An array that supports weak references, unlike a plain one."""


class _Death(weakref.ref[_Watched]):
    """Calls `tell` when the array dies. It lives until then because it is `watched`.

    An interrupt that Python raises in a finalizer is ignored, and the rest of the finalizer is not
    run. So nothing of this is written in Python, and neither should `tell` be, if it can be helped.
    """

    __slots__ = ("held", "tell")
    tell: Callable[[], object]
    held: _Death
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _Issued:
    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.entries: dict[int, object] = {}
        self.deaths: dict[int, _Death] = {}
        #: keeps every `_Death` alive until its array dies
        self.watched: set[_Death] = set()


# per process: a ticket is a tensor that passes through torch, and carries nothing but its number
_issued = _Issued()
# at the end of the process nobody wants to hear of deaths
atexit.register(_issued.watched.clear)
_tell: Any = methodcaller("tell")


def telling(
    array: np.ndarray[tuple[int], np.dtype[np.generic]], died: Callable[[], object]
) -> torch.Tensor:
    """A tensor on the array's memory, keeping it alive; calls `died` when its storage dies.

    `died` runs inside a finalizer, on whichever thread dropped the last reference and possibly
    between any two lines of ours: it must not take a lock. It does not run at interpreter exit.
    """
    return _telling(array, died)[0]


def _telling(
    array: np.ndarray[tuple[int], np.dtype[np.generic]], died: Callable[[], object]
) -> tuple[torch.Tensor, _Death]:
    owner = array.view(_Watched)
    death = _Death(owner, _tell)
    death.tell = died
    held = _Death(owner, _issued.watched.discard)
    held.held = death
    _issued.watched.add(held)
    return torch.from_numpy(owner), death


def issue(entry: object, died: Callable[[], object]) -> tuple[int, torch.Tensor]:
    """A new ticket for `entry`, which can be found until `retire`; numbers are never reused."""
    number = next(_issued.numbers)
    ticket, death = _telling(np.array([number], dtype=np.int64), died)
    _issued.entries[number], _issued.deaths[number] = entry, death
    return number, ticket


def tell_instead(number: int, died: Callable[[], object]) -> None:
    """Call another `died` for a ticket that is alive."""
    _issued.deaths[number].tell = died


def issue_owned(entry: object) -> torch.Tensor:
    """A new ticket that retires itself when its storage dies."""
    number = next(_issued.numbers)
    _issued.entries[number] = entry
    return telling(np.array([number], dtype=np.int64), partial(retire, number))


def fake_ticket() -> torch.Tensor:
    """The form of a ticket, for tracing."""
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def retire(number: int) -> None:
    """Forget a ticket whose storage has died."""
    _issued.entries.pop(number, None)
    _issued.deaths.pop(number, None)


def find(ticket: torch.Tensor, kind: type[Entry]) -> Entry:
    """The ticket's entry; OffloadError if the ticket is not ours or is of another kind."""
    number = int(ticket.item())
    entry = _issued.entries.get(number)
    if not isinstance(entry, kind):
        found = "nothing" if entry is None else f"a {type(entry).__name__}"
        raise OffloadError(
            f"Ticket {number} stands for {found}, not for a {kind.__name__}. Tickets live as long "
            "as their storage, in the process that made them: copies, saved files and other "
            "processes do not have what they stand for."
        )
    return entry


def peek(tensor: torch.Tensor, kind: type[Entry]) -> Entry | None:
    """The entry if the tensor is a ticket of that kind, else None; accepts any tensor."""
    if tensor.dtype != torch.int64 or tensor.shape != (1,) or tensor.device.type != "cpu":
        return None
    entry = _issued.entries.get(int(tensor.item()))
    return entry if isinstance(entry, kind) else None
