"""Describes how a graph was split into pieces along its tokens: parts, pieces, and the gain.

`graph.split` makes these records; reports and refusals put them into words.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from offcompile.ir import Problem
from offcompile.ir.units import counted


@dataclass(frozen=True)
class SplitPart:
    """Products of one shape that were split alike, each with the ops around it."""

    #: a chain runs on from its product to another; a loss ends with it
    kind: Literal["loss", "chain"]
    tokens: int
    width: int
    pieces: int
    #: nodes of the products; fewer than `count` if not all layers were traced
    products: tuple[str, ...]
    count: int
    #: True if backward computes it again
    reruns: bool = False
    #: True if the user gets its result
    returned: bool = False

    def words(self) -> str:
        shape = f"({self.tokens:,} tokens by {self.width:,})"
        pieces = f"in {counted(self.pieces, 'piece')}"
        if self.count > 1:
            noun = "losses" if self.kind == "loss" else "chains"
            said = f"{self.count} {noun} such as {self.products[0]} {shape}, each {pieces}"
        else:
            said = f"{self.kind} {self.products[0]} {shape} {pieces}"
        said += ", computed again in backward" if self.reruns else ""
        return said + (", and its result returned" if self.returned else "")


@dataclass(frozen=True)
class StepEstimate:
    """A step whose ops were not measured: enough to know its floor."""

    problem: Problem
    #: the least budget, including what the runtime takes
    floor_bytes: int

    @property
    def compute_us(self) -> float:
        return sum(op.duration_us for op in self.problem.ops)


@dataclass(frozen=True)
class Splitting:
    """One way to split a graph."""

    #: number of pieces of the largest part; smaller parts are in fewer
    pieces: int
    parts: tuple[SplitPart, ...]
    #: the step as a whole, and in pieces
    whole: StepEstimate
    split: StepEstimate

    def words(self) -> str:
        return "; ".join(part.words() for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "pieces": self.pieces,
            "parts": [asdict(part) for part in self.parts],
            "whole_floor_bytes": self.whole.floor_bytes,
            "floor_bytes": self.split.floor_bytes,
            "slower": self.slower,
        }

    @property
    def subject(self) -> str:
        """Names in short what was split."""
        return subject_of(self.parts)

    @property
    def slower(self) -> float:
        """The share by which the ops take longer in pieces."""
        return self.split.compute_us / max(self.whole.compute_us, 1e-9) - 1


def subject_of(parts: tuple[SplitPart, ...]) -> str:
    losses = sum(part.count for part in parts if part.kind == "loss")
    chains = sum(part.count for part in parts if part.kind == "chain")
    said = ["the loss" if losses == 1 else f"{losses} losses"] if losses else []
    return " and ".join([*said, *([counted(chains, "chain")] if chains else [])])
