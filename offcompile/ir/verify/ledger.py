"""The auditor's own accounts: the copies on each tier, their state, and the bytes they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offcompile.ir.model import Machine, Problem

from .order import held_bytes

Place = tuple[str, str]  # tensor, tier


@dataclass
class LedgerCopy:
    """One copy. It is in use while an op reads or writes it or a move reads or fills it."""

    codec: str | None
    nbytes: int
    valid: bool
    users: int = 0


class Ledger:
    """Copies by tensor and tier, bytes held by tier, and the peak of each tier."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self._problem = problem
        self._capacity = {t.name: t.capacity_bytes for t in machine.tiers}
        self._copies: dict[str, dict[str, LedgerCopy]] = {}
        self.used_bytes = dict.fromkeys(self._capacity, 0)
        self.peak_bytes = dict.fromkeys(self._capacity, 0)

    def get(self, place: Place) -> LedgerCopy | None:
        return self._copies.get(place[0], {}).get(place[1])

    def of(self, tensor: str) -> dict[str, LedgerCopy]:
        """The copies of `tensor` by tier."""
        return self._copies.get(tensor, {})

    def places(self) -> Iterator[tuple[Place, LedgerCopy]]:
        for tensor, by_tier in self._copies.items():
            for tier, copy in by_tier.items():
                yield (tensor, tier), copy

    def growth(self, place: Place, codec: str | None = None) -> int:
        """Bytes that a copy in this form would add; it reuses the space of an old copy."""
        old = self.get(place)
        return held_bytes(self._problem, place[0], codec) - (old.nbytes if old else 0)

    def shortage(self, tier: str, wanted_bytes: int) -> int:
        """Bytes missing on `tier` to hold `wanted_bytes` more."""
        capacity = self._capacity[tier]
        if capacity is None or wanted_bytes <= 0:
            return 0
        return max(0, self.used_bytes[tier] + wanted_bytes - capacity)

    def hold(self, place: Place, codec: str | None, valid: bool) -> LedgerCopy:
        """Takes the space for a copy in this form, reusing that of an old copy if there is one."""
        tensor, tier = place
        self.take(tier, self.growth(place, codec))
        copy = self._copies.setdefault(tensor, {}).get(tier)
        nbytes = held_bytes(self._problem, tensor, codec)
        if copy is None:
            copy = self._copies[tensor][tier] = LedgerCopy(codec, nbytes, valid)
        else:
            copy.codec, copy.nbytes, copy.valid = codec, nbytes, valid
        return copy

    def free(self, place: Place) -> None:
        copy = self._copies[place[0]].pop(place[1])
        self.used_bytes[place[1]] -= copy.nbytes

    def take(self, tier: str, nbytes: int) -> None:
        """Takes space for workspace or a growing copy; a negative number gives it back."""
        self.used_bytes[tier] += nbytes
        self.peak_bytes[tier] = max(self.peak_bytes[tier], self.used_bytes[tier])
