"""Which of the weights that live on the host stay on the device all the same, for good.

A weight that stays is never loaded and takes its bytes all through the step. What a byte of it
saves is much the same for each, so what counts is where the lane is given rest: the chosen ones
are spread evenly over the order of use. The first one used is always among them, since its load
has nothing to hide behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

#: shares tried beside none and all, and how finely the best of them is looked at
FIRST_SHARES = (Fraction(1), Fraction(1, 2))
LEAST_STEP = Fraction(1, 8)


def spread(sizes: Sequence[tuple[str, int]], share: Fraction) -> frozenset[str]:
    """About `share` of all bytes, evenly over the order given, the first one included."""
    if share <= 0:
        return frozenset()
    chosen: list[str] = []
    owed = Fraction(0)
    for name, nbytes in sizes:
        owed += nbytes * share
        if not chosen or 2 * owed >= nbytes:
            chosen.append(name)
            owed -= nbytes
    return frozenset(chosen)


def best_share(
    cost_of: Callable[[Fraction], float | None], none: float, room: Fraction = Fraction(1)
) -> Fraction:
    """The cheapest share found; `cost_of` gives None where there is no plan, `none` is the cost of
    staying at none, and beyond `room` no share fits.

    All, a half, and then halves of the interval around the best so far: enough, since cost falls
    with each byte that stays until the device is too full, and rises from there, ever faster. So
    what lies on a slope that does not come down to the best is not tried, nor what leaves the rest
    of the step no room at all.
    """
    costs: dict[Fraction, float | None] = {Fraction(0): none}
    for share in FIRST_SHARES if room >= 1 else FIRST_SHARES[1:]:
        costs[share * room] = cost_of(share * room)
    step = FIRST_SHARES[-1] * room / 2
    while step >= LEAST_STEP:
        middle = _cheapest(costs)
        for share in (middle - step, middle + step):
            if 0 < share < room and share not in costs and not _above_best(costs, share):
                costs[share] = cost_of(share)
        step /= 2
    return _cheapest(costs)


def _above_best(costs: dict[Fraction, float | None], share: Fraction) -> bool:
    """Whether a slope that falls towards `share`, gone on with, is above the best cost there.

    One that rises tells nothing: plans are found by a search, and some turn out badly.
    """
    known = sorted((at, cost) for at, cost in costs.items() if cost is not None)
    best = min(cost for _, cost in known)
    below, above = [k for k in known if k[0] < share], [k for k in known if k[0] > share]
    for pair in (below[-2:], above[1::-1]):
        if len(pair) < 2:
            continue
        (far, far_cost), (near, near_cost) = pair
        slope = (near_cost - far_cost) / float(near - far)
        if near_cost < far_cost and near_cost + slope * float(share - near) >= best:
            return True
    return False


def _cheapest(costs: dict[Fraction, float | None]) -> Fraction:
    found = [(cost, share) for share, cost in costs.items() if cost is not None]
    return min(found)[1]
