"""The record of one compiled graph: its plan, and the measurements of the steps that ran."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from offcompile.ir import DEVICE, PHASES, Machine, OffloadError, Plan, Problem, Timeline
from offcompile.ir.jsonio import machine_to_json, plan_to_json, problem_to_json
from offcompile.ir.units import counted, show_us, size
from offcompile.planning.feedback.corrections import Corrected
from offcompile.planning.feedback.measured import MeasuredStep
from offcompile.planning.floors import floor_of
from offcompile.planning.planned_layout import planned_layout, planned_returns
from offcompile.planning.planner import PlanResult
from offcompile.planning.splitting import Splitting
from offcompile.planning.timelines import moved_bytes, timeline_to_json
from offcompile.runtime.disk.drive_life import DriveLife
from offcompile.runtime.memory.malloc.fragmentation import Returns

from .before_after import split_text
from .explain import Fate, fates, print_fate
from .figures import PlannedMemory, RunFigures
from .modes import modes, module_rows, modules_of
from .simple_way import SimpleWay
from .stalls import StallRow, measured_to_json, print_stalls, stall_rows
from .trace_events import to_trace
from .verified import Verified

#: maximum number of steps per phase that the measured time is the median of
STEPS_REMEMBERED = 512


class Seen(Protocol):
    """The part of a run's `Profile` that reports tell; a `Profile` itself brings torch along."""

    @property
    def densities(self) -> Mapping[str, float]: ...
    @property
    def said(self) -> Sequence[str]: ...
    @property
    def lanes(self) -> Any: ...
    def has_zeros(self, tensor: str, /) -> bool: ...


