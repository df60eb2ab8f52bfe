"""The one place that knows hypothesis, which is imported only when a strategy is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")
Draw = Callable[[Any], Any]


def strategies() -> Any:
    """`hypothesis.strategies`, or an error that says how to get it."""
    try:
        from hypothesis import strategies as st
    except ImportError as error:
        raise ImportError(
            "offcompile.testing needs hypothesis, which is not installed: "
            "pip install offcompile[test]"
        ) from error
    return st


def composite(draw_value: Callable[[Draw], T]) -> SearchStrategy[T]:
    """The strategy whose values `draw_value` puts together from what it draws."""
    strategy: SearchStrategy[T] = _drawn_by(draw_value.__qualname__)(draw_value)
    return strategy


@functools.cache
def _drawn_by(kind: str) -> Any:
    """Made once for each kind of value: hypothesis parses the source of what it makes one of.

    It tells kinds apart by what the function holds, and mixes values of one kind.
    """

    def drawn(draw: Draw, draw_value: Callable[[Draw], Any], kind: str = kind) -> Any:
        return draw_value(draw)

    return strategies().composite(drawn)


# Each choice costs the engine about a tenth of a millisecond, and a problem needs dozens of
# them: so figures, and whole sets of rare features, are drawn in one choice each.


def durations(st: Any) -> Any:
    """Whole and awkward microseconds: halves of a nanosecond, thirds, nothing at all."""
    whole = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 30.0)
    return st.sampled_from((*whole, 0.0005, 1.0005, 3.3333))


def rates(st: Any) -> Any:
    """Bytes per microsecond, of which some divide no size evenly."""
    return st.sampled_from((1.0, 2.0, 5.0, 0.5, 3.7, 1000.0))


def some_of(st: Any, things: Sequence[T]) -> Any:
    """Any of a few things, in their order; none of them first."""
    return st.integers(0, 2 ** len(things) - 1).map(
        lambda bits: tuple(x for i, x in enumerate(things) if bits >> i & 1)
    )
