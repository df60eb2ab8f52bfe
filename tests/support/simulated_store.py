"""The store of a process group without processes: a wait for what is not there ends at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta


class SimulatedStore:
    """Keeps values as torch's stores do, and counts what is asked of it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.asked = 0
        #: seconds that waits in vain would have taken
        self.waited_s = 0.0
        #: True if the process that keeps the store has ended
        self.gone = False

    def set(self, key: str, value: str | bytes) -> None:
        self._ask()
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self._ask()
        return self.values[key]

    def check(self, keys: Sequence[str]) -> bool:
        self._ask()
        return all(key in self.values for key in keys)

    def wait(self, keys: Sequence[str], longest: timedelta) -> None:
        self._ask()
        if not all(key in self.values for key in keys):
            self.waited_s += longest.total_seconds()
            raise RuntimeError("wait timeout")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._ask()
        if not expected:
            return self.values.setdefault(key, desired.encode())
        if self.values.get(key, b"").decode() == expected:
            self.values[key] = desired.encode()
        return self.values.get(key, expected.encode())

    def _ask(self) -> None:
        self.asked += 1
        if self.gone:
            raise RuntimeError("Broken pipe")
