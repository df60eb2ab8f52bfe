"""Holds the plan of one graph, its report and its memory needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import sympy
import torch

from offcompile.graph.sizes import hint_of
from offcompile.graph.weight_placement import Choice
from offcompile.ir import Problem
from offcompile.planning.empty_turn import kept_at_turn
from offcompile.planning.endurance import planned_life
from offcompile.planning.fit_budget import Decided
from offcompile.planning.footprint import Footprint, NeedsBySize, bytes_of, standing_in
from offcompile.report.report import PlanReport
from offcompile.run.accounts.apply_placement import WeightPlaces
from offcompile.run.problem_source import ProblemSource, values
from offcompile.run.recording import Touched, touched_by
from offcompile.run.step_recorder import StepRecorder
from offcompile.run.verifying import Verifying
from offcompile.runtime.base.clock import Clock

from .candidates import Candidate
from .planner import GraphPlanner
from .request import PlanRequest


@dataclass(frozen=True, eq=False)
class Planned:
    """The plan of one graph, whole. It holds no graphs unless its sizes are dynamic."""

    request: PlanRequest
    source: ProblemSource
    decided: Decided
    #: storage → dtype of its elements
    dtypes: Mapping[str, torch.dtype]
    #: number of pieces of the loss; None: whole
    pieces: int | None
    report: PlanReport
    needs: NeedsBySize
    placement: WeightPlaces
    #: weight → its index among the parameters
    weights: Mapping[str, int]
    #: for each saved output of forward, its storage; None if codecs may not pack it
    saved: tuple[str | None, ...]
    #: storages that codecs may pack
    packable: frozenset[str]
    #: outputs of backward that are gradients offered to an optimizer; None: nothing is offered
    offered: tuple[int, ...] | None
    clock: Clock
    recorder: StepRecorder
    #: compares the first step with the plain run; None: no verification
    verifying: Verifying | None

    @property
    def moves(self) -> bool:
        """True if any tensor leaves the device or is recomputed."""
        return not self.report.fits

    @property
    def holds_saved(self) -> bool:
        """True if, from the start of backward, the plan includes everything that forward saved."""
        return self.request.kind.offload_saved and self.decided.result.policy == "turnover"

    @cached_property
    def changes_weights(self) -> bool:
        """True if the graph itself changes weights."""
        problem = self.report.problem
        written = {t for op in problem.ops for t in op.writes}
        return any(t.id in written for t in problem.tensors if t.kind == "weight")

    @cached_property
    def touched(self) -> Touched:
        return touched_by(self.report.problem, self.weights)


def report_of(planner: GraphPlanner, choice: Choice) -> PlanReport:
    """Report what is known before anything runs."""
    annotated, decided, source = choice.annotated, choice.decided, planner.source
    budget, peak, target = planner.budget(), decided.order.peak_bytes, source.target
    reserve = 0 if decided.fits else target.reserve_bytes(budget or peak)
    whole_bytes = budget if budget is not None else peak + reserve
    return PlanReport(
        name=planner.request.name,
        problem=annotated.problem,
        machine=decided.machine,
        result=decided.result,
        budget_bytes=whole_bytes,
        reserve_bytes=reserve,
        holes_bytes=decided.holes_bytes,
        worst_peak_bytes=peak,
        labels=annotated.labels,
        names=annotated.names,
        room=target.room(whole_bytes),
        touch_us_per_mib=source.touch_again_us_per_mib,
        beside_bytes=planner.request.held_bytes,
        split=choice.split,
        life=partial(planned_life, annotated.problem, decided.result.plan, target.runtime),
    )


def needs_of(
    found: Candidate, report: PlanReport, symbols: tuple[sympy.Symbol, ...]
) -> NeedsBySize:
    """Compute the memory needs of a plan, at the planned sizes and at others."""
    decided, problem = found.choice.decided, found.choice.annotated.problem
    kept = decided.kept
    if kept is None:
        kept = kept_at_turn(problem, decided.result.timeline)
    dynamic = any(isinstance(v, torch.SymInt) for v in values(found.graphs))

    def problem_at(sizes: tuple[int, ...]) -> Problem:
        return found.problem_at(hint_of(dict(zip(symbols, sizes, strict=True))))

    return NeedsBySize(
        Footprint(standing_in(problem), report.needed_peak_bytes, bytes_of(problem, kept)),
        problem_at if dynamic else None,
        decided.result.plan,
        decided.order.steps,
        report.reserve_bytes,
        kept,
    )
