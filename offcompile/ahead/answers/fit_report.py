"""The answer of `offcompile.fit` for one model on one device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from offcompile.ahead.ranks.forecast import RanksAnswer
from offcompile.ir import DEVICE
from offcompile.ir.units import show_us, size
from offcompile.report.notebook import as_html
from offcompile.report.report import PlanReport
from offcompile.report.simple_way import SimpleWay, against
from offcompile.report.words import bound_by, split_facts

from .cards import CardRow, card_lines, cheapest
from .lengths import LengthRow, answered, length_lines
from .outcome import StepOutcome, how_it_fits
from .training import TrainedParameters


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
    #: the answer for several ranks; None: there is one
    ranks: RanksAnswer | None = None
    #: the same model with sequences of other lengths, the shortest first
    lengths: tuple[LengthRow, ...] = ()
    training: TrainedParameters | None = None
    #: the same step on other cards, the fastest first
    cards: tuple[CardRow, ...] = ()

    @property
    def outcome(self) -> StepOutcome:
        """The answer in one row."""
        report = self.report
        if report is None:
            return StepOutcome(reason=self.reason, smallest_change=self.smallest_change)
        step_us, peak, how = report.planned_us, self.tier_bytes[DEVICE], how_it_fits(report)
        if self.ranks is None:
            return StepOutcome(step_us, peak, how)
        way = self.ranks.chosen
        return StepOutcome(way.step_us, peak, how, way.reason, way.smallest_change)

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
        long = f" with length {answered(self.lengths).length}" if self.lengths else ""
        if report is None:
            yield f"does not fit{long}: {self.reason}"
            yield f"what would help: {self.smallest_change}"
        else:
            how = "nothing has to move" if report.fits else "tensors move"
            yield f"fits: a batch of {self.batch}{long} in {asked} of {self.hardware}; {how}"
            alone = "" if self.ranks is None else ", before communication"
            yield f"  step           {show_us(report.planned_us)} predicted{alone}"
            yield (
                f"  lower bound    {show_us(report.lower_bound_us)}; {bound_by(report)} can beat"
                f" it, this one is {100 * report.gap:.1f}% above"
            )
            for tier, nbytes in self.tier_bytes.items():
                yield f"  {tier:14} {size(nbytes)} at most"
            if self.training is not None and self.training.trained < self.training.total:
                yield f"  trains         {self.training.words()}"
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
        if self.lengths:
            yield ""
            yield from length_lines(self.lengths)
        if self.cards:
            yield ""
            yield from card_lines(self.cards)

    def to_json(self) -> dict[str, Any]:
        report, best = self.report, cheapest(self.cards)
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
            "lengths": [row.to_json() for row in self.lengths],
            "cards": [row.to_json() for row in self.cards],
            "cheapest_card": None if best is None else best.card,
            "parameters": None if self.training is None else self.training.to_json(),
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


def pareto(points: Iterable[BudgetPoint]) -> tuple[BudgetPoint, ...]:
    """Keep the points that no other beats in both memory and time, least memory first."""
    kept: list[BudgetPoint] = []
    for point in sorted(points, key=lambda p: (p.memory_bytes, p.step_us)):
        if not kept or point.step_us < kept[-1].step_us:
            kept.append(point)
    return tuple(kept)
