"""Says how many ranks there are, how they share a model, and what connects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offcompile.ir import InvalidInput, Violation
from offcompile.machine.rank_links import RankLink, rank_link

#: a whole replica on each rank; shares of everything; shares of the optimizer's states
Shard = Literal["ddp", "fsdp", "zero1"]
SHARDS: tuple[Shard, ...] = ("ddp", "fsdp", "zero1")
MOST_RANKS = 16384


@dataclass(frozen=True)
class RankRequest:
    """A checked request."""

    ranks: int
    shard: Shard
    link: RankLink
    #: ranks on one node
    node_ranks: int

    @classmethod
    def read(
        cls,
        ranks: int,
        shard: str = "ddp",
        link: str = "nvlink",
        node_ranks: int | None = None,
        optimizer: str | None = None,
    ) -> RankRequest:
        """Check what was asked for. Raises `InvalidInput`."""
        if not 2 <= ranks <= MOST_RANKS:
            detail = f"{ranks} ranks do not share a model; give 2 to {MOST_RANKS:,}"
            raise _invalid("ranks", f"{detail}, or leave it out for one")
        if shard not in SHARDS:
            raise _invalid("shard", f"{shard!r:.60} is not known; there are {', '.join(SHARDS)}")
        if shard == "zero1" and optimizer is None:
            detail = "zero1 shares out the states of an optimizer, and there is none"
            raise _invalid("shard", f"{detail}; give optimizer='adamw', or shard='ddp'")
        found = rank_link(link)
        usual = ranks if found.one_node else 1
        together = usual if node_ranks is None else node_ranks
        if not 1 <= together <= ranks or ranks % together:
            detail = f"{ranks} ranks cannot be {together} on each node; give a divisor of {ranks}"
            raise _invalid("node_ranks", detail)
        if found.one_node and together != ranks:
            detail = f"{found.name} connects the ranks of one node, and {together} of {ranks} are"
            raise _invalid("node_ranks", f"{detail} on each; leave it out, or name a network")
        return cls(ranks, shard, found, together)


def _invalid(where: str, detail: str) -> InvalidInput:
    return InvalidInput([Violation("bad-value", where, detail)])
