"""The gaps in which tensors could be evicted, the memory each would free, and its cost.

All gaps belong to one `Program`: recomputations, direct accesses and host updates are fixed before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from offcompile.ir import DEVICE, HOST, SELF_ENDING_KINDS, Infeasible, Machine, Tensor

from .decisions import Away
from .lanes import Routes
from .program import Access, Intervals, Program

#: beyond this many runs, neighbouring runs share a cell
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
    The bytes of a cell are never less than those of any of its runs.
    """

    gaps: list[Gap] = field(default_factory=list)
    #: peak bytes per cell without any eviction
    full: list[int] = field(default_factory=list)
    cell_of: list[int] = field(default_factory=list)  # run → cell

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
    asked = tiers, machine.lanes, machine.codecs, tier, lossy
    if asked not in program.gaps:
        program.gaps[asked] = _find_gaps(program, machine, tier, lossy)
    found: Gaps = program.gaps[asked]
    return found


def _find_gaps(program: Program, machine: Machine, tier: str, lossy: bool) -> Gaps:
    n = len(program.runs)
    width = max(1, -(-n // MOST_CELLS))
    result = Gaps(cell_of=[j // width for j in range(n)])
    cells = result.cell_of[-1] + 1 if n else 0
    total = Intervals(n)
    ways = _GapWays(machine, tier, lossy)
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
            out_us, in_us, codec = way
            gap = Gap(
                index=len(result.gaps),
                tensor=tensor,
                after=after,
                first=first,
                last=last,
                cells=_cells_within(first, last, width, n),
                value=values + value,
                dirty=dirty,
                out_us=out_us,
                in_us=in_us,
                tier=tier,
                codec=codec,
            )
            result.gaps.append(gap)
        values += len(accesses) + 1
    result.full = [0] * cells
    for j, (own, more) in enumerate(zip(program.op_bytes, total.sums(), strict=True)):
        cell = result.cell_of[j]
        result.full[cell] = max(result.full[cell], own + more)
    return result


def _cells_within(first: int, last: int, width: int, n: int) -> tuple[tuple[int, int], ...]:
    """Returns the cells whose runs all lie strictly between two positions of a ring."""

    def between(low: int, high: int) -> tuple[int, int]:  # both ends included
        # the last cell may be a short one
        return -(-low // width), -(-n // width) if high == n - 1 else (high + 1) // width

    if last > first:
        found = [between(first + 1, last - 1)]
    else:
        found = [between(first + 1, n - 1), between(0, last - 1)]
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
