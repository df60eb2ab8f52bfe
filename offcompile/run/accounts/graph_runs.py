"""Runs compiled graphs one after the other under one budget, and bounds what the keeper may hold.

If several graphs, or one with several sets of weights, share a budget, the runtime's keeper holds
their saved activations while there is room (`runtime.keeping`), guided by their learnt order
(`passes.correlation`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from offcompile.ir import BACKWARD, FORWARD, Machine
from offcompile.ir.units import show_bytes
from offcompile.passes.correlation.backwards import KnownBackwards
from offcompile.passes.correlation.predictor import Predictor
from offcompile.planning.footprint import Footprint
from offcompile.report.log import first_time, warn
from offcompile.runtime.base.counters import now_ns
from offcompile.runtime.base.weak import WeakTensor
from offcompile.runtime.device import tickets
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.moves.activation_cache import ActivationCache
from offcompile.runtime.moves.registry import RuntimeSettings, runtime_for, runtimes
from offcompile.runtime.moves.saved import Saved

from .hole_reserve import HoleReserve
from .step_plan import AFTER, Ran, StepPlanner, graph_runs
from .usage import DeviceUsage, GraphUsage, ParameterSet

#: a gap between executions is one itself for the keeper if the program takes this share of the
#: budget meanwhile
WORTH_PAUSE = 1 / 64
NS_PER_US = 1000
#: least share for the keeper of the room beside a run, however much is reserved for holes
KEEPER_SHARE = 3 / 8


@dataclass(frozen=True)
class Room:
    """Device memory of one run: the peak of its plan, and the room that it leaves to the keeper."""

    peak_bytes: int
    kept_limit_bytes: int
    #: the part of it that the keeper holds at the beginning, or that stays free
    held_bytes: int
    #: bytes of the peak that are there at the beginning: the tensors that forward has left for
    #: backward
    left_bytes: int = 0
    #: values of the symbols in the arguments of forward
    sizes: tuple[int, ...] = ()
    #: True if steps repeat themselves, as far as is known
    repeats: bool = True


@dataclass(eq=False)
class GraphRuns:
    """The executions of one captured graph."""

    name: str
    #: None: as little as possible, whatever others hold
    budget_bytes: int | None
    usage: DeviceUsage
    entry: GraphUsage
    settings: RuntimeSettings
    #: the bytes that the keeper leaves to holes between tensors
    reserve: HoleReserve
    #: the machine with so much device memory, for plans of whole steps
    machine_for: Callable[[int], Machine]
    #: binding and sizes of the call that runs; no parameters before the first
    binding: ParameterSet = field(default_factory=lambda: ParameterSet(()))
    sizes: tuple[int, ...] = ()
    #: its weights on the host that the graph may fetch; None: it changes some
    weights: Sequence[WeakTensor] | None = ()
    #: by how much a run of the newest plan was over the budget
    over_bytes: int = 0
    #: True if the plan of the last call leaves their room to graphs that run before its backward
    encloses: bool = False

    def exceeded(self, over_bytes: int) -> None:
        """Note that a run took so much more than the budget."""
        self.over_bytes = max(self.over_bytes, over_bytes)

    def may_keep_bytes(self) -> int | None:
        """The most that forward may leave for backward beside the graphs that have run between the
        two, not counting weights and inputs. None: there are none, or no budget."""
        budget, entry = self.budget_bytes, self.entry
        if budget is None or not entry.in_turn or self.encloses:
            return None
        return max(0, entry.most_kept_bytes + budget - entry.most_wanted_bytes)

    def call(self, binding: ParameterSet, sizes: tuple[int, ...]) -> None:
        """Note that forward is about to run."""
        self.binding, self.sizes = binding, sizes

    @contextmanager
    def running(
        self,
        phase: str,
        arguments: Sequence[Any],
        needs_at: Callable[[tuple[int, ...]], Footprint],
        no_buffer_reuse: bool,
        offload_saved: bool,
        moves: bool,
        counts_saved: Collection[str],
    ) -> Iterator[Room | None]:
        """Wrap a run of one half. Yields None if the graph is alone under its budget.

        needs_at: the plan's memory for given sizes. no_buffer_reuse: the graph does not write
        to tensors that the keeper may hold. offload_saved: saved activations may leave. moves: any
        tensor may leave. counts_saved: halves whose plan includes, at its peak, everything that
        forward has saved, wherever it is.
        """
        binding, sizes = self.binding, self.sizes
        if phase == BACKWARD:
            binding, sizes = self.forward_of(arguments)
            self.usage.begins(self.entry, binding)
        if self.budget_bytes is None:
            yield None
            return
        outside, waiting = self.usage.outside, self.usage.waiting_forwards()
        outside.ends(in_step=waiting > 0)
        self._note_amid(phase, binding, sizes, needs_at(sizes))
        execution = self.name, phase, binding, sizes
        shares = (self.entry.in_turn and not self.encloses) or offload_saved
        keeper = self._keeper(make=shares and moves)
        with self._beside(
            execution, needs_at(sizes), keeper, shares, no_buffer_reuse, counts_saved
        ) as room:
            yield room
        # a backward still waits until it is over
        if phase == FORWARD or (phase == BACKWARD and waiting > 1):
            outside.begins(binding.gap_peaks, (phase, sizes), runtime_for(self.settings.key).device)
            if room is not None and keeper is not None:
                self._leave_room_outside(execution, needs_at(sizes), room, keeper)

    def _note_amid(
        self, phase: str, binding: ParameterSet, sizes: tuple[int, ...], needs: Footprint
    ) -> None:
        """Note for forwards that wait how much this run takes; and if it is the backward of one,
        how much others took before."""
        own = self.entry.newest(binding) if phase == BACKWARD else None
        self.usage.outside.holds(needs.peak_bytes - needs.standing_bytes, own)
        if own is not None:
            binding.gap_peaks.note_amid(sizes, own.amid_bytes)

    def _keeper(self, make: bool) -> ActivationCache | None:
        """The keeper of the graph's runtime; `make`: it gets one if it has none."""
        keeper = self._keepers().get(self.settings.key)
        if keeper is None and make:
            mover = runtime_for(self.settings.key).mover
            planner = StepPlanner(self.machine_for)
            keeper = ActivationCache(mover, Predictor(KnownBackwards(_backward_of)), planner)
            keeper.steps.settled = planner.save_less
            mover.keeper = keeper
        return keeper

    @contextmanager
    def _beside(
        self,
        execution: Ran,
        needs: Footprint,
        keeper: ActivationCache | None,
        shares: bool,
        no_buffer_reuse: bool,
        counts_saved: Collection[str],
    ) -> Iterator[Room | None]:
        """Bound what keepers hold during an execution. See `running`."""
        assert self.budget_bytes is not None
        _, phase, binding, sizes = execution
        keepers = self._keepers()
        keepers.pop(self.settings.key, None)
        others = [k for k in keepers.values() if k.held_bytes]
        held_bytes = 0 if keeper is None else keeper.held_bytes
        if not (others or held_bytes or (shares and keeper is not None)):
            yield None
            return
        peak_bytes = needs.peak_bytes
        # the plan of a backward includes what its own forward left
        left_bytes = self.entry.left_by(binding) if phase == BACKWARD else 0
        beside_bytes = self.usage.held_beside(self.entry, binding).now - left_bytes
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
        own = None
        if phase in counts_saved:
            forward = self.name, FORWARD, binding, sizes
            own = keeper.bytes_of(forward) if phase == BACKWARD else 0
        if keeper.step_begins():
            before_bytes = self.reserve.nbytes
            guard = heap().guard
            placed = guard is not None and guard.places.blocks > 0
            less = self.reserve.step_over(heap().trims, keeper.steps.unused_bytes, placed)
            grown = partial(_grown, before_bytes=before_bytes, now_bytes=self.reserve.nbytes)
            keeper.steps.rooms_grow(less, grown)
            if isinstance(planner := keeper.steps.plan, StepPlanner):
                planner.step_over(now_ns() / NS_PER_US, keeper.steps.kept)
        kept = _keeps(limit, self.reserve.nbytes)
        most = kept + (own or 0)
        spare = min(limit, self.reserve.free_bytes)
        keeper.enter(execution, most, no_buffer_reuse, weights, phase == BACKWARD, own)
        try:
            held = keeper.held_bytes + spare
            yield Room(peak_bytes, limit, held, left_bytes, sizes, keeper.steps.is_settled)
        finally:
            self._measure(phase == BACKWARD, spare)
            keeper.leave()

    def _leave_room_outside(
        self, execution: Ran, needs: Footprint, room: Room, keeper: ActivationCache
    ) -> None:
        """Leave the program the room that it took the last times, if that is much."""
        assert self.budget_bytes is not None
        name, phase, binding, sizes = execution
        took_bytes = binding.gap_peaks.most_bytes((phase, sizes))
        if took_bytes < self.budget_bytes * WORTH_PAUSE:
            return
        limit = room.kept_limit_bytes - took_bytes
        if phase == FORWARD:
            limit += needs.peak_bytes - needs.standing_bytes - needs.kept_bytes
        self.usage.outside.pauses(
            keeper,
            (name, AFTER + phase, binding, sizes),
            _keeps(max(0, limit), self.reserve.nbytes),
            phase == BACKWARD,
        )

    def _measure(self, backward: bool, spare_bytes: int) -> None:
        """Measure what the process leaves of the budget; malloc keeps `spare_bytes` of it free."""
        left_bytes = heap().check()
        if left_bytes < float("inf"):
            left_bytes -= self.reserve.free_bytes - spare_bytes
            weight_bytes = self.usage.holdings.weight_bytes()
            self.reserve.ran(left_bytes, heap().resident_bytes(), weight_bytes, backward)

    def _keepers(self) -> dict[str, ActivationCache]:
        """The keepers of all runtimes that move tensors of this device, by key."""
        mine = (r for r in runtimes() if r.settings.target == self.settings.target)
        return {r.settings.key: r.mover.keeper for r in mine if r.mover.keeper is not None}

    def forward_of(self, arguments: Sequence[Any]) -> tuple[ParameterSet, tuple[int, ...]]:
        """Find the forward that saved the arguments of a backward: its binding and its sizes."""
        keeper = self._keepers().get(self.settings.key)
        if keeper is not None:
            for x in arguments:
                saved = tickets.peek(x, Saved) if isinstance(x, torch.Tensor) else None
                execution = None if saved is None else keeper.execution_of(saved)
                if isinstance(execution, tuple):
                    return execution[2], execution[3]
        newest = self.entry.waiting()[-1:]
        return newest[0].binding if newest else self.binding, self.sizes


