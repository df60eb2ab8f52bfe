"""The choice of gaps: what each frees, the best one first, and none that need not be spent away."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offcompile.ir import HOST, Tensor
from offcompile.passes.build.gaps import MOST_CELLS, Gap, Gaps, cells_within
from offcompile.passes.select.excess import BlockedExcess, Excess, excess
from offcompile.passes.select.gap_set import GapSet, Prices


class Recording(Prices):
    """Prices that keep the gaps in the order in which they are chosen."""

    def __init__(self) -> None:
        super().__init__(1.0, 1.0)
        object.__setattr__(self, "order", [])

    def taken(self, gap: Gap, writes: bool) -> None:
        self.order.append((gap.index, writes))


def drawn(seed: int, n: int) -> Gaps:
    """Gaps of a few values on a ring of `n` cells, in which up to a few bytes are held."""
    rng = random.Random(seed)
    gaps = Gaps(full=[rng.randint(0, 90) for _ in range(n)], cell_of=list(range(n)))
    for i in range(rng.randint(0, 14)):
        first, last = rng.randrange(n), rng.randrange(n)
        gap = Gap(
            index=i,
            tensor=Tensor(f"t{i}", rng.randint(1, 40), "weight"),
            after=f"op{first}",
            first=first,
            last=last,
            cells=cells_within(first, last, range(n + 1)),
            value=i // rng.randint(1, 4),
            dirty=rng.random() < 0.6,
            out_us=rng.uniform(0.5, 2),
            in_us=rng.uniform(0.5, 2),
            tier=HOST,
            codec=None,
        )
        gaps.gaps.append(gap)
    return gaps


def cells(gap: Gap) -> list[int]:
    return [j for a, b in gap.cells for j in range(a, b)]


SEEDS, LENGTHS, CAPACITIES = st.integers(0, 10**6), st.integers(1, 300), st.integers(10, 80)


@given(SEEDS, LENGTHS, CAPACITIES, st.sampled_from((Excess, BlockedExcess)))
def test_a_gap_frees_the_excess_that_it_covers(
    seed: int, n: int, capacity: int, form: type[Excess]
) -> None:
    gaps = drawn(seed, n)
    cover, over = GapSet(gaps), form(gaps.full, [capacity] * n)

    def expected(gap: Gap) -> int:
        return sum(max(0, min(cover.held[j] - capacity, gap.tensor.nbytes)) for j in cells(gap))

    assert all(over.freed_first(g) == expected(g) for g in gaps.gaps)
    for one in gaps.gaps:
        assert all(over.freed(g) == expected(g) for g in gaps.gaps)
        cover.add(one.index)
        over.lower(cover.held, one)
        assert over.left == [max(0, held - capacity) for held in cover.held]
        assert over.some is (max(cover.held) > capacity)


@pytest.mark.parametrize(
    ("n", "limit", "form"),
    [
        (MOST_CELLS, 10, Excess),
        (MOST_CELLS + 1, 10, BlockedExcess),
        (MOST_CELLS + 1, 10.0, BlockedExcess),
        (MOST_CELLS + 1, 10.5, Excess),
        (MOST_CELLS + 1, float("inf"), Excess),
    ],
)
def test_many_cells_are_summed_by_block_if_bytes_are_whole(
    n: int, limit: float, form: type[Excess]
) -> None:
    assert type(excess([11] * n, [limit] * n)) is form


@given(SEEDS, LENGTHS, CAPACITIES)
def test_the_exact_choice_takes_the_best_gap_every_time(seed: int, n: int, capacity: int) -> None:
    gaps = drawn(seed, n)
    cover, prices = GapSet(gaps), Recording()
    cover.repair(capacity, prices, exact=True)
    so_far = GapSet(gaps)

    def profit(gap: Gap) -> float:
        over = [max(0, min(so_far.held[j] - capacity, gap.tensor.nbytes)) for j in cells(gap)]
        return sum(over) / prices.of(gap, so_far.writes(gap))

    for i, writes in prices.order:
        assert writes is so_far.writes(gaps.gaps[i])
        best = max(profit(g) for g in gaps.gaps if g.index not in so_far.away)
        assert profit(gaps.gaps[i]) == pytest.approx(best, rel=1e-11)
        so_far.add(i)
    assert so_far.away == cover.away and so_far.held == cover.held


@given(SEEDS, LENGTHS, CAPACITIES, st.booleans())
def test_what_can_be_covered_is_and_nothing_redundant_stays_away(
    seed: int, n: int, capacity: int, exact: bool
) -> None:
    gaps = drawn(seed, n)
    cover = GapSet(gaps)
    fits = cover.repair(capacity, Prices(), exact=exact)
    assert fits is (max(cover.held) <= capacity)
    cover.prune(capacity, Prices())
    assert fits is (max(cover.held) <= capacity)
    assert cover.held == gaps.held(cover.away)
    least = gaps.held(range(len(gaps.gaps)))
    for held, all_away in zip(cover.held, least, strict=True):
        assert held <= capacity or held == all_away
    assert not any(cover.fits(i, capacity) for i in cover.away)


def test_gaps_of_one_value_share_its_write_back() -> None:
    one = Gap(0, Tensor("w", 10, "weight"), "a", 0, 3, ((1, 3),), 5, True, 2.0, 1.0, HOST, None)
    two = Gap(1, Tensor("w", 10, "weight"), "b", 3, 6, ((4, 6),), 5, True, 2.0, 1.0, HOST, None)
    gaps = Gaps([one, two], [10] * 8, list(range(8)))
    cover = GapSet(gaps)
    assert cover.writes(one) and cover.writes(two)
    cover.add(0)
    assert cover.writes(one) and not cover.writes(two)
    cover.add(1)
    assert not cover.writes(one) and not cover.writes(two)
    assert cover.traffic_us() == 4.0
