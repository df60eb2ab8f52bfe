"""One row's worth of an answer: the step, its peak, and how it stays within the budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offcompile.ir.units import show_us, size
from offcompile.report.report import PlanReport

#: heads of the columns that `StepOutcome.cells` fills
HEADS = f"{'fits':4}  {'step':>12}"
NOTHING_MOVES = "nothing moves"


@dataclass(frozen=True)
class StepOutcome:
    """A planned step in a few figures. `step_us` is None if there is no plan, and `reason` says
    why."""

    step_us: float | None = None
    #: peak bytes on the device
    device_bytes: int = 0
    #: keeps the step within the budget: moves, ops that run again, both, or nothing
    how: str = ""
    reason: str = ""
    smallest_change: str = ""

    @property
    def fits(self) -> bool:
        return self.step_us is not None

    @property
    def cells(self) -> str:
        """The first columns of a table."""
        if self.step_us is None:
            return f"{'no':4}  {'':>12}"
        return f"{'yes':4}  {show_us(self.step_us):>12}"

    @property
    def peak(self) -> str:
        return size(self.device_bytes) if self.fits else ""

    @property
    def note(self) -> str:
        """How the step fits, or what would help."""
        return self.how if self.fits else self.smallest_change or self.reason

    def to_json(self) -> dict[str, Any]:
        if not self.fits:
            return {"fits": False, "reason": self.reason, "smallest_change": self.smallest_change}
        found = {"step_us": self.step_us, "device_bytes": self.device_bytes, "how": self.how}
        return {"fits": True} | found


def how_it_fits(report: PlanReport) -> str:
    """Say in a few words how the plan stays within the budget."""
    plan = report.plan
    moves = bool(plan.moves or plan.directs or any(u.where != "device" for u in plan.updates))
    parts = {
        "moves": moves,
        "computed again": bool(plan.recomputes),
        "split": bool(report.split),
    }
    found = [word for word, is_so in parts.items() if is_so]
    return ", ".join(found) if moves else ", ".join([NOTHING_MOVES, *found])
