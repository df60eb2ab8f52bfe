"""The same model with sequences of several lengths, one row each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .outcome import HEADS, StepOutcome

US_PER_SECOND = 1e6


@dataclass(frozen=True)
class LengthRow:
    """The step with sequences of one length."""

    length: int
    #: tokens of one step, on all ranks
    tokens: int
    outcome: StepOutcome
    #: None: not searched
    largest_batch: int | None = None

    @property
    def tokens_per_second(self) -> float | None:
        step_us = self.outcome.step_us
        return None if step_us is None else self.tokens / step_us * US_PER_SECOND

    def to_json(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "largest_batch": self.largest_batch,
            **self.outcome.to_json(),
        }


def answered(rows: Sequence[LengthRow]) -> LengthRow:
    """The row that the whole answer is for: the longest that fits; if none does, the shortest."""
    return next((row for row in reversed(rows) if row.outcome.fits), rows[0])


def length_lines(rows: Sequence[LengthRow]) -> Iterator[str]:
    """Yield a table with a line per length; nothing if there are none."""
    if not rows:
        return
    searched = any(row.largest_batch is not None for row in rows)
    batch = f"  {'largest batch':>13}" if searched else ""
    yield f"{'length':>8}  {HEADS}  {'tokens/s':>10}  {'device peak':>11}{batch}  how"
    for row in rows:
        rate, outcome = row.tokens_per_second, row.outcome
        largest = "" if row.largest_batch is None else f"{row.largest_batch:,}"
        batch = f"  {largest:>13}" if searched else ""
        tokens = "" if rate is None else f"{rate:,.0f}"
        yield (
            f"{row.length:>8}  {outcome.cells}  {tokens:>10}  {outcome.peak:>11}{batch}"
            f"  {outcome.note}"
        )
