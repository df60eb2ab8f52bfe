"""A tensor that left the device, and the part of its mover that a keeper drives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offcompile.runtime.device.interface import Copy, Device, Slot


class KeptCounts(Protocol):
    """See the counters `keeper_*`."""

    hits: int
    misses: int
    late: int
    wasted_bytes: int


class Moving(Protocol):
    """Begins copies and hears of their end; `Mover` is the one."""

    @property
    def device(self) -> Device: ...
    def begin_out(
        self, saved: Saved, x: torch.Tensor, ended: Callable[[Copy], None], /
    ) -> Copy: ...
    def begin_in(
        self, saved: Saved, buffer: torch.Tensor, lane: str, ended: Callable[[Copy], None], /
    ) -> Copy: ...
    def saved_on_host(self, host: torch.Tensor, slot: Slot, tag: str, lane: str, /) -> Saved: ...
    def copy_cancelled(self, saved: Saved, /) -> None: ...
    def count_kept(self, counted: KeptCounts, /) -> None: ...
    def died(self, tell: Callable[[], None], /) -> None: ...
    def sweep(self) -> None: ...
    def wait_out(self, saved: Saved, /) -> None: ...
    def start_load(
        self, saved: Saved, tag: str, lane: str, /
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(eq=False)
class Saved:
    """A tensor that left. Its slot is freed when nothing uses it: ticket, out copy, loads."""

    mover: Moving
    tag: str
    lane: str
    slot: Slot
    users: int = 1  # the ticket; then the copy out, and loads
    number: int = 0
    ticket_alive: bool = True
    awaited: bool = False  # compute may be queued behind the copy: it can no longer be cancelled
    copy: Copy | None = None
    #: on host memory that ops can use in place: that memory, as a flat uint8 tensor
    host: torch.Tensor | None = None
    #: size and stride in which it left
    layout: tuple[Sequence[int], Sequence[int]] | None = None

    def stride_of(self, size: Sequence[int], traced: Sequence[int]) -> Sequence[int]:
        """The stride in which its bytes lie: an op may have laid its result out otherwise than its
        traced form (convolutions on channels that lie last)."""
        if self.layout is None or tuple(self.layout[0]) != tuple(size):
            return traced
        return self.layout[1]

    @property
    def written(self) -> bool:
        """Whether the slot holds it, or will once the copy has ended."""
        return self.copy is not None and self.copy.error is None
