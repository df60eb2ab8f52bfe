"""`offcompile.fit`: tells if a step fits, how fast it would be, and what the alternatives are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from offcompile.graph.split.decision import LADDER
from offcompile.ir import DEVICE, HOST, Infeasible, InvalidInput, Problem, Violation
from offcompile.ir.units import show_us, size
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
from offcompile.report.notebook import as_html
from offcompile.report.report import PlanReport
from offcompile.report.simple_way import SimpleWay, against
from offcompile.report.words import split_facts
from offcompile.runtime.base.mapping import page_multiple
from offcompile.runtime.base.progress import Progress

from .batch_trace import as_arguments
from .plan import CPU, Ahead, ForecastRequest, Tell, check_model, refuse_measuring, simple_ways
from .ranks.forecast import RanksAnswer
from .ranks.request import RankRequest
from .ranks.surveyed import AheadOnRank
from .ranks.ways import compared, way_of
from .scaled import Scale, ScaledWay, largest_batch
from .simple_ways import policy_ways

#: no further budgets are planned after this time
TABLE_SECONDS = 20.0
#: planning time of each search for another budget or batch
TRIAL_SECONDS = 1.0
#: planning time of each published policy
COMPARED_SECONDS = 2.0
#: budgets to plan, as shares of the way from the floor to the peak when nothing moves
SHARES = (0.5, 0.25, 0.75, 0.1)


@dataclass(frozen=True)
class BudgetPoint:
    """The step under one budget."""

    memory_bytes: int
    step_us: float
    #: True if anything moves
    moves: bool
    policy: str = ""


@dataclass(frozen=True)
class FitReport:
    """The answer. `report` is None if nothing fits; then `reason` says why, and `smallest_change`
    what would help."""

    hardware: str
    batch: int
    memory_bytes: int
    report: PlanReport | None
    reason: str = ""
    smallest_change: str = ""
    #: step times under other budgets, least memory first
    table: tuple[BudgetPoint, ...] = ()
    #: None: not searched
    largest_batch: int | None = None
    #: peak bytes of each tier, including rounding
    tier_bytes: dict[str, int] = field(default_factory=dict)
    #: bytes written to files in every step
    spilled_bytes: int = 0
    #: the same step by simpler ways; empty if nothing has to move
    simple_ways: tuple[SimpleWay, ...] = ()
    #: what several ranks take; None: there is one
    ranks: RanksAnswer | None = None

    @property
    def fits(self) -> bool:
        return self.report is not None

    def to_text(self) -> str:
        return "\n".join(self._lines())

    __str__ = to_text

    def _repr_html_(self) -> str:
        """The answer as the last line of a notebook's cell shows it."""
        used = None
        if self.report is not None:
            used = self.report.planned_peak_bytes, self.memory_bytes
        title, *lines = self._lines()
        return as_html(title, (), lines, used)

    def _lines(self) -> Iterable[str]:
        report, asked = self.report, size(self.memory_bytes)
        if report is None:
            yield f"does not fit: {self.reason}"
            yield f"what would help: {self.smallest_change}"
        else:
            how = "nothing has to move" if report.fits else "tensors move"
            yield f"fits: a batch of {self.batch} in {asked} of {self.hardware}; {how}"
            alone = "" if self.ranks is None else ", before communication"
            yield f"  step           {show_us(report.planned_us)} predicted{alone}"
            yield (
                f"  lower bound    {show_us(report.lower_bound_us)}; no plan can beat it,"
                f" this one is {100 * report.gap:.1f}% above"
            )
            for tier, nbytes in self.tier_bytes.items():
                yield f"  {tier:14} {size(nbytes)} at most"
            for name, said in split_facts(report):
                yield f"  {name:14} {said}"
            if self.spilled_bytes:
                yield f"  to disk        {size(self.spilled_bytes)} written with every step"
        if self.largest_batch:
            yield f"largest batch    {self.largest_batch}"
        elif self.largest_batch == 0:
            yield "largest batch    none fits"
        if self.table:
            yield ""
            yield f"{'memory':>12}  {'step':>12}"
            for point in self.table:
                note = "" if point.moves else "  nothing moves"
                yield f"{size(point.memory_bytes):>12}  {show_us(point.step_us):>12}{note}"
        if self.simple_ways:
            yield ""
            yield from against(None if report is None else report.planned_us, self.simple_ways)
        if self.ranks is not None:
            yield ""
            yield from self.ranks.lines()

    def to_json(self) -> dict[str, Any]:
        report = self.report
        found: dict[str, Any] = {
            "fits": self.fits,
            "hardware": self.hardware,
            "batch": self.batch,
            "memory_bytes": self.memory_bytes,
            "largest_batch": self.largest_batch,
            "table": [
                {"memory_bytes": p.memory_bytes, "step_us": p.step_us, "moves": p.moves}
                for p in self.table
            ],
            "simple_ways": [way.to_json() for way in self.simple_ways],
            "ranks": None if self.ranks is None else self.ranks.to_json(),
        }
        if report is None:
            return found | {"reason": self.reason, "smallest_change": self.smallest_change}
        return found | {
            "step_us": report.planned_us,
            "lower_bound_us": report.lower_bound_us,
            "gap": report.gap,
            "tier_bytes": dict(self.tier_bytes),
            "spilled_bytes": self.spilled_bytes,
            "split": report.split,
            "splitting": None if report.splitting is None else report.splitting.to_json(),
        }


