"""The bytes that the keeper may hold beside a run, and how a smaller reserve changes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offcompile.run.accounts.graph_runs import KEEPER_SHARE, _grown, _keeps

BYTES = st.integers(0, 1 << 40)


@given(BYTES, BYTES, BYTES)
def test_rooms_are_forecast_from_what_was_recorded_with_another_reserve(
    limit: int, before: int, now: int
) -> None:
    forecast = _grown(_keeps(limit, before), before_bytes=before, now_bytes=now)
    assert abs(forecast - _keeps(limit, now)) <= 1 + 1 / KEEPER_SHARE


def test_a_smaller_reserve_gives_nothing_to_a_run_that_kept_its_least_share() -> None:
    assert _keeps(80, 60) == _grown(30, before_bytes=60, now_bytes=55) == 30
