"""Blocks of a model on the simulated device: they save numbers, and read them back in reverse."""

from __future__ import annotations

import numpy as np
import torch
from simulated import SimulatedDevice

from offcompile.runtime.device import tickets
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.saved import Load, Saved


def fill(value: int) -> object:
    def kernel(*arrays: np.ndarray) -> None:
        arrays[-1][:] = value

    return kernel


def save(
    mover: Mover, device: SimulatedDevice, nbytes: int, value: int, tag: str, kernel: str
) -> torch.Tensor:
    """Compute a tensor full of `value` and let it leave; returns its ticket."""
    x = device.empty(nbytes)
    device.compute(fill(value), (), (x,), kernel)
    ticket = mover.start_out(x, tag, "host", "out")
    mover.wait_out(tickets.find(ticket, Saved))
    return ticket


def read_back(
    mover: Mover, device: SimulatedDevice, mine: list[torch.Tensor], seen: list[int], kernel: str
) -> None:
    """Load what was saved, the last first, and note the values that compute finds."""
    while mine:
        saved = tickets.find(mine[-1], Saved)
        buffer, ticket = mover.start_load(saved, saved.tag, "in")
        mover.wait_load(tickets.find(ticket, Load))
        device.compute(lambda b: seen.append(int(b[0])), (buffer,), (), kernel)
        mine.pop()
        del buffer, ticket, saved
