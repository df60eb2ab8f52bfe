"""Recomputation as people have it without a planner: blocks checkpointed, or torch's budget.

Both run on the problem that the planner is given. There the addition that ends a block may be one
kernel with the norm that begins the next, and whoever runs the norm again would run the addition
too. Checkpointing ends its kernels where blocks end, so there such a kernel is taken apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from offcompile.ir import Op, Problem, Recompute
from offcompile.passes.decisions import Away, Decisions
from offcompile.passes.pressure import pressure
from offcompile.passes.rematerialization import NS_PER_US, Rematerialization, Rerun

#: keeping a tensor costs more than any op, in ns
DEAR = 1 << 40
#: into how many parts forward is cut where no names tell its blocks apart
PARTS = (24, 12, 6)
#: blocks named by the first number in a module's path, by two, by three
DEPTHS = (1, 2, 3)
#: fewer blocks than this are no blocks
FEWEST_BLOCKS = 2
#: words of a label that has no path
SHAPE_AND_TYPE = 2
#: results of a kernel below this share of a block's input are statistics of it
SMALL_SHARE = 1 / 8
#: uniform prices tried, from cheap to dear, and halvings between the last too cheap and the first
#: dear enough
PRICES, HALVINGS = 8, 4


@dataclass(frozen=True)
class Rerunning:
    """One choice of what runs again, the time that it adds, and the device memory that is left."""

    reruns: frozenset[Rerun]
    added_us: float
    peak_bytes: int


@dataclass(eq=False)
class Reruns:
    """Choices for one problem in which the tensors of `away` leave, and nothing else moves."""

    problem: Problem
    away: tuple[Away, ...] = ()
    _tried: dict[frozenset[Rerun], Rerunning] = field(default_factory=dict)

    @cached_property
    def choices(self) -> Rematerialization:
        return Rematerialization(self.problem)

    def decisions(self, reruns: Iterable[Rerun]) -> Decisions:
        return Decisions(away=self.away, recomputes=tuple(Recompute(*r) for r in sorted(reruns)))

    def of(self, reruns: frozenset[Rerun]) -> Rerunning:
        if reruns not in self._tried:
            peak = max(pressure(self.problem, self.decisions(reruns)).kept_bytes, default=0)
            added_us = sum(self.problem.op[op].duration_us for op, _ in reruns)
            self._tried[reruns] = Rerunning(reruns, added_us, peak)
        return self._tried[reruns]

    def blocks_again(self, labels: Mapping[str, str], capacity: int) -> tuple[Reruns, Rerunning]:
        """Keep what enters each block and what is made outside of blocks; run the insides again.

        A block is a module that has a number in its path, the outermost such or one within; without
        names forward is cut into equal parts. Of these the fastest that fits counts, or else the
        one that does with least memory. It comes with the choices of the problem that it is for,
        in which kernels end where blocks do.
        """
        found: list[tuple[Reruns, Rerunning]] = []
        for depth in DEPTHS:
            blocks = blocks_of(self.problem, labels, depth)
            if len({b for b in blocks if b is not None}) >= FEWEST_BLOCKS:
                found.append(self._within(blocks))
        if not found:
            kept = (self.choices.boundaries(parts) for parts in PARTS)
            found = [(self, self.of(self.choices.reruns(_dear, k))) for k in kept]
        return min(found, key=lambda f: rank(f[1], capacity))

    def _within(self, blocks: list[str | None]) -> tuple[Reruns, Rerunning]:
        forward = self.choices.forward
        outside = {t for op, b in zip(forward, blocks, strict=True) if b is None for t in op.writes}
        starts = [i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1]]
        problem, kept = kernels_parted(self.problem, starts)
        made = Reruns(problem, self.away)
        return made, made.of(made.choices.reruns(_dear, frozenset(kept | outside)))

    def budgeted(self, capacity: int) -> Rerunning:
        """The least added time at which the step fits, where each kept byte costs the same.

        This stands for `torch._functorch.config.activation_memory_budget`, set to the largest
        share that fits. Torch solves a knapsack over the ops that its own cut would not repeat;
        here it is a minimum cut at a uniform price, the least that fits, and between two prices the
        early layers pay the dearer one. Both weigh saved bytes against time and know nothing of
        when an op runs again.
        """
        found = [self.of(frozenset())]
        if found[0].peak_bytes <= capacity:
            return found[0]
        low = 0.0
        for price in self._prices():
            found.append(self._at(price, price, 1.0))
            if found[-1].peak_bytes <= capacity:
                found += self._between(low, price, capacity)
                break
            low = price
        return min(found, key=lambda r: rank(r, capacity))

    def _between(self, low: float, high: float, capacity: int) -> list[Rerunning]:
        """Fewer and fewer early layers that pay the dearer price, as long as it fits."""
        found: list[Rerunning] = []
        fits, fails = 1.0, 0.0
        for _ in range(HALVINGS):
            share = (fits + fails) / 2
            found.append(self._at(low, high, share))
            if found[-1].peak_bytes <= capacity:
                fits = share
            else:
                fails = share
        return found

    def _at(self, low: float, high: float, share: float) -> Rerunning:
        """Prices in ns per byte: the high one for what is made in that share of forward."""
        tensor, made = self.problem.tensor, self.choices.progress

        def price_ns(t: str) -> float:
            return (high if made[t] <= share else low) * tensor[t].nbytes

        return self.of(self.choices.reruns(price_ns))

    def _prices(self) -> list[float]:
        """From the cheapest byte to the dearest, in steps of equally many bytes; then all."""
        freed: dict[str, int] = {}
        for t in self.choices.saved:
            op = self.choices.maker[t]
            freed[op.id] = freed.get(op.id, 0) + self.problem.tensor[t].nbytes
        dear = sorted(
            (NS_PER_US * self.problem.op[op].duration_us / n, n) for op, n in freed.items() if n
        )
        total, passed = sum(n for _, n in dear), 0
        found: list[float] = []
        for price, n in dear:
            passed += n
            if passed * PRICES >= total * (len(found) + 1):
                found.append(price * (1 + 1e-6))
        return [*sorted({p for p in found if p > 0}), float(DEAR)]


def _dear(tensor: str) -> float:
    return DEAR


def rank(r: Rerunning, capacity: int) -> tuple[bool, float, float]:
    """The fastest that fits is first; where none does, the one that needs least."""
    if r.peak_bytes <= capacity:
        return False, r.added_us, r.peak_bytes
    return True, r.peak_bytes, r.added_us


def blocks_of(problem: Problem, labels: Mapping[str, str], depth: int) -> list[str | None]:
    """Per forward op the block that it belongs to; None: it stands before or after all of them.

    An op without a path belongs to the block of the op before it.
    """
    found: list[str | None] = []
    for op in problem.ops:
        if op.phase != "forward":
            continue
        path = path_of(labels.get(op.id, ""))
        block = block_named(path, depth)
        if not path and found:
            block = found[-1]
        found.append(block)
    return found


def path_of(label: str) -> str:
    """The module's path in a label; before shape and type, which a tuple does not have."""
    words = label.split(" ")
    return "" if len(words) == SHAPE_AND_TYPE else words[0]


