"""Simulates recomputation without a planner: checkpointed blocks, or torch's memory budget.

Both use the problem that the planner gets. In it, the addition that ends a block may be fused with
the norm that begins the next, so recomputing the norm would recompute the addition too. Kernels of
checkpointed blocks end where blocks end, so such a kernel is split for checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from offcompile.ir import Op, Problem
from offcompile.passes.search.recompute_fit import DEAR, FittingReruns, rank
from offcompile.passes.search.recompute_fit import Rerunning as Rerunning

#: numbers of parts to cut forward into if names do not reveal its blocks
PARTS = (24, 12, 6)
#: blocks may be named by the first one, two or three numbers in a module's path
DEPTHS = (1, 2, 3)
#: with fewer, names do not reveal blocks
FEWEST_BLOCKS = 2
#: number of words in a label without a path
SHAPE_AND_TYPE = 2
#: kernel outputs below this share of a block's input size count as statistics of it
SMALL_SHARE = 1 / 8


@dataclass(eq=False)
class Reruns(FittingReruns):
    """Recomputation choices for one problem in which only the tensors of `away` move.

    `budgeted` stands for `torch._functorch.config.activation_memory_budget`, set to the largest
    share that fits. Torch solves a knapsack over the ops that its own cut would not recompute; both
    weigh saved bytes against time, and ignore when an op is recomputed.
    """

    def blocks_again(self, labels: Mapping[str, str], capacity: int) -> tuple[Reruns, Rerunning]:
        """Keep inputs of blocks and tensors made outside of blocks; recompute the inside of blocks.

        A block is a module with a number in its path, the outermost such or a nested one; without
        names, forward is cut into equal parts. Returns the fastest choice that fits, or else the
        one with the lowest peak, along with the `Reruns` of its problem, in which kernels end where
        blocks end.
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
    """The block of each forward op; None: the op is outside of all blocks.

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
    """The module path in a label. Shape and dtype follow it, except for tuples."""
    words = label.split(" ")
    return "" if len(words) == SHAPE_AND_TYPE else words[0]


def block_named(path: str, depth: int) -> str | None:
    """`transformer.h.3.mlp.act` → `transformer.h.3` for depth 1; None if it has fewer numbers."""
    parts = path.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[depth - 1] + 1]) if len(numbers) >= depth else None


def crossing(problem: Problem, starts: Iterable[int]) -> set[str]:
    """Tensors made before one of these positions of forward, and read there or later."""
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
    """Split kernels that belong to two blocks; return the problem and the inputs of blocks.

    If several outputs of one kernel cross into a block, the one that is read last is taken as the
    block's input. The others, and outputs small enough to be statistics, are assumed to be computed
    from it in half of the kernel's time.
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
