"""Which weights stay on the device: an even spread, and the share of them that pays."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offcompile.passes.select.pinned_weights import LEAST_STEP, best_share, spread, without_room

shares = st.fractions(0, 1, max_denominator=16)
sizes = st.lists(st.integers(1, 1000), min_size=1, max_size=30).map(
    lambda found: [(f"w{i}", nbytes) for i, nbytes in enumerate(found)]
)


@given(sizes, shares)
def test_a_spread_has_about_its_share_of_the_bytes(
    weights: list[tuple[str, int]], share: Fraction
) -> None:
    chosen = spread(weights, share)
    total = sum(n for _, n in weights)
    got = sum(n for name, n in weights if name in chosen)
    assert abs(got - share * total) <= max(n for _, n in weights)
    assert not share or weights[0][0] in chosen


@given(sizes)
def test_none_and_all(weights: list[tuple[str, int]]) -> None:
    assert spread(weights, Fraction(0)) == frozenset()
    assert spread(weights, Fraction(1)) == {name for name, _ in weights}


def test_a_spread_is_even() -> None:
    chosen = sorted(int(i) for i in spread([(str(i), 5) for i in range(12)], Fraction(1, 4)))
    assert len(chosen) == 3 and chosen[0] == 0
    assert {b - a for a, b in pairwise(chosen)} <= {4, 5}


@given(sizes, st.integers(0, 20_000))
def test_the_host_has_room_for_those_that_leave(
    weights: list[tuple[str, int]], room_bytes: int
) -> None:
    stays = without_room(weights, room_bytes)
    assert sum(nbytes for name, nbytes in weights if name not in stays) <= room_bytes
    assert not stays or sum(nbytes for _, nbytes in weights) > room_bytes


def test_no_more_stay_than_the_host_has_no_room_for() -> None:
    weights = [(str(i), 100) for i in range(12)]
    assert without_room(weights, None) == without_room(weights, 1200) == frozenset()
    for room_bytes in (0, 99, 250, 800, 1199):
        assert len(without_room(weights, room_bytes)) == 12 - room_bytes // 100


@pytest.mark.parametrize("best", [Fraction(n, 8) for n in range(9)])
def test_the_best_share_is_found(best: Fraction) -> None:
    asked: list[Fraction] = []

    def cost(share: Fraction) -> float:
        asked.append(share)
        return float(abs(share - best))

    found = best_share(cost, float(best))
    assert abs(found - best) <= LEAST_STEP
    assert len(asked) == len(set(asked)) <= 6


def test_what_a_slope_rules_out_is_not_tried() -> None:
    asked: list[Fraction] = []

    def cost(share: Fraction) -> float:
        asked.append(share)
        return 1 + float(share)

    assert best_share(cost, 1.0) == 0
    assert asked == [Fraction(1), Fraction(1, 2)]
    asked.clear()
    assert best_share(lambda share: cost(share) - 0.9, 1.0) == Fraction(1, 8)
    assert asked[2:] == [Fraction(1, 4), Fraction(3, 4), Fraction(1, 8)]
    found = {Fraction(1, 2): 6.5, Fraction(1, 4): 6.7, Fraction(1, 8): 5.5}  # one turned out badly
    assert best_share(found.get, 5.8) == Fraction(1, 8)


def test_shares_that_do_not_fit_are_passed_over() -> None:
    def cost(share: Fraction) -> float | None:
        return None if share > Fraction(1, 4) else 1 - float(share)

    assert best_share(cost, 1.0) == Fraction(1, 4)
    assert best_share(lambda share: None, 1.0) == 0
