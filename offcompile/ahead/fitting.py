"""Answers for one model on one device: the step, other budgets, batches and ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from offcompile.graph.split.decision import LADDER
from offcompile.ir import DEVICE, HOST, Infeasible, Problem
from offcompile.ir.units import size
from offcompile.machine.options import Options
from offcompile.machine.target import Target
from offcompile.planning.endurance import spilled_bytes
from offcompile.planning.fit_budget import (
    PlanSearch,
    fit_budget,
    floor_of,
    peak_alone,
    with_reserve,
)
from offcompile.report.report import PlanReport
from offcompile.report.simple_way import SimpleWay
from offcompile.runtime.base.mapping import page_multiple

from .answers.fit_report import BudgetPoint, FitReport, pareto
from .plan import CPU, Ahead, ForecastRequest, Tell, simple_ways, target_ahead
from .ranks.request import RankRequest
from .ranks.surveyed import AheadOnRank
from .ranks.ways import compared, way_of
from .scaled import Scale, ScaledWay, largest_batch
from .simple_ways import policy_ways
from .surveyed import NotAlike

#: no further budgets are planned after this time
TABLE_SECONDS = 20.0
#: planning time of each search for another budget or batch
TRIAL_SECONDS = 1.0
#: planning time of each published policy
COMPARED_SECONDS = 2.0
#: budgets to plan, as shares of the way from the floor to the peak when nothing moves
SHARES = (0.5, 0.25, 0.75, 0.1)


@dataclass(frozen=True)
class MoreAnswers:
    """Answers that are asked for beside the step itself."""

    #: other budgets, or with several ranks other ways to share
    table: bool
    largest: bool
    #: each published policy by itself
    compare: bool


@dataclass(eq=False)
class DeviceFit:
    """Answers for one batch, of which each is made when it is asked for."""

    asked: Callable[[int], ForecastRequest]
    batch: int
    tell: Tell
    ranks: RankRequest | None = None
    #: the same model and batch, traced for another card
    like: Ahead | None = None

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.ahead = self._first()
        self.target, self.options = self.ahead.target, self.ahead.asked.options
        budget = self.target.budget_bytes(self.options)
        self.memory = self.target.device_bytes if budget is None else budget
        beside = self.ahead.beside_bytes if isinstance(self.ahead, AheadOnRank) else 0
        self.budget = max(1, self.memory - beside)

    def _first(self) -> Ahead:
        if self.like is not None:
            try:
                return self._shared(repriced(self.like, self.asked(self.batch).options, self.tell))
            except NotAlike:
                self.tell("tracing again")
        return self.traced(self.batch)

    def traced(self, batch: int, target: Target | None = None) -> Ahead:
        return self._shared(Ahead.of(self.asked(batch), self.tell, target))

    def _shared(self, one: Ahead) -> Ahead:
        return one if self.ranks is None else AheadOnRank.sharing(one, self.ranks, self.tell)

    @cached_property
    def answer(self) -> FitReport:
        """The step itself, without other budgets, batches and ways."""
        found = FitReport(self.options.hardware or "this machine", self.batch, self.memory, None)
        made: PlanReport | Infeasible
        try:
            made = report = self.ahead.report(self.tell)
        except Infeasible as error:
            made = error
            found = replace(found, reason=made.reason, smallest_change=made.smallest_change or "")
        else:
            kind = CPU if self.target.device.type == CPU else "cuda"
            spilled = spilled_bytes(report.problem, report.plan, kind)
            found = replace(
                found, report=report, tier_bytes=tier_bytes(report), spilled_bytes=spilled
            )
        if isinstance(self.ahead, AheadOnRank):
            way = way_of(self.ahead, made, tier_bytes)
            answer = compared(self.ahead, way, tier_bytes, self.tell, None)
            peaks = found.tier_bytes | ({DEVICE: way.device_bytes} if way.fits else {})
            found = replace(found, ranks=answer, tier_bytes=peaks)
        return found

    @property
    def trial_seconds(self) -> float:
        """Planning time of each search for another budget or batch: no more than the step's own."""
        return min(TRIAL_SECONDS, self.options.seconds or TRIAL_SECONDS)

    def result(self, more: MoreAnswers) -> FitReport:
        most = self.largest if more.largest else None
        found = replace(self.answer, largest_batch=most)
        if found.report is None and most:
            change = f"A batch of {most} fits. {found.smallest_change}"
            found = replace(found, smallest_change=change)
        if isinstance(self.ahead, AheadOnRank) and found.ranks is not None:
            way, seconds = found.ranks.chosen, self.trial_seconds if more.table else None
            return replace(found, ranks=compared(self.ahead, way, tier_bytes, self.tell, seconds))
        ways = self.simple_ways(found.report, more.compare)
        points = self.table(found.report) if more.table else ()
        return replace(found, table=points, simple_ways=ways)

    def simple_ways(self, report: PlanReport | None, compare: bool) -> tuple[SimpleWay, ...]:
        """Evaluate simpler ways; none if nothing has to move."""
        if report is not None and report.fits:
            return ()
        self.tell("comparing with simpler ways")
        budget = self.budget if report is None else report.budget_bytes
        found = simple_ways(self.ahead, budget)
        found += published_ways(self.ahead, budget, COMPARED_SECONDS) if compare else []
        return tuple(found)

    # --- other budgets ------------------------------------------------------------------------

    def table(self, report: PlanReport | None) -> tuple[BudgetPoint, ...]:
        plain = self.ahead.survey.problem(self.ahead.graphs).problem
        alone = peak_alone(plain, self.ahead.survey.machine)
        points = [BudgetPoint(alone, sum(op.duration_us for op in plain.ops), False)]
        if report is not None and not report.fits:
            points.append(BudgetPoint(self.budget, report.foreseen_us, True, report.policy))
        floor = with_reserve(self.floor(self.ahead), self.target.reserve_bytes)
        for share in SHARES:
            if time.monotonic() - self.began > TABLE_SECONDS or alone <= floor:
                break
            memory = int(floor + share * (alone - floor))
            self.tell(f"planning for {size(memory)}")
            try:
                choice = self.ahead.choose(memory, self.tell, self.trial_seconds, explains=False)
            except Infeasible:
                continue
            found = choice.decided
            points.append(BudgetPoint(memory, found.cost_us, True, found.result.policy))
        return pareto(points)

    def floor(self, ahead: Ahead) -> int:
        problems = variants(ahead) + variants_in_pieces(ahead, self.tell)
        return min(floor_of(p, ahead.survey.machine) for p in problems)

    # --- other batches ------------------------------------------------------------------------

    @cached_property
    def largest(self) -> int | None:
        """Find the largest batch that fits; None if traces of different batches do not line up."""
        other = self.traced(2 * self.batch, self.target)
        batches = self.batch, 2 * self.batch
        pairs = zip(variants(self.ahead), variants(other), strict=False)
        scales = [Scale(a, b, batches) for a, b in pairs]
        if not scales or not all(s.lines_up for s in scales):
            return None
        split = (variants_in_pieces(ahead, self.tell) for ahead in (self.ahead, other))
        in_pieces = [Scale(a, b, batches) for a, b in zip(*split, strict=False)]
        self.tell("looking for the largest batch")
        machine, capacity = self.ahead.survey.machine, self.target.device_bytes
        capacity = min(capacity, self.budget)
        ways = [
            ScaledWay(scale, scale.floors(machine), at_home=place == 0)
            for some in (scales, in_pieces)
            for place, scale in enumerate(some)
            if scale.lines_up
        ]
        reserve = self.target.reserve_bytes
        return largest_batch(ways, lambda x: with_reserve(x, reserve) <= capacity, self.planned)

    def planned(self, problem: Problem, at_home: bool) -> bool:
        """True if there is a plan for it within the budget."""
        search = PlanSearch(
            self.ahead.survey.machine,
            self.target.reserve_bytes,
            self.options.whole_policy,
            self.trial_seconds,
            self.tell,
            reuses=self.options.reuse_plans,
        )
        try:
            fit_budget(problem, search, self.budget, may_fit=at_home)
        except Infeasible:
            return False
        return True


