"""The gaps in which tensors could be evicted, the memory each would free, and its cost.

All gaps belong to one `Program`: recomputations, direct accesses and host updates are fixed before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from offcompile.ir import DEVICE, HOST, SELF_ENDING_KINDS, Infeasible, Machine, Tensor

from .decisions import Away
from .lanes import Routes
from .program import Access, Intervals, Program

#: beyond this many runs, neighbouring runs share a cell, as long as evictions fit the device so
MOST_CELLS = 256


@dataclass(frozen=True, slots=True)
class Gap:
    """An interval in which a tensor's device copy only waits for its next use."""

    index: int
    tensor: Tensor
    after: str | None
    first: int  # the access before the gap
    last: int  # the access after it (at or below `first`: in the next step)
    #: cells entirely within the gap: half-open ranges
    cells: tuple[tuple[int, int], ...]
    #: gaps of the same value share its write-back: the second is cheaper (the discount rule)
    value: int
    dirty: bool
    out_us: float
    in_us: float
    tier: str
    codec: str | None

    @property
    def away(self) -> Away:
        return Away(self.tensor.id, self.after, self.tier, self.codec)


@dataclass
class Gaps:
    """Every gap of a program, and the memory held without any eviction.

    Bytes are kept per *cell*: one run of a short program, several neighbouring runs of a long one.
    The bytes of a cell are never less than those of any of its runs. With an eviction in every gap,
    no cell takes more than the device has unless one of its runs does.
    """

    gaps: list[Gap] = field(default_factory=list)
    #: peak bytes per cell without any eviction
    full: list[int] = field(default_factory=list)
    cell_of: list[int] = field(default_factory=list)  # run → cell

    @cached_property
    def siblings(self) -> dict[int, list[int]]:
        """Value → its gaps."""
        found: dict[int, list[int]] = {}
        for gap in self.gaps:
            found.setdefault(gap.value, []).append(gap.index)
        return found

    def at(self, cell: int) -> list[int]:
        """Returns the gaps that contain a cell."""
        return [g.index for g in self.gaps if any(a <= cell < b for a, b in g.cells)]

    def over(self, cells: Iterable[int]) -> list[int]:
        """Returns the gaps that contain any of these cells."""
        marks = [0] * len(self.full)
        for c in cells:
            marks[c] = 1
        before = list(accumulate(marks, initial=0))
        return [g.index for g in self.gaps if any(before[a] < before[b] for a, b in g.cells)]

    def held(self, away: Iterable[int]) -> list[int]:
        """Returns the bytes per cell with evictions in the gaps `away`."""
        steps = [0] * (len(self.full) + 1)
        for i in away:
            gap = self.gaps[i]
            for a, b in gap.cells:
                steps[a] -= gap.tensor.nbytes
                steps[b] += gap.tensor.nbytes
        return [x + y for x, y in zip(self.full, accumulate(steps), strict=False)]


def find_gaps(program: Program, machine: Machine, tier: str = HOST, lossy: bool = False) -> Gaps:
    """Returns the gaps that allow eviction to `tier`, with the codec that takes least lane time."""
    tiers = tuple(t.name for t in machine.tiers)
    # the capacity decides which runs share a cell
    capacity = machine.tier[DEVICE].capacity_bytes if len(program.runs) > MOST_CELLS else None
    asked = tiers, capacity, machine.lanes, machine.codecs, tier, lossy
    if asked not in program.gaps:
        program.gaps[asked] = _find_gaps(program, machine, tier, lossy)
    found: Gaps = program.gaps[asked]
    return found


def _find_gaps(program: Program, machine: Machine, tier: str, lossy: bool) -> Gaps:
    n = len(program.runs)
    total, evicted = Intervals(n), Intervals(n)
    ways = _GapWays(machine, tier, lossy)
    open_gaps: list[_OpenGap] = []
    values = 0
    for tensor in program.problem.tensors:
        accesses = program.accesses[tensor.id]
        if not accesses and not tensor.pinned:
            continue
        if not accesses and program.problem.steady and tensor.home == DEVICE:
            total.add(-1, n, tensor.nbytes)
        for after, first, last, value, dirty in _stretches(program, tensor, accesses):
            total.add(first, last, tensor.nbytes)
            # values that forward reads again stay exact
            rounds = last < n and program.runs[last].op.phase != "forward"
            way = ways.of(tensor, dirty, rounds)
            if way is None or not tensor.nbytes or tensor.pinned:
                continue
            evicted.add(first, last, tensor.nbytes)
            open_gaps.append((tensor, after, first, last, values + value, dirty, *way))
        values += len(accesses) + 1
    held = [own + more for own, more in zip(program.op_bytes, total.sums(), strict=True)]
    ends = _ends_of_cells(held, evicted.sums(), open_gaps, machine.tier[DEVICE].capacity_bytes)
    result = Gaps(full=[max(held[a:b]) for a, b in pairwise(ends)])
    for cell, (a, b) in enumerate(pairwise(ends)):
        result.cell_of += [cell] * (b - a)
    for tensor, after, first, last, value, dirty, out_us, in_us, codec in open_gaps:
        gap = Gap(
            index=len(result.gaps),
            tensor=tensor,
            after=after,
            first=first,
            last=last,
            cells=cells_within(first, last, ends),
            value=value,
            dirty=dirty,
            out_us=out_us,
            in_us=in_us,
            tier=tier,
            codec=codec,
        )
        result.gaps.append(gap)
    return result


