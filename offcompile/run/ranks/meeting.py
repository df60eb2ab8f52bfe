"""Lets the ranks of a group plan one graph once: one plans for all, the others take its plan.

    every rank   writes its figures
    rank 0       reads them all, plans for the least of them, writes its answer
    the others   read the answer, and judge it on their own machine

A later plan of the graph, which not all ranks may need, is made by the first rank that asks for it;
it knows from before what the others have. And where measured steps speak for another plan, rank 0
judges them for all, at the same calls. Everything goes through the store of the group, without a
collective, and nothing but the equality of plans depends on it. If a rank does not come, has a
problem of its own or has ended, nobody waits for it any longer, and each plans for itself. One rank
alone decides that, so no two can see it differently. The traffic grows with the number of ranks;
planning does not.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from offcompile.ir import Machine, OffloadError
from offcompile.planning.feedback.corrections import Factors
from offcompile.report.log import warn

from .figures import RankFigures, least_of

#: the rank that plans a graph first
LEADER = 0
#: how long a rank waits for the answer of the one that plans: measuring and planning take minutes
LONGEST_PLANNING_S = 600.0
#: a rank that waits looks so often if the others are still there
LOOK_S = 2.0

Answer = dict[str, Any]


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        warn(
            f"the store of the process group does not answer; this rank plans for itself ({error})"
        )


@contextmanager
def _unreadable() -> Iterator[None]:
    try:
        yield
    except (zlib.error, LookupError, TypeError, ValueError, OffloadError) as error:
        warn(
            "another rank has written something into the store of the process group that cannot be"
            f" read ({error!r:.200}); this rank plans for itself. Do all ranks run the same version"
            " of offcompile?"
        )


@dataclass(eq=False)
class RankGroup:
    """The ranks that would wait for each other in collectives, as one of them sees them."""

    store: Any
    rank: int
    world: int
    #: how long a rank waits for others to come to the same graph
    longest_s: float = 120.0
    #: is told which ranks have not come
    missing: Callable[[Sequence[int]], None] = lambda ranks: None
    #: says in a sentence that one of some ranks has ended
    gone: Callable[[Sequence[int]], str | None] = lambda ranks: None

    def wait(self, keys: Mapping[int, str], longest_s: float) -> bool:
        """Wait for keys of other ranks. False, and a warning, if they do not come."""
        for _ in range(max(1, round(longest_s / LOOK_S))):
            try:
                self.store.wait(list(keys.values()), timedelta(seconds=min(LOOK_S, longest_s)))
            except RuntimeError:  # torch's error of a wait that took too long
                late = self._late(keys)
                ended = self.gone(late) if late else None
                if ended is not None:
                    warn(f"{ended}. Rank {self.rank} plans for itself")
                    return False
            else:
                return True
        late = self._late(keys)
        if late:
            self.missing(late)
        return not late

    def write(self, key: str, text: str) -> None:
        self.store.set(key, zlib.compress(text.encode()))

    def read(self, key: str) -> str:
        return zlib.decompress(self.store.get(key)).decode()

    @property
    def lost(self) -> AbstractContextManager[None]:
        """Inside the block, a store that does not answer costs a warning."""
        return _lost()

    @property
    def unreadable(self) -> AbstractContextManager[None]:
        """Inside the block, a text that another version wrote otherwise costs a warning."""
        return _unreadable()

    def _late(self, keys: Mapping[int, str]) -> list[int]:
        return [rank for rank, key in keys.items() if not self.store.check([key])]


@dataclass(eq=False)
class Known:
    """The figures of this rank and of all ranks when they first planned a graph, and how often it
    was planned."""

    mine: RankFigures
    least: RankFigures
    turns: Counter[str] = field(default_factory=Counter)

    @property
    def slowest(self) -> tuple[Machine, Factors]:
        """The slowest machine, and the times of ops on the slowest rank over the costs here."""
        return self.least.machine, self.least.over(self.mine)

    @property
    def lacking_bytes(self) -> int:
        """Bytes of the budget here that another rank does not have."""
        return (self.mine.budget_bytes or 0) - (self.least.budget_bytes or 0)


@dataclass(eq=False)
class Meeting(ABC):
    """The exchange about one plan of one graph. `known` is None until the ranks have met."""

    group: RankGroup
    key: str
    known: Known | None = None
    leader: int = LEADER
    #: True once this rank has told the others its plan, or that there is none
    _said: bool = field(default=False, init=False)

    @abstractmethod
    def leads(self, mine: RankFigures) -> bool:
        """True if this rank plans for the others."""

    def least(self, mine: RankFigures) -> Known | None:
        """Return what all ranks have together; None if each plans for itself. For the leader."""
        return self.known

    def answer(self, said: Answer | None) -> None:
        """Tell the other ranks the plan, once; None: there is none for them."""
        if self._said:
            return
        self._said = True
        least = None if self.known is None else self.known.least.dumps()
        with self.group.lost:
            self.group.write(self._answer, json.dumps([least, said]))

    def answered(self, mine: RankFigures) -> Answer | None:
        """Return the answer of the leader; None if there is none."""
        found = self._heard()
        return None if found is None else found[1]

    def end(self) -> None:
        """Let no rank wait for this one any longer, if an error came before it had answered."""
        if self.leader == self.group.rank:
            self.answer(None)

    @property
    def _answer(self) -> str:
        return f"{self.key}/answer"

    def _heard(self) -> tuple[RankFigures | None, Answer | None] | None:
        with self.group.lost:
            if self.group.wait({self.leader: self._answer}, LONGEST_PLANNING_S):
                return self._read()
        return None

    def _read(self) -> tuple[RankFigures | None, Answer | None] | None:
        with self.group.unreadable:
            least, said = json.loads(self.group.read(self._answer))
            if not isinstance(said, dict | None):
                raise TypeError(f"{said!r:.60} is no answer")
            return None if least is None else RankFigures.loads(least), said
        return None


class FirstMeeting(Meeting):
    """The exchange about the first plan of a graph, to which all ranks come: rank 0 plans."""

    _told = False

    def leads(self, mine: RankFigures) -> bool:
        self._tell(mine.dumps())
        return self.group.rank == LEADER

    def least(self, mine: RankFigures) -> Known | None:
        others = {r: self._figures(r) for r in range(self.group.world) if r != LEADER}
        with self.group.lost:
            if not self.group.wait(others, self.group.longest_s):
                return None
            with self.group.unreadable:
                texts = [self.group.read(key) for key in others.values()]
                if all(texts):
                    least = least_of([mine, *map(RankFigures.loads, texts)])
                    self.known = None if least is None else Known(mine, least)
        return self.known

    def answered(self, mine: RankFigures) -> Answer | None:
        with self.group.lost:
            if self.group.wait({LEADER: self._figures(LEADER)}, self.group.longest_s):
                least, said = self._heard() or (None, None)
                self.known = None if least is None else Known(mine, least)
                return said
        return None

    def end(self) -> None:
        self._tell("")
        super().end()

    def _tell(self, figures: str) -> None:
        if not self._told:
            self._told = True
            with self.group.lost:
                self.group.write(self._figures(self.group.rank), figures)

    def _figures(self, rank: int) -> str:
        return f"{self.key}/figures/{rank}"


class LaterMeeting(Meeting):
    """The exchange about a plan that not all ranks may need: the first that asks for it plans."""

    _claimed = False

    def leads(self, mine: RankFigures) -> bool:
        assert self.known is not None
        rank = self.leader = self.group.rank
        turn = self.known.turns[mine.structure] = self.known.turns[mine.structure] + 1
        self.key = f"{self.key}/{mine.structure}/{turn}"
        with self.group.lost:
            first = self.group.store.compare_set(f"{self.key}/leader", "", str(rank))
            self.leader, self._claimed = int(first), True
        return self.leader == rank

    def end(self) -> None:
        if self._claimed:
            super().end()


class Ballot(Meeting):
    """The exchange about another plan in place of one that has run: rank 0 judges it for all."""

    def leads(self, mine: RankFigures) -> bool:
        return self.group.rank == LEADER

    def offers_another(self) -> bool:
        """True if there is another plan. For ranks that do not lead."""
        found = self._heard()
        return found is not None and found[1] is not None
