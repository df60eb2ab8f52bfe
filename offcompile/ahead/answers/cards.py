"""The same step on several cards, one row each, and what it costs at the user's prices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offcompile.ir import InvalidInput, Violation
from offcompile.ir.units import size
from offcompile.machine.hardware import list_profiles, load_profile

from .outcome import HEADS, StepOutcome

CPU = "cpu"
ALL = "all"
US_PER_HOUR = 3.6e9
MILLION = 1_000_000


@dataclass(frozen=True)
class StepWork:
    """Count the work that one step on all ranks gets done."""

    #: number of tokens, or of samples if the inputs are no tokens
    count: int
    #: "tokens" or "samples"
    unit: str
    ranks: int = 1


@dataclass(frozen=True)
class CardRow:
    """The step on one card."""

    card: str
    #: the budget on the card
    memory_bytes: int
    outcome: StepOutcome
    work: StepWork
    #: price of one card, in the user's currency; None: not given
    hourly_price: float | None = None

    @property
    def step_cost(self) -> float | None:
        """Price of one step on all ranks."""
        if self.hourly_price is None or self.outcome.step_us is None:
            return None
        return self.work.ranks * self.hourly_price * self.outcome.step_us / US_PER_HOUR

    @property
    def million_cost(self) -> float | None:
        """Price of a million tokens, or samples."""
        cost = self.step_cost
        return None if cost is None else cost / self.work.count * MILLION

    def to_json(self) -> dict[str, Any]:
        found = {"card": self.card, "memory_bytes": self.memory_bytes, **self.outcome.to_json()}
        if self.hourly_price is None:
            return found
        priced = {"hourly_price": self.hourly_price, "step_cost": self.step_cost}
        return found | priced | {f"million_{self.work.unit}_cost": self.million_cost}


def by_step(rows: Iterable[CardRow]) -> tuple[CardRow, ...]:
    """The fastest first, then those that do not fit, the largest first."""

    def order(row: CardRow) -> tuple[float, int, str]:
        step_us = row.outcome.step_us
        return math.inf if step_us is None else step_us, -row.memory_bytes, row.card

    return tuple(sorted(rows, key=order))


def cheapest(rows: Iterable[CardRow]) -> CardRow | None:
    """The row whose step costs least, the first of equals; None if no price is known."""
    priced = [(row.step_cost, i, row) for i, row in enumerate(rows) if row.step_cost is not None]
    return min(priced)[2] if priced else None


def card_lines(rows: Sequence[CardRow]) -> Iterator[str]:
    """Yield a table with a line per card; nothing if there are none."""
    if not rows:
        return
    priced = any(row.hourly_price is not None for row in rows)
    unit, wide = rows[0].work.unit, max(len("card"), *(len(row.card) for row in rows))
    million = f"per million {unit}"
    costs = f"  {'cost of a step':>14}  {million:>{len(million)}}" if priced else ""
    yield f"{'card':{wide}}  {'memory':>10}  {HEADS}{costs}  how"
    for row in rows:
        step, each = _cost(row.step_cost), _cost(row.million_cost)
        costs = f"  {step:>14}  {each:>{len(million)}}" if priced else ""
        memory = size(row.memory_bytes)
        yield f"{row.card:{wide}}  {memory:>10}  {row.outcome.cells}{costs}  {row.outcome.note}"
    best = cheapest(rows)
    if best is not None:
        yield f"cheapest: {best.card}, {_cost(best.million_cost)} {million}"


def _cost(cost: float | None) -> str:
    """The cost with three digits, or two behind the point, and no exponent."""
    if not cost:
        return "" if cost is None else "0"
    return f"{cost:,.{max(2, 2 - math.floor(math.log10(cost)))}f}"


# --- reading ------------------------------------------------------------------------------------


def read_cards(cards: str | Iterable[str]) -> tuple[str, ...]:
    """The names of profiles, each once. Raises `InvalidInput` for one that is no card."""
    if isinstance(cards, str):
        cards = [name for name in list_profiles() if name != CPU] if cards == ALL else [cards]
    found = tuple(dict.fromkeys(_named(name) for name in cards))
    if not found:
        raise _bad("cards", f"there is none; name profiles, or {ALL!r}")
    for name in found:
        if load_profile(name).name == CPU:
            raise _bad("cards", f"{name!r} is no card; leave it out, or plan for it by itself")
    return found


def read_prices(
    prices: Mapping[str, float] | None, cards: Sequence[str] | None
) -> dict[str, float]:
    """Card → its price of an hour. Raises `InvalidInput` for one that is no price."""
    if prices is None:
        return {}
    if cards is None:
        raise _bad("prices", "they are for a comparison of cards; give cards too")
    found = {}
    for name, price in prices.items():
        card = _named(name)
        if card not in cards:
            raise _bad("prices", f"{name!r} is not compared; there are {', '.join(cards)}")
        number = isinstance(price, int | float) and not isinstance(price, bool)
        if not number or not 0 <= price < math.inf:
            raise _bad("prices", f"{price!r} is no price of {name}; give a number of 0 or more")
        found[card] = float(price)
    return found


def _named(name: str) -> str:
    """The name of a shipped profile without aliases; a file's as it was given."""
    text = name.strip()
    profile = load_profile(text)
    return text if "/" in text or text.endswith(".toml") else profile.name


def _bad(where: str, detail: str) -> InvalidInput:
    return InvalidInput([Violation("bad-value", where, detail)])
