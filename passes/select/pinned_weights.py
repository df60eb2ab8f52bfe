"""Chooses weights at home on the host that stay on the device permanently.

A resident weight is never loaded and takes its bytes throughout the step. The time saved per byte
is about the same for each weight. It matters when the lane is relieved, so the chosen ones are
spread evenly over the order of use. The first one used is always among them, since there is nothing
to hide its load behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from offcompile.ir import DEVICE, HOST, Machine, Problem

#: shares tried besides none and all, and the resolution of the search around the best
FIRST_SHARES = (Fraction(1), Fraction(1, 2))
LEAST_STEP = Fraction(1, 8)
#: resolution of the share that stays where the host has no room for all
CROWDED_STEP = Fraction(1, 32)
#: weights and gradients below this share of the device's bytes gain next to nothing if they leave:
#: near the floor, a step gets about as much faster as its device gets larger
LITTLE = 0.01


def spread(sizes: Sequence[tuple[str, int]], share: Fraction) -> frozenset[str]:
    """Returns weights with about `share` of all bytes, evenly spread in order, with the first."""
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


def without_room(sizes: Sequence[tuple[str, int]], room_bytes: int | None) -> frozenset[str]:
    """Returns weights, evenly spread in order, that stay on the device so that the host has room
    for the others; `room_bytes`: None: for all."""
    total = sum(nbytes for _, nbytes in sizes)
    if room_bytes is None or total <= room_bytes:
        return frozenset()
    share = 1 - Fraction(room_bytes, total)
    while share < 1:
        stays = spread(sizes, share)
        if sum(nbytes for name, nbytes in sizes if name not in stays) <= room_bytes:
            return stays
        share += CROWDED_STEP
    return frozenset(name for name, _ in sizes)


def best_share(
    cost_of: Callable[[Fraction], float | None], none: float, room: Fraction = Fraction(1)
) -> Fraction:
    """Returns the cheapest share found.

    `cost_of` returns None if there is no plan, `none` is the cost without residents, and no share
    beyond `room` fits.

    It tries all, a half, and then halves of the interval around the best so far. That is enough,
    since cost falls with each resident byte until the device is too full, and then rises, ever
    faster. So shares are skipped if a slope towards them cannot come down to the best cost, or if
    they leave the rest of the step no room at all.
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
    """True if a slope falling towards `share`, extrapolated to it, stays above the best cost.

    A rising slope tells nothing: plans are found by a search, and some turn out badly.
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


def without_room_on_host(problem: Problem, room_bytes: int) -> frozenset[str]:
    """Weights at home on the host that stay on the device where only so much may live there."""
    return without_room(weights_in_use_order(problem), room_bytes)


def weights_in_use_order(problem: Problem) -> list[tuple[str, int]]:
    hosted = {t.id: t.nbytes for t in problem.tensors if t.kind == "weight" and t.home == HOST}
    order = dict.fromkeys(t for op in problem.ops for t in op.reads if t in hosted)
    return [(t, hosted[t]) for t in order]


def weigh_little(problem: Problem, machine: Machine) -> bool:
    """True if weights and gradients take next to nothing of the device, wherever they are."""
    capacity = machine.tier[DEVICE].capacity_bytes
    nbytes = sum(t.nbytes for t in problem.tensors if t.kind in ("weight", "gradient"))
    return capacity is not None and nbytes <= capacity * LITTLE
