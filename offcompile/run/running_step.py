"""Wraps the compiled halves of a planned graph: timing, heap, accounts, verification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from offcompile.graph.lowering.lower import Compiled, Phase
from offcompile.ir import BACKWARD, FORWARD
from offcompile.machine.target import CudaTarget
from offcompile.planning.feedback.endurance import spilled_bytes, watch_for
from offcompile.runtime.base.interrupts import uninterrupted
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.moves.registry import runtime_for
from offcompile.runtime.states.update_ops import taken_or_kept

from .accounts.graph_runs import Room
from .accounts.peak_watch import PeakWatch
from .accounts.process import process
from .plan.contract import GraphFacts, Planned
from .recording import recorded
from .replay.step_graph import StepGraph

#: the heap is trimmed in the first of these in any case, of leftovers from compiling
CLEANING_RUNS = 3


class _Places:
    """Decides if the large blocks of a step get fixed places: something moves, or the heap has to
    be trimmed although all fits."""

    def __init__(self, moves: bool, watched: bool) -> None:
        self._wanted, self._watched = moves, watched
        self._runs = self._trims = 0

    def wanted(self) -> bool:
        """Call this before each forward."""
        if not self._wanted and self._watched:
            before, self._trims = self._trims, heap().trims
            self._runs += 1
            self._wanted = self._runs > CLEANING_RUNS and self._trims > before
        return self._wanted


class RunningHalf:
    """Runs one compiled half of a planned graph."""

    def __init__(
        self,
        facts: GraphFacts,
        planned: Planned,
        phase: Phase,
        compiled: Compiled,
        step: StepGraph | None = None,
    ) -> None:
        process.garbage.compiled()
        report, on_cpu = planned.report, facts.target.device.type == "cpu"
        self.facts, self.planned, self.phase, self.compiled = facts, planned, phase, compiled
        self._step = step
        # a step that fits stays within its budget only if freed memory goes back to the system
        budgeted = facts.options.memory is not None and heap().keeps
        self._heap_watched = on_cpu and (not report.fits or budgeted)
        self._heap_settled = False
        begins = phase != BACKWARD
        self._places = _Places(begins and on_cpu and not report.fits, begins and self._heap_watched)
        self._offered = planned.offered or () if phase == BACKWARD else ()
        self._direct_reads = _direct_reads(planned, phase)
        self._mover = runtime_for(facts.target.runtime.key).mover if self._direct_reads else None
        moves = (m for m in report.plan.moves if m.tensor in planned.packable)
        self._tensor_of = {m.id: m.tensor for m in moves}
        spills = spilled_bytes(report.problem, report.plan, facts.target.device.type) > 0
        self._drives = watch_for(facts.target.runtime) if spills else None
        self._observe = partial(report.observe, FORWARD if phase == "inference" else phase)
        self._peaks = self._peak_watch()

    @uninterrupted  # movement ops look for interrupts where they have not begun
    def __call__(self, arguments: list[Any]) -> Any:
        planned, phase, clock = self.planned, self.phase, self.planned.clock
        if self._step is not None:
            replayed = self._step.run(phase, arguments, self.compiled)
            if replayed is not None:
                if self._mover is not None:
                    self._mover.read_in_place(self._direct_reads)
                self._over()
                return replayed
        verifying = planned.verifying
        check = None if verifying is None else verifying.begin(phase, arguments)
        with self._recorded(arguments), self._among_others(arguments) as room:
            runs, guard = self.facts.runs, heap().guard
            if guard is not None and self._begins_step() and self._places.wanted():
                if room is None or room.repeats or not runs.entry.in_turn:
                    guard.places.begin_step(runs, planned, self._room_bytes, runs.binding.ids)
                else:
                    guard.places.begin_other_step(runs)
            begins = phase != BACKWARD or room is not None
            if self._heap_watched and begins and not self._is_amid(room):
                self._begin_heap(room)
            started = clock.start()
            with self._watched():
                result = self.compiled(arguments)
            clock.stop(started, self._observe)
        if phase != FORWARD:
            process.garbage.ran()
        if planned.saved and phase == FORWARD:
            saved = result[-len(planned.saved) :]
            self.facts.profile.look_at_saved(planned.saved, saved)
        if self._mover is not None:
            self._mover.read_in_place(self._direct_reads)
        if self._offered:
            result = list(result)
            for i in self._offered:
                result[i] = taken_or_kept(result[i])
        self._over()
        if phase != FORWARD:
            if self._heap_watched and not self._is_amid(room):
                heap().end()
            if self._drives is not None:
                self._drives.step_over()
        if check is not None:
            check(result)
        return result

    def _begins_step(self) -> bool:
        return self.phase != BACKWARD and not self.facts.runs.usage.waiting_forwards()

    def _is_amid(self, room: Room | None) -> bool:
        """True if the step of a graph around this one goes on, whose limit the heap keeps."""
        runs = self.facts.runs
        return room is None and runs.encloses and runs.usage.waiting_forwards() > 0

    def _room_bytes(self) -> int:
        """Bytes of the budget for what comes and goes in a step, whichever graph makes it."""
        planned, runs = self.planned, self.facts.runs
        most = planned.report.budget_bytes
        if runs.budget_bytes is not None:
            most = runs.budget_bytes - runs.usage.held_beside(runs.entry, runs.binding).now
        return most - planned.needs.planned.standing_bytes

    def _over(self) -> None:
        """Note in the accounts that the half has run."""
        if self.phase == BACKWARD:
            self.facts.runs.entry.end()
            self.planned.placement.made_gradients()

    def _peak_watch(self) -> PeakWatch | None:
        """None on the CPU, whose heap watches itself, and where sizes or the budget are open."""
        facts, needs = self.facts, self.planned.needs.planned
        request = replace(self.planned.request, lacking_bytes=0)
        budget = request.budget(facts.options, facts.target)
        device = runtime_for(facts.target.runtime.key).device
        if facts.symbols or budget is None or not isinstance(device, CudaDevice):
            return None
        begins_with = needs.standing_bytes + (needs.kept_bytes if self.phase == BACKWARD else 0)
        if isinstance(facts.target, CudaTarget):
            begins_with += facts.target.library_bytes  # there since the first step
        return PeakWatch(device.streams, budget - begins_with, facts.runs.exceeded)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        planned, peaks = self.planned, self._peaks
        with (
            planned.recorder.running(self.phase),
            self.facts.profile.watching(self._tensor_of),
            nullcontext() if peaks is None else peaks.running(),
        ):
            yield

    def _recorded(self, arguments: Sequence[Any]) -> AbstractContextManager[None]:
        recording, runs = recorded(), self.facts.runs
        if recording is None:
            return nullcontext()
        binding = runs.binding
        if self.phase == BACKWARD:
            binding, _ = runs.forward_of(arguments)
        touched, device = self.planned.touched, self.facts.target.device
        return recording.running(runs.name, self.phase, binding, touched, device)

    def _among_others(self, arguments: Sequence[Any]) -> AbstractContextManager[Room | None]:
        planned, offload_saved = self.planned, self.planned.request.kind.offload_saved
        return self.facts.runs.running(
            self.phase,
            arguments,
            planned.needs.at,
            offload_saved or self.facts.options.lowering != "inductor",
            offload_saved,
            planned.moves,
            planned.counts_saved,
        )

    def _begin_heap(self, room: Room | None) -> None:
        """Tell the heap how much this run may take, at its first run after cleaning up."""
        report = self.planned.report
        if not self._heap_settled:
            self._heap_settled = True
            if not report.fits:
                process.garbage.collect_of_compiling()
            heap().settle()
        sizes = self.facts.runs.sizes if room is None else room.sizes
        standing, most = self.planned.needs.at(sizes).standing_bytes, report.budget_bytes
        if room is not None:
            standing += room.left_bytes + room.held_bytes
            most = room.peak_bytes + room.kept_limit_bytes
        heap().begin(standing, most, self._at_rest, lays_out=not report.fits)

    def _at_rest(self) -> None:
        runtime_for(self.facts.target.runtime.key).device.drain()


def _direct_reads(planned: Planned, phase: Phase) -> int:
    """Count the operands that ops of this half use in place on the host."""
    ops = planned.report.problem.op
    reads = (d for d in planned.report.plan.directs if d.tensor in ops[d.op].reads)
    return sum((ops[d.op].phase == BACKWARD) == (phase == BACKWARD) for d in reads)
