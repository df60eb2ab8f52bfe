"""Draws faults of one rank among several: what goes wrong, when, and with which optimizer."""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPS = 4
#: the group's timeout where a rank is stuck, and what it and the ranks' patience are elsewhere
SHORT_S, LONG_S = 8, 600
#: how long the others may take to raise an error
LONGEST_S = 30

#: how a rank fails → True if the others must raise an error that names it
KINDS = {
    "killed": True,
    "raises": True,
    "infeasible": True,
    "stuck": True,
    "slow": False,
    "odd graph": False,
    "odd batch": False,
}
ENDS = ("killed", "raises")
MOMENTS = (
    "compile",
    "planned",
    "forward",
    "backward",
    "reducing",
    "step",
    "updating",
    "state_dict",
    "between",
)
OPTIMIZERS = ("torch", "overlap", "sharded", "overlap_sharded")


@dataclass(frozen=True)
class Fault:
    """A fault of rank `who` at a moment of a step."""

    number: int
    kind: str
    moment: str
    step: int
    who: int
    world: int
    optimizer: str
    memory: str

    @property
    def name(self) -> str:
        return (
            f"{self.number}: rank {self.who} of {self.world} {self.kind}, {self.moment} of step"
            f" {self.step}, {self.optimizer}, {self.memory}"
        )

    @property
    def fails(self) -> bool:
        return KINDS[self.kind]


def drawn(number: int) -> Fault:
    """Draw the fault of that number."""
    chance = random.Random(number)
    # how ranks end in the middle matters most
    kind = chance.choice([*ENDS, *ENDS, *ENDS, *KINDS])
    moment = chance.choice(MOMENTS)
    world = chance.choice((2, 2, 2, 3))
    step = 0 if moment in ("compile", "planned") else chance.randrange(STEPS - 1)
    who, optimizer = chance.randrange(world), chance.choice(OPTIMIZERS)
    memory = chance.choice(("minimum", "1GiB"))
    return Fault(number, kind, moment, step, who, world, optimizer, memory)
