"""Accounts for what compiled graphs of one process share, whichever models they belong to.

A refusal is counted among it because it may hold memory. A notebook keeps the last error, and with
it the frames that it passed through. One of them is the call of the refused model, whose memory
would then be missing for the next model.
"""

from __future__ import annotations

import copy
import itertools
import traceback
import weakref

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.interpreter import Garbage

from .usage import DeviceUsage


class ProcessAccounts:
    """The device memory in use, garbage and refusals that may hold some, and names of graphs."""

    def __init__(self) -> None:
        self.garbage = Garbage()
        #: all models on one device share its memory
        self.usages: dict[torch.device, DeviceUsage] = {}
        #: these outlive the graphs that they were raised for
        self._refusals: weakref.WeakSet[OffloadError] = weakref.WeakSet()
        self._numbers = itertools.count()

    def usage_of(self, device: torch.device) -> DeviceUsage:
        """The usage of one device by this process."""
        return self.usages.setdefault(device, DeviceUsage())

    def next_name(self) -> str:
        """The name of a new graph in logs and reports."""
        return f"graph {next(self._numbers)}"

    def raised(self, error: OffloadError) -> OffloadError:
        """Return a copy of the error to raise. Dynamo keeps the original as long as the model's
        code lives, so the original must not get a traceback."""
        one = copy.copy(error)
        self._refusals.add(one)
        return one

    def collect(self) -> None:
        """Collect all garbage, models of refusals included."""
        self._cut_tracebacks()
        self.garbage.collect()

    def _cut_tracebacks(self) -> None:
        """Cut the tracebacks of refusals that are still alive down to their first frame. Clearing
        the frames is not enough: a frame keeps its function, which may be bound to the model."""
        for error in tuple(self._refusals):
            where = error.__traceback__
            traceback.clear_frames(where)
            if where is not None:
                where.tb_next = None


# per process, as Dynamo's compiled graphs are: each comes to the backend by itself
process = ProcessAccounts()
