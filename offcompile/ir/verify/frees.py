"""The conditions for freeing a copy: requested drops, and values that are no longer needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from offcompile.ir.model import SELF_ENDING_KINDS, Problem
from offcompile.ir.plan import Freed, Plan, Timeline

from .ledger import Ledger, Place
from .order import Touch, VerifiedRun


class Frees:
    """The copies that may be freed at this moment, and the reasons."""

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        ledger: Ledger,
        touching: Mapping[str, tuple[Touch, ...]],
    ) -> None:
        self._problem, self._ledger, self._touching = problem, ledger, touching
        self._asks: dict[str | None, list[Place]] = {}
        for drop in plan.drops:
            self._asks.setdefault(drop.after, []).append((drop.tensor, drop.tier))
        self._touched: dict[str, int] = {}  # touches of each tensor started in this step
        self.pending: dict[Place, None] = {}  # requested drops, in order
        self.dying: set[str] = set()  # self-ending tensors whose values are no longer needed
        self.dropped: dict[Place, bool] = {}  # freed places: true if the last free was a drop
        #: tensors touched by some event since the last call of `due`: only their copies can have
        #: become free, since each reason for a free concerns its own tensor
        self._news: set[str] = set()

    def ask(self, after: str | None) -> None:
        """Makes the drops that `after` triggers pending, except those of missing copies."""
        for place in self._asks.get(after, ()):
            if self._ledger.get(place) is not None:
                self.pending[place] = None
                self._news.add(place[0])

    def begin_step(self) -> None:
        self._touched.clear()
        self._news.update(t for t, _ in self.pending)
        self.ask(None)

    def begin_run(self, run: VerifiedRun) -> None:
        for tensor in run.op.operands:
            self._touched[tensor] = self._touched.get(tensor, 0) + 1
        self._news.update(run.op.operands)
        self.dying.difference_update(run.op.writes)

    def end_run(self, run: VerifiedRun) -> None:
        """Ends values whose last reader was this run, or that it wrote and that nobody reads."""
        self._news.update(run.op.operands)
        for tensor in run.op.operands:
            kind = self._problem.tensor[tensor].kind
            if kind in SELF_ENDING_KINDS and not self.read_again(tensor):
                self.dying.add(tensor)

    def end_move(self, tensor: str) -> None:
        self._news.add(tensor)

    def read_again(self, tensor: str) -> bool:
        """True if an op that has not started reads `tensor` before one overwrites it."""
        several = self._touching.get(tensor, ())
        done = self._touched.get(tensor, 0)
        if done < len(several):
            return several[done].reads
        return self._problem.steady and bool(several) and several[0].reads

    def spare(self, tensor: str) -> bool:
        """True if a drop may take the last valid copy: the contract's second reason for a drop."""
        return not self._problem.must_survive(tensor) and not self.read_again(tensor)

    def grounds(self, place: Place) -> set[str]:
        """The causes for which the copy may be freed now."""
        copy = self._ledger.get(place)
        if copy is None or copy.users:
            return set()
        found = {"death"} if place[0] in self.dying else set()
        if place in self.pending:
            copies = self._ledger.of(place[0]).items()
            others = any(c.valid for tier, c in copies if tier != place[1])
            if others or self.spare(place[0]):
                found.add("drop")
        return found

    def due(self) -> dict[Place, set[str]]:
        """Returns every copy that has become free since the last call, with the causes."""
        news, self._news = self._news, set()
        dead = [(t, tier) for t in self.dying & news for tier in self._ledger.of(t)]
        asked = [place for place in self.pending if place[0] in news]
        found = {place: self.grounds(place) for place in (*asked, *dead)}
        return {place: grounds for place, grounds in found.items() if grounds}

    def release(self, place: Place) -> None:
        self._ledger.free(place)
        if not self._ledger.of(place[0]):
            self.dying.discard(place[0])
        self.dropped[place] = place in self.pending
        self.pending.pop(place, None)

    def why_kept(self, freed: Freed) -> tuple[str, str]:
        """The rule that an unexplained free breaks, and how."""
        place = (freed.tensor, freed.tier)
        copy = self._ledger.get(place)
        if copy is None:
            return "bad-value", "freed, but no copy is there"
        if copy.users:
            return "read-after-drop", "freed while an op or a move uses it"
        if freed.cause == "drop" and place in self.pending:
            if self._problem.must_survive(freed.tensor):
                return "missing-write-back", "dropped while no other valid copy is complete"
            return "lost", "dropped while its value is still to be read and held nowhere else"
        if freed.cause == "death" and self.read_again(freed.tensor):
            return "read-after-drop", "died although an op still reads its value"
        return "bad-value", f"freed as {freed.cause!r}, for which there is no ground"


class RecordedFrees:
    """The frees of a record that the audit has not carried out yet, with the objections to them."""

    def __init__(self, timeline: Timeline) -> None:
        self._at: dict[int, list[Freed]] = {}
        for freed in timeline.freed:
            self._at.setdefault(freed.time_ns, []).append(freed)
        self._objections: dict[Freed, tuple[str, str]] = {}

    @property
    def times(self) -> set[int]:
        return set(self._at)

    def at(self, now: int) -> Sequence[Freed]:
        return self._at.get(now, ())

    def remove(self, freed: Freed) -> None:
        self._at[freed.time_ns].remove(freed)

    def doubt(self, now: int, why_kept: Callable[[Freed], tuple[str, str]]) -> None:
        """Notes the objection to each free recorded now; the first one counts."""
        for freed in self.at(now):
            if freed not in self._objections:
                self._objections[freed] = why_kept(freed)

    def take(self, now: int) -> Iterator[tuple[Freed, tuple[str, str]]]:
        """Gives up the frees recorded now, each with its objection."""
        for freed in self._at.pop(now, ()):
            yield freed, self._objections[freed]

    def rest(self) -> list[Freed]:
        return [freed for several in self._at.values() for freed in several]
