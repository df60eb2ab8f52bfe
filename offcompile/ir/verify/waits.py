"""Everything that an op or a move must wait for by the contract, from the auditor's accounts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from offcompile.ir.model import DEVICE, HOST
from offcompile.ir.plan import Move, Plan
from offcompile.ir.units import show_bytes

from .ledger import Ledger, Place
from .order import Touch, VerifiedRun, arrives_as
from .record import Key, Task

Reason = tuple[str, str]  # rule, obstacle


class Waits:
    """The reasons that keep a task from starting at this moment."""

    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        touching: Mapping[str, tuple[Touch, ...]],
        running: Mapping[str, Task],
        dropped: Mapping[Place, bool],
    ) -> None:
        self._ledger, self._running, self._dropped = ledger, running, dropped
        # the listed order can be broken only where both lanes touch a tensor
        self._touched = {
            on_host: {
                tensor: [t.run for t in several if t.run.on_host == on_host]
                for tensor, several in touching.items()
                if len({t.run.on_host for t in several}) == 2
            }
            for on_host in (False, True)
        }
        self._awaited: dict[str, list[Move]] = {}
        for move in plan.moves:
            if move.ready_before is not None:
                self._awaited.setdefault(move.ready_before, []).append(move)
        self.step = 0
        self.ended: set[Key] = set()

    def of_run(self, step: int, run: VerifiedRun) -> Iterator[Reason]:
        if step > self.step:
            yield "bad-value", f"step {step} has not begun"
        for move in self._awaited.get(run.id, ()):
            queued = step - move.wraps
            if queued >= 0 and (queued, move.id) not in self.ended:
                yield "late-move", f"move {move.id} of step {queued} has not arrived"
        if self._touched[not run.on_host]:
            for tensor in run.op.operands:
                yield from self._order(step, run, tensor)
        for tensor in run.op.reads:
            yield from self._readable(tensor, run.tier_of(tensor), None)
        for task in self._running.values():
            if task.move is not None and task.move.tensor in run.op.writes:
                yield "stale-read", f"move {task.id} of {task.move.tensor}, which it writes, runs"
        yield from self._room(run)

    def of_move(self, step: int, move: Move) -> Iterator[Reason]:
        if step > self.step:
            yield "bad-value", f"step {step} has not begun"
        if move.start_after is not None and (step, move.start_after) not in self.ended:
            yield "bad-value", f"{move.start_after}, its start_after, has not ended"
        form = None if move.source == DEVICE else move.codec
        yield from self._readable(move.tensor, move.source, form)
        target = self._ledger.get((move.tensor, move.target))
        if target is not None and target.valid:
            yield "bad-value", f"{move.target} holds a valid copy of {move.tensor} already"
        elif target is not None and target.users:
            yield "bad-value", f"the copy of {move.tensor} on {move.target} is in use"
        growth = self._ledger.growth((move.tensor, move.target), arrives_as(move))
        yield from self._fits(move.target, growth)

    def _order(self, step: int, run: VerifiedRun, tensor: str) -> Iterator[Reason]:
        """Checks that host updates and device ops keep the listed order on a shared tensor."""
        for earlier in self._touched[not run.on_host].get(tensor, ()):
            if earlier.position >= run.position:
                return
            if (step, earlier.id) not in self.ended:
                yield "stale-read", f"{earlier.id} comes first on {tensor} and has not ended"

    def _readable(self, tensor: str, tier: str, form: str | None) -> Iterator[Reason]:
        place = (tensor, tier)
        copy = self._ledger.get(place)
        if copy is None:
            if self._dropped.get(place):
                yield "read-after-drop", f"the copy of {tensor} on {tier} has been dropped"
            else:
                yield "missing-copy", f"there is no copy of {tensor} on {tier}"
        elif not copy.valid:
            yield "stale-read", f"the copy of {tensor} on {tier} is stale or not complete"
        elif copy.codec != form:
            yield "codec", f"the copy of {tensor} on {tier} is {copy.codec or 'not compressed'}"

    def _room(self, run: VerifiedRun) -> Iterator[Reason]:
        wanted = {HOST if run.on_host else DEVICE: run.op.workspace_bytes}
        for tensor in run.op.writes:
            tier = run.tier_of(tensor)
            wanted[tier] = wanted.get(tier, 0) + self._ledger.growth((tensor, tier))
        for tier, nbytes in wanted.items():
            yield from self._fits(tier, nbytes)

    def _fits(self, tier: str, nbytes: int) -> Iterator[Reason]:
        missing = self._ledger.shortage(tier, nbytes)
        if missing:
            yield "no-space", f"{show_bytes(missing)} are missing on {tier}"
