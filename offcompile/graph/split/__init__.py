"""Splits chains of ops along tokens, so that their largest tensors never exist as a whole.

In: AOTAutograd's joint graph of forward and backward, before it is partitioned. Out: a joint graph
that computes its loss over many words, and wide chains such as MLPs, piece by piece. `region` finds
the ops to split by structure: it asks each op's rule (`rules`) if the op can be computed for a
subset of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from offcompile.graph.graphs import closed, copied
from offcompile.planning.splitting import SplitPart

from .builder import Builder
from .find import find_regions
from .forms import into_known_forms
from .losses import take_apart_losses
from .pieces import bounds, in_pieces
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
        """The joint graph with its largest region in `pieces` pieces, and all others in pieces that
        are no larger. Regions that are small already stay whole."""
        made = in_pieces(self.joint, self.tokens_in_each(pieces), self.ordered)
        made.graph.eliminate_dead_code()
        return closed(made)

    def tokens_in_each(self, pieces: int) -> dict[Region, int]:
        """Region to split → the number of tokens in each of its pieces."""
        largest = max(region.nbytes for region in self.regions)
        sizes = {}
        for region in self.regions:
            tokens = max(1, -(-self.most_bytes // (pieces * region.row_bytes)))
            if tokens < region.space.count or 2 * region.nbytes >= largest:
                sizes[region] = tokens
        return sizes

    @cached_property
    def most_bytes(self) -> int:
        """Bytes of the largest tensor, with those of losses beside it: users may have split a loss
        already."""
        return max(region.beside_bytes for region in self.regions)

    @property
    def most_pieces(self) -> int:
        largest = max(self.regions, key=lambda region: region.beside_bytes)
        return largest.beside_bytes // largest.row_bytes

    def parts(self, pieces: int) -> tuple[SplitPart, ...]:
        """Describe what so many pieces split, equal regions together."""
        found: dict[SplitPart, list[str]] = {}
        for region, size in self.tokens_in_each(pieces).items():
            part = SplitPart(
                "chain" if region.is_chain else "loss",
                region.space.count,
                region.words,
                len(bounds(region.space.count, size)),
                (),
                0,
                region.reruns,
                bool(region.returned),
            )
            found.setdefault(part, []).append(region.seed.name)
        return tuple(
            replace(part, products=tuple(names), count=len(names)) for part, names in found.items()
        )


def splittable(joint: fx.GraphModule, ordered: bool = False) -> Splittable | None:
    """Find the regions of a joint graph that can be split, without changing it; None if there are
    none. `ordered`: graph edges enforce the order of pieces."""
    graph = copied(joint)
    build = Builder(graph.graph)
    take_apart_losses(graph.graph, build)
    into_known_forms(graph.graph, build)
    regions = find_regions(graph.graph)
    return Splittable(graph, tuple(regions), ordered) if regions else None


@dataclass(eq=False)
class Splits:
    """A joint graph that is about to be partitioned, for hooks that may want it in pieces."""

    joint: fx.GraphModule
    #: partitions a joint graph as torch would
    partition: Callable[[fx.GraphModule], Halves]
    ordered: bool
    #: number of pieces → the halves
    _made: dict[int, Halves] = field(default_factory=dict)

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
        return max((region.nbytes for region in regions), default=0)

    def into(self, pieces: int) -> Halves:
        assert self.found is not None
        if pieces not in self._made:
            self._made[pieces] = self.partition(self.found.into(pieces))
        return self._made[pieces]

    def parts(self, pieces: int) -> tuple[SplitPart, ...]:
        assert self.found is not None
        return self.found.parts(pieces)
