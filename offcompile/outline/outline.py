"""Solves the program of an outline, and rounds its answer to choices of whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from offcompile.ir import DEVICE, HOST, Machine, Problem
from offcompile.passes.search.program_variant import Choices, forced_choices
from offcompile.passes.search.starts import GapKey, Hints

from .program import MS, StepProgram
from .recipes import SlotNeeds, needs_of, rerun_sets
from .slots import Slots, cut, is_update
from .weights import MOST_ALONE, MOST_LARGE, Movable, movable

#: a solution that takes longer is of no use: a search needs about as long
MOST_SECONDS = 10.0
#: smaller parts are errors of the arithmetic
LEAST_PART = 1e-6
#: a recipe with less than this part says little of its activations
SMALL_PART = 0.01

#: shares of the links' rates and of the device's memory that outlines count on, one after the
#: other: a plan cannot always keep a link busy and memory full, and the choices that come of less
#: are often better
SLACKS = ((1.0, 1.0), (0.95, 1.0), (0.9, 0.97), (0.8, 0.95))

Answer = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepOutline:
    """choices: recomputation and host updates that round the answer. stays:
    weights that had better stay on the device, if they may. cost_us: the step's time by the
    program, which no plan reaches quite. away: the part of each activation that leaves the device
    while it waits."""

    choices: Choices
    stays: frozenset[str]
    cost_us: float
    away: Hints = field(default_factory=dict, hash=False)


def outline(
    problem: Problem, machine: Machine, may_stay: bool = False, update_us_per_byte: float = 0.0
) -> StepOutline | None:
    """Outlines the step; None if the program has no answer.

    may_stay: weights at home on the host may live on the device instead. update_us_per_byte: time
    after the step that each byte of a weight costs which does not.
    """
    outliner = _Outliner.of(problem, machine, MOST_LARGE if may_stay else MOST_ALONE)
    return None if outliner is None else outliner.outline(machine, may_stay, update_us_per_byte)


def outlines(problem: Problem, machine: Machine) -> Iterator[StepOutline]:
    """Outlines the step with more and more slack, beginning with none."""
    outliner = _Outliner.of(problem, machine, MOST_ALONE)
    if outliner is None:
        return
    for rate, memory in SLACKS:
        found = outliner.outline(_smaller(machine, rate, memory))
        if found is None:
            return
        yield found


def _smaller(machine: Machine, rate: float, memory: float) -> Machine:
    """The machine with these shares of its links' rates and of its device's memory."""
    tiers = tuple(
        replace(tier, capacity_bytes=int((tier.capacity_bytes or 0) * memory))
        if tier.name == DEVICE
        else tier
        for tier in machine.tiers
    )
    lanes = (replace(lane, bytes_per_us=lane.bytes_per_us * rate) for lane in machine.lanes)
    return replace(machine, tiers=tiers, lanes=tuple(lanes))


@dataclass(frozen=True)
class _Outliner:
    """The parts of a step's program that depend on the step alone."""

    problem: Problem
    slots: Slots
    groups: Movable
    needs: list[SlotNeeds]

    @classmethod
    def of(cls, problem: Problem, machine: Machine, most_alone: int) -> _Outliner | None:
        """most_alone: number of large updates whose sides are chosen one by one."""
        lanes = machine.lanes_between(HOST, DEVICE), machine.lanes_between(DEVICE, HOST)
        if not all(lanes) or machine.tier[DEVICE].capacity_bytes is None or not problem.ops:
            return None
        slots = cut(problem)
        groups = movable(problem, slots, most_alone)
        needs = [needs_of(problem, slots, groups.tensors, again) for again in rerun_sets(problem)]
        return cls(problem, slots, groups, needs)

    def outline(
        self, machine: Machine, may_stay: bool = False, update_us_per_byte: float = 0.0
    ) -> StepOutline | None:
        problem = self.problem
        program = StepProgram(
            problem, machine, self.slots, self.groups, self.needs, may_stay, update_us_per_byte
        )
        answer = program.lp.solve(MOST_SECONDS)
        if answer is None:
            return None
        rounding = _Rounding(problem, program, answer)
        forced = forced_choices(problem, machine)
        choices = Choices(forced.directs, rounding.reruns(), forced.hosted | rounding.hosted())
        cost_ms = sum(answer[: self.slots.count])
        return StepOutline(choices, rounding.stays(), float(cost_ms) / MS, rounding.away())


@dataclass(frozen=True)
class _Rounding:
    problem: Problem
    program: StepProgram
    answer: Answer

    def reruns(self) -> frozenset[tuple[str, str]]:
        """Per slot of forward the recipe with the largest part, counting what is owed so far."""
        program, index = self.program, self.problem.op_index
        owed = np.zeros(len(program.needs))
        chosen: list[int] = []
        for columns in program.recipes:
            owed = owed + self.answer[columns]
            chosen.append(int(np.argmax(owed)))
            owed[chosen[-1]] -= 1.0
        slot_of = program.slots.of_op
        return frozenset(
            rerun
            for number, needs in enumerate(program.needs)
            for rerun in needs.reruns
            if chosen[slot_of[index[rerun[0]]]] == number
        )

    def stays(self) -> frozenset[str]:
        nbytes = self.problem.tensor
        return _picked(
            (weight, nbytes[weight].nbytes, self._part(columns.stays))
            for columns in self.program.weights
            for weight in columns.group.weights
        )

    def hosted(self) -> frozenset[str]:
        """Weights in the order of their gradients."""
        host_us: dict[str, float] = {}
        for op in self.problem.ops:
            if is_update(op):
                for t in op.writes:
                    host_us[t] = host_us.get(t, 0.0) + (op.host_duration_us or 0.0)
        part = {
            weight: self._part(columns.hosted) / max(LEAST_PART, 1 - self._part(columns.stays))
            for columns in self.program.weights
            for weight in columns.group.weights
        }
        return _picked((t, us, part[t]) for t, us in host_us.items() if t in part)

    def away(self) -> dict[GapKey, float]:
        found: dict[GapKey, float] = {}
        for group in self.program.leaving:
            part = self._part(group.part)
            if part > SMALL_PART and group.outs:
                share = min(1.0, sum(map(self._part, group.outs)) / part)
                found.update(dict.fromkeys(group.gaps, share))
        return found

    def _part(self, column: int | None) -> float:
        return 0.0 if column is None else float(self.answer[column])


def _picked(items: Iterable[tuple[str, float, float]]) -> frozenset[str]:
    """Rounds parts of (name, size, part): their sum is that of the parts, spread evenly."""
    owed, found = 0.0, set[str]()
    for name, size, part in items:
        owed += part * size
        if part > LEAST_PART and 2 * owed >= size:
            owed -= size
            found.add(name)
    return frozenset(found)
