"""Errors as values: a named rule, where it was broken, and what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RULES = (
    "unknown-key",
    "bad-value",
    "duplicate-id",
    "unknown-id",
    "wrong-lane",
    "stale-read",
    "missing-copy",
    "read-after-drop",
    "missing-write-back",
    "late-move",
    "no-space",
    "codec",
    "direct",
    "recompute",
    "update",
    "steady",
    "lost",
    "deadlock",
)


@dataclass(frozen=True)
class Violation:
    """A broken rule of the contract: which one, where, and the figures."""

    rule: str
    where: str
    detail: str

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"{self.rule!r} is not a rule")

    def __str__(self) -> str:
        return f"{self.rule} at {self.where}: {self.detail}"


class OffloadError(Exception):
    """Base of every error that offcompile raises on purpose. Instances can be copied and pickled
    as they are, without their tracebacks."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.args, self.__dict__)


def _made_again(
    kind: type[OffloadError], args: tuple[object, ...], fields: Mapping[str, object]
) -> OffloadError:
    """Returns an error with these fields, whatever arguments its constructor takes."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class InvalidInput(OffloadError):
    """A problem, machine or plan that cannot be what it claims to be."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        shown = [str(v) for v in self.violations[:10]]
        if len(self.violations) > 10:
            shown.append(f"… and {len(self.violations) - 10} more")
        super().__init__("\n".join(shown))


class BrokenPlan(OffloadError):
    """One of our policies made a plan that fails validation: a bug to report."""


class Infeasible(OffloadError):
    """No plan of the requested kind fits: by how much, and the smallest change that would help."""

    def __init__(self, reason: str, needed_bytes: int | None, smallest_change: str) -> None:
        self.reason = reason
        self.needed_bytes = needed_bytes
        self.smallest_change = smallest_change
        super().__init__(f"{reason} {smallest_change}".strip())
