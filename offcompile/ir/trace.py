"""A trace: the executions that ran, in order, and the blocks that each of them touched.

An execution is a compiled graph together with its binding: the same graph run for another layer
is another execution. A block is a unit of movement: a weight, an optimizer state, a saved
activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType


@dataclass(frozen=True)
class Block:
    id: str
    nbytes: int


@dataclass(frozen=True)
class Run:
    """One run of an execution. All its blocks are on the device while it runs.

    `reads` come first, in the order of use. A block that is only in `writes` is created: its
    previous contents are not needed. One in both is updated in place. `dead` blocks hold nothing
    afterwards.
    """

    graph: str
    duration_us: float
    binding: str | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()

    @cached_property
    def execution(self) -> tuple[str, str | None]:
        """The identity of the execution: the graph and its binding."""
        return self.graph, self.binding

    @cached_property
    def touched(self) -> tuple[str, ...]:
        """All blocks without duplicates, in the order of first use."""
        return tuple(dict.fromkeys(self.reads + self.writes))


@dataclass(frozen=True)
class Trace:
    blocks: tuple[Block, ...]
    runs: tuple[Run, ...]

    @cached_property
    def nbytes(self) -> Mapping[str, int]:
        """Block id → size."""
        return MappingProxyType({b.id: b.nbytes for b in self.blocks})

    @cached_property
    def total_bytes(self) -> int:
        """The total size of all blocks."""
        return sum(b.nbytes for b in self.blocks)

    def bytes_of(self, blocks: Iterable[str]) -> int:
        return sum(self.nbytes[b] for b in blocks)

    @cached_property
    def largest_run_bytes(self) -> int:
        """The size of the largest run: no smaller device can hold its blocks."""
        return max((self.bytes_of(r.touched) for r in self.runs), default=0)

    @cached_property
    def given(self) -> frozenset[str]:
        """Blocks that are read before any run has written them: they existed beforehand."""
        written: set[str] = set()
        given: set[str] = set()
        for run in self.runs:
            given.update(b for b in run.reads if b not in written)
            written.update(run.writes)
        return frozenset(given)

    @cached_property
    def peak_bytes(self) -> int:
        """The peak memory if nothing leaves the device before it dies."""
        alive = set(self.given)
        now = peak = self.bytes_of(alive)
        for run in self.runs:
            fresh = [b for b in run.touched if b not in alive]
            alive.update(fresh)
            now += self.bytes_of(fresh)
            peak = max(peak, now)
            gone = [b for b in dict.fromkeys(run.dead) if b in alive]
            alive.difference_update(gone)
            now -= self.bytes_of(gone)
        return peak
