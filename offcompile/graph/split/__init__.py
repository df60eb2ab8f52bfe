"""Splits chains of ops along tokens, so that their largest tensors never exist as a whole.

In: AOTAutograd's joint graph of forward and backward, before it is partitioned. Out: a joint graph
that computes its loss over many words piece by piece. `region` finds the ops to split by structure:
it asks each op's rule (`rules`) if the op can be computed for a subset of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from offcompile.graph.graphs import closed, copied

from .builder import Builder
from .find import find_regions
from .losses import take_apart
from .pieces import bounds, in_pieces, tokens_in_each
from .region import Region

__all__ = ["Halves", "Splits", "Splittable", "splittable"]

Halves = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True, eq=False)
class Splittable:
    """A joint graph with regions that can be split."""

    joint: fx.GraphModule
    regions: tuple[Region, ...]

    #: True if graph edges enforce the order of pieces, since Inductor keeps no other order
    ordered: bool = False

    def into(self, pieces: int) -> fx.GraphModule:
        """The joint graph with all its regions in `pieces` pieces."""
        made = in_pieces(self.joint, list(self.regions), pieces, self.ordered)
        made.graph.eliminate_dead_code()
        return closed(made)

    @property
    def most_pieces(self) -> int:
        return max(region.beside for region in self.regions)

    def describe(self, pieces: int) -> str:
        """Describe the split products and the number of pieces of each."""
        said = []
        for region in self.regions:
            count = len(bounds(region.space.count, tokens_in_each(region, pieces)))
            shape = f"{region.space.count:,} tokens by {region.words:,}"
            again = ", computed again in backward" if region.reruns else ""
            again += ", and its result returned" if region.returned else ""
            pieces_said = f"{count} piece{'s' if count > 1 else ''}"
            said.append(f"{region.seed.name} ({shape}) in {pieces_said}{again}")
        return "; ".join(said)


def splittable(joint: fx.GraphModule, ordered: bool = False) -> Splittable | None:
    """Find the regions of a joint graph that can be split, without changing it; None if there are
    none. `ordered`: graph edges enforce the order of pieces."""
    graph = copied(joint)
    take_apart(graph.graph, Builder(graph.graph))
    regions = find_regions(graph.graph)
    return Splittable(graph, tuple(regions), ordered) if regions else None


@dataclass(eq=False)
class Splits:
    """A joint graph that is about to be partitioned, for hooks that may want it in pieces."""

    joint: fx.GraphModule
    #: partitions a joint graph as torch would
    partition: Callable[[fx.GraphModule], Halves]
    ordered: bool

    @cached_property
    def found(self) -> Splittable | None:
        return splittable(self.joint, self.ordered)

    @property
    def most_pieces(self) -> int:
        return 0 if self.found is None else self.found.most_pieces

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest tensor that a split removes."""
        regions = () if self.found is None else self.found.regions
        seeds = [region.seed.meta["val"] for region in regions]
        return max((seed.numel() * seed.element_size() for seed in seeds), default=0)

    def into(self, pieces: int) -> Halves:
        assert self.found is not None
        return self.partition(self.found.into(pieces))

    def describe(self, pieces: int) -> str:
        assert self.found is not None
        return self.found.describe(pieces)
