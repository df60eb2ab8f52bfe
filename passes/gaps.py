"""Where a tensor could leave the device: its gaps, what each would free, and what it costs.

All on one `Program`: recomputations, direct accesses and host updates are settled before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from offcompile.ir import DEVICE, HOST, SELF_ENDING_KINDS, Infeasible, Machine, Tensor

from .decisions import Away
from .lanes import Routes
from .program import Access, Program, span


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch in which a tensor's device copy waits for its next use."""

    index: int
    tensor: Tensor
    after: str | None
    positions: tuple[int, ...]  # runs during which nobody uses the copy
    #: gaps with one value share its write-back: the second is cheaper (the discount rule)
    value: int
    dirty: bool
    out_us: float
    in_us: float
    tier: str
    codec: str | None

    @property
    def away(self) -> Away:
        return Away(self.tensor.id, self.after, self.tier, self.codec)


@dataclass(slots=True)
class Gaps:
    """Every gap of a program, and the bytes held when all of them are spent on the device."""

    gaps: list[Gap] = field(default_factory=list)
    #: bytes that stay whatever is decided: operands, outputs, workspace, copies with no way out
    fixed: list[int] = field(default_factory=list)
    at: list[list[int]] = field(default_factory=list)  # position → gaps over it

    def held(self, away: Iterable[int]) -> list[int]:
        """Bytes per run when the gaps in `away` are spent elsewhere."""
        gone = set(away)
        held = list(self.fixed)
        for gap in self.gaps:
            if gap.index not in gone:
                for j in gap.positions:
                    held[j] += gap.tensor.nbytes
        return held


def find_gaps(
    program: Program, machine: Machine, tier: str = HOST, lossy: bool = False
) -> Gaps:
    """The gaps that may be spent on `tier`, with the codec that takes the lanes least time."""
    result = Gaps(fixed=list(program.op_bytes), at=[[] for _ in program.runs])
    ways = _Ways(machine, tier, lossy)
    values = 0
    for tensor in program.problem.tensors:
        accesses = program.accesses[tensor.id]
        if not accesses:
            continue
        for after, positions, value, dirty in _stretches(program, tensor, accesses):
            way = ways.of(tensor, dirty)
            if way is None or not tensor.nbytes:
                for j in positions:
                    result.fixed[j] += tensor.nbytes
                continue
            out_us, in_us, codec = way
            gap = Gap(
                index=len(result.gaps),
                tensor=tensor,
                after=after,
                positions=positions,
                value=values + value,
                dirty=dirty,
                out_us=out_us,
                in_us=in_us,
                tier=tier,
                codec=codec,
            )
            result.gaps.append(gap)
            for j in positions:
                result.at[j].append(gap.index)
        values += len(accesses) + 1
    return result


def _stretches(
    program: Program, tensor: Tensor, accesses: list[Access]
) -> Iterable[tuple[str | None, tuple[int, ...], int, bool]]:
    """(after, positions, number of the value, whether it must be written back) of each gap."""
    n, steady = len(program.runs), program.problem.steady
    survives = program.problem.must_survive(tensor.id)
    ring = list(accesses)
    if not steady and tensor.home is not None:
        ring.insert(0, Access(-1, None, tensor.home, False, True))
    last_write = None
    if steady:
        last_write = next((i for i in range(len(ring) - 1, -1, -1) if ring[i].writes), None)
    for i, a in enumerate(ring):
        if a.writes:
            last_write = i
        if a.tier != DEVICE:
            continue
        following = ring[i + 1 :] + (ring[: i + 1] if steady else [])
        reader = _next_device_read(following)
        dirty = last_write is not None and ring[last_write].tier == DEVICE
        value = -1 if last_write is None else last_write
        if reader is not None:
            positions = tuple(span(a.position, reader.position, n))
        elif survives and not any(b.reads for b in following[:1]):
            # the only copy of a value that must last: until the next write, or the end
            end = following[0].position if following else n
            positions = tuple(span(a.position, end, n))
        else:
            continue
        if positions:
            yield a.name, positions, value + 1, dirty


def _next_device_read(following: list[Access]) -> Access | None:
    for b in following:
        if b.reads and b.tier == DEVICE:
            return b
        if b.writes:
            return None
    return None


class _Ways:
    """The cheapest way out to a tier and back, per tensor."""

    def __init__(self, machine: Machine, tier: str, lossy: bool) -> None:
        self.machine, self.tier = machine, tier
        self.routes = Routes(machine)
        self.codecs = [c for c in machine.codecs if lossy or c.lossless]

    def of(self, tensor: Tensor, dirty: bool) -> tuple[float, float, str | None] | None:
        if self.tier not in self.machine.tier:
            return None
        try:
            back = self.routes.lanes(self.tier, DEVICE)
            out = self.routes.lanes(DEVICE, self.tier) if dirty else []
        except Infeasible:
            return None
        names: list[str | None] = [None]
        if dirty and tensor.kind in SELF_ENDING_KINDS:
            names += [c.name for c in self.codecs if tensor.ratios.get(c.name, 1.0) < 1.0]
        best: tuple[float, float, str | None] | None = None
        for codec in names:
            out_us = max((self.routes.move_us(tensor, x, codec) for x in out), default=0.0)
            in_us = max(self.routes.move_us(tensor, x, codec) for x in back)
            if best is None or out_us + in_us < best[0] + best[1]:
                best = (out_us, in_us, codec)
        return best