#: (tensor, after, first, last, value, needs write-back, time out, time in, codec)
_OpenGap = tuple[Tensor, str | None, int, int, int, bool, float, float, str | None]


def _ends_of_cells(
    held: Sequence[int], evicted: Sequence[int], gaps: Sequence[_OpenGap], capacity: int | None
) -> list[int]:
    """Returns 0 and the end of each cell of a program.

    Runs share no cell that takes more than the device has with an eviction in every gap, if none of
    them takes as much by itself.

    held: bytes per run without evictions. evicted: those that evictions in all gaps would free.
    """
    n = len(held)
    width = max(1, -(-n // MOST_CELLS))
    ends = [*range(0, n, width), n]
    if width == 1 or capacity is None:
        return ends
    if max(a - b for a, b in zip(held, evicted, strict=True)) > capacity:
        return ends  # too much for any cells
    freed = [0] * len(ends)
    for tensor, _, first, last, *_ in gaps:
        for a, b in cells_within(first, last, ends):
            freed[a] += tensor.nbytes
            freed[b] -= tensor.nbytes
    found = [0]
    for (a, b), less in zip(pairwise(ends), accumulate(freed), strict=False):
        found += [b] if max(held[a:b]) - less <= capacity else range(a + 1, b + 1)
    return found


def cells_within(first: int, last: int, ends: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns the cells whose runs all lie strictly between two positions of a ring.

    ends: 0 and the end of each cell.
    """

    def between(low: int, high: int) -> tuple[int, int]:  # without `high`
        return bisect_left(ends, low), bisect_right(ends, high) - 1

    if last > first:
        found = [between(first + 1, last)]
    else:
        found = [between(first + 1, ends[-1]), between(0, last)]
    return tuple((a, b) for a, b in found if a < b)


def _stretches(
    program: Program, tensor: Tensor, accesses: list[Access]
) -> Iterable[tuple[str | None, int, int, int, bool]]:
    """Yields (after, first, last, value number, needs write-back) for each gap."""
    n, steady = len(program.runs), program.problem.steady
    survives = tensor.id in program.problem.surviving_ids
    ring = accesses
    if not steady and tensor.home is not None:
        ring = [Access(-1, None, tensor.home, False, True), *accesses]
    readers = _next_device_reads(ring, steady)
    last_write = None
    if steady:
        last_write = next((i for i in range(len(ring) - 1, -1, -1) if ring[i].writes), None)
    for i, a in enumerate(ring):
        if a.writes:
            last_write = i
        if a.tier != DEVICE:
            continue
        reader = readers[i]
        if reader is not None:
            end = reader.position
        elif survives or (tensor.pinned and a.name is None):
            # the only copy of a value that must survive: until the next write, or the end
            following = ring[i + 1] if i + 1 < len(ring) else ring[0] if steady else None
            if following is not None and following.reads:
                continue
            end = n if following is None else following.position
        else:
            continue
        if end - a.position != 1 and (end != 0 or a.position != n - 1):
            dirty = last_write is not None and ring[last_write].tier == DEVICE
            value = 0 if last_write is None else last_write + 1
            yield a.name, a.position, end, value, dirty


def _next_device_reads(ring: list[Access], steady: bool) -> list[Access | None]:
    """Returns for each access the next device access that reads its value."""
    found: list[Access | None] = [None] * len(ring)
    reader: Access | None = None
    for _ in range(2 if steady else 1):
        for i in range(len(ring) - 1, -1, -1):
            found[i] = reader
            b = ring[i]
            if b.reads and b.tier == DEVICE:
                reader = b
            elif b.writes:
                reader = None
    return found


class _GapWays:
    """Finds the cheapest route to a tier and back, per tensor."""

    def __init__(self, machine: Machine, tier: str, lossy: bool) -> None:
        self.machine, self.tier = machine, tier
        self.routes = Routes(machine)
        self.codecs = [c for c in machine.codecs if lossy or c.lossless]
        self._found: dict[tuple[object, ...], tuple[float, float, str | None] | None] = {}

    def of(
        self, tensor: Tensor, dirty: bool, rounds: bool
    ) -> tuple[float, float, str | None] | None:
        """`rounds`: True if the reloaded value may lose precision (needs `lossy` as well)."""
        if self.tier not in self.machine.tier:
            return None
        ratios = tuple(sorted(tensor.ratios.items())) if tensor.ratios else ()
        key = (tensor.nbytes, tensor.kind in SELF_ENDING_KINDS, ratios, dirty, rounds)
        if key not in self._found:
            self._found[key] = self._cheapest(tensor, dirty, rounds)
        return self._found[key]

    def _cheapest(
        self, tensor: Tensor, dirty: bool, rounds: bool
    ) -> tuple[float, float, str | None] | None:
        try:
            back = self.routes.lanes(self.tier, DEVICE)
            out = self.routes.lanes(DEVICE, self.tier) if dirty else []
        except Infeasible:
            return None
        names: list[str | None] = [None]
        if dirty and tensor.kind in SELF_ENDING_KINDS:
            fit = (c for c in self.codecs if rounds or c.lossless)
            names += [c.name for c in fit if tensor.ratios.get(c.name, 1.0) < 1.0]
        best: tuple[float, float, str | None] | None = None
        for codec in names:
            out_us = max((self.routes.move_us(tensor, x, codec) for x in out), default=0.0)
            in_us = max(self.routes.move_us(tensor, x, codec) for x in back)
            if best is None or out_us + in_us < best[0] + best[1]:
                best = (out_us, in_us, codec)
        return best
