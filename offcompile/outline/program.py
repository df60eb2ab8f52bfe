"""The linear program of an outline: groups of tensors over the slots of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offcompile.ir import DEVICE, HOST, Machine, Problem
from offcompile.passes.search.starts import GapKey

from .linear import Linear, Term
from .recipes import SlotNeeds
from .slots import Slots, is_update
from .weights import GradientGroup, GroupUpdate, Movable, WeightGroup, WeightVisit

MS, GIB = 1e-3, 1 / 2**30
#: groups of activations below this share of the device stay
LEAST_SHARE = 1 / 4000
#: transfers and reruns count a little even if a step is no longer for them
TIE = 1e-4
#: states that cross for an update on the device cost this share of their time, times the part of
#: the step's compute that those of one weight take: ops behind the update wait for all of them, so
#: large weights had rather be updated on the host and small ones on the device
BURST = 0.2


@dataclass(frozen=True)
class WeightColumns:
    """The parts of a group of weights that stay on the device for good, and that the host updates.
    None: not an option."""

    group: WeightGroup
    stays: int | None
    hosted: int | None


@dataclass(frozen=True)
class Leaving:
    """Activations that wait alike: the part of their recipe, and what of it leaves in each slot."""

    part: int
    gaps: tuple[GapKey, ...]
    outs: tuple[int, ...]


class StepProgram:
    """Rows: the time of compute, of each link and of the host in each slot; the memory in each."""

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        slots: Slots,
        movable: Movable,
        needs: Sequence[SlotNeeds],
        may_stay: bool,
        update_us_per_byte: float = 0.0,
    ) -> None:
        self.lp, self.slots, self.needs = Linear(), slots, needs
        #: time gained after the step by each byte that stays; None: no weight may stay
        self.gain_us_per_byte = update_us_per_byte if may_stay else None
        self.in_rate = max(lane.bytes_per_us for lane in machine.lanes_between(HOST, DEVICE))
        self.out_rate = max(lane.bytes_per_us for lane in machine.lanes_between(DEVICE, HOST))
        self.capacity = machine.tier[DEVICE].capacity_bytes or 0
        lasts = [self.lp.column(cost=1.0) for _ in range(slots.count)]
        self.compute, self.into, self.out, self.host = (
            [self.lp.limit(0.0, (column, -1.0)) for column in lasts] for _ in range(4)
        )
        self.memory = [self.lp.limit(self.capacity * GIB) for _ in lasts]
        for at, op in enumerate(problem.ops):
            if not is_update(op):
                self.lp.take(self.compute[slots.of_op[at]], op.duration_us * MS)
        #: per slot of forward: the part of each recipe
        self.recipes = self._recipes()
        self.leaving: list[Leaving] = []
        for number, one in enumerate(needs):
            for (first, last), nbytes in one.waiting.items():
                part = self.recipes[first][number]
                outs = self._wait(part, first, last, nbytes)
                self.leaving.append(Leaving(part, tuple(one.gaps[first, last]), tuple(outs)))
        self.weights = [self._weights(group) for group in movable.weights]
        for gradients in movable.gradients:
            self._gradients(gradients)

    # --- activations ------------------------------------------------------------------------

    def _recipes(self) -> list[list[int]]:
        lp, plain = self.lp, self.needs[0]
        found = [
            [lp.column(cost=TIE * one.added_in(slot) * MS) for one in self.needs]
            for slot in range(self.slots.tail)
        ]
        for parts in found:
            lp.equal(1.0, *((column, 1.0) for column in parts))
        made_in = _most_read(plain, self.slots)
        for slot, row in enumerate(self.memory):
            lp.take(row, plain.fixed_bytes[slot] * GIB)
            for number, one in enumerate(self.needs):
                more = one.fixed_bytes[slot] - plain.fixed_bytes[slot]
                lp.put(row, found[made_in[slot]][number], more * GIB)
        for number, one in enumerate(self.needs):
            for (made, again), us in one.added_us.items():
                lp.put(self.compute[again], found[made][number], us * MS)
        return found

    def _wait(self, part: int, first: int, last: int, nbytes: int) -> list[int]:
        """Activations that wait between two slots, on the device or on the host; returns the part
        that leaves per slot."""
        between = range(first + 1, last)
        for slot in between:
            self._hold(slot, part, nbytes)
        if nbytes < self.capacity * LEAST_SHARE:
            return []
        outs = self._cross(self.out, range(first, last), nbytes / self.out_rate)
        backs = self._cross(self.into, range(first + 1, last + 1), nbytes / self.in_rate)
        self._same(outs, backs)
        self.lp.limit(0.0, *((column, 1.0) for column in outs), (part, -1.0))
        for slot in between:
            gone, back = outs[: slot - first], backs[: slot - first]
            self.lp.limit(0.0, *((c, 1.0) for c in back), *((c, -1.0) for c in gone))
            for column in gone:
                self._hold(slot, column, -nbytes)
            for column in back:
                self._hold(slot, column, nbytes)
        return outs

    # --- weights ----------------------------------------------------------------------------

    def _weights(self, group: WeightGroup) -> WeightColumns:
        lp, nbytes, update = self.lp, group.nbytes, group.update
        stays = None
        if self.gain_us_per_byte is not None:
            gain_ms = nbytes * self.gain_us_per_byte * MS
            large = update is not None and update.large
            stays = lp.column(cost=-gain_ms, most=1.0, whole=large)
        staying: list[Term] = [] if stays is None else [(stays, 1.0)]
        for slot in range(self.slots.count) if stays is not None else ():
            self._hold(slot, stays or 0, nbytes + (update.state_bytes if update else 0))
        before: WeightVisit | None = None
        direct_before: int | None = None
        for visit in group.visits:
            direct = None if visit.in_place_us is None else lp.column()
            self._visit(visit, before, nbytes, staying, direct_before, direct)
            before, direct_before = visit, direct
        hosted = None
        if update is not None and before is not None:
            hosted = self._update(group, update, before.last, staying)
        return WeightColumns(group, stays, hosted)

    def _visit(
        self,
        visit: WeightVisit,
        before: WeightVisit | None,
        nbytes: int,
        staying: list[Term],
        direct_before: int | None,
        direct: int | None,
    ) -> None:
        lp = self.lp
        begin = 0 if before is None else before.last + 1
        loads = self._cross(self.into, range(begin, visit.first + 1), nbytes / self.in_rate)
        for slot, column in enumerate(loads, begin):
            for held in range(slot, visit.first):
                self._hold(held, column, nbytes)
        parts = list(loads)
        if before is not None:
            keeps = lp.column()
            parts.append(keeps)
            for slot in range(begin, visit.first):
                self._hold(slot, keeps, nbytes)
            if direct_before is not None:  # only what was there can be kept
                lp.limit(1.0, (keeps, 1.0), (direct_before, 1.0), *staying)
        if direct is not None:
            parts.append(direct)
            lp.put(self.compute[visit.first], direct, (visit.in_place_us or 0.0) * MS)
            lp.put(self.into[visit.first], direct, nbytes / self.in_rate * MS)
        lp.equal(1.0, *((column, 1.0) for column in parts), *staying)
        elsewhere = [*staying, *([(direct, 1.0)] if direct is not None else [])]
        for slot in range(visit.first, visit.last + 1):
            lp.take(self.memory[slot], nbytes * GIB)
            for column, _ in elsewhere:
                self._hold(slot, column, -nbytes)

    def _update(
        self, group: WeightGroup, update: GroupUpdate, used: int, staying: list[Term]
    ) -> int:
        """The updates on either side; returns the part of the host."""
        lp, slot = self.lp, update.slot
        hosted, there = lp.column(most=1.0, whole=update.large), lp.column(self._burst(update))
        lp.equal(1.0, (hosted, 1.0), (there, 1.0), *staying)
        if update.device_us is None:
            lp.equal(0.0, (there, 1.0))
        for column in (there, *(c for c, _ in staying)):
            lp.put(self.compute[slot], column, (update.device_us or 0.0) * MS)
        # on the device: its states arrive before, and leave with the weight
        arrive = self._cross(self.into, range(slot + 1), update.state_bytes / self.in_rate)
        self._same(arrive, [there])
        for begin, column in enumerate(arrive):
            for held in range(begin, slot + 1):
                self._hold(held, column, update.state_bytes)
        for held in range(used + 1, slot + 1):
            self._hold(held, there, group.nbytes)
        both = update.state_bytes + group.nbytes
        self._leave(there, update.ready, both)
        # on the host: the gradient leaves first
        gone = self._leave(hosted, update.ready, update.gradient_bytes)
        after = range(update.ready, self.slots.count)
        work = lp.columns(len(after))
        self._same(work, [hosted])
        for k, (at, column) in enumerate(zip(after, work, strict=True), 1):
            lp.put(self.host[at], column, (update.host_us or 0.0) * MS)
            terms = [*((c, 1.0) for c in work[:k]), *((c, -1.0) for c in gone[:k])]
            lp.limit(0.0, *terms)
        return hosted

    def _burst(self, update: GroupUpdate) -> float:
        """The cost of states that cross in one go for longer than a slot. 0 where weights may stay:
        it is about the order of moves, and places are chosen by their sums."""
        states_us = update.most_state_bytes / self.in_rate
        if self.gain_us_per_byte is not None or states_us <= self.slots.us:
            return 0.0
        burst = states_us / max(1.0, self.slots.us * self.slots.tail)
        return BURST * burst * update.state_bytes / self.in_rate * MS

    def _leave(self, part: int, slot: int, nbytes: int) -> list[int]:
        """A part that must leave the device in this slot or later; returns it per slot."""
        after = range(slot, self.slots.count)
        gone = self._cross(self.out, after, nbytes / self.out_rate)
        self._same(gone, [part])
        for at, column in zip(after, gone, strict=True):
            for held in range(slot + 1, at + 1):
                self._hold(held, column, nbytes)
        return gone

    def _gradients(self, group: GradientGroup) -> None:
        """Gradients that stay, leave, or are written to the host in place."""
        lp, nbytes = self.lp, group.nbytes
        after = range(group.slot, self.slots.count)
        gone = self._cross(self.out, after, nbytes / self.out_rate)
        direct = None
        if group.in_place_us is not None:
            direct = lp.column()
            lp.put(self.compute[group.slot], direct, group.in_place_us * MS)
            lp.put(self.out[group.slot], direct, nbytes / self.out_rate * MS)
        lp.limit(1.0, *((column, 1.0) for column in gone), *([(direct, 1.0)] if direct else []))
        for slot in after[1:]:
            lp.take(self.memory[slot], nbytes * GIB)
            for column in [*gone[: slot - group.slot], *([direct] if direct else [])]:
                self._hold(slot, column, -nbytes)

    # --- rows -------------------------------------------------------------------------------

    def _hold(self, slot: int, column: int, nbytes: float) -> None:
        self.lp.put(self.memory[slot], column, nbytes * GIB)

    def _cross(self, link: Sequence[int], when: Iterable[int], us: float) -> list[int]:
        """Columns for the parts that cross a link in each of these slots."""
        found = []
        for slot in when:
            column = self.lp.column(cost=TIE * us * MS)
            self.lp.put(link[slot], column, us * MS)
            found.append(column)
        return found

    def _same(self, parts: Iterable[int], others: Iterable[int]) -> None:
        self.lp.equal(0.0, *((c, 1.0) for c in parts), *((c, -1.0) for c in others))


def _most_read(needs: SlotNeeds, slots: Slots) -> list[int]:
    """Per slot: the slot that made most of the activations that waited for it."""
    made: dict[int, dict[int, int]] = defaultdict(dict)
    for (first, last), nbytes in needs.waiting.items():
        made[last][first] = made[last].get(first, 0) + nbytes
    return [
        max(made[slot], key=made[slot].__getitem__) if slot in made else min(slot, slots.tail - 1)
        for slot in range(slots.count)
    ]
