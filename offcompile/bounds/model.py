"""The relaxation: a linear program that every valid plan satisfies, per slot of the step.

It follows the lower bound of "Weight Offloading Strategies" §6 (Theorem 2), widened from weights
to everything that contract §2 allows. What a valid plan does is read off as follows.

- A tensor in a gap between two accesses either *stays* on the device throughout (z = 1), or
  leaves: `r` is then the part not gone yet, `load` the part that its last load brought back,
  `redone` what a recomputation brought back. All four take memory.
- `held` per tier is the part of the current value that has been carried there; it starts at 0
  when the device writes the tensor, at 1 when the host does. Nothing leaves before it is held.
- A slot is at least as long as what its ops take, and as what each lane carries in it; what an
  op writes can be carried only in what remains of the slot after it (eq. (3) of the paper).

Plans are whole where the program is fractional, and space is reserved before the bytes come:
the program is a relaxation. With `z` whole it is the MILP.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from offcompile.ir import DEVICE, HOST, Lane

from .grid import Grid
from .matrix import Columns, Ints, Program, Rows
from .survey import Gap, Survey, least_bytes


@dataclass(frozen=True)
class Stay:
    """The columns of one gap that others refer to."""

    gap: Gap
    stays: int
    load: Ints  # cumulative; the last is at the gap's end
    redone: Ints | None
    held: dict[str, Ints]  # per tier, cumulative


@dataclass(frozen=True)
class Model:
    program: Program
    unit_ns: float  # one unit of time of the program
    most_ns: float  # makespans above this are not looked at: the bound is capped here
    stays: tuple[Stay, ...]


def build(survey: Survey, grid: Grid) -> Model:
    return _Builder(survey, grid).build()


class _Builder:
    def __init__(self, survey: Survey, grid: Grid) -> None:
        self.s, self.grid = survey, grid
        self.cols, self.rows = Columns(), Rows()
        self.zero, self.unity = self.cols.one(0, 0), self.cols.one(1, 1)
        total = sum(survey.base_ns) + sum(h or 0 for h in survey.host_ns)
        per_gap = sum(
            2 * ns * sum(g.free for g in survey.gaps[t]) for (t, _), ns in survey.carry_ns.items()
        )
        slower = sum(max(0, d) for d in survey.direct_ns.values())
        again = sum(survey.again_ns.values())
        self.most_ns = float(2 * (total + per_gap + slower + again) + 1000)
        self.unit = max(1.0, self.most_ns / (100.0 * survey.n_ops))
        self.capacity = survey.capacity
        self.limited = {
            t: c
            for t in survey.tiers
            if (c := survey.machine.tier[t].capacity_bytes) is not None
        }
        self.into_device = [x for x in survey.lanes if x.target == DEVICE]
        self.out_of_device = [x for x in survey.lanes if x.source == DEVICE]
        self.in_place: dict[tuple[int, str], int] = {}  # direct access, by op and tensor
        self.on_host: dict[int, int] = {}  # host update, by op
        self.length: dict[int, int] = {}  # ops whose duration is a choice
        self.again: dict[tuple[int, int], int] = {}  # recomputations, by op and slot
        self.born: dict[tuple[int, str], int] = {}  # host share of a write, by op and tensor
        self.made: dict[tuple[str, int | None], Stay] = {}  # by tensor and the op before
        self.ended: dict[tuple[str, int], Stay] = {}  # by tensor and the op after
        self.late_carry: list[tuple[str, int]] = []
        self.fresh: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)

    def time(self, ns: float) -> float:
        return ns / self.unit

    def build(self) -> Model:
        self._slots()
        self._choices()
        self._memory_rows()
        for gaps in self.s.gaps.values():
            self._tensor(gaps)
        self._operands()
        self._slot_lengths()
        self._fresh_values()
        self._host_lane()
        return Model(
            self.rows.program(self.cols), self.unit, self.most_ns, tuple(self.made.values())
        )

    # ---- time ----------------------------------------------------------------------------

    def _slots(self) -> None:
        s, grid = self.s, self.grid
        optional = {op for op, _ in s.direct_ns} | {i for i, h in enumerate(s.host_ns) if h}
        optional |= {i for i, h in enumerate(s.host_ns) if h is not None}
        self.fixed_ns = [
            sum(s.base_ns[i] for i in grid.ops_of(k) if i not in optional)
            for k in range(grid.n_slots)
        ]
        most = self.time(self.most_ns)
        self.tau = np.array(
            [
                self.cols.one(self.time(f), most, 1.0)
                if k or not grid.steady
                else self.cols.one(0, 0)
                for k, f in enumerate(self.fixed_ns)
            ]
        )
        for i in sorted(optional):
            self.length[i] = self.cols.one(0, most)
        self.lane_rows = {}
        for lane in s.lanes:
            rows = self.rows.reserve(grid.n_slots)
            self.rows.put(rows, self.tau, -1.0)
            self.lane_rows[lane.name] = rows

    def _choices(self) -> None:
        """How long an op takes: direct accesses change it, a host update takes it away."""
        s = self.s
        for i, h in enumerate(s.host_ns):
            if h is not None:
                self.on_host[i] = self.cols.one()
        deltas: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for (op, t), delta in s.direct_ns.items():
            self.in_place[op, t] = self.cols.one()
            deltas[op].append((self.in_place[op, t], self.time(delta)))
        for op, column in self.length.items():
            base = self.time(s.base_ns[op])
            terms = [(column, -1.0), *deltas[op]]
            if op in self.on_host:
                terms.append((self.on_host[op], -base))
            self.rows.add(-base, *terms)

    def _slot_lengths(self) -> None:
        s, grid = self.s, self.grid
        again: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for (op, slot), column in self.again.items():
            again[slot].append((column, self.time(s.again_ns[op])))
        for k in range(grid.n_slots):
            chosen = [(self.length[i], 1.0) for i in grid.ops_of(k) if i in self.length]
            if chosen or again[k]:
                self.rows.add(
                    -self.time(self.fixed_ns[k]), (int(self.tau[k]), -1.0), *chosen, *again[k]
                )

    def _fresh_values(self) -> None:
        """What an op writes can leave the device only in the rest of its slot (eq. (3))."""
        s, grid = self.s, self.grid
        for (op, _), terms in self.fresh.items():
            slot = grid.slot_of(op)
            gone = 0
            chosen = []
            for i in grid.ops_of(slot):
                if i in self.length:
                    chosen.append((self.length[i], 1.0))
                else:
                    gone += s.base_ns[i]
                if i == op:
                    break
            if gone or chosen:
                self.rows.add(-self.time(gone), (int(self.tau[slot]), -1.0), *chosen, *terms)

    def _host_lane(self) -> None:
        """Host updates run one at a time, after the ops before that touch the same tensors."""
        s, grid = self.s, self.grid
        if not self.on_host:
            return
        ops = s.problem.ops
        latest = {}
        for j in self.on_host:
            mine = set(ops[j].operands)
            latest[j] = max(
                (
                    i
                    for i in range(j)
                    if i not in self.on_host and not mine.isdisjoint(ops[i].operands)
                ),
                default=-1,
            )
        starts = sorted(set(latest.values()) - {-1})
        if len(starts) > 24:  # each row is long; a few say nearly all
            starts = [starts[k * len(starts) // 24] for k in range(24)]
        for first in [-1, *starts]:
            work = [
                (self.on_host[j], self.time(s.host_ns[j] or 0))
                for j, i in latest.items()
                if i >= first
            ]
            slot, gone = 0, 0
            chosen = []
            if first >= (int(grid.samples[0]) if grid.steady else 0):
                slot = grid.slot_of(first)
                for i in grid.ops_of(slot):
                    if i in self.length:
                        chosen.append((self.length[i], 1.0))
                    else:
                        gone += s.base_ns[i]
                    if i == first:
                        break
            rest = [(int(c), -1.0) for c in self.tau[slot:]]
            self.rows.add(-self.time(gone), *rest, *chosen, *work)
        for lane in self.out_of_device if len(self.out_of_device) == 1 else ():
            if self.late_carry:
                row = int(self.rows.reserve(1)[0])
                self.rows.put(row, self.tau, -1.0)
                for t, column in self.late_carry:
                    self.rows.put(row, column, self.time(s.carry_ns[t, lane.name]))

    # ---- memory --------------------------------------------------------------------------

    def _memory_rows(self) -> None:
        """One row per sampled op where not everything fits; what surely stands there is fixed."""
        samples = self.grid.samples
        self.memory = np.full(len(samples), -1)
        self.at_sample = {int(op): k for k, op in enumerate(samples)}
        for k in np.flatnonzero(self.s.crowded[samples]):
            assert self.capacity is not None
            self.memory[k] = self.rows.reserve(1, 1.0)[0]
        self.tier_rows = {t: self.rows.reserve(len(samples), 1.0) for t in self.limited}
        self.critical = (self.memory >= 0) | bool(self.limited)

    def _share(self, nbytes: int) -> float:
        return nbytes / max(1, self.capacity or 1)

    def _fix(self, sample: int, nbytes: int) -> None:
        self.rows.rhs[self.memory[sample]] -= self._share(nbytes)

    def _operands(self) -> None:
        """Outputs, operands and workspace at each sampled crowded op."""
        s = self.s
        for op, sample in self.at_sample.items():
            row = int(self.memory[sample])
            if row < 0:
                continue
            on_host = self.on_host.get(op)
            workspace = s.problem.ops[op].workspace_bytes
            self._fix(sample, workspace)
            if on_host is not None:
                self.rows.put(row, on_host, -self._share(workspace))
            for t in s.problem.ops[op].operands:
                nbytes = s.problem.tensor[t].nbytes
                before = self.ended.get((t, op))
                if not s.optional(op, t):
                    self._fix(sample, nbytes)
                elif t in s.problem.ops[op].reads:
                    for column in self._presence(before) if before else ():
                        self.rows.put(row, column, self._share(nbytes))
                else:
                    self._fix(sample, nbytes)
                    for absent in self._absent(op, t):
                        self.rows.put(row, absent, -self._share(nbytes))

    def _absent(self, op: int, tensor: str) -> list[int]:
        """Columns that add up to the part of an operand that needs no device copy."""
        found = (self.in_place.get((op, tensor)), self.on_host.get(op))
        return [c for c in found if c is not None]

    @staticmethod
    def _presence(stay: Stay) -> list[int]:
        """Columns that add up to the device copy at the end of a gap."""
        found = [stay.stays, int(stay.load[-1])]
        return found if stay.redone is None else [*found, int(stay.redone[-1])]

    # ---- one tensor ----------------------------------------------------------------------

    def _tensor(self, gaps: tuple[Gap, ...]) -> None:
        if not any(g.free for g in gaps):
            for gap in gaps:
                self._stands(gap)
            return
        tensor = self.s.problem.tensor[gaps[0].tensor]
        last_free = max(k for k, g in enumerate(gaps) if g.free)
        written = any(g.new_value for g in gaps)
        loop = self.s.problem.steady and not written
        held: dict[str, int] = {}
        loop_heads: dict[str, int] = {}
        redone_elsewhere = self.zero
        for k, gap in enumerate(gaps):
            if gap.new_value:
                held = {t: self._born(gap) if t == HOST else self.zero for t in self.s.tiers}
                redone_elsewhere = self.zero
            elif gap.before is None:
                held = {t: self.unity if t == tensor.home else self.zero for t in self.s.tiers}
            elif k == 0 and loop:
                # never written and for ever the same: where there is room, copies cost nothing
                loop_heads = {t: self.cols.one() for t in self.s.tiers if t in self.limited}
                held = {t: loop_heads.get(t, self.unity) for t in self.s.tiers}
            elif not held:
                held = dict.fromkeys(self.s.tiers, self.unity)
            follows = next((j for j in range(k, len(gaps)) if gaps[j].new_value and j > k), None)
            needed = any(g.free for g in gaps[k : follows if follows else len(gaps)])
            if not gap.free:
                self._stands(gap)
            if not needed or (k > last_free and not loop_heads):
                continue
            stay, redone_elsewhere = self._gap(gap, held, redone_elsewhere)
            held = {t: int(c[-1]) for t, c in stay.held.items()}
        for t, column in loop_heads.items():
            self.rows.add(0.0, (column, 1.0), (held[t], -1.0))
        for gap in gaps:
            if gap.free:
                self._link(gap)

    def _stands(self, gap: Gap) -> None:
        """A gap that nobody would use to leave: its bytes are there."""
        if gap.kind == "late":
            return
        nbytes = self.s.problem.tensor[gap.tensor].nbytes
        for sample in self.grid.inside(gap):
            if self.memory[sample] >= 0:
                self._fix(sample, nbytes)

    def _born(self, gap: Gap) -> int:
        """The part of a new value that was written on the host."""
        assert gap.before is not None
        where = self._absent(gap.before, gap.tensor)
        if not where:
            return self.zero
        column = self.cols.one()
        self.rows.add(0.0, (column, 1.0), *((c, -1.0) for c in where))
        self.born[gap.before, gap.tensor] = column
        return column

    def _gap(self, gap: Gap, held: dict[str, int], elsewhere: int) -> tuple[Stay, int]:
        """Columns and rows of one gap; `held` is what stands off the device as it begins."""
        s, rows, grid = self.s, self.rows, self.grid
        tensor = s.problem.tensor[gap.tensor]
        inside = grid.inside(gap)
        slots = grid.slots(gap, inside)
        marks = inside[self.critical[inside]] if gap.free else inside[:0]
        group = np.concatenate([[0], np.cumsum(self.critical[inside])]) if gap.free else slots * 0
        count = len(marks) + 1
        loads = gap.free and gap.kind == "live"
        away_first = gap.before is None and tensor.home != DEVICE
        # a copy in flight as an optional access runs is neither there nor away: not whole then
        whole = gap.before is None or not s.optional(gap.before, gap.tensor)
        stays = self.unity
        if gap.free:
            stays = self.zero if away_first or gap.kind == "late" else self.cols.one(whole=whole)
        load = self.cols.new(count) if loads else np.full(count, self.zero)

        flows: dict[str, Ints] = {}
        for lane in s.lanes:
            if (lane.target == DEVICE and not loads) or held.get(lane.target) == self.unity:
                continue
            flow = self.cols.new(len(slots))
            rows.put(
                self.lane_rows[lane.name][slots], flow, self.time(s.carry_ns[tensor.id, lane.name])
            )
            flows[lane.name] = flow
            if lane.source == DEVICE and gap.new_value and gap.before is not None:
                cost = self.time(s.carry_ns[tensor.id, lane.name])
                self.fresh[gap.before, lane.name].append((int(flow[0]), cost))
        gained: dict[str, list[Ints]] = defaultdict(list)
        for lane in s.lanes:
            if lane.name in flows:
                gained[lane.target].append(flows[lane.name])

        after: dict[str, Ints] = {}
        for tier in s.tiers:
            if held[tier] == self.unity and tier not in self.limited:
                after[tier] = np.full(count, self.unity)
                continue
            after[tier] = self.cols.new(count)
            self._grow(after[tier], held[tier], gained[tier], group)
            if tier in self.limited:
                share = least_bytes(tensor, s.machine) / max(1, self.limited[tier])
                rows.put(self.tier_rows[tier][marks], after[tier][:-1], share)
        if loads:
            self._grow(load, self.zero, gained[DEVICE], group)
        redoers = s.rewriters.get(tensor.id, ()) if loads else ()
        redone = None
        if redoers:
            redone = self.cols.new(count)
            runs = [np.array([self._again(op, int(k)) for k in slots]) for op in redoers]
            self._grow(redone, self.zero, runs, group)
            ever = self.cols.one()
            row = rows.add(0.0, (ever, 1.0), (elsewhere, -1.0))
            for run in runs:
                rows.put(row, run, -1.0)
            direct = any(tensor.id in s.problem.ops[op].direct for op in redoers)
            elsewhere = ever if direct else self.zero
        self._sources(held, after, flows, group, bool(redoers))
        stay = Stay(gap, stays, load, redone, after)
        self.made[tensor.id, gap.before] = stay
        if gap.after is not None:
            self.ended[tensor.id, gap.after] = stay
        if gap.free:
            self._exists(stay, marks, ever if redoers else None)
        return stay, elsewhere

    def _grow(self, levels: Ints, start: int, flows: list[Ints], group: Ints) -> None:
        """Each level is at most the one before and what flowed in since."""
        rows = self.rows.reserve(len(levels))
        self.rows.put(rows, levels, 1.0)
        self.rows.put(rows, np.concatenate([[start], levels[:-1]]), -1.0)
        for flow in flows:
            self.rows.put(rows[group], flow, -1.0)

    def _again(self, op: int, slot: int) -> int:
        if (op, slot) not in self.again:
            most = max(1, len(self.grid.ops_of(slot)))
            self.again[op, slot] = self.cols.one(0, most)
        return self.again[op, slot]

    def _sources(
        self,
        held: dict[str, int],
        after: dict[str, Ints],
        flows: dict[str, Ints],
        group: Ints,
        redone: bool,
    ) -> None:
        """A lane carries no more from a tier than was held there, or came within the stretch.

        One tier without limit needs no such rows: what left the device is held there.
        """
        if (len(self.s.tiers) == 1 and not self.limited) or redone:
            return
        for lane in self.s.lanes:
            if lane.source == DEVICE or lane.name not in flows:
                continue
            flow = flows[lane.name]
            rows = self.rows.reserve(len(flow))
            self.rows.put(rows, flow, 1.0)
            levels = np.concatenate([[held[lane.source]], after[lane.source][:-1]])
            self.rows.put(rows, levels[group], -1.0)
            for other in self.s.lanes:
                if other.target == lane.source and other.name in flows:
                    self._gains(rows, flows[other.name], group)

    def _gains(self, rows: Ints, flow: Ints, group: Ints) -> None:
        """Add to each row all that flowed within the same stretch between two marks."""
        for g in range(int(group[-1]) + 1):
            at = np.flatnonzero(group == g)
            self.rows.put(np.repeat(rows[at], len(at)), np.tile(flow[at], len(at)), -1.0)
