"""Show what simpler ways take of a step, beside our plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offcompile.ir.units import show_us, size


@dataclass(frozen=True)
class SimpleWay:
    """One way. `step_us` and `peak_bytes` are what it takes whether it fits or not; None: it has
    no plan at all, and `reason` says why."""

    name: str
    step_us: float | None
    peak_bytes: int | None
    #: over the budget; 0: it fits
    missing_bytes: int = 0
    reason: str = ""

    @property
    def fits(self) -> bool:
        return self.step_us is not None and self.missing_bytes == 0

    def to_line(self) -> str:
        """Name, step, and by how much it misses the budget if it does."""
        step = "no plan" if self.step_us is None else show_us(self.step_us)
        note = f"  {self.reason}" if self.reason else ""
        if self.missing_bytes:
            note = f"  does not fit: {size(self.missing_bytes)} missing"
        return f"{self.name:40}  {step:>12}{note}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def against(planned_us: float | None, ways: Sequence[SimpleWay]) -> Iterator[str]:
    """A table of the ways under our plan's own line; nothing where there are none."""
    if not ways:
        return
    yield f"{'against simpler ways':40}  {'step':>12}"
    if planned_us is not None:
        yield SimpleWay("this plan", planned_us, None).to_line()
    yield from (way.to_line() for way in ways)