def block_named(path: str, depth: int) -> str | None:
    """`transformer.h.3` of `transformer.h.3.mlp.act`, for depth 1; None: it has fewer numbers."""
    parts = path.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[depth - 1] + 1]) if len(numbers) >= depth else None


def crossing(problem: Problem, starts: Iterable[int]) -> set[str]:
    """Tensors made in forward before one of these positions of it, and read there or later."""
    made: dict[str, int] = {}
    last: dict[str, int] = {}
    forward = [op for op in problem.ops if op.phase == "forward"]
    for at, op in enumerate(forward):
        last.update((t, at) for t in op.reads if t in made)
        for t in op.writes:
            made.setdefault(t, at)
    ordered = sorted(starts)
    return {t for t, end in last.items() if any(made[t] < s <= end for s in ordered)}


def kernels_parted(problem: Problem, starts: Iterable[int]) -> tuple[Problem, set[str]]:
    """The problem with no kernel that belongs to two blocks, and what enters blocks then.

    Of the results of one kernel that cross into a block, the one that is read last is taken to be
    the block's input, and the others to be made of it in half of the kernel's time, with what is
    too small to be anything but a statistic.
    """
    enters = crossing(problem, starts)
    forward = [op for op in problem.ops if op.phase == "forward"]
    last = {t: at for at, op in enumerate(forward) for t in op.reads}
    ops: list[Op] = []
    for op in problem.ops:
        together = [t for t in op.writes if t in enters] if op.phase == "forward" else []
        if len(together) < 2:
            ops.append(op)
            continue
        nbytes = {t: problem.tensor[t].nbytes for t in op.writes}
        entry = max(together, key=lambda t: (last[t], nbytes[t]))
        small = nbytes[entry] * SMALL_SHARE
        then = tuple(t for t in op.writes if t != entry and (t in together or nbytes[t] < small))
        enters.difference_update(then)
        half = op.duration_us / 2
        writes = tuple(t for t in op.writes if t not in then)
        ops.append(replace(op, duration_us=half, writes=writes))
        ops.append(Op(f"{op.id}.then", op.phase, half, (entry,), then, recompute=True))
    return replace(problem, ops=tuple(ops)), enters
