"""The copies of every tensor on every tier: their bytes, validity, and when they may be freed."""

from __future__ import annotations

from dataclasses import dataclass, field

from offcompile.ir import Freed, Span, Violation

from .compiled import CompiledPlan
from .drops import PendingDrops

NONE, STALE, VALID, FILLING = 0, 1, 2, 3  # FILLING: held, but still being moved or written


class Halt(Exception):
    """The plan broke a rule in a way that ends the simulation."""

    def __init__(self, *violations: Violation) -> None:
        self.violations = violations
        super().__init__(str(violations))


@dataclass(slots=True)
class Journal:
    """Everything that a simulation writes down for its timeline."""

    #: True if frees and the reasons of stalls are written down, too
    details: bool
    spans: list[Span] = field(default_factory=list)
    freed: list[Freed] = field(default_factory=list)
    #: (begin, end) of each step that is over
    steps: list[tuple[int, int]] = field(default_factory=list)


class Copies:
    """Status, bytes and users of each copy, and the requested drops.

    A tier holds at most one copy of a tensor; a copy is used while an op, a host update or a move
    that reads or writes it runs.
    """

    def __init__(self, plan: CompiledPlan, record: bool) -> None:
        base = plan.base
        self.p, self.base = plan, base
        self.journal = Journal(record)
        n_copies = len(base.nbytes) * base.n_tiers
        self.now = 0
        self.status = [NONE] * n_copies
        self.size = [0] * n_copies
        self.codec = [0] * n_copies
        self.users = [0] * n_copies
        self.drops = PendingDrops(len(base.nbytes), base.n_tiers)
        self.used = [0] * base.n_tiers
        self.peak = [0] * base.n_tiers
        self.moving = [0] * len(base.nbytes)
        self.next_access = [0] * len(base.nbytes)
        self.ending: set[int] = set()  # self-ending tensors whose values are no longer needed
        for key, nbytes, codec in plan.start:
            self.status[key], self.codec[key] = VALID, codec
            self._hold(key, nbytes)
        over = [
            Violation(
                "no-space",
                "start",
                f"start puts {used:,} bytes on {name}, {used - cap:,} over its {cap:,}",
            )
            for used, cap, name in zip(self.used, base.capacity, base.tier_names, strict=True)
            if used > cap
        ]
        if over:
            raise Halt(*over)

    def _hold(self, key: int, nbytes: int) -> None:
        tier = key % self.base.n_tiers
        self.used[tier] += nbytes - self.size[key]
        self.size[key] = nbytes
        if self.used[tier] > self.peak[tier]:
            self.peak[tier] = self.used[tier]

    def _free(self, key: int, cause: str) -> None:
        self.status[key] = NONE
        self.codec[key] = 0
        self._hold(key, 0)
        self.drops.done(key)
        if self.journal.details:
            tensor, tier = self.name_of(key)
            started = len(self.journal.spans)
            self.journal.freed.append(Freed(tensor, tier, self.now, cause, started))

    def name_of(self, key: int) -> tuple[str, str]:
        tensor, tier = divmod(key, self.base.n_tiers)
        return self.base.problem.tensors[tensor].id, self.base.machine.tiers[tier].name

    def copies(self, tensor: int) -> range:
        return range(tensor * self.base.n_tiers, (tensor + 1) * self.base.n_tiers)

    def value_is_over(self, tensor: int) -> bool:
        """True if no op reads the tensor again before its next write."""
        accesses, i = self.p.accesses[tensor], self.next_access[tensor]
        if i < len(accesses):
            return accesses[i]
        if not self.base.problem.steady:
            return True
        return not accesses or accesses[0]

    def _free_ended(self) -> None:
        status, users = self.status, self.users
        for tensor in sorted(self.ending):
            held = False
            for key in self.copies(tensor):
                if status[key] != NONE:
                    if users[key]:
                        held = True
                    else:
                        self._free(key, "death")
            if not held:
                self.ending.discard(tensor)

    def _ask_drops(self, indices: list[int]) -> None:
        for i in indices:
            key = self.p.drops[i]
            if self.status[key] != NONE and key not in self.drops.asked:
                self.drops.ask(key, self.p.plan.drops[i].after or "the step's start")

    def _free_asked(self) -> None:
        for key in self.drops.take_stirred():
            # one free makes no other possible: others could only rely on the copy now gone
            if not self.users[key] and self.may_go(key):
                self._free(key, "drop")

    def may_go(self, key: int) -> bool:
        tensor, status = key // self.base.n_tiers, self.status
        for k in self.copies(tensor):
            if status[k] == VALID and k != key:
                return True
        return not self.base.must_survive[tensor] and self.value_is_over(tensor)
