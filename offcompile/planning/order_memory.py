"""Device memory of a program at any speed of the lanes, and the waits that this requires.

A copy (`copy_lifetimes`) takes space from the step that begins its stay until the program has
passed the runs that use it and has waited for the moves that do. Simulated times only choose the
waits: before a run, the program may wait for stays that the simulation had ended when the run
started, the first to end first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from itertools import count

from offcompile.ir import OffloadError

from .copy_lifetimes import CopyArrival, Lifetime, Step


class OrderLedger:
    """Bytes held as steps are written; calls `write_wait` with each move to be waited for."""

    def __init__(
        self,
        capacity_bytes: int | None,
        arrivals: Mapping[str, CopyArrival],
        write_wait: Callable[[str], None],
    ) -> None:
        self.capacity: float = float("inf") if capacity_bytes is None else capacity_bytes
        self.arrivals, self.write_wait = arrivals, write_wait
        self.used = self.peak = self.runs_done = 0
        self.started: set[str] = set()
        self.waited: set[str] = set()
        self.there: dict[str, Lifetime] = {}  # by tensor: one stay begins when the last has ended
        self._awaiting: dict[str, list[Lifetime]] = {}  # move → stays that need it complete
        self._gated: dict[int, list[Lifetime]] = {}  # run → stays that last until it has ended
        #: stays that only moves keep, ordered by when the simulation ended them
        self._leaving: list[tuple[int, int, Lifetime]] = []
        self._serial = count()

    def begin(self, stay: Lifetime) -> None:
        """Takes a stay's space; there must be room, and no older stay of its tensor."""
        self.there[stay.tensor] = stay
        self.used += stay.nbytes
        self.peak = max(self.peak, self.used)
        if stay.gone_at is None:
            return  # it lasts to the end
        for move in stay.needs:
            self._awaiting.setdefault(move, []).append(stay)
        if stay.gate >= self.runs_done:
            self._gated.setdefault(stay.gate, []).append(stay)
        else:
            self._passed(stay)

    def end_run(self, workspace_bytes: int) -> int:
        """Ends the next run and returns the bytes held while it ran."""
        held = self.used + workspace_bytes
        self.peak = max(self.peak, held)
        run, self.runs_done = self.runs_done, self.runs_done + 1
        for stay in self._gated.pop(run, ()):
            self._passed(stay)
        return held

    def wait(self, moves: Iterable[str]) -> None:
        """Waits for these moves, so that they are known to be complete."""
        for move in moves:
            if move in self.waited:
                continue
            if move not in self.started:
                raise OffloadError(
                    f"The move {move} would be waited for before it can start:"
                    " the timeline is not that of this plan. Simulate the plan and try again."
                )
            self.waited.add(move)
            self.write_wait(move)
            for stay in self._awaiting.pop(move, ()):
                self._end_if_free(stay)

    def clear(self, tensor: str) -> None:
        """Ends the tensor's stay, so that its next one can begin."""
        if tensor in self.there:
            self._let_go(self.there[tensor])

    def make_room(self, nbytes: int, step: Step | None) -> None:
        """Waits for stays to end until `nbytes` are free before `step` (None: the end)."""
        kept: list[tuple[int, int, Lifetime]] = []
        while self.used + nbytes > self.capacity and self._leaving:
            entry = heapq.heappop(self._leaving)
            end_ns, _, stay = entry
            if self.there.get(stay.tensor) is not stay:
                continue
            if self._may_end(stay, step):
                self._let_go(stay)
                continue
            kept.append(entry)
            if step is not None and end_ns > step.span.start_ns:
                break
        for entry in kept:
            heapq.heappush(self._leaving, entry)
        if self.used + nbytes > self.capacity:
            raise OffloadError(
                f"The device must hold {self.used + nbytes:,} bytes before"
                f" {'the end' if step is None else step.run.id} and its budget is"
                f" {self.capacity:,}: the timeline is not that of this plan on this machine."
                " Simulate the plan on it and try again."
            )

    def could_begin(self, stay: Lifetime, beside_bytes: int, step: Step | None) -> bool:
        """True if there is room for the stay and `beside_bytes`, after waits that cost nothing
        before `step` (None: without any waits)."""
        old = self.there.get(stay.tensor)
        if old is stay:
            return True
        missing = self.used + beside_bytes + stay.nbytes - self.capacity
        if step is None:
            return missing <= 0 and old is None
        if old is not None and not self._may_end(old, step):
            return False
        for _, _, other in self._leaving:
            if missing <= 0:
                break
            if self.there.get(other.tensor) is other and self._may_end(other, step):
                missing -= other.nbytes
        return missing <= 0

    def _passed(self, stay: Lifetime) -> None:
        """Notes that no run keeps the stay any more."""
        if not self._end_if_free(stay):
            last = max(self.arrivals[m].span.end_ns for m in stay.needs)
            heapq.heappush(self._leaving, (last, next(self._serial), stay))

    def _end_if_free(self, stay: Lifetime) -> bool:
        free = stay.gate < self.runs_done and stay.needs <= self.waited
        if free and self.there.get(stay.tensor) is stay:
            del self.there[stay.tensor]
            self.used -= stay.nbytes
        return free

    def _may_end(self, stay: Lifetime, step: Step | None) -> bool:
        """True if everything that keeps the stay had ended when the simulation started `step`."""
        if stay.gate >= self.runs_done or stay.gone_at is None:
            return False
        for move in stay.needs - self.waited:
            arrival = self.arrivals[move]
            late = step is not None and (
                arrival.span.end_ns > step.span.start_ns or arrival.position > step.position
            )
            if late or move not in self.started:
                return False
        return True

    def _let_go(self, stay: Lifetime) -> None:
        """Waits for everything that keeps the stay, in the order in which it ended."""
        left = (self.arrivals[m] for m in stay.needs - self.waited)
        self.wait(a.move.id for a in sorted(left, key=lambda a: (a.span.end_ns, a.position)))
