"""The drops that a plan has requested and that wait until their copies may go."""

from __future__ import annotations


class PendingDrops:
    """Requested drops, in the order of their requests, by the key of the copy."""

    def __init__(self, n_tensors: int, n_tiers: int) -> None:
        self._n_tiers = n_tiers
        #: copy → number of drops requested before it
        self.asked: dict[int, int] = {}
        self._times_asked = 0
        #: copy → op or move before its last drop, for messages
        self.after: dict[int, str] = {}
        #: per tensor: number of pending drops of its copies
        self.of_tensor = [0] * n_tensors
        #: tensors with pending drops that have changed since those were last checked; no other
        #: pending drop can have become possible
        self.stirred: set[int] = set()

    def ask(self, key: int, after: str) -> None:
        self.asked[key] = self._times_asked
        self._times_asked += 1
        tensor = key // self._n_tiers
        self.of_tensor[tensor] += 1
        self.stirred.add(tensor)
        self.after[key] = after

    def done(self, key: int) -> None:
        """Forget the drop of a copy that is gone, if one was pending."""
        if self.asked.pop(key, None) is not None:
            self.of_tensor[key // self._n_tiers] -= 1

    def stir_all(self) -> None:
        self.stirred.update(key // self._n_tiers for key in self.asked)

    def take_stirred(self) -> list[int]:
        """The copies whose drops may have become possible, the first requested first."""
        asked, n = self.asked, self._n_tiers
        keys = [k for t in self.stirred for k in range(t * n, (t + 1) * n) if k in asked]
        if len(keys) > 1:
            keys.sort(key=asked.__getitem__)
        self.stirred.clear()
        return keys
