"""The broken rules that an audit finds."""

from __future__ import annotations

from offcompile.ir.errors import Violation

ENOUGH = 40  # findings after which the rest would only be consequences


class Findings:
    """Collects violations, and remembers what has been reported."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self._reported: set[object] = set()

    @property
    def enough(self) -> bool:
        return len(self.found) >= ENOUGH

    def note(self, rule: str, where: str, detail: str) -> None:
        self.found.append(Violation(rule, where, detail))

    def first(self, about: object) -> bool:
        """True the first time that it is asked about a place or a task."""
        if about in self._reported:
            return False
        self._reported.add(about)
        return True
