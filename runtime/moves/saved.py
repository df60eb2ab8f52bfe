"""The things that tickets stand for, and the interface of the mover that they and a keeper use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offcompile.ir import OffloadError
from offcompile.passes.correlation.predictor import Counters
from offcompile.runtime.device.interface import Copy, Device, Slot


class Moving(Protocol):
    """Starts copies and is told when they end; implemented by `Mover`."""

    @property
    def device(self) -> Device: ...
    @property
    def waited_us(self) -> float: ...
    def begin_out(
        self, saved: Saved, x: torch.Tensor, ended: Callable[[Copy], None], /
    ) -> Copy: ...
    def begin_in(
        self, saved: Saved, buffer: torch.Tensor, lane: str, ended: Callable[[Copy], None], /
    ) -> Copy: ...
    def saved_on_host(self, host: torch.Tensor, slot: Slot, tag: str, lane: str, /) -> Saved: ...
    def copy_cancelled(self, saved: Saved, /) -> None: ...
    def count_kept(self, counted: Counters, /) -> None: ...
    def died(self, tell: Callable[[], None], /) -> None: ...
    def sweep(self) -> None: ...
    def wait_out(self, saved: Saved, /) -> None: ...
    def start_load(
        self, saved: Saved, tag: str, lane: str, /
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def wait_load(self, load: Load, /) -> None: ...


@dataclass(eq=False)
class Saved:
    """A tensor that was copied out. The last user (ticket, copy out, loads) frees its slot."""

    mover: Moving
    tag: str
    lane: str
    slot: Slot
    users: int = 1  # the ticket; later also the copy out, and loads
    number: int = 0
    ticket_alive: bool = True
    awaited: bool = False  # compute may be queued behind the copy, so it can no longer be cancelled
    copy: Copy | None = None
    #: the host memory, as a flat uint8 tensor, if ops can use it in place
    host: torch.Tensor | None = None
    #: size and stride of the tensor that was copied out
    layout: tuple[Sequence[int], Sequence[int]] | None = None

    def stride_of(self, size: Sequence[int], traced: Sequence[int]) -> Sequence[int]:
        """The stride in which its bytes are stored.

        It differs from the traced stride if an op chose another layout (channels-last
        convolutions).
        """
        if self.layout is None or tuple(self.layout[0]) != tuple(size):
            return traced
        return self.layout[1]

    @property
    def written(self) -> bool:
        """True if the slot holds the data, or will once the copy has ended."""
        return self.copy is not None and self.copy.error is None


@dataclass(eq=False)
class Load:
    """A reload into a buffer of its own."""

    mover: Moving
    tag: str
    lane: str
    saved: Saved
    number: int = 0
    awaited: bool = False
    #: None if the data was already there
    copy: Copy | None = None
    #: True if the keeper owns the buffer and the copy
    kept: bool = False


def check_dense(x: torch.Tensor, tag: str) -> None:
    """Raise OffloadError unless the tensor fills its memory, and so can be copied out whole."""
    if x.is_contiguous():
        return
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    if x.numel() and last + 1 != x.numel():
        raise OffloadError(
            f"{tag} cannot move: a tensor of size {tuple(x.shape)} and stride {x.stride()} does "
            "not fill its memory. Move the storage, as one dense tensor, and rebuild the view."
        )
