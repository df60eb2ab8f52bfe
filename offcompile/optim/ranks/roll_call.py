"""Lets ranks meet before a collective, so that one that comes alone gets an error and no hang.

Each rank writes what it comes with into the store of the process group. The first member compares
and writes the verdict, which all obey. A rank that has ended is named at once, one that does not
come after `LONGEST_S`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offcompile.ir import OffloadError
from offcompile.run.ranks.absence import Ranks

#: how long a rank waits for the others
LONGEST_S = 120.0
#: a verdict comes later than the last rank by this much at most
VERDICT_S = 30.0
_SAME = "same"

#: says in words that two ranks differ: (a rank, its line, another rank, its line)
Difference = Callable[[int, str, int, str], str]


@dataclass(eq=False)
class RollCall:
    """The meetings of the ranks about one thing, which all hold in the same order."""

    ranks: Ranks
    key: str
    meetings: int = 0

    def meet(self, place: str, lines: Sequence[str], differ: Difference) -> None:
        """Wait until every rank is at this `place`, with the same lines. Else OffloadError, on all
        ranks that have come."""
        self.meetings += 1
        key, store = f"{self.key}/{self.meetings}", self.ranks.store
        text = "\n".join(lines)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        store.set(f"{key}/text/{self.ranks.rank}", zlib.compress(text.encode()))
        store.set(f"{key}/digest/{self.ranks.rank}", digest)
        leader = self.ranks.members[0]
        if self.ranks.rank == leader:
            missing = self._wait(place, key, [r for r in self.ranks.members if r != leader])
            store.set(f"{key}/verdict", missing or self._compared(key, lines, digest, differ))
        else:
            missing = self._wait(place, key, [leader])
            if missing is None:
                self.ranks.wait([f"{key}/verdict"], LONGEST_S + VERDICT_S)
        verdict = missing or store.get(f"{key}/verdict").decode()
        if verdict != _SAME:
            raise OffloadError(verdict) if missing is None else self.ranks.error(missing)

    def _wait(self, place: str, key: str, others: Sequence[int]) -> str | None:
        """Wait for what other ranks write; say who does not come."""
        keys = {rank: f"{key}/digest/{rank}" for rank in others}
        ended = self.ranks.wait(list(keys.values()), LONGEST_S)
        late = [rank for rank, k in keys.items() if not self.ranks.store.check([k])]
        if not late:
            return None
        if ended is not None:
            return f"{ended}. {place} needs all ranks of the process group"
        some = ", ".join(map(str, late[:4])) + (", …" if len(late) > 4 else "")
        return (
            f"{place} needs all ranks of the process group, and rank {some} did not come in"
            f" {LONGEST_S:.0f} s: call it on every rank"
        )

    def _compared(self, key: str, mine: Sequence[str], digest: str, differ: Difference) -> str:
        store, rank = self.ranks.store, self.ranks.rank
        for other in self.ranks.members:
            if store.get(f"{key}/digest/{other}").decode() == digest:
                continue
            theirs = zlib.decompress(store.get(f"{key}/text/{other}")).decode().split("\n")
            at = next(
                (i for i, pair in enumerate(zip(mine, theirs, strict=False)) if len(set(pair)) > 1),
                min(len(mine), len(theirs)),
            )
            here, there = (lines[at] if at < len(lines) else "nothing" for lines in (mine, theirs))
            return differ(rank, here, other, there)
        return _SAME
