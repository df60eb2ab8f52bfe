"""Where each tensor may be in each of its gaps, and what getting there takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offcompile.ir import DEVICE, HOST

from .matrix import Ints
from .survey import Gap, least_bytes
from .times import Times

WHOLE = False
MONO = False
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Stay:
    """The columns of one gap. Levels are cumulative: one per marked sample, then the end's."""

    gap: Gap
    stays: int  # the part that is on the device throughout
    load: Ints  # the part that its last load has brought back
    redone: Ints | None  # the part that a recomputation has brought back
    ever: int  # whether its value was recomputed at all
    held: Mapping[str, Ints]  # per tier, what has been carried there since the value was written
    kept: Mapping[str, Ints]  # per tier with a limit, what still stands there

    @property
    def presence(self) -> list[int]:
        """Columns that add up to the device copy at the gap's end."""
        redone = [] if self.redone is None else [int(self.redone[-1])]
        return [self.stays, int(self.load[-1]), *redone]


@dataclass
class Heads:
    """What stands off the device as a gap begins."""

    held: dict[str, int]
    kept: dict[str, int]
    born: int  # part of a new value that the host wrote
    remade: int  # part that a recomputation wrote on the host


class Residence:
    """Columns and rows for all tensors that may leave the device, or start elsewhere."""

    def __init__(self, times: Times, memory: Ints, limits: Mapping[str, tuple[int, Ints]]) -> None:
        """`memory`: row per sample (−1: everything fits); `limits`: tier → capacity, rows."""
        self.t, self.s, self.grid = times, times.survey, times.grid
        self.cols, self.rows = times.cols, times.rows
        self.memory, self.limits = memory, limits
        self.marked: Bools = (memory >= 0) | bool(limits)
        self.made: list[Stay] = []
        self.ended: dict[tuple[str, int], Stay] = {}  # by tensor and the op after

    def share(self, nbytes: int) -> float:
        return nbytes / max(1, self.s.capacity or 1)

    def fix(self, sample: int, nbytes: int) -> None:
        """Bytes that are surely on the device at a sample."""
        self.rows.rhs[int(self.memory[sample])] -= self.share(nbytes)

    def add(self, gaps: tuple[Gap, ...]) -> None:
        """One tensor: its gaps in order, a new value's first gap first."""
        for gap in gaps:
            if not gap.free:
                for sample in self.grid.inside(gap):
                    if self.memory[sample] >= 0:
                        self.fix(int(sample), self.s.problem.tensor[gap.tensor].nbytes)
        if not any(g.free for g in gaps):
            return
        loops = self.s.problem.steady and not any(g.new_value for g in gaps)
        first = heads = self._heads(gaps[0])
        mine = []
        for k, gap in enumerate(gaps):
            if k and gap.new_value:
                heads = self._heads(gap)
            ends = next((j for j in range(k + 1, len(gaps)) if gaps[j].new_value), len(gaps))
            if any(g.free for g in gaps[k:ends]) or (loops and self.limits):
                stay = self._gap(gap, heads)
                mine.append(stay)
                heads = Heads(
                    {t: int(c[-1]) for t, c in stay.held.items()},
                    {t: int(c[-1]) for t, c in stay.kept.items()},
                    self.t.zero,
                    stay.ever if self._redo_direct(gap.tensor) else self.t.zero,
                )
        if loops:
            for tier, column in first.kept.items():
                self.rows.add(0.0, (column, 1.0), (heads.kept[tier], -1.0))
        for stay in mine:
            if stay.gap.free:
                self._ends(stay)
                self._begins(stay)
        self.made += mine

    def _heads(self, gap: Gap) -> Heads:
        """What stands off the device as the first gap of a value begins."""
        zero, unity = self.t.zero, self.t.unity
        if gap.new_value and gap.before is not None:
            where, born = self.t.absent(gap.before, gap.tensor), zero
            if where:
                born = self.cols.one()
                self.rows.add(0.0, (born, 1.0), *((c, -1.0) for c in where))
            held = {t: born if t == HOST else zero for t in self.s.tiers}
            return Heads(held, {t: held[t] for t in self.limits}, born, zero)
        if gap.before is None:
            home = self.s.problem.tensor[gap.tensor].home
            held = {t: unity if t == home else zero for t in self.s.tiers}
            return Heads(held, {t: held[t] for t in self.limits}, zero, zero)
        # never written in a steady step: a copy once made is good for ever, where there is room
        held = dict.fromkeys(self.s.tiers, unity)
        return Heads(held, {t: self.cols.one() for t in self.limits}, zero, zero)

    def _redo_direct(self, tensor: str) -> bool:
        ops = self.s.problem.ops
        return any(tensor in ops[op].direct for op in self.s.rewriters.get(tensor, ()))

    def _gap(self, gap: Gap, heads: Heads) -> Stay:
        s, rows, t = self.s, self.rows, self.t
        tensor = s.problem.tensor[gap.tensor]
        inside = self.grid.inside(gap)
        slots = self.grid.slots(gap, inside)
        marked = self.marked[inside] if gap.free else np.zeros(len(inside), dtype=np.bool_)
        marks = inside[marked]
        group = np.concatenate([[0], np.cumsum(marked)])  # of each slot: the mark it leads up to
        count = len(marks) + 1
        loads = gap.free and gap.kind == "live"

        flows: dict[str, Ints] = {}
        gained: dict[str, list[Ints]] = defaultdict(list)
        for lane in s.lanes:
            if lane.target == DEVICE and not loads:
                continue
            if heads.held.get(lane.target) == t.unity and lane.target not in self.limits:
                continue
            fresh = gap.before if gap.new_value and lane.source == DEVICE else None
            flows[lane.name] = t.carry(tensor.id, lane.name, slots, fresh)
            gained[lane.target].append(flows[lane.name])

        held, kept = {}, {}
        for tier in s.tiers:
            if heads.held[tier] == t.unity:
                held[tier] = np.full(count, t.unity)
            else:
                held[tier] = self.cols.new(count)
                self._grow(held[tier], heads.held[tier], gained[tier], group)
            if tier in self.limits:
                capacity, tier_rows = self.limits[tier]
                kept[tier] = self.cols.new(count)
                grown = self._grow(kept[tier], heads.kept[tier], gained[tier], group)
                if tier == HOST and gap.before in t.on_host:
                    rows.put(grown, heads.born, -1.0)  # a host update may run late
                share = least_bytes(tensor, s.machine) / max(1, capacity)
                rows.put(tier_rows[marks], kept[tier][:-1], share)

        stays = t.unity
        if gap.free:
            # a copy in flight across an optional access is neither there nor away: not whole
            whole = gap.before is None or not s.optional(gap.before, gap.tensor)
            elsewhere = gap.kind == "late" or (gap.before is None and tensor.home != DEVICE)
            stays = t.zero if elsewhere else self.cols.one(whole=whole)
        load = self.cols.new(count) if loads else np.full(count, t.zero)
        if loads:
            self._grow(load, t.zero, gained[DEVICE], group)
        redone, ever = None, heads.remade
        redoers = s.rewriters.get(tensor.id, ())
        if redoers:
            runs = [np.array([t.again(op, int(k)) for k in slots]) for op in redoers]
            ever = self.cols.one()
            row = rows.add(0.0, (ever, 1.0), (heads.remade, -1.0))
            for run in runs:
                rows.put(row, run, -1.0)
            if loads:
                redone = self.cols.new(count)
                self._grow(redone, t.zero, runs, group)
        stay = Stay(gap, stays, load, redone, ever, held, kept)
        self._sources(stay, heads, flows, group)
        if gap.after is not None:
            self.ended[tensor.id, gap.after] = stay
        if gap.free:
            self._exists(stay, marks, inside, slots, flows)
        return stay

    def _grow(self, levels: Ints, start: int, flows: list[Ints], group: Ints) -> Ints:
        """Each level is at most the one before and what flowed in since."""
        rows = self.rows.reserve(len(levels))
        self.rows.put(rows, levels, 1.0)
        self.rows.put(rows, np.concatenate([[start], levels[:-1]]), -1.0)
        for flow in flows:
            self.rows.put(rows[group], flow, -1.0)
        return rows

    def _sources(self, stay: Stay, heads: Heads, flows: Mapping[str, Ints], group: Ints) -> None:
        """A lane carries no more from a tier than was there, or came within the same stretch.

        With one tier and no limit it is implied: what left the device is held there.
        """
        if len(self.s.tiers) == 1 and not self.limits:
            return
        for lane in self.s.lanes:
            if lane.source == DEVICE or lane.name not in flows:
                continue
            levels = stay.kept.get(lane.source, stay.held[lane.source])
            start = heads.kept.get(lane.source, heads.held[lane.source])
            rows = self.rows.reserve(len(group))
            self.rows.put(rows, flows[lane.name], 1.0)
            self.rows.put(rows, np.concatenate([[start], levels[:-1]])[group], -1.0)
            if lane.source == HOST:
                self.rows.put(rows, heads.born, -1.0)
                if self._redo_direct(stay.gap.tensor):
                    self.rows.put(rows, stay.ever, -1.0)
            for other in self.s.lanes:
                if other.target == lane.source and other.name in flows:
                    for g in range(int(group[-1]) + 1):
                        at = np.flatnonzero(group == g)
                        flow = np.tile(flows[other.name][at], len(at))
                        self.rows.put(np.repeat(rows[at], len(at)), flow, -1.0)

    def _exists(self, stay: Stay, marks: Ints, inside: Ints, slots: Ints, flows) -> None:
        """At each crowded sample: the bytes on the device, and the value must be somewhere."""
        gap, rows = stay.gap, self.rows
        share = self.share(self.s.problem.tensor[gap.tensor].nbytes)
        at = np.flatnonzero(self.memory[marks] >= 0)
        memory = self.memory[marks[at]]
        rows.put(memory, stay.stays, share)
        reserved = stay.load[at]
        busy = self.grid.busy
        where = {int(m): k for k, m in enumerate(marks[at])}
        if busy and gap.kind == "live":
            reserved = self.cols.new(len(at), whole=WHOLE)
            lim = rows.reserve(len(at))
            rows.put(lim, stay.load[at], 1.0)
            rows.put(lim, reserved, -1.0)
            if MONO and len(at) > 1:
                lim = rows.reserve(len(at) - 1)
                rows.put(lim, reserved[:-1], 1.0)
                rows.put(lim, reserved[1:], -1.0)
            for lane in self.s.lanes:
                if lane.target == DEVICE:
                    c = self.s.carry_ns[gap.tensor, lane.name]
                    for j, slot in enumerate(slots[:-1]):
                        op = busy.get(int(slot))
                        if op is not None and int(inside[j]) in where and c > 0:
                            r = self.t.longest(op) / c
                            rows.add(0.0, (int(flows[lane.name][j]), 1.0), (int(reserved[where[int(inside[j])]]), -r))
        rows.put(memory, reserved, share)
        if stay.redone is not None:
            rows.put(memory, stay.redone[at], share)
        places = [stay.kept.get(tier, levels)[at] for tier, levels in stay.held.items()]
        if any((p == self.t.unity).all() for p in places) or (gap.kind == "late" and self.limits):
            return  # it is safe elsewhere, or may have gone once the host update was done
        not_gone = self.cols.new(len(at), whole=WHOLE)
        rows.put(memory, not_gone, share)
        if busy and gap.tensor not in self.s.rewriters:
            for lane in self.s.lanes:
                if lane.source == DEVICE and lane.name in flows:
                    c = self.s.carry_ns[gap.tensor, lane.name]
                    for j, slot in enumerate(slots):
                        op = busy.get(int(slot))
                        if j and op is not None and int(inside[j - 1]) in where and c > 0:
                            r, k = self.t.longest(op) / c, where[int(inside[j - 1])]
                            rows.add(0.0, (int(flows[lane.name][j]), 1.0), (int(not_gone[k]), -r), (stay.stays, -r), (int(reserved[k]), -r))
        redo = gap.kind == "live" and gap.tensor in self.s.rewriters
        need = rows.reserve(len(at), 0.0 if redo or gap.kind == "late" else -1.0)
        for columns in (not_gone, *places):
            rows.put(need, columns, -1.0)
        for spared in self._spared(gap):
            rows.put(need, spared, -1.0)
        if gap.kind == "late":
            rows.put(need, self.t.on_host[gap.before or 0], 1.0)
        elif redo:
            # what comes back by a load has been somewhere, unless it was made anew in between
            rows.put(need, int(stay.load[-1]), 1.0)
            rows.put(need, stay.ever, -1.0)
        else:
            rows.put(need, stay.stays, -1.0)
            if self.limits:
                rows.put(need, stay.load[at], -1.0)

    def _spared(self, gap: Gap) -> list[int]:
        """Host updates, run early or late, that excuse the value from being anywhere."""
        found = []
        after = None if gap.after is None else self.t.on_host.get(gap.after)
        if after is not None and (self.limits or not self._reads(gap.after, gap.tensor)):
            found.append(after)
        before = None if gap.before is None else self.t.on_host.get(gap.before)
        if before is not None and self.limits and gap.new_value:
            found.append(before)
        return found

    def _reads(self, op: int | None, tensor: str) -> bool:
        return op is not None and tensor in self.s.problem.ops[op].reads

    def _writes(self, op: int | None, tensor: str) -> bool:
        return op is not None and tensor in self.s.problem.ops[op].writes

    def _ends(self, stay: Stay) -> None:
        """The access after the gap: a device copy, or one on the host to be accessed there."""
        gap, add = stay.gap, self.rows.add
        remade = [(stay.ever, -1.0)] if self._redo_direct(gap.tensor) else []
        off_device = [(int(levels[-1]), -1.0) for levels in stay.held.values()]
        if gap.kind == "late":
            return
        if gap.kind == "live" and gap.after is not None:
            there = [*stay.presence, *self.t.absent(gap.after, gap.tensor)]
            add(-1.0, *((c, -1.0) for c in there))
            in_place = self.t.in_place.get((gap.after, gap.tensor))
            if in_place is not None:
                on_host = stay.kept.get(HOST, stay.held[HOST])
                add(0.0, (in_place, 1.0), (int(on_host[-1]), -1.0), *remade)
        update = None if gap.after is None else self.t.on_host.get(gap.after)
        reads = self._reads(gap.after, gap.tensor)
        if gap.kind == "live" and gap.tensor in self.s.rewriters:
            add(0.0, (int(stay.load[-1]), 1.0), *off_device, *remade)
        else:
            spared = [(update, -1.0)] if update is not None and not reads else []
            add(-1.0, (stay.stays, -1.0), *off_device, *spared)
        if update is not None and reads and self._writes(gap.after, gap.tensor):
            late = self.t.carry_late(gap.tensor)
            host = int(stay.held[HOST][-1])
            add(0.0, (update, 1.0), (host, -1.0), (late, -1.0), *remade)

    def _begins(self, stay: Stay) -> None:
        """The access before the gap, if it may have done without a device copy."""
        gap, add = stay.gap, self.rows.add
        op = gap.before
        if op is None or not self.s.optional(op, gap.tensor):
            return
        update = self.t.on_host.get(op)
        before = self.ended.get((gap.tensor, op))
        if gap.new_value:
            in_place = self.t.in_place.get((op, gap.tensor))
            terms = [] if in_place is None else [(in_place, 1.0)]
            if update is not None and before is not None and before.gap.kind == "live":
                # the host may have updated it early, and the new value been loaded since
                terms += [(update, 1.0), (int(before.load[-1]), -1.0)]
            add(1.0, (stay.stays, 1.0), *terms)
            return
        if before is not None:
            add(0.0, (stay.stays, 1.0), *((c, -1.0) for c in before.presence))
        if update is not None:
            # read on the host before the next op that touches it, and within the step
            last = len(stay.held[HOST]) - 1
            if gap.wraps:
                ahead = self.grid.inside(gap)[: self.grid.before_boundary(gap)]
                last = int(self.marked[ahead].sum())
            remade = [(stay.ever, -1.0)] if self._redo_direct(gap.tensor) else []
            add(0.0, (update, 1.0), (int(stay.held[HOST][last]), -1.0), *remade)
