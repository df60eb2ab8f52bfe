"""Runs of compiled graphs, one after the other under one budget: what room each leaves to others.

Where several graphs, or one with several sets of weights, share a budget, the runtime's keeper
holds what they leave for backward as long as there is room (`runtime.keeping`), by what it has
learnt of their order (`passes.correlation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from offcompile.ir import BACKWARD, FORWARD
from offcompile.ir.units import show_bytes
from offcompile.passes.correlation.predictor import Predictor
from offcompile.report.log import first_time, warn
from offcompile.runtime.base.weak import WeakTensor
from offcompile.runtime.device import tickets
from offcompile.runtime.moves.keeping import ActivationCache
from offcompile.runtime.moves.registry import RuntimeSettings, runtime_for, runtimes
from offcompile.runtime.moves.saved import Saved

from .books import UNBOUND, DeviceUsage, GraphUsage, ParameterSet

#: of the room beside a run, what the keeper has at least, however much holes may take
KEEPER_SHARE = 3 / 8


@dataclass(frozen=True)
class Room:
    """What one run may have of the device: its plan's peak, and what it leaves to the keeper."""

    peak_bytes: int
    kept_limit_bytes: int
    #: of that, what the keeper holds at the beginning
    held_bytes: int
    #: of what forward was called with
    sizes: tuple[int, ...] = ()


@dataclass(eq=False)
class GraphRuns:
    """Those of one captured graph."""

    name: str
    #: None: as little as can be, whatever others hold
    budget_bytes: int | None
    books: DeviceUsage
    entry: GraphUsage
    settings: RuntimeSettings
    #: of the budget, what the keeper had better leave to holes between tensors
    holes_bytes: int = 0
    #: of the call that runs, with the sizes of what it was given
    binding: ParameterSet = UNBOUND
    sizes: tuple[int, ...] = ()
    #: those of them on the host that the graph may fetch; None: it changes some
    weights: Sequence[WeakTensor] | None = ()

    def call(self, binding: ParameterSet, sizes: tuple[int, ...]) -> None:
        """Forward is about to run."""
        self.binding, self.sizes = binding, sizes

    @contextmanager
    def running(
        self,
        phase: str,
        arguments: Sequence[Any],
        peak_at: Callable[[tuple[int, ...]], int],
        lends: bool,
        turns: bool,
        moves: bool,
        holds_saved: bool,
    ) -> Iterator[Room | None]:
        """Around a run of one half; None: it is alone under its budget.

        peak_at: what the plan takes at most, for given sizes. lends: see `ActivationCache.enter`.
        turns: what it keeps for backward may leave. moves: so may anything. holds_saved: its plan
        counts all that forward saved from where backward begins, wherever it is.
        """
        keepers = self._keepers()
        mine = keepers.pop(self.settings.key, None)
        binding, sizes = self.binding, self.sizes
        if phase == BACKWARD:
            binding, sizes = self.forward_of(arguments)
            self.books.begins(self.entry, binding)
        if self.budget_bytes is None:
            yield None
            return
        shares = self.entry.in_turn or turns
        keeper = mine
        if keeper is None and shares and moves:
            mover = runtime_for(self.settings.key).mover
            keeper = mover.keeper = ActivationCache(mover, Predictor())
        others = [k for k in keepers.values() if k.held_bytes]
        held_bytes = 0 if keeper is None else keeper.held_bytes
        if not (others or held_bytes or (shares and keeper is not None)):
            yield None
            return
        peak_bytes = peak_at(sizes)
        beside_bytes = self.books.held_beside(self.entry, binding).now
        if phase == BACKWARD:  # what its own forward left is in its plan
            beside_bytes -= self.entry.left_by(binding)
        limit = self.budget_bytes - beside_bytes - peak_bytes
        if limit < 0 and first_time(f"{self.name} is over its budget"):
            warn(
                f"{self.name}: the plan of its {phase} and what others hold come to"
                f" {show_bytes(-limit)} more than the budget of {show_bytes(self.budget_bytes)}."
                f" Set memory to {show_bytes(self.budget_bytes - limit)} to be safe."
            )
        limit = _share(max(0, limit), others)
        if keeper is None:
            yield None
            return
        weights = None
        if self.weights is not None:
            weights = [w for ref in self.weights if (w := ref()) is not None]
        execution = self.name, phase, binding, sizes
        own = 0
        if holds_saved and phase == BACKWARD:
            own = keeper.bytes_of((self.name, FORWARD, binding, sizes))
        kept = max(limit - self.holes_bytes, int(limit * KEEPER_SHARE))
        keeper.enter(execution, kept + own, lends, weights, phase == BACKWARD)
        try:
            yield Room(peak_bytes, limit, keeper.held_bytes, sizes)
        finally:
            keeper.leave()

    def _keepers(self) -> dict[str, ActivationCache]:
        """Those of all runtimes that move tensors of this device, by key."""
        mine = (r for r in runtimes() if r.settings.target == self.settings.target)
        return {r.settings.key: r.mover.keeper for r in mine if r.mover.keeper is not None}

    def forward_of(self, arguments: Sequence[Any]) -> tuple[ParameterSet, tuple[int, ...]]:
        """That which saved what backward gets: with which parameters, and which sizes."""
        keeper = self._keepers().get(self.settings.key)
        if keeper is not None:
            for x in arguments:
                saved = tickets.peek(x, Saved) if isinstance(x, torch.Tensor) else None
                execution = None if saved is None else keeper.execution_of(saved)
                if isinstance(execution, tuple):
                    return execution[2], execution[3]
        newest = self.entry.waiting()[-1:]
        return newest[0].binding if newest else self.binding, self.sizes


def _share(limit_bytes: int, others: Sequence[ActivationCache]) -> int:
    """What a graph's own keeper may hold beside others of the device: half is theirs at most."""
    for other in others:
        other.bound(limit_bytes // 2)
        limit_bytes -= other.held_bytes
    return max(0, limit_bytes)


def kept_between(settings: RuntimeSettings) -> str | None:
    """How what a runtime keeps between graphs has served, in words; None: it keeps nothing."""
    open_now = (r.mover for r in runtimes() if r.settings.key == settings.key)
    mover = next((m for m in open_now if m.keeper is not None), None)
    if mover is None or mover.keeper is None:
        return None
    t = mover.tally
    asked = t.keeper_hits + t.keeper_late + t.keeper_misses
    if not asked:
        return None
    return (
        f"of {asked} tensors asked for, {t.keeper_hits} were there, {t.keeper_late} on their way,"
        f" {t.keeper_misses} missed; {show_bytes(t.keeper_wasted_bytes)} fetched in vain,"
        f" tables of {show_bytes(mover.keeper.foresight.table_bytes)}"
    )
