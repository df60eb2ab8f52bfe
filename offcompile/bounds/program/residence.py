"""The places where each tensor may be in each of its gaps, and the transfers that requires."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from offcompile.bounds.highs import Ints
from offcompile.bounds.survey import SurveyGap, least_bytes
from offcompile.ir import DEVICE, HOST

from .access import begins, ends, remade_on_host, spared
from .stay import GapColumns, Heads, StayFrame
from .times import Times


class Residence:
    """Columns and rows for all tensors that may leave the device, or start elsewhere."""

    def __init__(
        self, times: Times, memory: Ints, limits: Mapping[str, tuple[int, Ints]], whole: bool
    ) -> None:
        """`memory`: row per sample (−1: everything fits); `limits`: tier → capacity, rows.

        `whole`: in the MILP, copies take all of their space or none.
        """
        self.t, self.s, self.grid = times, times.survey, times.grid
        self.cols, self.rows, self.whole = times.cols, times.rows, whole
        self.memory, self.limits = memory, limits
        self.made: list[GapColumns] = []
        self.ended: dict[tuple[str, int], GapColumns] = {}  # by tensor and the op after the gap

    def share(self, nbytes: int) -> float:
        return nbytes / max(1, self.s.capacity or 1)

    def fix(self, sample: int, nbytes: int) -> None:
        """Adds bytes that are certainly on the device at a sample."""
        self.rows.rhs[int(self.memory[sample])] -= self.share(nbytes)

    def add(self, gaps: tuple[SurveyGap, ...]) -> None:
        """Adds one tensor: its gaps in order, the first gap of a new value first."""
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
                heads = stay.heads_of_next(self.cols.zero, remade_on_host(self.s, gap.tensor))
        if loops:
            for tier, column in first.kept.items():
                self.rows.add(0.0, (column, 1.0), (heads.kept[tier], -1.0))
        for stay in mine:
            if stay.gap.free:
                ends(self.t, stay)
                begins(self.t, stay, self.ended)
        self.made += mine

    def _heads(self, gap: SurveyGap) -> Heads:
        """The copies off the device as the first gap of a value begins."""
        zero, unity = self.cols.zero, self.cols.unity
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
            # never written in a steady step: a copy once made stays valid, if it has room
            held = dict.fromkeys(self.s.tiers, unity)
            return Heads(held, {t: self.cols.one() for t in self.limits}, zero, zero)
        return Heads(held, {t: held[t] for t in self.limits}, born, zero)

    # ---- one gap -------------------------------------------------------------------------

    def _gap(self, gap: SurveyGap, heads: Heads) -> GapColumns:
        s = self.s
        home = s.problem.tensor[gap.tensor].home
        frame = self._frame(gap, heads)
        loads = gap.free and gap.kind == "live"
        flows, gained = self._book(frame, loads)
        held, kept = self._levels(frame, gained)
        stays = self.cols.unity
        if gap.free:
            # a copy in flight across an optional access is neither present nor away: not integral
            whole = gap.before is None or not s.optional(gap.before, gap.tensor)
            elsewhere = gap.kind == "late" or (gap.before is None and home != DEVICE)
            stays = self.cols.zero if elsewhere else self.cols.one(whole=whole)
        load = np.full(frame.n_levels, self.cols.zero)
        if loads:
            load = self.cols.new(frame.n_levels)
            self._grow(load, self.cols.zero, gained[DEVICE], frame)
        redone, ever = self._redo(frame, loads)
        stay = GapColumns(frame, stays, load, redone, ever, held, kept)
        self._sources(stay, flows)
        if gap.after is not None:
            self.ended[gap.tensor, gap.after] = stay
        if gap.free:
            self._space(stay)
        return stay

    def _frame(self, gap: SurveyGap, heads: Heads) -> StayFrame:
        """Sets marks where memory is short, or everywhere if other tiers may be short of it."""
        inside = self.grid.inside(gap)
        slots = self.grid.slots(gap, inside)
        marked = (self.memory[inside] >= 0) & gap.free
        if self.limits:
            marked[:] = True
        window = np.zeros(len(slots), dtype=np.int64)
        window[len(slots) - len(inside) :] = np.cumsum(marked)
        boundary = int(marked[: self.grid.before_boundary(gap)].sum()) if gap.wraps else 0
        return StayFrame(gap, heads, slots, window, inside[marked], boundary)

    def _book(self, frame: StayFrame, loads: bool) -> tuple[dict[str, Ints], dict[str, list[Ints]]]:
        """Adds columns for the transfers, by lane, and by the tier where they arrive."""
        gap, flows = frame.gap, {}
        gained: dict[str, list[Ints]] = defaultdict(list)
        for lane in self.s.lanes:
            full = frame.heads.held.get(lane.target) == self.cols.unity
            if (lane.target == DEVICE and not loads) or (full and lane.target not in self.limits):
                continue
            fresh = gap.before if gap.new_value and lane.source == DEVICE else None
            flow = self.t.carry(gap.tensor, lane.name, frame.slots, fresh, gap.after)
            flows[lane.name] = flow
            gained[lane.target].append(flow)
        return flows, gained

    def _levels(
        self, frame: StayFrame, gained: Mapping[str, list[Ints]]
    ) -> tuple[dict[str, Ints], dict[str, Ints]]:
        """The parts carried to each tier, and the parts still held on tiers with a limit."""
        held, kept = {}, {}
        for tier in self.s.tiers:
            start = frame.heads.held[tier]
            held[tier] = np.full(frame.n_levels, self.cols.unity)
            if start != self.cols.unity:
                held[tier] = self.cols.new(frame.n_levels)
                self._grow(held[tier], start, gained[tier], frame)
            if tier in self.limits:
                capacity, tier_rows = self.limits[tier]
                kept[tier] = self.cols.new(frame.n_levels)
                grown = self._grow(kept[tier], frame.heads.kept[tier], gained[tier], frame)
                if tier == HOST and frame.gap.before in self.t.on_host:
                    self.rows.put(grown, frame.heads.born, -1.0)  # the update may run late
                tensor = self.s.problem.tensor[frame.gap.tensor]
                share = least_bytes(tensor, self.s.machine) / max(1, capacity)
                self.rows.put(tier_rows[frame.marks], kept[tier][:-1], share)
        return held, kept

    def _grow(self, levels: Ints, start: int, flows: list[Ints], frame: StayFrame) -> Ints:
        """Limits each level to the one before plus the flow since."""
        rows = self.rows.reserve(len(levels))
        self.rows.put(rows, levels, 1.0)
        self.rows.put(rows, np.concatenate([[start], levels[:-1]]), -1.0)
        for flow in flows:
            self.rows.put(rows[frame.window], flow, -1.0)
        return rows

    def _redo(self, frame: StayFrame, loads: bool) -> tuple[Ints | None, int]:
        """The parts that recomputations bring back, and whether any ran since the value's head."""
        redoers = self.s.rewriters.get(frame.gap.tensor, ())
        if not redoers:
            return None, frame.heads.remade
        ever = self.cols.one(whole=True)
        row = self.rows.add(0.0, (ever, 1.0), (frame.heads.remade, -1.0))
        runs = [np.array([self.t.again(op, int(k)) for k in frame.slots]) for op in redoers]
        for run in runs:
            self.rows.put(row, run, -1.0)
        if not loads:
            return None, ever
        redone = self.cols.new(frame.n_levels, whole=True)
        self._grow(redone, self.cols.zero, runs, frame)
        return redone, ever

    def _sources(self, stay: GapColumns, flows: Mapping[str, Ints]) -> None:
        """A lane carries no more from a tier than was there, or arrived between the same marks.

        With one tier and no limit this is implied: everything that left the device is held there.
        """
        if len(self.s.tiers) == 1 and not self.limits:
            return
        heads, window = stay.frame.heads, stay.frame.window
        for lane in self.s.lanes:
            if lane.source == DEVICE or lane.name not in flows:
                continue
            levels = stay.kept.get(lane.source, stay.held[lane.source])
            start = heads.kept.get(lane.source, heads.held[lane.source])
            rows = self.rows.reserve(len(window))
            self.rows.put(rows, flows[lane.name], 1.0)
            self.rows.put(rows, np.concatenate([[start], levels[:-1]])[window], -1.0)
            if lane.source == HOST:
                self.rows.put(rows, heads.born, -1.0)
                if remade_on_host(self.s, stay.gap.tensor):
                    self.rows.put(rows, stay.ever, -1.0)
            for other in self.s.lanes:
                if other.target == lane.source and other.name in flows:
                    for g in range(stay.frame.n_levels):
                        at = np.flatnonzero(window == g)
                        flow = np.tile(flows[other.name][at], len(at))
                        self.rows.put(np.repeat(rows[at], len(at)), flow, -1.0)

    # ---- memory --------------------------------------------------------------------------

    def _space(self, stay: GapColumns) -> None:
        """Adds the bytes on the device at each crowded mark; the value must be somewhere."""
        gap, rows = stay.gap, self.rows
        share = self.share(self.s.problem.tensor[gap.tensor].nbytes)
        at = np.flatnonzero(self.memory[stay.frame.marks] >= 0)
        if not len(at):
            return
        memory = self.memory[stay.frame.marks[at]]
        rows.put(memory, stay.stays, share)
        rows.put(memory, self._reserved(stay, at), share)
        if stay.redone is not None:
            rows.put(memory, stay.redone[at], share)
        places = [stay.kept.get(tier, levels)[at] for tier, levels in stay.held.items()]
        if any((p == self.cols.unity).all() for p in places) or (
            gap.kind == "late" and self.limits
        ):
            return  # the value is elsewhere, or may be gone since the host update is done
        not_gone = self.cols.new(len(at), whole=self.whole)
        rows.put(memory, not_gone, share)
        redo = gap.kind == "live" and gap.tensor in self.s.rewriters
        need = rows.reserve(len(at), 0.0 if redo or gap.kind == "late" else -1.0)
        for columns in (not_gone, *places):
            rows.put(need, columns, -1.0)
        for column in spared(self.t, gap, bool(self.limits)):
            rows.put(need, column, -1.0)
        if gap.kind == "late":
            rows.put(need, self.t.on_host[gap.before or 0], 1.0)
        elif redo:
            # a loaded value has been held somewhere, unless it was recomputed in between
            rows.put(need, int(stay.load[-1]), 1.0)
            rows.put(need, stay.ever, -1.0)
        else:
            rows.put(need, stay.stays, -1.0)
            if self.limits:
                rows.put(need, stay.load[at], -1.0)

    def _reserved(self, stay: GapColumns, at: Ints) -> Ints:
        """The space of a load at some marks. In the MILP it is integral, from the load's start."""
        if not self.whole or stay.gap.kind != "live":
            return stay.load[at]
        reserved = self.cols.new(len(at), whole=True)
        rows = self.rows.reserve(2 * len(at) - 1)
        here, later = rows[: len(at)], rows[len(at) :]
        self.rows.put(here, stay.load[at], 1.0)
        self.rows.put(here, reserved, -1.0)
        self.rows.put(later, reserved[:-1], 1.0)
        self.rows.put(later, reserved[1:], -1.0)
        return reserved
