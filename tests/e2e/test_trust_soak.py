"""Steps of all kinds, failures among them, leave nothing behind, and losses stay the twin's."""

from __future__ import annotations

import pytest
from trust import soak

import offcompile


@pytest.mark.long
def test_books_are_flat_and_losses_those_of_the_twin() -> None:
    before = offcompile.counters()
    seen = soak.soak(steps=48, life=36, look=6, seed=0)
    assert seen.wrong == []
    assert soak.unsteady(seen, 36) == []
    assert set(seen.ways) == set(soak.WAYS)
    after = offcompile.counters()
    assert after["bytes_out"] > before["bytes_out"]
    assert after["raw_bytes_out"] - before["raw_bytes_out"] > (
        after["bytes_out"] - before["bytes_out"]
    )  # some were packed


def test_growth_is_that_between_windows_of_whole_turns() -> None:
    flat = {step: 1000 + step % 30 for step in range(0, 300, 5)}
    assert soak.slope_bytes(flat, 10) == 0
    assert soak.slope_bytes({s: v + 2 * s for s, v in flat.items()}, 10) == 2000
