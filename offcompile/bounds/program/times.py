"""Slots and their contents: ops, lanes, recomputations, and the lane of host updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from offcompile.bounds.highs import Ints
from offcompile.bounds.survey import Survey
from offcompile.ir import DEVICE

from .carriers import Carriers
from .grid import Grid
from .matrix import Columns, MatrixRows

Terms = list[tuple[int, float]]
MOST_HOST_WINDOWS = 24  # each is a long row; a few have nearly the full effect


class Times:
    """The columns for time. A slot is at least as long as its ops, and as each lane's work."""

    def __init__(self, survey: Survey, grid: Grid) -> None:
        s = self.survey = survey
        self.grid = grid
        self.cols, self.rows = Columns(), MatrixRows()
        self.most_ns = _ample_ns(survey)
        self.unit = max(1.0, self.most_ns / (100.0 * max(1, s.n_ops)))
        most = self.scaled(self.most_ns)
        self.tau: Ints = np.array([self._slot(k) for k in range(grid.n_slots)])
        #: direct accesses by (op, tensor), host updates by op
        self.in_place = {key: self.cols.one() for key in s.direct_ns}
        self.on_host = {i: self.cols.one() for i, h in enumerate(s.host_ns) if h is not None}
        #: the duration of the ops that a plan may make longer or shorter
        self.length = {i: self.cols.one(0, most) for i in sorted(s.elastic)}
        self._again: dict[tuple[int, int], int] = {}  # recomputations, by op and slot
        #: transfers of values that an op has only just written, or waits for
        self._fresh: dict[tuple[int, str], Terms] = defaultdict(list)
        self._due: dict[tuple[int, str], Terms] = defaultdict(list)
        self._late: list[tuple[str, int]] = []
        self._carriers = Carriers(survey, self.rows, self.tau)

    def _slot(self, k: int) -> int:
        if self.grid.steady and k == 0:
            return self.cols.zero
        ops, most = self.grid.ops_of(k), self.scaled(self.most_ns)
        if self.grid.is_one_op(k) and ops[0] not in self.survey.elastic:
            most = self.scaled(self.survey.base_ns[ops[0]])
        return self.cols.one(0, most, 1.0)

    def scaled(self, ns: float) -> float:
        return ns / self.unit

    def absent(self, op: int, tensor: str) -> list[int]:
        """Columns that add up to the part of an operand that needs no device copy."""
        found = (self.in_place.get((op, tensor)), self.on_host.get(op))
        return [c for c in found if c is not None]

    def carry(
        self, tensor: str, lane: str, slots: Ints, fresh_from: int | None, due_by: int | None
    ) -> Ints:
        """Adds one column per slot: the part of the tensor that the lane carries in it.

        `fresh_from`: the op before whose end there is nothing to carry; `due_by`: the op by
        whose start the tensor must have been carried.
        """
        cost = self.scaled(self.survey.carry_ns[tensor, lane])
        flow = self.cols.new(len(slots))
        self._carriers.carry(lane, slots, flow, cost)
        if fresh_from is not None:
            self._fresh[fresh_from, lane].append((int(flow[0]), cost))
        if due_by is not None:
            self._due[due_by, lane].append((int(flow[-1]), cost))
        return flow

    def carry_late(self, tensor: str) -> int:
        """Adds a copy sent to the host at any time, for a host update that runs late."""
        column = self.cols.one()
        self._late.append((tensor, column))
        return column

    def again(self, op: int, slot: int) -> int:
        """Column of recomputations of `op` in the slot: at most one before each op and the next."""
        if (op, slot) not in self._again:
            self._again[op, slot] = self.cols.one(0, len(self.grid.ops_of(slot)) + 1)
        return self._again[op, slot]

    # ---- rows that need all other rows and columns ----------------------------------------

    def close(self) -> None:
        self._durations()
        self._lengths()
        self._accesses()
        self._crossings(self._fresh, after=True)
        self._crossings(self._due, after=False)
        if self.on_host:
            self._host_lane()

    def _crossings(self, found: Mapping[tuple[int, str], Terms], after: bool) -> None:
        """Limits transfers of a value to the rest of its slot after the write.

        This is eq. (3) of the paper. Likewise, tensors that an op waits for arrive in the part of
        its slot before it. Several ops in a slot share its lanes: transfers of the later outputs
        fit beside the ops up to the first.
        """
        by_slot: dict[tuple[int, str], list[tuple[int, Terms]]] = defaultdict(list)
        for (op, lane), terms in found.items():
            slot = self.grid.slot_after(op) if after else self.grid.slot_before(op)
            if op in self.grid.ops_of(slot):  # else slots are cut right there: all of it remains
                by_slot[slot, lane].append((self.grid.ops_of(slot).index(op), terms))
        for (slot, _), group in by_slot.items():
            ops, shared = self.grid.ops_of(slot), []
            for place, terms in sorted(group, key=lambda g: g[0], reverse=after):
                shared += terms
                self._rest(slot, ops[: place + 1] if after else ops[place:], shared)

    def _rest(self, slot: int, ops: Sequence[int], terms: Terms) -> None:
        """Requires that `terms` fit into the slot in addition to these of its ops."""
        gone, chosen = self._taken(ops)
        self.rows.add(-gone, (int(self.tau[slot]), -1.0), *chosen, *terms)

    def _taken(self, ops: Sequence[int]) -> tuple[float, Terms]:
        """The time of ops: a constant, and columns to add."""
        fixed = sum(self.survey.base_ns[i] for i in ops if i not in self.length)
        return self.scaled(fixed), [(self.length[i], 1.0) for i in ops if i in self.length]

    def _durations(self) -> None:
        """Direct accesses change the time of an op; a host update takes no compute-lane time."""
        s = self.survey
        deltas: dict[int, Terms] = defaultdict(list)
        for (op, t), delta in s.direct_ns.items():
            deltas[op].append((self.in_place[op, t], self.scaled(delta)))
        for op, column in self.length.items():
            base = self.scaled(s.base_ns[op])
            spared = [(self.on_host[op], -base)] if op in self.on_host else []
            self.rows.add(-base, (column, -1.0), *deltas[op], *spared)

    def _lengths(self) -> None:
        again: dict[int, Terms] = defaultdict(list)
        for (op, slot), column in self._again.items():
            again[slot].append((column, self.scaled(self.survey.again_ns[op])))
        for k in range(self.grid.n_slots):
            if self.grid.ops_of(k) or again[k]:
                self._rest(k, self.grid.ops_of(k), again[k])

    def _accesses(self) -> None:
        """Operands that ops access in place take time on the links, beside the slot's moves."""
        slot_of = {i: k for k in range(self.grid.n_slots) for i in self.grid.ops_of(k)}
        for (op, t), column in self.in_place.items():
            self._carriers.access(slot_of[op], column, op, t, self.unit)

    def _host_lane(self) -> None:
        """Host updates run one at a time, after the earlier ops that touch the same tensors."""
        s, ops = self.survey, self.survey.problem.ops
        after = {}
        for j in self.on_host:
            mine = set(ops[j].operands)
            earlier = (i for i in range(j) if i not in self.on_host)
            after[j] = max((i for i in earlier if not mine.isdisjoint(ops[i].operands)), default=-1)
        starts = sorted(set(after.values()) - {-1})
        if len(starts) > MOST_HOST_WINDOWS:
            picked = range(MOST_HOST_WINDOWS)
            starts = [starts[k * len(starts) // MOST_HOST_WINDOWS] for k in picked]
        for first in [-1, *starts]:
            work = [
                (self.on_host[j], self.scaled(s.host_ns[j] or 0))
                for j, i in after.items()
                if i >= first
            ]
            # from the end of the op to the end of the step; work for the next step in the last slot
            # of a steady grid is included
            in_step = 2 * first + 1 > (int(self.grid.samples[0]) if self.grid.steady else -1)
            slot = self.grid.slot_after(first) if in_step else 0
            mine_ops = self.grid.ops_of(slot) if in_step else []
            spent = mine_ops[: mine_ops.index(first) + 1] if first in mine_ops else []
            gone, chosen = self._taken(spent)
            rest: Terms = [(int(c), -1.0) for c in self.tau[slot:]]
            self.rows.add(-gone, *rest, *chosen, *work)
        outward = [x.name for x in s.lanes if x.source == DEVICE]
        if self._late and len(outward) == 1:
            late = [(c, self.scaled(s.carry_ns[t, outward[0]])) for t, c in self._late]
            self.rows.add(0.0, *((int(c), -1.0) for c in self.tau), *late)


def _ample_ns(s: Survey) -> float:
    """A makespan beyond which the program need not look: bounds are capped there."""
    compute = sum(s.base_ns) + sum(h or 0 for h in s.host_ns) + sum(s.again_ns.values())
    slower = sum(max(0, d) for d in s.direct_ns.values())
    carried = sum(ns * sum(g.free for g in s.gaps[t]) for (t, _), ns in s.carry_ns.items())
    return float(2 * (compute + slower + 2 * carried) + 1000)