@dataclass(frozen=True, eq=False)
class Record:
    """One compiled graph: its problem, its plan, the certificate, and the steps measured so far.

    The device capacity in `machine` is the part of the budget that the plan may use: the budget
    less the reserve and the holes of `memory`.
    """

    name: str
    problem: Problem
    machine: Machine
    result: PlanResult
    memory: PlannedMemory
    #: tensor or op id → a description for users (module path, shape)
    labels: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: weight or gradient → the parameter's name
    names: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: measurements of the tensors, shared by all plans of this graph
    profile: Seen | None = field(default=None, repr=False)
    #: how the graph was split into pieces; None if it was not
    splitting: Splitting | None = field(default=None, repr=False)
    #: with `verify=True`, the comparison of the first step with the plain run
    verified: Verified | None = field(default=None, repr=False)
    #: estimates of the same step under simpler strategies, if requested
    simple_ways: tuple[SimpleWay, ...] = field(default=(), repr=False)
    running: RunFigures = field(default=RunFigures(), repr=False)
    _steps_us: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)
    _corrected: list[Corrected] = field(default_factory=list, init=False, repr=False)

    # --- planned ----------------------------------------------------------------------------

    @property
    def budget_bytes(self) -> int:
        return self.memory.budget_bytes

    @property
    def plan(self) -> Plan:
        return self.result.plan

    @property
    def timeline(self) -> Timeline:
        return self.result.timeline

    @property
    def policy(self) -> str:
        return self.result.policy

    @property
    def split(self) -> str:
        """Describes the parts of the graph that were split into pieces; empty if none were."""
        return "" if self.splitting is None else self.splitting.words()

    @property
    def lower_bound_us(self) -> float:
        return self.result.lower_bound_us

    @property
    def gap(self) -> float:
        """Planned time divided by the lower bound, minus one."""
        return self.result.gap

    @property
    def planned_us(self) -> float:
        return self.result.makespan_us

    @property
    def planned_peak_bytes(self) -> int:
        """The device's peak memory, including the runtime's reserve and the holes."""
        return self.needed_peak_bytes + self.memory.holes_bytes

    @property
    def needed_peak_bytes(self) -> int:
        """The device's peak memory without the holes, which can be given back."""
        peak = self.memory.worst_peak_bytes
        if peak is None:
            peak = self.timeline.peak_bytes.get(DEVICE, 0)
        return peak + self.memory.reserve_bytes

    @cached_property
    def floor_bytes(self) -> int:
        """The least memory that the device needs if every movable tensor is evicted."""
        return floor_of(self.problem, self._machine_for) + self.memory.reserve_bytes

    @cached_property
    def layout_waste(self) -> float | None:
        """The extra memory that preplanned offsets would need, as a share of the peak.

        None if nothing moves, or if the plan is for the steady state, which has no first step.
        """
        if self.fits or self.problem.steady:
            return None
        return planned_layout(self.problem, self.machine, self.plan, self.timeline).waste

    @cached_property
    def returns(self) -> Returns | None:
        """The memory that a step gives back to the system for lack of room and touches again."""
        room = self.memory.room
        if room is None or self.problem.steady:
            return None
        return planned_returns(self.problem, self.machine, self.plan, self.timeline, room)

    @property
    def foreseen_us(self) -> float:
        """The planned step, plus the time that moves take from compute and the time to touch
        memory that was given back to the system."""
        touching_us, each_us = 0.0, self.memory.touch_us_per_mib
        if each_us and self.returns is not None:
            touching_us = self.returns.touched_mib * each_us
        return self.result.cost_us + touching_us

    def _machine_for(self, device_bytes: int) -> Machine:
        return self.machine.with_capacity(DEVICE, device_bytes)

    @property
    def fits(self) -> bool:
        """True if everything stays on the device, so that the graphs are unchanged."""
        return self.plan.moves_nothing

    # --- measured ---------------------------------------------------------------------------

    def observe(self, phase: str, us: float) -> None:
        """Record the time of one run of a phase."""
        if phase not in PHASES:
            raise ValueError(f"{phase!r} is no phase; there are {', '.join(PHASES)}")
        runs_us = self._steps_us.setdefault(phase, [])
        runs_us.append(us)
        if len(runs_us) > STEPS_REMEMBERED:
            del runs_us[: STEPS_REMEMBERED // 2]

    @property
    def measured_us(self) -> float | None:
        """The sum of the median times of all phases. None until every phase has run."""
        if self.running.settle is not None:
            self.running.settle()
        needed = {op.phase for op in self.problem.ops}
        if not needed or not all(self._steps_us.get(phase) for phase in needed):
            return None
        return sum(median(list(self._steps_us[phase])) for phase in needed)

    @property
    def measured_over_planned(self) -> float | None:
        measured_us = self.measured_us
        if measured_us is None or self.planned_us <= 0:
            return None
        return measured_us / self.planned_us

    def correct(self, corrected: Corrected) -> None:
        """Store the plan's step time recomputed with the costs measured in the first steps."""
        self._corrected[:] = [corrected]

    @property
    def corrected(self) -> Corrected | None:
        """The plan's step recomputed with the costs measured in the first steps; None until
        then."""
        return self._corrected[0] if self._corrected else None

    @property
    def predicted_us(self) -> float:
        """The expected time of a step: the corrected one if there is one, else `foreseen_us`."""
        return self.foreseen_us if self.corrected is None else self.corrected.step_us

    @property
    def measured_steps(self) -> int:
        """The number of steps that `measured_us` is the median of."""
        return min(len(self._steps_us[p]) for p in {op.phase for op in self.problem.ops})

    @property
    def measured_over_predicted(self) -> float | None:
        measured_us = self.measured_us
        if measured_us is None or self.predicted_us <= 0:
            return None
        return measured_us / self.predicted_us

    @property
    def drive_life(self) -> DriveLife | None:
        """The wear on the drives that hold spill files, at the measured or else planned speed."""
        life = self.running.life
        return None if life is None else life(self.measured_us or self.planned_us)

    @property
    def measured_step(self) -> MeasuredStep | None:
        """The times of moves and waits in the median of the last recorded steps.

        None if none was recorded, or if forwards and backwards cannot be matched with certainty.
        """
        return None if self.running.steps is None else self.running.steps.median()

    def watch(self, steps: int = 5) -> None:
        """Record the next steps. By default the CPU records all, CUDA only the first eight."""
        if steps < 1:
            raise OffloadError(f"watch(steps={steps}): at least one step has to be recorded.")
        if self.running.steps is not None:
            self.running.steps.watch(steps)

    def stall_rows(self, measured: MeasuredStep | None = None) -> tuple[StallRow, ...]:
        """The waits of compute in a step, as planned and as `measured`; the longest first."""
        return stall_rows(self.plan, self.timeline, measured, self.labels, self.names)

    # --- text -------------------------------------------------------------------------------

    def summary(self) -> str:
        """The certificate in one line."""
        bound = f"bound {show_us(self.lower_bound_us)}, gap {100 * self.gap:.2f}%"
        peak = f"peak {size(self.planned_peak_bytes)} of {size(self.budget_bytes)}"
        if self.fits:
            return f"{self.name}: fits, nothing moves; {show_us(self.planned_us)}, {bound}; {peak}"
        out, back = self._moved_bytes(DEVICE, None), self._moved_bytes(None, DEVICE)
        again = (
            f", {counted(len(self.plan.recomputes), 'op')} recomputed"
            if self.plan.recomputes
            else ""
        )
        return (
            f"{self.name}: planned {show_us(self.planned_us)}, {bound}; {peak}; per step "
            f"{size(out)} out, {size(back)} in{again} ({self.policy})"
        )

    def stalls(self, limit: int | None = None) -> str:
        """Describe the step's time: compute, and the waits for each tensor, planned and
        measured."""
        measured = self.measured_step
        return print_stalls(self.stall_rows(measured), self.timeline, measured, limit)

    def fates(self) -> tuple[Fate, ...]:
        """The treatment of each tensor, the most expensive first."""
        return fates(self.problem, self.machine, self.plan, self.timeline)

    def modules(self) -> str:
        """Describe the treatment of each module's tensors and the reason; the most expensive
        first."""
        found = modes(self.problem, self.plan, {fate.tensor.id: fate for fate in self.fates()})
        rows = list(module_rows(found, modules_of(self.names, self.labels)))
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(5)]
        lines = ("  ".join(f"{v:{w}}" for v, w in zip(r, widths, strict=True)) for r in rows)
        return "\n".join(line.rstrip() for line in lines)

    def explain(self, limit: int | None = None) -> str:
        """Describe each module's treatment, then each tensor's location, moves and reasons; the
        most expensive first. Compare a step that was split with the whole one."""
        told = self.modules()
        split = "" if self.splitting is None else split_text(self.splitting, self.problem)
        tensors = self._explain_tensors(limit)
        checked = [] if self.verified is None else ["beside the plain run", *self.verified.lines()]
        return "\n\n".join(filter(None, (told, split, tensors, "\n".join(checked))))

    def _explain_tensors(self, limit: int | None) -> str:
        every = self.fates()
        shown = every if limit is None else every[:limit]
        said = [print_fate(fate, self.labels.get(fate.tensor.id, "")) for fate in shown]
        if len(shown) < len(every):
            said.append(f"… and {len(every) - len(shown)} more")
        return "\n".join(said) if said else "no tensors"

    def to_json(self) -> dict[str, Any]:
        """The whole record as plain values."""
        measured = self.measured_step
        rows = self.stall_rows(measured)
        return {
            "name": self.name,
            "policy": self.policy,
            "fits": self.fits,
            "budget_bytes": self.budget_bytes,
            "reserve_bytes": self.memory.reserve_bytes,
            "holes_bytes": self.memory.holes_bytes,
            "floor_bytes": self.floor_bytes,
            "planned_peak_bytes": self.planned_peak_bytes,
            "planned_us": self.planned_us,
            "lower_bound_us": self.lower_bound_us,
            "bound_method": self.result.bound_method,
            "gap": self.gap,
            "measured_us": self.measured_us,
            "measured_over_planned": self.measured_over_planned,
            "predicted_us": self.predicted_us,
            "updates_us": self.running.updates_us,
            "touched_again_bytes": None if self.returns is None else self.returns.touched_bytes,
            "measured_over_predicted": self.measured_over_predicted,
            "measured": None if measured is None else measured_to_json(measured, rows),
            "planning_seconds": self.result.seconds,
            "densities": {} if self.profile is None else dict(self.profile.densities),
            "verified": None if self.verified is None else self.verified.to_json(),
            "decisions": [] if self.profile is None else list(self.profile.said),
            "simple_ways": [way.to_json() for way in self.simple_ways],
            "split": None if self.splitting is None else self.splitting.to_json(),
            "labels": dict(self.labels),
            "problem": problem_to_json(self.problem),
            "machine": machine_to_json(self.machine),
            "plan": plan_to_json(self.plan),
            "timeline": timeline_to_json(self.timeline),
        }

    def save_trace(self, path: str | Path) -> None:
        """Write the planned and measured lanes as JSON for Perfetto (ui.perfetto.dev) or Chrome."""
        trace = self.to_trace()
        try:
            Path(path).write_text(json.dumps(trace), "utf-8")
        except OSError as error:
            raise OffloadError(f"The trace cannot be written: {error}") from error

    def to_trace(self) -> dict[str, Any]:
        """The trace that `save_trace` writes."""
        return to_trace(
            self.problem, self.plan, self.timeline, self.measured_step, self.labels, self.names
        )

    # --- parts ------------------------------------------------------------------------------

    def _moved_bytes(self, source: str | None, target: str | None) -> int:
        """Bytes per step that leave `source` or reach `target`."""
        return sum(
            moved_bytes(self.problem, move.tensor, move.codec)
            for move in self.plan.moves
            if source in (None, move.source) and target in (None, move.target)
        )
