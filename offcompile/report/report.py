"""Defines the report that users print, explain and save, and lists the reports of this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import page
from .notebook import as_html
from .record import Record
from .simple_way import against
from .words import facts, measured_zeros, traffic


class PlanReport(Record):
    """One compiled graph: its problem, its plan, the certificate, and the steps measured so far."""

    def to_text(self) -> str:
        told = list(facts(self))
        width = max(len(name) for name, _ in told)
        lines = [self.name, *(f"  {name:{width}}  {value}" for name, value in told)]
        if self.plan.moves:
            lines += ["", "  what moves, per step", *(f"    {row}" for row in traffic(self))]
        if packed := measured_zeros(self):
            lines += ["", "  zeros, as measured", *(f"    {row}" for row in packed)]
        if self.simple_ways:
            lines += ["", *(f"  {row}" for row in against(self.planned_us, self.simple_ways))]
        return "\n".join(lines)

    __str__ = to_text

    def _repr_html_(self) -> str:
        """The report as the last line of a notebook's cell shows it."""
        more = list(traffic(self)) if self.plan.moves else []
        if self.simple_ways:
            more += ["", *against(self.planned_us, self.simple_ways)]
        used = self.planned_peak_bytes, self.budget_bytes
        return as_html(self.name, facts(self), more, used)

    def save_html(self, path: str | Path) -> None:
        """Write the report as one page for a browser, which needs no network or other files."""
        page.save_html(path, [self])


#: limit on reports kept; a process that keeps recompiling drops the oldest
MOST_REMEMBERED = 1_000
# per process: `offcompile.reports()` is about all that was compiled in it
_remembered: list[PlanReport] = []


def remember(report: PlanReport) -> None:
    """Keep the report of a graph that was compiled in this process."""
    _remembered.append(report)
    del _remembered[:-MOST_REMEMBERED]


def reports() -> list[PlanReport]:
    """The reports of all graphs compiled in this process, in order; at most the last 1,000."""
    return list(_remembered)


def save_html(path: str | Path, reports: Sequence[Record] | None = None) -> None:
    """Write the page of `reports`, by default of every graph compiled in this process."""
    page.save_html(path, _remembered if reports is None else reports)
