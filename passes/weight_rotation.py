"""Weights that take turns on the device (weight-offloading paper, hal-03580767 §3 to §5).

Between two uses a weight may wait elsewhere; which gaps are spent so is chosen greedily until no
run is over the budget. The paper's chain of forward and backward ops is one case: any tensor that
outlives the step is looked at, whatever ops touch it, on the ring of a steady problem or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from offcompile.ir import DEVICE, HOST, Infeasible, Machine, Plan, Problem, Tensor

from .contract import Judge
from .decisions import Away, Decisions
from .lanes import Clock, Routes
from .program import Program
from .residency import Residency, plan_residency
from .rotation_selection import (
    Congestion,
    Gap,
    Need,
    Selection,
    aware_coverage,
    greedy,
    plain_coverage,
    prune,
)
from .schedule import Builder

ROTATING = ("weight", "state")
VARIANTS = ("best", "aware", "spread", "printed", "printed_once", "l2l", "l2l_overlapped")
import os
BUCKETS = float(os.environ.get("BUCKETS","1"))
WEIGHT = float(os.environ.get("WEIGHT","20"))


@dataclass(frozen=True)
class WeightRotation:
    name: ClassVar[str] = "weight_rotation"
    variant: str = "best"
    judge: Judge | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant {self.variant!r} is not one of {', '.join(VARIANTS)}")

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        base = Decisions((), plan.directs, plan.recomputes, plan.updates)
        rotation = Rotation(problem, machine, base)
        return rotation.build(self.variant, self.judge)


class Rotation:
    def __init__(self, problem: Problem, machine: Machine, base: Decisions) -> None:
        self.problem, self.machine, self.base = problem, machine, base
        self.program = Program(problem, base)
        self.clock = Clock.unhindered(self.program)
        self.n = len(self.program.runs)
        residency = plan_residency(self.program, base)
        self.need = Need(self._excess(residency), tuple(self._gaps(residency)), problem.steady)

    def _excess(self, residency: Residency) -> tuple[int, ...]:
        n = self.n
        change = [0] * (n + 1)
        for tensor, first, last in residency.held:
            pieces = [(first + 1, last)] if last > first else [(first + 1, n), (0, last)]
            for a, b in pieces:
                if a < b:
                    change[a] += tensor.nbytes
                    change[b] -= tensor.nbytes
        cap = self.machine.tier[DEVICE].capacity_bytes
        kept, out = 0, []
        for own, c in zip(self.program.op_bytes, change):
            kept += c
            out.append(kept + own)
        limit = max(out, default=0) if cap is None else cap
        return tuple(x - limit for x in out)

    def _gaps(self, residency):
        routes = Routes(self.machine)
        for tensor, first, last in residency.held:
            if tensor.kind not in ROTATING:
                continue
            end = last if last > first else last + self.n
            acc = self.program.accesses[tensor.id]
            writes = [a.position for a in acc if a.writes and a.position <= first]
            if writes:
                written = writes[-1]
            elif self.problem.steady:
                w = [a.position for a in acc if a.writes]
                written = w[-1] if w else None
            else:
                written = -1 if tensor.home == DEVICE else None
            out = sum(routes.move_us(tensor, l, None) for l in routes.lanes(DEVICE, HOST))
            back = sum(routes.move_us(tensor, l, None) for l in routes.lanes(HOST, DEVICE))
            if not self.problem.steady and last == self.n:
                back = 0.0
            yield Gap(tensor.id, tensor.nbytes, self.program.runs[first].name if first >= 0 else None, first, end,
                      None if written is None else (tensor.id, written), out, back)

    def select(self, variant):
        need = self.need
        def plain_price(gap, writes):
            return gap.back_us + (gap.out_us if writes else 0.0)
        if variant in ("l2l", "l2l_overlapped"):
            return set(range(len(need.gaps)))
        if variant in ("printed", "printed_once"):
            s = Selection(need, plain_coverage(need))
            greedy(s, plain_price, variant == "printed")
            return s.chosen
        s = Selection(need, aware_coverage(need, self.clock))
        if variant == "aware":
            greedy(s, plain_price)
            prune(s, plain_price)
        else:
            c = Congestion(need, self.clock, max(8,int(BUCKETS*self.clock.period/(1e-9+sum(g.back_us for g in need.gaps)/len(need.gaps)))), WEIGHT)
            greedy(s, c.price, True, c.add)
            prune(s, plain_price)
        if max(s.left) > 0:
            t = Selection(need, plain_coverage(need))
            for i in s.chosen: t.add(i)
            greedy(t, plain_price)
            return t.chosen
        return s.chosen

    def decisions(self, chosen):
        g = self.need.gaps
        return Decisions(tuple(Away(g[i].tensor, g[i].after, HOST) for i in sorted(chosen)), self.base.directs, self.base.recomputes, self.base.updates)

    def build(self, variant, judge):
        if variant == "best":
            best=None
            for v in ("aware", "spread"):
                plan = self.build(v, judge)
                t = judge(self.problem, self.machine, plan)
                if best is None or t.makespan_us < best[0]:
                    best = (t.makespan_us, plan)
            return best[1]
        b = Builder(self.problem, self.machine, self.decisions(self.select(variant)))
        if variant == "l2l":
            return b.lazy()
        return b.best(judge)
