"""Compares our plan's step time with that of simpler strategies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offcompile.ir.units import show_us, size


@dataclass(frozen=True)
class SimpleWay:
    """One simpler strategy. `step_us` and `peak_bytes` are given even if it does not fit; `step_us`
    is None if it has no plan at all, and `reason` says why."""

    name: str
    step_us: float | None
    peak_bytes: int | None
    #: bytes over the budget; 0 if it fits
    missing_bytes: int = 0
    reason: str = ""

    @property
    def fits(self) -> bool:
        return self.step_us is not None and self.missing_bytes == 0

    def to_line(self) -> str:
        """Name, step, and the bytes over the budget if it does not fit."""
        step = "no plan" if self.step_us is None else show_us(self.step_us)
        note = f"  {self.reason}" if self.reason else ""
        if self.missing_bytes:
            note = f"  does not fit: {size(self.missing_bytes)} missing"
        return f"{self.name:40}  {step:>12}{note}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def against(planned_us: float | None, ways: Sequence[SimpleWay]) -> Iterator[str]:
    """Yields a table with our plan's line, then a line per strategy; nothing if there are none."""
    if not ways:
        return
    yield f"{'against simpler ways':40}  {'step':>12}"
    if planned_us is not None:
        yield SimpleWay("this plan", planned_us, None).to_line()
    yield from (way.to_line() for way in ways)
