"""Slots and what fills them: ops, lanes, recomputations, and the lane of host updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from offcompile.ir import DEVICE

from .grid import Grid
from .matrix import Columns, Ints, Rows
from .survey import Survey
from .windows import Tree

Terms = list[tuple[int, float]]
MOST_HOST_WINDOWS = 24  # each is a long row; a few say nearly all


class Times:
    """The columns for time. A slot is at least as long as its ops, and as each lane's work."""

    def __init__(self, survey: Survey, grid: Grid) -> None:
        s = self.survey = survey
        self.grid, self.tree = grid, Tree(grid.n_slots)
        self.cols, self.rows = Columns(), Rows()
        self.zero, self.unity = self.cols.one(0, 0), self.cols.one(1, 1)
        self.most_ns = _ample_ns(survey)
        self.unit = max(1.0, self.most_ns / (100.0 * max(1, s.n_ops)))
        self.optional = {op for op, _ in s.direct_ns} | {
            i for i, h in enumerate(s.host_ns) if h is not None
        }
        self.fixed_ns = [
            sum(s.base_ns[i] for i in grid.ops_of(k) if i not in self.optional)
            for k in range(grid.n_slots)
        ]
        self.tau: Ints = np.array([self._slot(k) for k in range(grid.n_slots)])
        #: direct access, by (op, tensor); host update, by op
        self.in_place = {key: self.cols.one() for key in s.direct_ns}
        self.on_host = {i: self.cols.one() for i, h in enumerate(s.host_ns) if h is not None}
        #: the duration of ops for which it is a choice
        most = self.scaled(self.most_ns)
        self.length = {i: self.cols.one(0, most) for i in sorted(self.optional)}
        self._again: dict[tuple[int, int], int] = {}  # recomputations, by op and slot
        #: what lanes carry, by lane and node; what of it an op has just written, or waits for
        self._booked: dict[tuple[str, int], Terms] = defaultdict(list)
        self._fresh: dict[tuple[int, str, int], Terms] = defaultdict(list)
        self._due: dict[tuple[int, str, int], Terms] = defaultdict(list)
        self._late: list[tuple[str, int]] = []

    def _slot(self, k: int) -> int:
        if k == 0 and self.grid.steady:
            return self.zero
        least = self.scaled(self.fixed_ns[k])
        return self.cols.one(least, self.scaled(self.most_ns), 1.0)

    def scaled(self, ns: float) -> float:
        return ns / self.unit

    def absent(self, op: int, tensor: str) -> list[int]:
        """Columns that add up to the part of an operand that needs no device copy."""
        found = (self.in_place.get((op, tensor)), self.on_host.get(op))
        return [c for c in found if c is not None]

    def carry(
        self,
        tensor: str,
        lane: str,
        nodes: Sequence[int],
        fresh_from: int | None,
        due_by: int | None,
    ) -> Ints:
        """One column per node: the part of the tensor that the lane carries in its slots.

        `fresh_from`: the op before whose end there is nothing to carry; `due_by`: the op by
        whose start it must have been carried.
        """
        cost = self.scaled(self.survey.carry_ns[tensor, lane])
        flow = self.cols.new(len(nodes))
        for node, column in zip(nodes, flow.tolist(), strict=True):
            self._booked[lane, node].append((column, cost))
        if fresh_from is not None:
            self._fresh[fresh_from, lane, nodes[0]].append((int(flow[0]), cost))
        if due_by is not None:
            self._due[due_by, lane, nodes[-1]].append((int(flow[-1]), cost))
        return flow

    def carry_late(self, tensor: str) -> int:
        """A copy sent to the host at any time, for a host update that runs late."""
        column = self.cols.one()
        self._late.append((tensor, column))
        return column

    def again(self, op: int, slot: int) -> int:
        """How often `op` is recomputed in the slot: at most once before each op."""
        if (op, slot) not in self._again:
            # it may come before each op that starts in the slot, and before the next one
            self._again[op, slot] = self.cols.one(0, len(self.grid.ops_of(slot)) + 1)
        return self._again[op, slot]

    # ---- rows that need everything else to be there ---------------------------------------

    def close(self) -> None:
        self._durations()
        self._lengths()
        self._lanes()
        for (op, _, node), terms in self._fresh.items():
            # eq. (3) of the paper: a value leaves in what remains of the slot after its write
            gone, chosen = self._until_end(op)
            if gone or chosen:
                self.rows.add(-gone, *self._length_of(node), *chosen, *terms)
        for (op, _, node), terms in self._due.items():
            # likewise, what an op waits for comes in what its slot holds before it
            gone, chosen = self._from_start(op)
            if gone or chosen:
                self.rows.add(-gone, *self._length_of(node), *chosen, *terms)
        if self.on_host:
            self._host_lane()

    def _length_of(self, node: int) -> Terms:
        return [(int(self.tau[k]), -1.0) for k in self.tree.slots(node)]

    def _lanes(self) -> None:
        """What is booked on a node, and inside it, fits into its slots."""
        below: dict[tuple[str, int], Terms] = defaultdict(list)
        for (lane, node), terms in self._booked.items():
            up = node
            while up:
                if (lane, up) in self._booked:
                    below[lane, up] += terms
                up //= 2
        for (_, node), terms in below.items():
            self.rows.add(0.0, *self._length_of(node), *terms)

    def _durations(self) -> None:
        """Direct accesses change what an op takes, a host update takes it off the lane."""
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
            chosen = [(self.length[i], 1.0) for i in self.grid.ops_of(k) if i in self.length]
            if chosen or again[k]:
                fixed = self.scaled(self.fixed_ns[k])
                self.rows.add(-fixed, (int(self.tau[k]), -1.0), *chosen, *again[k])

    def _until_end(self, op: int) -> tuple[float, Terms]:
        """Compute time in the slot where `op` ends, up to then: a figure, and columns to add."""
        ops = self.grid.ops_of(self.grid.slot_after(op))
        return self._taken(ops[: ops.index(op) + 1] if op in ops else [])

    def _from_start(self, op: int) -> tuple[float, Terms]:
        """Compute time in the slot where `op` starts, from then on."""
        ops = self.grid.ops_of(self.grid.slot_before(op))
        return self._taken(ops[ops.index(op) :] if op in ops else [])

    def _taken(self, ops: Sequence[int]) -> tuple[float, Terms]:
        fixed = sum(self.survey.base_ns[i] for i in ops if i not in self.length)
        return self.scaled(fixed), [(self.length[i], 1.0) for i in ops if i in self.length]

    def _host_lane(self) -> None:
        """Host updates run one at a time, after the ops before that touch the same tensors."""
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
            # a steady grid's last slot holds the first ops of the next step: no window there
            counted = 2 * first >= (int(self.grid.samples[0]) if self.grid.steady else 0)
            gone, chosen = self._until_end(first) if counted else (0.0, [])
            slot = self.grid.slot_after(first) if counted else 0
            rest: Terms = [(int(c), -1.0) for c in self.tau[slot:]]
            self.rows.add(-gone, *rest, *chosen, *work)
        outward = [x.name for x in s.lanes if x.source == DEVICE]
        if self._late and len(outward) == 1:
            late = [(c, self.scaled(s.carry_ns[t, outward[0]])) for t, c in self._late]
            booked = [
                x for (lane, _), terms in self._booked.items() if lane in outward for x in terms
            ]
            self.rows.add(0.0, *((int(c), -1.0) for c in self.tau), *late, *booked)


def _ample_ns(s: Survey) -> float:
    """A makespan beyond which the program need not look: bounds are capped there."""
    compute = sum(s.base_ns) + sum(h or 0 for h in s.host_ns) + sum(s.again_ns.values())
    slower = sum(max(0, d) for d in s.direct_ns.values())
    carried = sum(ns * sum(g.free for g in s.gaps[t]) for (t, _), ns in s.carry_ns.items())
    return float(2 * (compute + slower + 2 * carried) + 1000)
