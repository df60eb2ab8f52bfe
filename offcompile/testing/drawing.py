"""The one place that knows hypothesis, which is imported only when a strategy is made."""

from __future__ import annotations

from collections.abc import Callable
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
    strategy: SearchStrategy[T] = strategies().composite(draw_value)()
    return strategy


def durations(st: Any) -> Any:
    """Whole and awkward microseconds: halves of a nanosecond, thirds, nothing at all."""
    return st.integers(0, 30).map(float) | st.sampled_from((0.0005, 1.0005, 3.3333))


def rates(st: Any) -> Any:
    return st.sampled_from((1.0, 2.0, 5.0, 0.5, 3.7, 1000.0))
