"""Tickets: one-element int64 tensors whose storage owns an object, found by the ticket's number.

Autograd keeps a ticket for as long as it may need the saved tensor, so the death of the storage is
exactly when the slot is no longer needed: after backward, after a dropped loss, after an exception;
not before the second backward of `retain_graph`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from offcompile.ir import OffloadError

Entry = TypeVar("Entry")


class _Watched(np.ndarray[tuple[int], np.dtype[np.generic]]):
    """An array that supports weak references, unlike a plain one."""


def telling(
    array: np.ndarray[tuple[int], np.dtype[np.generic]], died: Callable[[], None]
) -> torch.Tensor:
    """A tensor on the array's memory, keeping it alive; calls `died` when its storage dies.

    `died` runs inside a finalizer, on whichever thread dropped the last reference and possibly
    between any two lines of ours: it must not take a lock. It does not run at interpreter exit.
    """
    owner = array.view(_Watched)
    weakref.finalize(owner, died).atexit = False
    return torch.from_numpy(owner)


class _Issued:
    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.entries: dict[int, object] = {}


# per process: a ticket is a tensor that passes through torch, and carries nothing but its number
_issued = _Issued()


def issue(entry: object, died: Callable[[], None]) -> tuple[int, torch.Tensor]:
    """A new ticket for `entry`, which can be found until `retire`; numbers are never reused."""
    number = next(_issued.numbers)
    ticket = telling(np.array([number], dtype=np.int64), died)
    _issued.entries[number] = entry
    return number, ticket


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
