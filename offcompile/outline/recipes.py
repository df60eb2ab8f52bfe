"""The memory and time that a step takes in each slot, under one recipe of recomputation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from offcompile.ir import DEVICE, SELF_ENDING_KINDS, Op, Problem
from offcompile.passes.build.program import Access, Intervals, Program
from offcompile.passes.search.program_variant import Choices, hostable
from offcompile.passes.search.recompute_starts import Recipe, RecomputeStarts
from offcompile.passes.search.starts import GapKey
from offcompile.passes.select.rematerialization import Rerun

from .slots import Slots, is_update

#: a tensor that is not used for at least this many slots may move meanwhile
LEAST_SLOTS = 2


def rerun_sets(problem: Problem) -> list[frozenset[Rerun]]:
    """No recomputation, then more and more of it."""
    starts = RecomputeStarts(problem, lambda reruns: None, lambda: False)
    found = [frozenset[Rerun]()]
    for price in sorted(starts.prices()):
        found.append(starts.reruns(Recipe(starts.parts()[0], price)))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class SlotNeeds:
    """reruns: the recomputation for which this holds. waiting: bytes of activations, by the slots
    of the uses between which they only wait. gaps: these activations, each with the run before it
    waits. fixed_bytes: what the device must hold in each slot
    beside these, and beside the weights and states that may move. added_us: time of reruns, by the
    slots where the op ran first and where it runs again."""

    reruns: frozenset[Rerun]
    waiting: dict[tuple[int, int], int]
    gaps: dict[tuple[int, int], list[GapKey]]
    fixed_bytes: list[int]
    added_us: dict[tuple[int, int], float]

    def added_in(self, slot: int) -> float:
        """Time of reruns of what this slot made."""
        return sum(us for (made, _), us in self.added_us.items() if made == slot)


class _Measured:
    """Collects the needs of one program."""

    def __init__(
        self, problem: Problem, slots: Slots, moving: Collection[str], reruns: frozenset[Rerun]
    ) -> None:
        self.problem, self.slots, self.moving, self.reruns = problem, slots, moving, reruns
        choices = Choices(recomputes=reruns, hosted=frozenset(hostable(problem)))
        self.program = Program.of(problem, choices.decisions(problem))
        self.runs, self.n = self.program.runs, len(self.program.runs)
        self.slot_of = [self._slot(run.name) for run in self.runs]
        self.first_of = {k: at for at, k in reversed(list(enumerate(self.slot_of)))}
        self.last_of = {k: at for at, k in enumerate(self.slot_of)}
        self.waiting: dict[tuple[int, int], int] = defaultdict(int)
        self.gaps: dict[tuple[int, int], list[GapKey]] = defaultdict(list)
        self.held = Intervals(self.n)

    def _slot(self, run: str) -> int:
        index = self.problem.op_index
        return self.slots.of_op[index[run] if run in index else index[run.partition("@")[2]]]

    def needs(self) -> SlotNeeds:
        for tensor, accesses in self.program.accesses.items():
            for first, last in self._stretches(tensor, accesses):
                self._add(tensor, first, last)
        fixed = [0] * self.slots.count
        added: dict[tuple[int, int], float] = defaultdict(float)
        index = self.problem.op_index
        for at, (run, held) in enumerate(zip(self.runs, self.held.sums(), strict=True)):
            if is_update(run.op):
                continue
            here = self.slot_of[at]
            fixed[here] = max(fixed[here], held + self._own_bytes(run.op))
            if run.name not in index:
                added[self.slots.of_op[index[run.op.id]], here] += run.duration_us
        return SlotNeeds(self.reruns, dict(self.waiting), dict(self.gaps), fixed, dict(added))

    def _own_bytes(self, op: Op) -> int:
        tensor = self.problem.tensor
        return op.workspace_bytes + sum(
            tensor[t].nbytes
            for t in op.operands
            if t not in self.moving or tensor[t].kind == "gradient"
        )

    def _stretches(self, tensor: str, accesses: Sequence[Access]) -> Iterator[tuple[int, int]]:
        """Runs between which the tensor must be somewhere; the last may be the end of the step."""
        if tensor in self.moving:
            # weights and states are accounted for elsewhere; a gradient is here until it is made
            made = self.problem.tensor[tensor].kind == "gradient"
            accesses = [a for a in accesses if made and not is_update(self.runs[a.position].op)]
            yield from pairwise(a.position for a in accesses)
            return
        here = [a for a in accesses if a.tier == DEVICE]
        survives = self.problem.must_survive(tensor)
        for a, b in pairwise(here):
            if b.reads or survives:
                yield a.position, b.position
        home = self.problem.tensor[tensor].home
        if home == DEVICE:
            yield -1, here[0].position if here else self.n
        if here and survives and home in (None, DEVICE):
            yield here[-1].position, self.n

    def _add(self, name: str, first: int, last: int) -> None:
        tensor, slot_of = self.problem.tensor[name], self.slot_of
        may_move = tensor.kind in SELF_ENDING_KINDS and not tensor.pinned
        if may_move and first >= 0 and last < self.n:
            begin, end = slot_of[first], slot_of[last]
            if end - begin >= LEAST_SLOTS:
                self.waiting[begin, end] += tensor.nbytes
                self.gaps[begin, end].append((name, self.runs[first].name))
                self._hold(first, self.last_of[begin] + 1, tensor.nbytes)
                self._hold(self.first_of[end] - 1, last, tensor.nbytes)
                return
        self._hold(first, last, tensor.nbytes)

    def _hold(self, first: int, last: int, nbytes: int) -> None:
        if last > first + 1:
            self.held.add(first, last, nbytes)


def needs_of(
    problem: Problem, slots: Slots, moving: Collection[str], reruns: frozenset[Rerun]
) -> SlotNeeds:
    return _Measured(problem, slots, moving, reruns).needs()
