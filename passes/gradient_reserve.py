"""GO-MemFerry: chooses which gradients stay on the device; the host gets the others.

MemFerry §IV-D: initially every gradient is written in place on the host, and the reserve factor
sets how many bytes of gradients may be produced on the device after all. Choosing them is a 0/1
knapsack: the gain of a gradient is the time saved by its backward op. A gradient that cannot be
written in place is written on the device and moved out at once.

The paper limits the sum of the bytes. The true limit is a peak over time. So without a reserve
factor, after the knapsack (which is safe), any gradient is added that fits during its lifetime.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar

from offcompile.ir import Machine, Op, Plan, Problem, Tensor
from offcompile.ir.units import exact, round_ns

from .build.contract import Judge
from .build.gaps import Gap
from .build.program import Intervals
from .search.fitting import Fitting
from .search.program_variant import Choices, ProgramVariant

#: cells of the dynamic program's table; they determine its quantum unless one is given
TABLE_CELLS = 2_000_000

METHODS = ("dp", "ratio")


@dataclass(frozen=True)
class GradientReserve:
    """Sends gradients to the host, written in place if possible, unless reserved on the device.

    `reserve` is the fraction of all gradient bytes that may stay on the device (None: as much as
    fits); `method` is `dp` (the paper's) or `ratio` (most gain per byte first).
    """

    name: ClassVar[str] = "gradient_reserve"

    reserve: float | None = None
    method: str = "dp"
    judge: Judge | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        if self.reserve is not None and not 0 <= self.reserve <= 1:
            raise ValueError(f"reserve is {self.reserve}; it must lie between 0 and 1, or be none")

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        fitting = Fitting(problem, machine, self.judge, plan, first="gradient")
        gradients = _Gradients(problem, fitting)
        kept = self._kept(gradients)
        # if the requested reserve does not fit, use none: the paper's default
        for reserved in dict.fromkeys((kept, frozenset[str]())):
            variant = fitting.variant(gradients.choices(reserved))
            fitting.offer(variant, gradients.away(reserved))
            if fitting.trials.best is not None:
                break
        return fitting.plan()

    def _kept(self, gradients: _Gradients) -> frozenset[str]:
        choose = reserve_dp if self.method == "dp" else reserve_ratio
        sizes = [g.nbytes for g in gradients.all]
        gains = [gradients.gain_ns(g) for g in gradients.all]
        if self.reserve is None:
            room = gradients.room()
            chosen = choose(sizes, gains, min(sum(sizes), max(0, room)))
            names = [gradients.all[n].id for n in chosen]
            return gradients.extended(names, [gradients.all[n].id for n in _by_ratio(sizes, gains)])
        chosen = choose(sizes, gains, int(exact(self.reserve) * sum(sizes)))
        return frozenset(gradients.all[n].id for n in chosen)


class _Gradients:
    """The gradients of a problem, the gain of each from staying on the device, and its gaps."""

    def __init__(self, problem: Problem, fitting: Fitting) -> None:
        self.problem, self.fitting = problem, fitting
        self.plain: ProgramVariant = fitting.variant(fitting.base)
        self.gaps: dict[str, list[Gap]] = {}
        self.direct: dict[str, tuple[str, ...]] = {}  # gradient → ops that write it in place
        self.all: list[Tensor] = []
        if not fitting.host:
            return
        for gap in self.plain.gaps.gaps:
            self.gaps.setdefault(gap.tensor.id, []).append(gap)
        hosted = {r.name for r in self.plain.program.runs if r.on_host}
        writing: dict[str, list[Op]] = {}
        for op in problem.ops:
            if op.id not in hosted:
                for t in dict.fromkeys(op.writes):
                    writing.setdefault(t, []).append(op)
        for tensor in problem.tensors:
            g = tensor.id
            writers = writing.get(g, [])
            if tensor.kind != "gradient" or tensor.pinned or not writers:
                continue
            if all(g in o.direct for o in writers):
                self.direct[g] = tuple(o.id for o in writers)
            if g in self.direct or g in self.gaps:
                self.all.append(tensor)

    def gain_ns(self, tensor: Tensor) -> int:
        """Returns the time saved by staying on the device: faster writers, or no transfers."""
        g = tensor.id
        if g in self.direct:
            ops = [self.problem.op[o] for o in self.direct[g]]
            return sum(round_ns(o.direct[g]) - round_ns(o.duration_us) for o in ops)
        return sum(round_ns(gap.out_us + gap.in_us) for gap in self.gaps[g])

    def choices(self, reserved: frozenset[str]) -> Choices:
        base = self.fitting.base
        born = {(o, g) for g, ops in self.direct.items() if g not in reserved for o in ops}
        return Choices(base.directs | born, base.recomputes, base.hosted)

    def away(self, reserved: frozenset[str]) -> set[tuple[str, str | None]]:
        """Returns the gaps that gradients without a reserved place spend on the host."""
        outside = [t.id for t in self.all if t.id not in reserved and t.id not in self.direct]
        return {(g, gap.after) for g in outside for gap in self.gaps[g]}

    def _held(self, reserved: frozenset[str]) -> list[int]:
        """Returns device bytes per run: everything in place, minus the gradients not reserved."""
        program = self.plain.program
        total = Intervals(len(program.runs))
        for gap in self.plain.gaps.gaps:
            total.add(gap.first, gap.last, gap.tensor.nbytes)
        for g in self._outside(reserved):
            for gap in self.gaps.get(g, ()):
                total.add(gap.first, gap.last, -gap.tensor.nbytes)
        held = [a + b for a, b in zip(program.op_bytes, total.sums(), strict=True)]
        for g in self._outside(reserved):
            for op in self.direct.get(g, ()):
                held[program.position[op]] -= self.problem.tensor[g].nbytes
        return held

    def _outside(self, reserved: frozenset[str]) -> list[str]:
        return [t.id for t in self.all if t.id not in reserved]

    def room(self) -> int:
        """Returns the bytes free at the worst run with no gradient reserved: they always fit."""
        capacity = self.plain.capacity
        if capacity == float("inf"):
            return sum(t.nbytes for t in self.all)
        return int(capacity) - max(self._held(frozenset()), default=0)

    def extended(self, reserved: Sequence[str], order: Sequence[str]) -> frozenset[str]:
        """Returns `reserved` plus other gradients that fit at every run, tried in this order."""
        kept = frozenset(reserved)
        capacity = self.plain.capacity
        if capacity == float("inf"):
            return kept
        for g in order:
            if g not in kept and max(self._held(kept | {g})) <= capacity:
                kept |= {g}
        return kept


def _by_ratio(sizes: Sequence[int], gains: Sequence[int]) -> list[int]:
    """Returns the items with a gain, most gain per byte first."""
    worth = [n for n, gain in enumerate(gains) if gain > 0]
    return sorted(worth, key=lambda n: (-Fraction(gains[n], max(sizes[n], 1)), n))


def _fill(
    order: Sequence[int], sizes: Sequence[int], room: int, taken: AbstractSet[int], without: int
) -> set[int]:
    """Returns `taken` plus other items that fit, in order."""
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
    """Fills the room, then leaves one item out or forces one in and refills, while that gains."""
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
    """Returns the items to reserve: most gain per byte first, then exchanges that gain."""
    return _improve(sizes, gains, capacity, set())


def reserve_dp(
    sizes: Sequence[int],
    gains: Sequence[int],
    capacity: int,
    quantum: int | None = None,
    fill: bool = True,
) -> frozenset[int]:
    """Returns the items to reserve, by recursion D(i, j) of §IV-D, a column per `quantum` bytes.

    Sizes are rounded up to whole quanta, so the answer always fits, but the rounding wastes a
    little: `fill` gives the unused bytes to other items that fit, with exchanges (the paper does
    not). Without a quantum, it is as fine as `TABLE_CELLS` allows: 10,000 columns for 200 items.
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
    """Returns the optimal set of items to reserve.

    Uses Nemhauser and Ullmann's lists of undominated (bytes, gain), most gain per byte first, and
    drops entries whose fractional completion cannot beat the best answer known. Fast on profiled
    data; gains that are nearly linear in bytes can make the lists long.
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
        """Returns `gain` plus the best that items `at`… could add if divisible (rounded up)."""
        low, high = at, len(order)
        limit = capacity - used + summed[at][0]
        while low < high:  # the largest whole number of items that fit
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

    front: list[tuple[int, int, int]] = [(0, 0, -1)]  # bytes, gain, index of the last link
    links: list[tuple[int, int]] = []  # (item, index of the link before it)
    best_gain, best_link = known_gain, -2
    for at, n in enumerate(order):
        size, gain = sizes[n], gains[n]
        merged = [(b, g, link, False) for b, g, link in front]
        merged += [(b + size, g + gain, link, True) for b, g, link in front if b + size <= capacity]
        merged.sort(key=lambda p: (p[0], -p[1]))
        front, highest = [], -1
        for used, total, link, took in merged:
            if total <= highest or bound(at + 1, used, total) <= best_gain:
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
