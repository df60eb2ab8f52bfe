"""Where each tensor may be in each of its gaps, and what getting there takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from offcompile.ir import DEVICE, HOST, Lane

from .access import begins, ends, remade_on_host, spared
from .matrix import Ints
from .stay import Heads, Stay
from .survey import Gap, least_bytes
from .times import Times
from .windows import Marks, marks


MONO = True
@dataclass
class _Plan:
    """One gap being built: where it is looked at, and what is booked in it."""

    gap: Gap
    heads: Heads
    inside: Ints
    slots: Ints
    out: Marks  # close together where a copy leaves
    back: Marks  # close together where it must be back
    flows: dict[str, Ints]

    def marks_of(self, lane: Lane) -> Marks:
        return self.back if lane.target == DEVICE else self.out


class Residence:
    """Columns and rows for all tensors that may leave the device, or start elsewhere."""

    def __init__(
        self, times: Times, memory: Ints, limits: Mapping[str, tuple[int, Ints]], whole: bool
    ) -> None:
        """`memory`: row per sample (−1: everything fits); `limits`: tier → capacity, rows.

        `whole`: copies take all of their space, or none, in the MILP.
        """
        self.t, self.s, self.grid = times, times.survey, times.grid
        self.cols, self.rows, self.whole = times.cols, times.rows, whole
        self.memory, self.limits = memory, limits
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
                inside = self.grid.inside(gap)
                for sample in inside[self.memory[inside] >= 0]:
                    self.fix(int(sample), self.s.problem.tensor[gap.tensor].nbytes)
        if not any(g.free for g in gaps):
            return
        loops = self.s.problem.steady and not any(g.new_value for g in gaps)
        first = heads = self._heads(gaps[0])
        mine = []
        for k, gap in enumerate(gaps):
            if k and gap.new_value:
                heads = self._heads(gap)
            end = next((j for j in range(k + 1, len(gaps)) if gaps[j].new_value), len(gaps))
            if any(g.free for g in gaps[k:end]) or (loops and self.limits):
                stay = self._gap(gap, heads)
                mine.append(stay)
                heads = stay.heads_of_next(self.t.zero, remade_on_host(self.s, gap.tensor))
        if loops:
            for tier, column in first.kept.items():
                self.rows.add(0.0, (column, 1.0), (heads.kept[tier], -1.0))
        for stay in mine:
            if stay.gap.free:
                ends(self.t, stay)
                begins(self.t, stay, self.ended)
        self.made += mine

    def _heads(self, gap: Gap) -> Heads:
        """What stands off the device as the first gap of a value begins."""
        zero, unity = self.t.zero, self.t.unity
        born = zero
        if gap.new_value and gap.before is not None:
            where = self.t.absent(gap.before, gap.tensor)
            if where:
                born = self.cols.one()
                self.rows.add(0.0, (born, 1.0), *((c, -1.0) for c in where))
            held = {t: born if t == HOST else zero for t in self.s.tiers}
        elif gap.before is None:
            home = self.s.problem.tensor[gap.tensor].home
            held = {t: unity if t == home else zero for t in self.s.tiers}
        else:
            # never written in a steady step: a copy once made is good for ever, if it has room
            held = dict.fromkeys(self.s.tiers, unity)
            return Heads(held, {t: self.cols.one() for t in self.limits}, zero, zero)
        return Heads(held, {t: held[t] for t in self.limits}, born, zero)

    # ---- one gap -------------------------------------------------------------------------

    def _gap(self, gap: Gap, heads: Heads) -> Stay:
        s, t = self.s, self.t
        tensor = s.problem.tensor[gap.tensor]
        inside = self.grid.inside(gap)
        slots = self.grid.slots(gap, inside)
        wanted = (self.memory[inside] >= 0) & gap.free
        if self.limits:  # what stands on a tier with a limit may come and go at any time
            wanted = np.ones(len(inside), dtype=np.bool_)
        loads = gap.free and gap.kind == "live"
        plan = _Plan(
            gap,
            heads,
            inside,
            slots,
            marks(t.tree, slots, wanted, None if self.limits else False),
            marks(t.tree, slots, wanted, None if self.limits else True),
            {},
        )
        gained = self._book(plan, loads)
        held, kept = self._levels(plan, gained)
        stays = t.unity
        if gap.free:
            # a copy in flight across an optional access is neither there nor away: not whole
            whole = gap.before is None or not s.optional(gap.before, gap.tensor)
            elsewhere = gap.kind == "late" or (gap.before is None and tensor.home != DEVICE)
            stays = t.zero if elsewhere else self.cols.one(whole=whole)
        load = np.full(plan.back.count, t.zero)
        if loads:
            load = self.cols.new(plan.back.count)
            self._grow(load, t.zero, gained[DEVICE], plan.back)
        redone, ever = self._redo(plan, loads)
        stay = Stay(gap, stays, load, redone, ever, held, kept, plan.inside[plan.out.at])
        self._sources(plan, stay)
        if gap.after is not None:
            self.ended[tensor.id, gap.after] = stay
        if gap.free and (self.memory[inside] >= 0).any():
            self._space(plan, stay)
        return stay

    def _book(self, plan: _Plan, loads: bool) -> dict[str, list[Ints]]:
        """Columns for what each lane carries; per tier, those that arrive there."""
        gap, gained = plan.gap, defaultdict(list)
        for lane in self.s.lanes:
            full = plan.heads.held.get(lane.target) == self.t.unity
            if (lane.target == DEVICE and not loads) or (full and lane.target not in self.limits):
                continue
            fresh = gap.before if gap.new_value and lane.source == DEVICE else None
            nodes = plan.marks_of(lane).nodes
            flow = self.t.carry(gap.tensor, lane.name, nodes, fresh, gap.after)
            plan.flows[lane.name] = flow
            gained[lane.target].append(flow)
        return gained

    def _levels(
        self, plan: _Plan, gained: Mapping[str, list[Ints]]
    ) -> tuple[dict[str, Ints], dict[str, Ints]]:
        """What has been carried to each tier, and what still stands on those with a limit."""
        held, kept = {}, {}
        for tier in self.s.tiers:
            start = plan.heads.held[tier]
            held[tier] = np.full(plan.out.count, self.t.unity)
            if start != self.t.unity:
                held[tier] = self.cols.new(plan.out.count)
                self._grow(held[tier], start, gained[tier], plan.out)
            if tier in self.limits:
                capacity, tier_rows = self.limits[tier]
                kept[tier] = self.cols.new(plan.out.count)
                grown = self._grow(kept[tier], plan.heads.kept[tier], gained[tier], plan.out)
                if tier == HOST and plan.gap.before in self.t.on_host:
                    self.rows.put(grown, plan.heads.born, -1.0)  # the update may run late
                tensor = self.s.problem.tensor[plan.gap.tensor]
                share = least_bytes(tensor, self.s.machine) / max(1, capacity)
                self.rows.put(tier_rows[plan.inside[plan.out.at]], kept[tier][:-1], share)
        return held, kept

    def _grow(self, levels: Ints, start: int, flows: list[Ints], at: Marks) -> Ints:
        """Each level is at most the one before and what flowed in since."""
        rows = self.rows.reserve(len(levels))
        self.rows.put(rows, levels, 1.0)
        self.rows.put(rows, np.concatenate([[start], levels[:-1]]), -1.0)
        for flow in flows:
            self.rows.put(rows[at.windows], flow, -1.0)
        return rows

    def _redo(self, plan: _Plan, loads: bool) -> tuple[Ints | None, int]:
        """What recomputations bring back, and whether there were any since the value's head."""
        redoers = self.s.rewriters.get(plan.gap.tensor, ())
        if not redoers:
            return None, plan.heads.remade
        ever = self.cols.one()
        row = self.rows.add(0.0, (ever, 1.0), (plan.heads.remade, -1.0))
        runs = [np.array([self.t.again(op, int(k)) for k in plan.slots]) for op in redoers]
        for run in runs:
            self.rows.put(row, run, -1.0)
        if not loads:
            return None, ever
        redone = self.cols.new(plan.back.count)
        grown = self._grow(redone, self.t.zero, [], plan.back)
        for run in runs:
            self.rows.put(grown[plan.back.slot_window], run, -1.0)
        return redone, ever

    def _sources(self, plan: _Plan, stay: Stay) -> None:
        """A lane carries no more from a tier than was there, or came within the same time.

        With one tier and no limit it is implied: what left the device is held there.
        """
        if len(self.s.tiers) == 1 and not self.limits:
            return
        tree = self.t.tree
        for lane in self.s.lanes:
            if lane.source == DEVICE or lane.name not in plan.flows:
                continue
            levels = stay.kept.get(lane.source, stay.held[lane.source])
            start = plan.heads.kept.get(lane.source, plan.heads.held[lane.source])
            rows = self.rows.reserve(len(plan.flows[lane.name]))
            self.rows.put(rows, plan.flows[lane.name], 1.0)
            # without care for when within the gap it came: the level that the gap ends with
            if levels[-1] == start:
                self.rows.put(rows, start, -1.0)
                continue
            at, mine = plan.out, plan.marks_of(lane)
            for row, node, window in zip(rows, mine.nodes, mine.windows, strict=True):
                first, last = self._span(plan, at, mine, int(window), tree.slots(node))
                before = levels[first - 1] if first else start
                self.rows.put(int(row), int(before), -1.0)
                for other in self.s.lanes:
                    if other.target == lane.source and other.name in plan.flows:
                        inflow = plan.flows[other.name]
                        within = (at.windows >= first) & (at.windows <= last)
                        self.rows.put(int(row), inflow[within], -1.0)
                if lane.source == HOST:
                    self.rows.put(int(row), plan.heads.born, -1.0)
                    if remade_on_host(self.s, plan.gap.tensor):
                        self.rows.put(int(row), stay.ever, -1.0)

    @staticmethod
    def _span(plan: _Plan, at: Marks, mine: Marks, window: int, slots: range) -> tuple[int, int]:
        """Of the windows of `at`, the first and last that meet one window of `mine`."""
        met = at.slot_window[(mine.slot_window == window) & np.isin(plan.slots, slots)]
        return int(met.min()), int(met.max())

    # ---- memory --------------------------------------------------------------------------

    def _space(self, plan: _Plan, stay: Stay) -> None:
        """At each crowded sample the bytes on the device; at the marks, the value is somewhere.

        Between marks a copy on its way back takes at least what it took at the mark before, one
        on its way out at least what it takes at the mark after.
        """
        gap, rows = stay.gap, self.rows
        share = self.share(self.s.problem.tensor[gap.tensor].nbytes)
        seen = np.flatnonzero(self.memory[plan.inside] >= 0)
        memory = self.memory[plan.inside[seen]]
        rows.put(memory, stay.stays, share)
        before = np.searchsorted(plan.back.at, seen, "right") - 1
        for levels in (self._reserved(stay), stay.redone):
            if levels is not None:
                rows.put(memory[before >= 0], levels[before[before >= 0]], share)
        places = [stay.kept.get(tier, levels)[:-1] for tier, levels in stay.held.items()]
        if any((p == self.t.unity).all() for p in places) or (gap.kind == "late" and self.limits):
            return  # it is safe elsewhere, or may have gone once the host update was done
        not_gone = self.cols.new(len(plan.out.at), whole=self.whole)
        after = np.searchsorted(plan.out.at, seen, "left")
        there = after < len(plan.out.at)
        rows.put(memory[there], not_gone[after[there]], share)
        loaded = np.searchsorted(plan.back.at, plan.out.at, "right") - 1
        self._exists(plan, stay, not_gone, places, loaded)

    def _reserved(self, stay: Stay) -> Ints:
        """Space of a load. In the MILP it is held, whole, from the load's start."""
        if not self.whole or stay.gap.kind != "live":
            return stay.load
        reserved = self.cols.new(len(stay.load) - 1, whole=True)
        rows = self.rows.reserve(len(reserved))
        self.rows.put(rows, stay.load[:-1], 1.0)
        self.rows.put(rows, reserved, -1.0)
        if MONO and len(reserved) > 1:
            rows = self.rows.reserve(len(reserved) - 1)
            self.rows.put(rows, reserved[:-1], 1.0)
            self.rows.put(rows, reserved[1:], -1.0)
        return reserved

    def _exists(
        self, plan: _Plan, stay: Stay, not_gone: Ints, places: list[Ints], loaded: Ints
    ) -> None:
        gap, rows = stay.gap, self.rows
        redo = gap.kind == "live" and gap.tensor in self.s.rewriters
        need = rows.reserve(len(not_gone), 0.0 if redo or gap.kind == "late" else -1.0)
        for columns in (not_gone, *places):
            rows.put(need, columns, -1.0)
        for column in spared(self.t, gap, bool(self.limits)):
            rows.put(need, column, -1.0)
        if gap.kind == "late":
            rows.put(need, self.t.on_host[gap.before or 0], 1.0)
        elif redo:
            # what comes back by a load has been somewhere, unless it was made anew in between
            rows.put(need, int(stay.load[-1]), 1.0)
            rows.put(need, stay.ever, -1.0)
        else:
            rows.put(need, stay.stays, -1.0)
            if self.limits:
                rows.put(need[loaded >= 0], stay.load[loaded[loaded >= 0]], -1.0)
