"""Replaces loads by recomputation where recomputing a tensor is faster than reloading it.

Minimum cuts rerun an op once (`rematerialization`), and its output is evicted to the host or stays
until its last use. Close to the memory floor there is no room for it to stay and no time to reload
it. There the tensor is recomputed once more right before the use, along with all inputs of its op
that are not on the device at that moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from offcompile.ir import DEVICE, SELF_ENDING_KINDS
from offcompile.passes.build.gaps import Gap
from offcompile.passes.select.gap_set import GapSet, Prices
from offcompile.passes.select.rematerialization import Rematerialization, Rerun

from .program_variant import Choices, ProgramVariant
from .search import SearchState

#: longest chain of ops to rerun for one tensor
LONGEST_CHAIN = 40
#: fractions of the replaceable loads that are tried, largest gains first
SHARES = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class Swap:
    """A gap whose load is dropped, the ops rerun instead, and the time that this gains."""

    gap: int
    reruns: frozenset[Rerun]
    gain_us: float
    stalls: bool


def rerun_variants(
    state: SearchState, remat: Rematerialization
) -> Iterator[tuple[ProgramVariant, GapSet]]:
    """Yields the same plan with some loads replaced by recomputation, boldest change first."""
    found = sorted(_Swaps(state, remat).all(), key=lambda s: -s.gain_us)
    seen: set[frozenset[Rerun]] = set()
    choices, variant = state.variant.choices, state.variant
    for stalled in (False, True):
        swaps = [s for s in found if s.stalls or not stalled]
        for share in SHARES:
            taken = swaps[: max(1, round(share * len(swaps)))] if swaps else []
            reruns = choices.recomputes.union(*(s.reruns for s in taken))
            if reruns == choices.recomputes or reruns in seen:
                continue
            seen.add(reruns)
            made, cover = variant.with_choices(
                Choices(choices.directs, reruns, choices.hosted), state.cover
            )
            if cover.repair(made.capacity, Prices()):
                cover.prune(made.capacity, Prices())
                yield made, cover


@dataclass(eq=False)
class _Swaps:
    state: SearchState
    remat: Rematerialization

    def all(self) -> Iterator[Swap]:
        program, gaps = self.state.variant.program, self.state.variant.gaps.gaps
        held_up = {s.op for s in self.state.timeline.stalls}
        for i in sorted(self.state.cover.away):
            gap = gaps[i]
            if gap.tensor.kind not in SELF_ENDING_KINDS or gap.last >= len(program.runs):
                continue
            run = program.runs[gap.last]
            if gap.last <= gap.first or run.on_host or run.op.phase == "forward":
                continue
            before = run.name.partition("@")[2] or run.op.id
            chain = self._chain(gap, before)
            if chain is None:
                continue
            op = self.state.variant.problem.op
            took_us = sum(op[o].duration_us for o in chain)
            alone = self.state.cover.values.get(gap.value, 0) == 1
            gain_us = gap.in_us + (gap.out_us if gap.dirty and alone else 0.0) - took_us
            if gain_us > 0:
                reruns = frozenset((o, before) for o in chain)
                yield Swap(i, reruns, gain_us, run.name in held_up)

    def _chain(self, gap: Gap, before: str) -> set[str] | None:
        """Returns the ops that rebuild the tensor from those on the device; None if impossible."""
        chain: set[str] = set()
        wanted = [gap.tensor.id]
        at_op = self.state.variant.problem.op_index[before]
        while wanted:
            t = wanted.pop()
            maker = self.remat.maker.get(t)
            if maker is None or not self.remat.may_run_again(maker.id, at_op):
                return None
            if maker.id in chain:
                continue
            chain.add(maker.id)
            if len(chain) > LONGEST_CHAIN:
                return None
            wanted += [u for u in maker.reads if u != t and not self._is_there(u, gap.last)]
        return chain

    def _is_there(self, t: str, position: int) -> bool:
        """True if the device holds the tensor at a run, or loads it anyway."""
        tensor = self.state.variant.problem.tensor[t]
        if tensor.pinned and tensor.home == DEVICE:
            return True
        if tensor.kind not in SELF_ENDING_KINDS:
            return True  # a weight is simply loaded again
        starts = self._gaps_of.get(t, [])
        i = bisect_left(starts, (position, -1, -1)) - 1
        if i >= 0:
            _, last, index = starts[i]
            if position < last:
                return index not in self.state.cover.away
        return any(a.position == position for a in self.state.variant.program.accesses[t])

    @cached_property
    def _gaps_of(self) -> dict[str, list[tuple[int, int, int]]]:
        """Tensor → (first, last, index) of its gaps, in order."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for gap in self.state.variant.gaps.gaps:
            found.setdefault(gap.tensor.id, []).append((gap.first, gap.last, gap.index))
        return {t: sorted(gaps) for t, gaps in found.items()}
