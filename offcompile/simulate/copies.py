"""The copies of every tensor on every tier: their bytes, validity, and when they may be freed."""

from __future__ import annotations

from offcompile.ir import Freed, Span, Violation

from .compiled import CompiledPlan

NONE, STALE, VALID, FILLING = 0, 1, 2, 3  # FILLING: held, but still being moved or written


class Halt(Exception):
    """The plan broke a rule in a way that ends the simulation."""

    def __init__(self, *violations: Violation) -> None:
        self.violations = violations
        super().__init__(str(violations))


class Copies:
    """Status, bytes and users of each copy, and the requested drops.

    A tier holds at most one copy of a tensor; a copy is used while an op, a host update or a move
    that reads or writes it runs.
    """

    def __init__(self, plan: CompiledPlan, record: bool) -> None:
        base = plan.base
        self.p, self.base, self.record = plan, base, record
        n_copies = len(base.nbytes) * base.n_tiers
        self.now = 0
        self.status = [NONE] * n_copies
        self.size = [0] * n_copies
        self.codec = [0] * n_copies
        self.users = [0] * n_copies
        self.drop_asked = [False] * n_copies
        self.dropped_by: dict[int, str] = {}  # copy → op or move before its drop, for messages
        #: pending drops: copy → number of drops requested before it
        self.asked: dict[int, int] = {}
        self._times_asked = 0
        #: per tensor: number of pending drops of its copies
        self.pending = [0] * len(base.nbytes)
        #: tensors with pending drops that have changed since those were last checked; no other
        #: pending drop can have become possible
        self.stirred: set[int] = set()
        self.used = [0] * base.n_tiers
        self.peak = [0] * base.n_tiers
        self.moving = [0] * len(base.nbytes)
        self.next_access = [0] * len(base.nbytes)
        self.ending: set[int] = set()  # self-ending tensors whose values are no longer needed
        self.spans: list[Span] = []
        self.freed: list[Freed] = []
        for key, nbytes, codec in plan.start:
            self.status[key], self.codec[key] = VALID, codec
            self._hold(key, nbytes)
        self.start_copies = {key for key, _, _ in plan.start}
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
        if self.drop_asked[key]:
            self.drop_asked[key] = False
            del self.asked[key]
            self.pending[key // self.base.n_tiers] -= 1
        if self.record:
            tensor, tier = self.name_of(key)
            self.freed.append(Freed(tensor, tier, self.now, cause, len(self.spans)))

    def name_of(self, key: int) -> tuple[str, str]:
        tensor, tier = divmod(key, self.base.n_tiers)
        return self.base.problem.tensors[tensor].id, self.base.tier_names[tier]

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
            if self.status[key] != NONE and not self.drop_asked[key]:
                self.drop_asked[key] = True
                self.asked[key] = self._times_asked
                self._times_asked += 1
                self.pending[key // self.base.n_tiers] += 1
                self.stirred.add(key // self.base.n_tiers)
                self.dropped_by[key] = self.p.plan.drops[i].after or "the step's start"

    def _free_asked(self) -> None:
        asked, stirred = self.asked, self.stirred
        keys = [k for t in stirred for k in self.copies(t) if k in asked]
        if len(keys) > 1:
            keys.sort(key=asked.__getitem__)
        for key in keys:
            # one free makes no other possible: others could only rely on the copy now gone
            if not self.users[key] and self.may_go(key):
                self._free(key, "drop")
        stirred.clear()

    def may_go(self, key: int) -> bool:
        tensor, status = key // self.base.n_tiers, self.status
        for k in self.copies(tensor):
            if status[k] == VALID and k != key:
                return True
        return not self.base.must_survive[tensor] and self.value_is_over(tensor)
