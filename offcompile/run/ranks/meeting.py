"""Lets the ranks of a group plan one graph once: the first plans for all, the others take its plan.

    every rank   writes its figures
    rank 0       reads them all, plans for the least of them, writes its answer
    the others   read the answer, and judge it on their own machine

Everything goes through the store of the group, without a collective, and nothing but the equality
of plans rests on it. A rank that does not come, has other figures to compare or has ended is not
waited for any longer, and each rank plans for itself. Only rank 0 decides that, so that no two
ranks can see it differently; the traffic grows with the number of ranks, planning does not.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from offcompile.report.log import warn

from .figures import RankFigures, least_of

#: the rank that plans for all
LEADER = 0
#: how long a rank waits for the answer of the one that plans: measuring and planning take minutes
LONGEST_PLANNING_S = 600.0
#: a rank that waits looks so often if the others are still there
LOOK_S = 2.0

Answer = dict[str, Any]


@dataclass(eq=False)
class Meeting:
    """The exchange about one plan of one graph.

    `missing` is told which ranks have not come within `longest_s`; `gone` says in a sentence that
    one of some ranks has ended, or returns None.
    """

    store: Any
    key: str
    rank: int
    world: int
    longest_s: float
    missing: Callable[[Sequence[int]], None]
    gone: Callable[[Sequence[int]], str | None]
    #: True once this rank has written its figures or its answer
    _said: bool = field(default=False, init=False)
    _answered: bool = field(default=False, init=False)

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    def least(self, mine: RankFigures) -> RankFigures | None:
        """Write this rank's figures; return those of all together. None if the ranks do not plan
        together. For the rank that plans."""
        try:
            self._write(mine.dumps())
            others = {r: self._figures(r) for r in range(self.world) if r != self.rank}
            if not self._wait(others, self.longest_s):
                return None
            texts = [self._read(key) for key in others.values()]
        except RuntimeError as error:
            warn(f"{_LOST} ({error})")
            return None
        if not all(texts):
            return None
        return least_of([mine, *map(RankFigures.loads, texts)])

    def answer(self, said: Answer | None) -> None:
        """Tell the other ranks the plan; None: each plans for itself."""
        if self._answered:
            return
        self._answered = True
        try:
            self.store.set(self._answer, zlib.compress(json.dumps(said).encode()))
        except RuntimeError as error:
            warn(f"{_LOST} ({error})")

    def answered(self, mine: RankFigures) -> Answer | None:
        """Write this rank's figures and return the answer of the rank that plans; None if this one
        plans for itself."""
        leader = {LEADER: self._figures(LEADER)}
        try:
            self._write(mine.dumps())
            if not self._wait(leader, self.longest_s):
                return None
            if not self._wait({LEADER: self._answer}, LONGEST_PLANNING_S):
                return None
            said = json.loads(zlib.decompress(self.store.get(self._answer)))
        except RuntimeError as error:
            warn(f"{_LOST} ({error})")
            return None
        return said if isinstance(said, dict) else None

    def decline(self) -> None:
        """Tell the others that this rank plans for itself, unless it has told them its figures."""
        try:
            self._write("")
        except RuntimeError as error:
            warn(f"{_LOST} ({error})")
        if self.leads:
            self.answer(None)

    # --- the store ------------------------------------------------------------------------------

    def _figures(self, rank: int) -> str:
        return f"{self.key}/figures/{rank}"

    @property
    def _answer(self) -> str:
        return f"{self.key}/answer"

    def _write(self, text: str) -> None:
        if not self._said:
            self._said = True
            self.store.set(self._figures(self.rank), zlib.compress(text.encode()))

    def _read(self, key: str) -> str:
        return zlib.decompress(self.store.get(key)).decode()

    def _wait(self, keys: Mapping[int, str], longest_s: float) -> bool:
        """Wait for keys of other ranks. False, and a warning, if they do not come."""
        for _ in range(max(1, round(longest_s / LOOK_S))):
            try:
                self.store.wait(list(keys.values()), timedelta(seconds=min(LOOK_S, longest_s)))
            except RuntimeError:  # torch's error of a wait that took too long
                late = [rank for rank, key in keys.items() if not self.store.check([key])]
                ended = self.gone(late) if late else None
                if ended is not None:
                    warn(f"{ended}. Rank {self.rank} plans for itself")
                    return False
            else:
                return True
        late = [rank for rank, key in keys.items() if not self.store.check([key])]
        if late:
            self.missing(late)
        return not late


_LOST = "the store of the process group does not answer, so this rank plans for itself"
