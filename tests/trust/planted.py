"""Orders taken away from the product, one at a time: the detectors have to see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.interface import Copy, Point, Slot
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.states.state_blocks import StateBlock
from offcompile.runtime.states.state_flow import Flow

_wait, _pin, _unpin = Mover._wait, Flow.pin, Flow.unpin


def _waits_for_loads_only(mover: Mover, copy: Copy, load: bool) -> None:
    if load:
        _wait(mover, copy, load)


def _waits_for_outs_only(mover: Mover, copy: Copy, load: bool) -> None:
    if not load:
        _wait(mover, copy, load)


def _after_nothing(mover: Mover, mark: Point | None, out: Copy | None = None) -> Sequence[Point]:
    return [] if out is None else [out]


def _nobody_uses(device: CudaDevice, slot: Slot) -> Sequence[Point | None]:
    return []


def _nothing_holds(device: CudaDevice, host: torch.Tensor) -> None:
    """Weights are used while they are updated."""


def _nothing_arrives(device: CudaDevice, points: Sequence[Point]) -> None:
    """Gradients are read before they are there."""


def _pinned_and_let_go(flow: Flow, block: StateBlock, write: bool) -> None:
    """A visit begins, and its block may leave at once."""
    _pin(flow, block, write)
    _unpin(flow, block, write)


def _not_unpinned(flow: Flow, block: StateBlock, write: bool) -> None:
    """It was."""


@contextmanager
def _unpinned_early() -> Iterator[None]:
    early = mock.patch.object(Flow, "pin", _pinned_and_let_go)
    with early, mock.patch.object(Flow, "unpin", _not_unpinned):
        yield


def _instead(owner: type, name: str, other: Any) -> Callable[[], AbstractContextManager[Any]]:
    return partial(mock.patch.object, owner, name, other)


#: a wait → a context in which nobody makes it
PLANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "copies out before memory is used again": _instead(Mover, "_wait", _waits_for_loads_only),
    "loads before they are used": _instead(Mover, "_wait", _waits_for_outs_only),
    "compute before copies": _instead(Mover, "_after", _after_nothing),
    "readers before weights are updated": _instead(CudaDevice, "_users", _nobody_uses),
    "updates before weights are used": _instead(CudaDevice, "claim", _nothing_holds),
    "gradients before updates": _instead(CudaDevice, "_reach", _nothing_arrives),
    "visits before blocks leave": _unpinned_early,
}
