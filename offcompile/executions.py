"""Runs of compiled graphs, one after the other under one budget: what room each leaves to others.

Where several graphs, or one with several sets of weights, share a budget, the runtime's keeper
holds what they leave for backward as long as there is room (`runtime.keeping`), by what it has
learnt of their order (`passes.correlation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from offcompile.passes.correlation.predictor import Predictor
from offcompile.runtime import tickets
from offcompile.runtime.keeping import Keeper
from offcompile.runtime.mover import Mover, Saved

from .books import Books, Entry
from .graphs import BACKWARD

#: the parameters that a graph was called with, by id
Binding = tuple[int, ...]


@dataclass(frozen=True)
class Room:
    """What one run may have of the device: its plan's peak, and what it leaves to the keeper."""

    peak_bytes: int
    kept_limit_bytes: int
    #: of that, what the keeper holds at the beginning
    held_bytes: int


@dataclass(eq=False)
class Executions:
    """Those of one captured graph."""

    name: str
    budget_bytes: int
    books: Books
    entry: Entry
    mover: Callable[[], Mover]
    #: of the call that runs, and what its plan needs
    binding: Binding = ()
    _peaks: dict[Binding, int] = field(default_factory=dict)

    def call(self, binding: Binding, peak_bytes: int) -> None:
        """Forward is about to run."""
        self.binding = binding
        self._peaks[binding] = peak_bytes

    @contextmanager
    def running(
        self, phase: str, arguments: Sequence[Any], peak_bytes: int, lends: bool
    ) -> Iterator[Room | None]:
        """Around a run of one half; None: it is alone under its budget."""
        if not self.books.several():
            yield None
            return
        mover = self.mover()
        if mover.keeper is None:
            mover.keeper = Keeper(mover, Predictor())
        keeper, binding = mover.keeper, self.binding
        if phase == BACKWARD:
            binding = self._binding_of(keeper, arguments)
        held = self.books.held_beside(self.entry, set(binding))
        limit = max(0, self.budget_bytes - held - peak_bytes)
        keeper.enter((self.name, phase, binding), limit, lends)
        try:
            yield Room(peak_bytes, limit, keeper.held_bytes)
        finally:
            keeper.leave()

    def _binding_of(self, keeper: Keeper, arguments: Sequence[Any]) -> Binding:
        """That of the forward which saved what backward gets."""
        for x in arguments:
            saved = tickets.peek(x, Saved) if isinstance(x, torch.Tensor) else None
            execution = None if saved is None else keeper.execution_of(saved)
            if isinstance(execution, tuple):
                binding: Binding = execution[2]
                return binding
        return ()