def fit(
    model: nn.Module,
    make_inputs: Callable[[int], Any],
    batch: int = 1,
    *,
    memory: int | float | str | None = None,
    hardware: str | Path | None = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: str | None = None,
    host_memory: int | str | None = None,
    measure: bool = False,
    table: bool = True,
    largest: bool = True,
    compare: bool = False,
    stream_states: bool = True,
    options: Mapping[str, object] | None = None,
    ranks: int | None = None,
    shard: str = "ddp",
    link: str = "nvlink",
    node_ranks: int | None = None,
) -> FitReport:
    """Tell if a training step fits, how long it would take, and what the other choices are.

    make_inputs: maps a batch size to the model's arguments: a tensor, a tuple, or a dictionary of
    keywords. table: also plan under other budgets; largest: search for the largest batch that fits;
    compare: also plan with each published policy by itself.
    ranks: how many ranks train the model, each with such a batch, sharing it as `shard` says
    ("ddp", "fsdp", "zero1") over `link` ("nvlink", "nvlink3", "pcie", "400gb", "100gb", or a rate
    as in "20GB/s"); node_ranks: those on one node. Then `table` means the other ways to share.
    The other arguments are those of `offcompile.plan`, which raises if nothing fits.
    """
    if batch < 1:
        raise InvalidInput(
            [Violation("bad-value", "batch", f"{batch} is no batch; give 1 or more")]
        )
    refuse_measuring(hardware, measure)
    given = {"host_memory": host_memory} | dict(options or {})
    read = Options.read(given | {"memory": memory, "hardware": hardware})
    several = None
    if ranks is not None:
        several = RankRequest.read(ranks, shard, link, node_ranks, optimizer)

    def asked(of: int) -> ForecastRequest:
        inputs = make_inputs(of)
        named = inputs if isinstance(inputs, dict) else {}
        plain = () if isinstance(inputs, dict) else as_arguments(inputs)
        return ForecastRequest(
            check_model(model),
            plain,
            named,
            read,
            loss,
            optimizer,
            measures=measure,
            streams=stream_states,
        )

    with Progress("fit") as tell:
        return _Fitting(asked, batch, tell, several).result(table, largest, compare)


@dataclass(eq=False)
class _Fitting:
    asked: Callable[[int], ForecastRequest]
    batch: int
    tell: Tell
    ranks: RankRequest | None = None

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.ahead = self.traced(self.batch)
        self.target, self.options = self.ahead.target, self.ahead.asked.options
        budget = self.target.budget_bytes(self.options)
        self.memory = self.target.device_bytes if budget is None else budget
        beside = self.ahead.beside_bytes if isinstance(self.ahead, AheadOnRank) else 0
        self.budget = max(1, self.memory - beside)

    def traced(self, batch: int, target: Target | None = None) -> Ahead:
        one = Ahead.of(self.asked(batch), self.tell, target)
        return one if self.ranks is None else AheadOnRank.sharing(one, self.ranks, self.tell)

    def result(self, table: bool, largest: bool, compare: bool) -> FitReport:
        found = FitReport(self.options.hardware or "this machine", self.batch, self.memory, None)
        most = self.largest() if largest else None
        made: PlanReport | Infeasible
        try:
            made = report = self.ahead.report(self.tell)
        except Infeasible as error:
            made, change = error, error.smallest_change or ""
            if most:
                change = f"A batch of {most} fits. {change}"
            found = replace(found, reason=error.reason, smallest_change=change)
        else:
            kind = CPU if self.target.device.type == CPU else "cuda"
            spilled = spilled_bytes(report.problem, report.plan, kind)
            found = replace(
                found, report=report, tier_bytes=tier_bytes(report), spilled_bytes=spilled
            )
        if isinstance(self.ahead, AheadOnRank):
            way, seconds = way_of(self.ahead, made, tier_bytes), TRIAL_SECONDS if table else None
            answer = compared(self.ahead, way, tier_bytes, self.tell, seconds)
            peaks = found.tier_bytes | ({DEVICE: way.device_bytes} if way.fits else {})
            return replace(found, ranks=answer, largest_batch=most, tier_bytes=peaks)
        ways = self.simple_ways(found.report, compare)
        points = self.table(found.report) if table else ()
        return replace(found, table=points, largest_batch=most, simple_ways=ways)

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
                choice = self.ahead.choose(memory, self.tell, TRIAL_SECONDS, explains=False)
            except Infeasible:
                continue
            found = choice.decided
            points.append(BudgetPoint(memory, found.cost_us, True, found.result.policy))
        return pareto(points)

    def floor(self, ahead: Ahead) -> int:
        problems = variants(ahead) + variants_in_pieces(ahead, self.tell)
        return min(floor_of(p, ahead.survey.machine) for p in problems)

    # --- other batches ------------------------------------------------------------------------

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
            TRIAL_SECONDS,
            self.tell,
        )
        try:
            fit_budget(problem, search, self.budget, may_fit=at_home)
        except Infeasible:
            return False
        return True


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


def pareto(points: Iterable[BudgetPoint]) -> tuple[BudgetPoint, ...]:
    """Keep the points that no other beats in both memory and time, least memory first."""
    kept: list[BudgetPoint] = []
    for point in sorted(points, key=lambda p: (p.memory_bytes, p.step_us)):
        if not kept or point.step_us < kept[-1].step_us:
            kept.append(point)
    return tuple(kept)


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