def _backward_of(execution: Hashable) -> Hashable | None:
    """The backward of an execution, as `running` names them; None for a backward."""
    assert isinstance(execution, tuple)
    name, phase, *call = execution
    return (name, BACKWARD, *call) if phase == FORWARD else None


def _keeps(limit_bytes: int, reserve_bytes: int) -> int:
    """The bytes that the keeper may hold of those left beside a run."""
    return max(limit_bytes - reserve_bytes, int(limit_bytes * KEEPER_SHARE))


def _grown(kept_bytes: int, *, before_bytes: int, now_bytes: int) -> int:
    """The bytes that the keeper may hold with another reserve."""
    limit = min(kept_bytes + before_bytes, int(kept_bytes / KEEPER_SHARE))
    return _keeps(limit, now_bytes)


def _share(limit_bytes: int, others: Sequence[ActivationCache]) -> int:
    """Bytes that a graph's own keeper may hold; bounds the device's other keepers to half."""
    for other in others:
        other.bound(limit_bytes // 2)
        limit_bytes -= other.held_bytes
    return max(0, limit_bytes)


def kept_between(settings: RuntimeSettings) -> str | None:
    """Describe the hit rate of a runtime's keeper; None if it has none or was never asked."""
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
        f" tables of {show_bytes(mover.keeper.foresight.table_bytes)}{_planned(mover.keeper)}"
    )


def _planned(keeper: ActivationCache) -> str:
    """Describe the newest plan of a whole step, after a semicolon; empty if there is none."""
    table = keeper.steps.newest
    if table is None:
        return ""
    saved_bytes = sum(map(table.step.nbytes, table.step.wanted))
    return (
        f"; a step of {graph_runs(table.step)} executions is planned as one:"
        f" {show_bytes(table.moved_bytes)} of {show_bytes(saved_bytes)} leave"
    )
