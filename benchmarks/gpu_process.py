"""Variants of `benchmarks.gpu` as processes that are asked for one thing at a time."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.bare import ROOT


@dataclass(frozen=True)
class Variant:
    """A row. `device_share`, `host_share`: what it may take at most, as shares of plain's peak."""

    name: str
    kind: str
    share: float = 1.0
    device_share: float = 0.9
    host_share: float = 0.0
    #: our policy, where it is not the usual one
    policy: str | None = None
    #: True if our optimizer keeps float32 masters of bfloat16 weights
    masters: bool = False
    #: where our optimizer has its states
    states: str = "auto"
    #: True if ours is captured as CUDA graphs
    cudagraphs: bool = False


class Failed(Exception):
    """A variant that ended, or did not answer in time; says why."""


@dataclass
class Child:
    """One variant in its process. `rounds`: of each round, what its steps took, in ms."""

    variant: Variant
    task: dict[str, Any]
    env: dict[str, str]
    rounds: list[float] = field(default_factory=list)
    beside_plain: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    compile_seconds: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu", "--child", json.dumps(self.task)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.env,
            cwd=ROOT,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")  # its end

    def tell(self, what: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # the answer tells why it ended

    def has_answered(self) -> bool:
        return not self._lines.empty()

    def answer(self, deadline: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise Failed("not reached in the time given") from None
        if not line:
            raise Failed(f"ended with exit code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        if "failed" in found:
            raise Failed(found["failed"])
        return found

    def ask(self, what: str, deadline: float) -> dict[str, Any]:
        self.tell(what)
        return self.answer(deadline)

    def end(self, patience_seconds: float = 10.0) -> None:
        """Gone for certain, with the memory it held."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=patience_seconds)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()

    def row(self) -> dict[str, Any]:
        names = ("rounds", "beside_plain", "losses", "facts", "compile_seconds", "note")
        return {"name": self.variant.name, "kind": self.variant.kind} | {
            name: getattr(self, name) for name in names
        }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
