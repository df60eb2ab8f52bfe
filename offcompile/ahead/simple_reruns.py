"""Recomputation as people have it without a planner: blocks checkpointed, or torch's budget.

Both run on the problem that the planner is given. There the addition that ends a block may be one
kernel with the norm that begins the next, and whoever runs the norm again would run the addition
too. Checkpointing ends its kernels where blocks end, so there such a kernel is taken apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from offcompile.ir import Op, Problem
from offcompile.passes.search.recompute_fit import DEAR, FittingReruns, rank
from offcompile.passes.search.recompute_fit import Rerunning as Rerunning

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


@dataclass(eq=False)
class Reruns(FittingReruns):
    """Choices for one problem in which the tensors of `away` leave, and nothing else moves.

    `budgeted` stands for `torch._functorch.config.activation_memory_budget`, set to the largest
    share that fits. Torch solves a knapsack over the ops that its own cut would not repeat; both
    weigh saved bytes against time and know nothing of when an op runs again.
    """

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


def _dear(tensor: str) -> float:
    return DEAR


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