def repriced(like: Ahead, options: Options, tell: Tell) -> Ahead:
    """The model that was traced for one card, on the card of these options, without tracing it
    again. Raises `NotAlike` if its layers cannot be repeated there."""
    asked, target = replace(like.asked, options=options), target_ahead(options, tell)
    return Ahead._made(asked, target, like.traces, like.layers, None, tell)


def published_ways(ahead: Ahead, budget: int, seconds: float) -> list[SimpleWay]:
    """Plan with each published policy. seconds: per policy, with weights on the device and again
    with weights on the host."""
    room = max(1, budget - ahead.target.reserve_bytes(budget))
    return list(policy_ways(variants(ahead), ahead.survey.machine(room), seconds))


def variants(ahead: Ahead) -> list[Problem]:
    """The step with all tensors on the device, and with weights on the host."""
    return ahead.variants


def variants_in_pieces(ahead: Ahead, tell: Tell) -> list[Problem]:
    """Like `variants`, with the loss in as many pieces as the planner tries; maybe empty."""
    if not ahead.may_split:
        return []
    return variants(ahead.in_pieces(min(LADDER[-1], ahead.most_pieces), tell))


def tier_bytes(report: PlanReport) -> dict[str, int]:
    """Peak bytes per tier: the device including the runtime's reserve, others in whole pages."""
    found = {DEVICE: report.planned_peak_bytes}
    for tier, nbytes in report.timeline.peak_bytes.items():
        if tier == DEVICE or nbytes == 0:
            continue
        there = {m.tensor for m in report.plan.moves if m.target == tier}
        there |= {t.id for t in report.problem.tensors if t.home == tier}
        if tier == HOST:
            there |= {d.tensor for d in report.plan.directs}
        sizes = (report.problem.tensor[t].nbytes for t in there)
        found[tier] = nbytes + sum(page_multiple(n) - n for n in sizes)
    return found
