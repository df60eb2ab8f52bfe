"""Keeps the tickets of one mover, and releases what each stood for after it has died.

A ticket dies in a finalizer, which may run between any two lines and must not take a lock. So the
finalizer only queues the death, and `sweep` handles it at the next op, copy or counter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch

from offcompile.runtime.base import interrupts
from offcompile.runtime.device import tickets


class Numbered(Protocol):
    """The thing that a ticket stands for."""

    number: int


Entry = TypeVar("Entry", bound=Numbered)


class LiveTickets:
    """The tickets that are alive; its length is their number."""

    def __init__(self) -> None:
        #: number → what its death calls
        self._live: dict[int, Callable[[], None]] = {}
        self._deaths: deque[Callable[[], None]] = deque()
        #: queue a call for the next sweep. For finalizers: takes no lock, and is no Python code
        self.died: Callable[[Callable[[], None]], None] = self._deaths.append
        self._is_closed = self._sweeps = False

    def __len__(self) -> int:
        return len(self._live)

    def issue(self, entry: Entry, died: Callable[[Entry], None]) -> torch.Tensor:
        """A new ticket for `entry`; a sweep after its death calls `died(entry)`."""
        told = partial(died, entry)
        note = self._died_late if self._is_closed else self.died
        entry.number, ticket = tickets.issue(entry, partial(note, told))
        self._live[entry.number] = told
        return ticket

    def retire(self, entry: Numbered) -> None:
        """Forget a ticket that has died."""
        tickets.retire(entry.number)
        self._live.pop(entry.number, None)

    def sweep(self) -> None:
        """Handle every death since the last sweep."""
        if not self._deaths:
            return
        if self._is_closed and self._sweeps:
            return  # a finalizer interrupted the sweep below, which goes on until all is done
        self._sweeps = True
        try:
            self._sweep()
        finally:
            self._sweeps = False

    @interrupts.uninterrupted
    def _sweep(self) -> None:
        while self._deaths:
            try:
                died = self._deaths.popleft()
            except IndexError:  # another thread was faster
                return
            died()
            del died  # objects that it held may die with it and be queued next

    def close(self) -> None:
        """Handle each later death as it happens: no sweep comes any more."""
        self._is_closed = True
        for number, told in tuple(self._live.items()):
            tickets.tell_instead(number, partial(self._died_late, told))
        self.sweep()

    def _died_late(self, told: Callable[[], None]) -> None:
        self._deaths.append(told)
        self.sweep()
