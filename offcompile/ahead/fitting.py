"""Answers for one model on one device: the step, other budgets, batches and ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from offcompile.graph.split.decision import LADDER
from offcompile.ir import DEVICE, HOST, Infeasible, Problem
from offcompile.machine.options import Options
from offcompile.planning.feedback.endurance import spilled_bytes
from offcompile.planning.fit_budget import PlanSearch, fit_budget
from offcompile.planning.floors import floor_of, peak_alone, with_reserve
from offcompile.report.report import PlanReport
from offcompile.report.simple_way import SimpleWay
from offcompile.run.plan.candidates import Candidate
from offcompile.runtime.base.mapping import page_multiple

from .answers.fit_report import BudgetPoint, FitReport, pareto
from .others.budgets import BudgetPlan, under_other_budgets
from .others.few_layers import FewLayers, few_layers
from .others.processes import Beside, only_here
from .plan import CPU, Ahead, ForecastRequest, Tell, simple_ways, target_ahead
from .ranks.request import RankRequest
from .ranks.surveyed import AheadOnRank
from .ranks.ways import compared, way_of
from .scaled import Scale, ScaledWay, largest_batch
from .simple_ways import policy_ways
from .surveyed import NotAlike

#: planning time of each search for another budget or batch
TRIAL_SECONDS = 1.0
#: the same for other budgets: these searches start from the step's own plan
TABLE_SEARCH_SECONDS = 0.8
#: planning time of each published policy
COMPARED_SECONDS = 2.0

#: the step in each way to hold weights: whole, and in pieces
_Steps = tuple[list[Problem], list[Problem]]


@dataclass(frozen=True)
class MoreAnswers:
    """Answers that are asked for beside the step itself."""

    #: other budgets, or with several ranks other ways to share
    table: bool
    largest: bool
    #: each published policy by itself
    compare: bool
    #: True if processes may be forked for them
    forks: bool = False


@dataclass(eq=False)
class DeviceFit:
    """Answers for one batch, of which each is made when it is asked for."""

    asked: Callable[[int], ForecastRequest]
    batch: int
    tell: Tell
    ranks: RankRequest | None = None
    #: the same model and batch, traced for another card
    like: Ahead | None = None
    #: True if the largest batch will be asked for
    seeks_largest: bool = False
    #: True if processes may be forked to compute answers beside this one
    forks: bool = False

    def __post_init__(self) -> None:
        self.tell = only_here(self.tell)
        self._made: Candidate | None = None
        first = self.asked(self.batch)
        self.target = target_ahead(first.options, self.tell)
        beside = self.forks and self.seeks_largest and not first.measures
        self._other = Beside(self._trace_other_batch, begins=beside)
        self.ahead = self._first()
        self.target, self.options = self.ahead.target, self.ahead.asked.options
        budget = self.target.budget_bytes(self.options)
        self.memory = self.target.device_bytes if budget is None else budget
        ranks_bytes = self.ahead.beside_bytes if isinstance(self.ahead, AheadOnRank) else 0
        self.budget = max(1, self.memory - ranks_bytes)
        self._ends = Beside(self._find_ends, beside, after=self._other)

    def _first(self) -> Ahead:
        if self.like is not None:
            try:
                return self._shared(repriced(self.like, self.asked(self.batch).options, self.tell))
            except NotAlike:
                self.tell("tracing again")
        return self.traced(self.batch)

    def traced(self, batch: int) -> Ahead:
        return self._shared(Ahead.of(self.asked(batch), self.tell, self.target))

    def _shared(self, one: Ahead) -> Ahead:
        return one if self.ranks is None else AheadOnRank.sharing(one, self.ranks, self.tell)

    @cached_property
    def answer(self) -> FitReport:
        """The step itself, without other budgets, batches and ways."""
        found = FitReport(self.options.hardware or "this machine", self.batch, self.memory, None)
        made: PlanReport | Infeasible
        try:
            candidate = self.ahead.candidate(self.options.memory, self.tell)
            made = report = self.ahead.report(self.tell, candidate.choice)
        except Infeasible as error:
            made = error
            found = replace(found, reason=made.reason, smallest_change=made.smallest_change or "")
        else:
            self._made = candidate
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
        found = self.answer
        if isinstance(self.ahead, AheadOnRank) and found.ranks is not None:
            way, seconds = found.ranks.chosen, self.trial_seconds if more.table else None
            ranks = compared(self.ahead, way, tier_bytes, self.tell, seconds)
            found = replace(found, ranks=ranks)
        else:
            points = self.table(found.report) if more.table else ()
            ways = self.simple_ways(found.report, more.compare)
            found = replace(found, table=points, simple_ways=ways)
        most = self.largest if more.largest else None
        if found.report is None and most:
            change = f"A batch of {most} fits. {found.smallest_change}"
            found = replace(found, smallest_change=change)
        return replace(found, largest_batch=most)

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
        floor = with_reserve(self.floor, self.target.reserve_bytes)
        start = None
        if self._made is not None and not self._made.choice.decided.fits:
            start = BudgetPlan(self._made, self.budget)
        seconds = min(TABLE_SEARCH_SECONDS, self.trial_seconds)
        between = floor, alone
        points += under_other_budgets(self.ahead, start, between, seconds, self.tell, self.forks)
        return pareto(points)

    @cached_property
    def floor(self) -> int:
        """The least bytes of any way to run the step, without the runtime's reserve."""
        if self._ends.begun:  # by the time this is asked for, it is known there
            return self._ends.result()[0]
        return self._find_floor()

    def _find_floor(self) -> int:
        problems = variants(self.ahead) + variants_in_pieces(self.ahead, self.tell)
        return min(floor_of(p, self.ahead.survey.machine) for p in problems)

    # --- other batches ------------------------------------------------------------------------

    @cached_property
    def largest(self) -> int | None:
        """The largest batch that fits; None if traces of different batches do not line up."""
        return self._ends.result()[1]

    def _find_ends(self) -> tuple[int, int | None]:
        """The floor and the largest batch, which share the step in pieces."""
        return self._find_floor(), self._find_largest()

    def _trace_other_batch(self) -> FewLayers | _Steps:
        """Trace the step with twice the batch; only few of its layers if it has many."""
        asked = self.asked(2 * self.batch)
        few = few_layers(asked, self.target, LADDER[-1], self.tell)
        return few or self._all_layers()

    def _all_layers(self) -> _Steps:
        other = self.traced(2 * self.batch)
        found = variants(other), variants_in_pieces(other, self.tell)
        return [replace(p) for p in found[0]], [replace(p) for p in found[1]]

    def _other_batch(self) -> _Steps:
        """The step with twice the batch: whole, and in pieces."""
        traced = self._other.result()
        if not isinstance(traced, FewLayers):
            return traced
        try:
            whole = traced.all_layers(self.ahead)
            in_pieces = _in_pieces(self.ahead, self.tell)
            return whole, [] if in_pieces is None else traced.all_layers(in_pieces)
        except NotAlike:
            self.tell("tracing all layers with twice the batch")
            return self._all_layers()

    def _find_largest(self) -> int | None:
        mine, mine_in_pieces = variants(self.ahead), variants_in_pieces(self.ahead, self.tell)
        whole, in_pieces = self._other_batch()
        batches = self.batch, 2 * self.batch
        pairs = zip(mine, whole, strict=False)
        scales = [Scale(a, b, batches) for a, b in pairs]
        if not scales or not all(s.lines_up for s in scales):
            return None
        pairs = zip(mine_in_pieces, in_pieces, strict=False)
        scales_in_pieces = [Scale(a, b, batches) for a, b in pairs]
        self.tell("looking for the largest batch")
        machine, capacity = self.ahead.survey.machine, self.target.device_bytes
        capacity = min(capacity, self.budget)
        ways = [
            ScaledWay(scale, scale.floors(machine), at_home=place == 0)
            for some in (scales, scales_in_pieces)
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
            trial=True,  # any plan will do
            reuses=self.options.reuse_plans,
            library_bytes=self.target.library_bytes,
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
    found = _in_pieces(ahead, tell)
    return [] if found is None else variants(found)


def _in_pieces(ahead: Ahead, tell: Tell) -> Ahead | None:
    pieces = min(LADDER[-1], ahead.most_pieces)
    return ahead.in_pieces(pieces, tell) if ahead.may_split else None


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
