"""The only module that imports hypothesis, and only when a strategy is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")
Draw = Callable[[Any], Any]


def strategies() -> Any:
    """Import `hypothesis.strategies`; if missing, raise an error that says how to install it."""
    try:
        from hypothesis import strategies as st
    except ImportError as error:
        raise ImportError(
            "offcompile.testing needs hypothesis, which is not installed: "
            "pip install offcompile[test]"
        ) from error
    return st


def composite(draw_value: Callable[[Draw], T]) -> SearchStrategy[T]:
    """Make a strategy from a function that draws the parts of a value."""
    strategy: SearchStrategy[T] = _drawn_by(draw_value.__qualname__)(draw_value)
    return strategy


@functools.cache
def _drawn_by(kind: str) -> Any:
    """Make the composite once per kind of value, since hypothesis parses its function's source.

    Hypothesis tells kinds apart by the function's contents (such as defaults), and mixes values of
    one kind.
    """

    def drawn(draw: Draw, draw_value: Callable[[Draw], Any], kind: str = kind) -> Any:
        return draw_value(draw)

    return strategies().composite(drawn)


# Each choice costs the engine about a tenth of a millisecond, and a problem needs dozens of
# them. So each figure, and each set of rare features, is drawn in a single choice.


def durations(st: Any) -> Any:
    """Durations in µs, including odd ones: half nanoseconds, thirds, zero."""
    whole = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 30.0)
    return st.sampled_from((*whole, 0.0005, 1.0005, 3.3333))


def rates(st: Any) -> Any:
    """Rates in bytes per µs, some of which divide no size evenly."""
    return st.sampled_from((1.0, 2.0, 5.0, 0.5, 3.7, 1000.0))


def some_of(st: Any, things: Sequence[T]) -> Any:
    """Subsets of a few things, in order; shrinks towards the empty one."""
    return st.integers(0, 2 ** len(things) - 1).map(
        lambda bits: tuple(x for i, x in enumerate(things) if bits >> i & 1)
    )
