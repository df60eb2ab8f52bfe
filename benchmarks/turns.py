"""Variants in processes of their own, which run one step each in turn, and what is said of them.

Whatever the machine does between minutes hits all alike, so ratios within a round can be compared.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offcompile.runtime.memory.malloc.launch import VARIABLE, environment

MIB = 1 << 20
LOWERINGS = ("aot_eager", "inductor")


@dataclass
class Child:
    """One variant, warmed up and waiting."""

    name: str
    task: dict[str, Any]
    bare: bool = False
    #: whose `--child` it is
    module: str = "benchmarks.activations"
    #: more settings of malloc, as glibc.malloc.NAME=VALUE
    malloc: tuple[str, ...] = ()
    steps: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", self.module, "--child", json.dumps(self.task)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment(),
        )
        warm = self.ask("warm")
        self.losses: list[float] = warm["losses"]
        self.warm_seconds: float = warm["seconds"]
        self.warm_facts = warm

    def _environment(self) -> dict[str, str]:
        found = dict(os.environ) if self.bare else environment(os.environ)
        settings = [found.get(VARIABLE, ""), *self.malloc]
        return {**found, VARIABLE: ":".join(s for s in settings if s)}

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} stopped with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def step(self) -> None:
        self.steps.append(self.ask("step"))

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    @property
    def kind(self) -> str:
        return str(self.task["kind"])

    @property
    def seconds(self) -> list[float]:
        return [step["seconds"] for step in self.steps]

    @property
    def all_losses(self) -> list[float]:
        return [*self.losses, *(step["loss"] for step in self.steps)]


def run_in_turn(children: Sequence[Child], rounds: int) -> None:
    """A step of each in every round, in an order that alternates; then their facts."""
    for turn in range(rounds):
        for child in children if turn % 2 == 0 else reversed(children):
            child.step()
    for child in children:
        child.facts = child.ask("facts")


def ratio(child: Child, other: Child, first: int = 0) -> float:
    """Median over the rounds, from `first` on, of one step over the other's in the same round."""
    pairs = zip(child.seconds[first:], other.seconds[first:], strict=True)
    return statistics.median(a / b for a, b in pairs)


def loss_line(children: list[Child]) -> str:
    plain = children[0].all_losses
    far = max(
        abs(a - b) / abs(b)
        for child in children
        if child.kind in ("ours", "blocks")
        for a, b in zip(child.all_losses, plain, strict=False)
    )
    if far == 0:
        return "Losses of ours: those of plain, to the last bit."
    return f"Losses of ours: within {far:.1e} of plain's."


def machine() -> str:
    """The machine and the versions behind a result, in words."""
    import torch

    versions = f"torch {torch.__version__}, CPython {platform.python_version()}"
    return f"{_cpu()}, {os.cpu_count()} cores, {versions}"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
