"""Chains of ops that are split along tokens, so that their largest tensors never exist as a whole.

In goes AOTAutograd's joint graph of forward and backward, before it is partitioned; out comes one
that computes its loss over many words piece by piece. What is split is found by structure: `region`
asks of each op's rule (`rules`) whether it may be computed for some tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from offcompile.graphs import closed, copied

from .builder import Builder
from .losses import take_apart
from .pieces import bounds, in_pieces, tokens_in_each
from .region import Region, find_regions

__all__ = ["Splittable", "splittable"]


@dataclass(frozen=True, eq=False)
class Splittable:
    """A joint graph in which something may be split."""

    joint: fx.GraphModule
    regions: tuple[Region, ...]

    def into(self, pieces: int) -> fx.GraphModule:
        """The joint graph with all of them in so many pieces."""
        made = in_pieces(self.joint, list(self.regions), pieces)
        made.graph.eliminate_dead_code()
        return closed(made)

    @property
    def most_pieces(self) -> int:
        return sum(region.space.count for region in self.regions)

    def describe(self, pieces: int) -> str:
        """Which products, and how many pieces there are of each."""
        size = tokens_in_each(list(self.regions), pieces)
        said = []
        for region in self.regions:
            count = len(bounds(region.space.count, size))
            shape = f"{region.space.count:,} tokens by {region.words:,}"
            again = "" if region.at_once else ", computed again in backward"
            pieces_said = f"{count} piece{'s' if count > 1 else ''}"
            said.append(f"{region.seed.name} ({shape}) in {pieces_said}{again}")
        return "; ".join(said)


def splittable(joint: fx.GraphModule) -> Splittable | None:
    """What may be split in a joint graph; None: nothing. The graph itself stays as it is."""
    graph = copied(joint)
    take_apart(graph.graph, Builder(graph.graph))
    regions = find_regions(graph.graph)
    return Splittable(graph, tuple(regions)) if regions else None
