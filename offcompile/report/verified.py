"""Results of `verify=True`: each tensor of a graph's first step compared with the plain run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

#: number of tensors named in a warning
NAMED = 3


@dataclass(frozen=True)
class Compared:
    """One tensor compared between both runs. Equal means bit for bit, except for NaN payloads."""

    name: str
    #: "output", "buffer" (updated in place) or "gradient"
    kind: str
    elements: int
    differing: int = 0
    #: the largest distance in ulp, counted in representable numbers
    most_ulp: float = 0.0
    #: the largest distance as a share of the plain run's largest value
    share: float = 0.0
    #: the reason why it was not compared, or a difference other than in its elements
    note: str = ""

    @property
    def equal(self) -> bool:
        return not self.differing and not self.note

    def __str__(self) -> str:
        if self.note:
            return f"{self.kind} {self.name}: {self.note}"
        if self.equal:
            return f"{self.kind} {self.name}: equal bit for bit"
        return (
            f"{self.kind} {self.name}: {self.differing:,} of {self.elements:,} elements differ,"
            f" by at most {self.most_ulp:,.0f} ulp, {self.share:.2g} of the largest value"
        )


@dataclass(eq=False)
class Verified:
    """The comparisons for one plan, filled in while its first step runs."""

    #: True if every bit must be equal to the plain run's
    exact: bool
    #: phase → its tensors
    compared: dict[str, tuple[Compared, ...]] = field(default_factory=dict)
    #: phase → the reason why it was not compared, or only in part
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def differing(self) -> tuple[Compared, ...]:
        """The tensors that differ from the plain run, the worst first."""
        found = [c for rows in self.compared.values() for c in rows if not c.equal]
        return tuple(sorted(found, key=lambda c: (not c.note, -c.share, -c.most_ulp)))

    def words(self) -> str:
        """`forward: 2 outputs equal bit for bit; backward: 3 of 34 gradients differ, …`."""
        phases = dict.fromkeys([*self.compared, *self.notes])
        return "; ".join(f"{phase}: {self._of(phase)}" for phase in phases) or "not yet run"

    def _of(self, phase: str) -> str:
        return ", ".join(self._parts(phase))

    def _parts(self, phase: str) -> Iterator[str]:
        rows = self.compared.get(phase, ())
        equal = Counter(c.kind for c in rows if c.equal)
        every = Counter(c.kind for c in rows)
        for kind, count in every.items():
            noun = kind if count == 1 else f"{kind}s"
            if equal[kind] == count:
                yield f"{count} {noun} equal bit for bit"
                continue
            worst = max((c for c in rows if c.kind == kind), key=lambda c: (c.share, c.most_ulp))
            differ = f"{count - equal[kind]} of {count} {noun} differ"
            if count == 1:
                differ = f"1 {noun} differs"
            yield f"{differ}, by at most {worst.share:.2g} of the largest value ({worst.name})"
        if phase in self.notes:
            yield self.notes[phase]

    def lines(self) -> list[str]:
        """The summary, followed by a line for each tensor that differs."""
        return [self.words(), *(f"  {c}" for c in self.differing)]

    def to_json(self) -> dict[str, Any]:
        compared = {phase: [asdict(c) for c in rows] for phase, rows in self.compared.items()}
        return {"exact": self.exact, "compared": compared, "notes": dict(self.notes)}
