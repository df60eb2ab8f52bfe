"""GO-MemFerry: which gradients keep their place on the device; the others are born on the host.

MemFerry §IV-D: every gradient is first taken to be written in place on the host, and the
reserve factor says how many bytes of them may be produced on the device after all. Choosing
them is a 0/1 knapsack: the gain of a gradient is what its backward op saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from fractions import Fraction

#: cells of the dynamic program's table: they set its quantum unless one is given
TABLE_CELLS = 4_000_000


def _by_ratio(sizes: Sequence[int], gains: Sequence[int]) -> list[int]:
    """Items worth taking, most gain per byte first."""
    worth = [n for n, gain in enumerate(gains) if gain > 0]
    return sorted(worth, key=lambda n: (-Fraction(gains[n], max(sizes[n], 1)), n))


def _fill(
    order: Sequence[int], sizes: Sequence[int], room: int, taken: AbstractSet[int], without: int
) -> set[int]:
    """`taken`, and what else fits, in order."""
    filled = set(taken)
    room -= sum(sizes[n] for n in taken)
    for n in order:
        if sizes[n] <= room and n not in filled and n != without:
            filled.add(n)
            room -= sizes[n]
    return filled


def _improve(
    sizes: Sequence[int], gains: Sequence[int], room: int, taken: set[int]
) -> frozenset[int]:
    """Fill up, then as long as it gains: leave one item out, or force one in, and fill up again."""
    order = _by_ratio(sizes, gains)
    best = _fill(order, sizes, room, taken, -1)
    best_gain = sum(gains[n] for n in best)
    while True:
        tried = [_fill(order, sizes, room, best - {old}, old) for old in sorted(best)]
        for new in order:
            if new not in best and sizes[new] <= room:
                kept, space = {new}, room - sizes[new]
                for n in order:
                    if n in best and sizes[n] <= space:
                        kept.add(n)
                        space -= sizes[n]
                tried.append(_fill(order, sizes, room, kept, -1))
        better = max(tried, key=lambda x: sum(gains[n] for n in x), default=best)
        if sum(gains[n] for n in better) <= best_gain:
            return frozenset(best)
        best, best_gain = better, sum(gains[n] for n in better)


def reserve_ratio(sizes: Sequence[int], gains: Sequence[int], capacity: int) -> frozenset[int]:
    """Which items to reserve: most gain per byte first, then exchanges that gain."""
    return _improve(sizes, gains, capacity, set())


def reserve_dp(
    sizes: Sequence[int],
    gains: Sequence[int],
    capacity: int,
    quantum: int | None = None,
    fill: bool = True,
) -> frozenset[int]:
    """Which items to reserve: the recursion D(i, j) of §IV-D, a column per `quantum` bytes.

    Sizes are rounded up to whole quanta, so the answer always fits, and what that leaves
    unused costs a little: `fill` hands the unused bytes to what still fits, with exchanges
    (the paper does not). Without a quantum it is as fine as `TABLE_CELLS` allow: 20,000 columns for 200 items.
    """
    items = [n for n in range(len(sizes)) if gains[n] > 0 and sizes[n] <= capacity]
    if sum(sizes[n] for n in items) <= capacity:
        return frozenset(items)
    if quantum is None:
        quantum = -(-capacity * len(items) // TABLE_CELLS)
    columns = capacity // quantum
    best = [0] * (columns + 1)
    takes: list[bytes] = []
    for n in items:
        cells, gain = -(-sizes[n] // quantum), gains[n]
        shifted = [value + gain for value in best[: columns + 1 - cells]]
        kept = best[cells:]
        takes.append(bytes(map(int.__lt__, kept, shifted)))
        best[cells:] = map(max, kept, shifted)
    taken: set[int] = set()
    column = columns
    for n, take in zip(reversed(items), reversed(takes), strict=True):
        cells = -(-sizes[n] // quantum)
        if column >= cells and take[column - cells]:
            taken.add(n)
            column -= cells
    return _improve(sizes, gains, capacity, taken) if fill else frozenset(taken)


def reserve_exact(sizes: Sequence[int], gains: Sequence[int], capacity: int) -> frozenset[int]:
    """Which items to reserve: the optimum.

    Nemhauser and Ullmann's lists of undominated (bytes, gain), most gain per byte first, with
    every entry left out whose fractional completion cannot beat the best answer known. Fast
    on what profiles give; gains that are nearly linear in bytes can make the lists long.
    """
    order = [n for n in _by_ratio(sizes, gains) if sizes[n] <= capacity]
    free = [n for n in order if sizes[n] == 0]
    order = [n for n in order if sizes[n] > 0]
    known = reserve_ratio(sizes, gains, capacity)
    known_gain = sum(gains[n] for n in known if sizes[n] > 0)
    summed = [(0, 0)]
    for n in order:
        summed.append((summed[-1][0] + sizes[n], summed[-1][1] + gains[n]))

    def bound(at: int, used: int, gain: int) -> int:
        """`gain` and the best that items `at`… add if they could be cut (rounded up)."""
        low, high = at, len(order)
        limit = capacity - used + summed[at][0]
        while low < high:  # the last whole number of items that fit
            half = (low + high + 1) // 2
            if summed[half][0] <= limit:
                low = half
            else:
                high = half - 1
        total = gain + summed[low][1] - summed[at][1]
        if low < len(order):
            n = order[low]
            total += -(-(limit - summed[low][0]) * gains[n] // sizes[n])
        return total

    front: list[tuple[int, int, int]] = [(0, 0, -1)]  # bytes, gain, index of the last taking
    links: list[tuple[int, int]] = []  # (item, index of the taking before it)
    best_gain, best_link = known_gain, -2
    for at, n in enumerate(order):
        size, gain = sizes[n], gains[n]
        merged = [(b, g, link, False) for b, g, link in front]
        merged += [(b + size, g + gain, link, True) for b, g, link in front if b + size <= capacity]
        merged.sort(key=lambda p: (p[0], -p[1]))
        front, highest = [], -1
        for used, total, link, took in merged:
            if total <= highest or bound(at + 1, used, total) <= best_gain and total <= best_gain:
                continue
            highest = total
            if took:
                links.append((n, link))
                link = len(links) - 1
            front.append((used, total, link))
            if total > best_gain:
                best_gain, best_link = total, link
    if best_link == -2:
        return frozenset(known)
    chosen = set(free)
    while best_link >= 0:
        item, best_link = links[best_link]
        chosen.add(item)
    return frozenset(chosen)
