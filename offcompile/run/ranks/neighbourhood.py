"""Lets two ranks of one machine reduce gradients in each other's memory, if both can reach it.

Each writes into the store of the group where its memory lies, before it says that it can take DDP's
place. When both can, each opens the other's memory and says if it did. The first that knows both
answers, or has waited for too long, writes the decision, which both obey.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from offcompile.ir import OffloadError
from offcompile.report.log import tell_once
from offcompile.runtime.device.common import machine
from offcompile.runtime.ranks.buckets import Bucket
from offcompile.runtime.ranks.neighbours import (
    Address,
    BucketRoom,
    Neighbours,
    OtherSide,
    OwnSide,
    why_not,
)

from .absence import Ranks, lives
from .torch_state import timeout_s

BESIDE, APART = "in each other's memory", "by collectives"


class Neighbourhood:
    """This rank's side of memory that two ranks show each other."""

    def __init__(self, ranks: Ranks, key: str, buckets: Sequence[Bucket], cap_bytes: int) -> None:
        """Offer this rank's memory to the other. key: of the store, the same on both."""
        self._ranks, self._key = ranks, key
        self._buckets, self._room = buckets, BucketRoom.of(buckets, cap_bytes)
        self._own: OwnSide | None = None
        if len(ranks.members) == Neighbours.world and why_not() is None:
            with suppress(OSError):
                self._own = OwnSide(self._room.nbytes)
        at = None if self._own is None else asdict(self._own.address)
        self._tell("at", {"machine": machine(), "address": at})

    def meet(self, group: Any, longest_s: float) -> Neighbours | None:
        """Return the exchange with the other rank; None, on both, if there is none. Both call this,
        after both have offered their memory. longest_s: wait no longer for the other."""
        ranks, parameters = self._ranks, [p for b in self._buckets for p in b.parameters]
        if len(ranks.members) != Neighbours.world:
            return None
        (rank,) = [one for one in ranks.members if one != ranks.rank]
        there = json.loads(ranks.store.get(f"{self._key}/{rank}/at"))
        other, obstacle = self._open(there)
        self._tell("reached", obstacle)
        ended = ranks.wait([f"{self._key}/{rank}/reached"], longest_s)
        if ended is not None:
            raise ranks.error(f"{ended}. Gradients cannot be reduced without it")
        if obstacle is None and ranks.store.check([f"{self._key}/{rank}/reached"]):
            obstacle = json.loads(ranks.store.get(f"{self._key}/{rank}/reached"))
        elif obstacle is None:
            obstacle = "the other has not answered"
        # the first decision stands
        mine = BESIDE if obstacle is None else APART
        way = ranks.store.compare_set(f"{self._key}/way", "", mine).decode()
        if way != BESIDE or self._own is None or other is None:
            why = obstacle or "the other rank has decided so"
            tell_once(f"Two ranks reduce gradients by collectives: {why}")
            return None
        tell_once("Two ranks reduce gradients in each other's memory")
        alive = partial(lives, there["address"]["pid"])
        sides, is_first = (self._own, other), ranks.rank < rank
        return Neighbours(parameters, sides, self._room, is_first, alive, timeout_s(group))

    def _tell(self, what: str, said: Any) -> None:
        self._ranks.store.set(f"{self._key}/{self._ranks.rank}/{what}", json.dumps(said))

    def _open(self, there: dict[str, Any]) -> tuple[OtherSide | None, str | None]:
        if there["machine"] != machine():
            return None, "they are on two machines"
        if self._own is None or there["address"] is None:
            return None, why_not() or "there is no memory for it"
        at = there["address"]
        try:
            return OtherSide(Address(**at | {"inodes": tuple(at["inodes"])})), None
        except (OSError, OffloadError) as error:
            return None, str(error)
