"""The first steps of a process: compiling, measuring and planning, with empty caches and again.

Run `python -m benchmarks.starts` for the table in `results/`. Each variant trains ten steps in a
process with empty caches, and then in new processes that find what it has left. Variants run one
after the other, so compare figures of one model only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.activations import OVERHEAD_BYTES
from benchmarks.models import INDUCTOR, task_of
from benchmarks.turns import LOWERINGS, MIB, Child, machine

STEPS = 10
#: processes that find caches
RESTARTS = 2
RESULT = Path(__file__).parent / "results" / "starts.md"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "OFFCOMPILE_CACHE_DIR")


@dataclass(frozen=True)
class Start:
    """The first steps of one process."""

    seconds: list[float]
    peak_bytes: int
    loss: float

    @property
    def lost_seconds(self) -> float:
        """How much longer they took than as many steps that have settled."""
        settled = statistics.median(self.seconds[-3:])
        return sum(self.seconds) - settled * len(self.seconds)

    def __str__(self) -> str:
        return f"{self.lost_seconds:.1f} s ({', '.join(f'{s:.1f}' for s in self.seconds)})"


@contextmanager
def caches(folder: Path) -> Iterator[None]:
    """Have children keep all that they cache in this folder."""
    before = {name: os.environ.get(name) for name in CACHES}
    os.environ.update({name: str(folder / name.lower()) for name in CACHES})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def start(name: str, task: dict[str, Any]) -> Start:
    """Train ten steps in a process of its own."""
    child = Child(name, task, module="benchmarks.models")
    try:
        seconds = list(child.warm_facts["each_seconds"])
        while len(seconds) < STEPS:
            seconds.append(child.ask("step")["seconds"])
        found = Start(seconds, child.warm_facts["peak_bytes"], child.losses[-1])
    finally:
        child.end()
    print(f"  {name}: {found}", file=sys.stderr, flush=True)
    return found


def starts(case: str, lowering: str, kind: str, memory: int | None) -> list[Start]:
    """The first process, with empty caches, and the ones after it."""
    task = task_of(case, kind, lowering, memory)
    with tempfile.TemporaryDirectory() as folder, caches(Path(folder)):
        return [start(kind, task) for _ in range(1 + RESTARTS)]


def row(case: str, title: str, lowering: str) -> str:
    found = {kind: starts(case, lowering, kind, None) for kind in ("plain", "checkpoint")}
    budget = found["checkpoint"][0].peak_bytes - OVERHEAD_BYTES
    found["ours"] = starts(case, lowering, "ours", budget)
    cells = [" / ".join(f"{one.lost_seconds:.0f}" for one in found[kind]) for kind in found]
    return f"| {title} | {budget / MIB:,.0f} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append")
    parser.add_argument("--lowering", choices=LOWERINGS, default="inductor")
    asked = parser.parse_args()
    from benchmarks import models_child

    rows = []
    for case in asked.case or INDUCTOR:
        title = models_child.CASES[case].title
        print(f"{title}; {asked.lowering}", file=sys.stderr, flush=True)
        rows.append(row(case, title, asked.lowering))
        print(rows[-1], file=sys.stderr, flush=True)
    text = TEXT.format(
        rows="\n".join(rows), steps=STEPS, lowering=asked.lowering, machine=machine()
    )
    print(text)
    if not asked.case and asked.lowering == "inductor":
        RESULT.write_text(text)


TEXT = """\
# The first steps

Seconds that the first {steps} steps of a process take beyond as many that have settled: to trace,
compile ({lowering}), measure ops and plan. `ckpt` is the library's own checkpointing; ours has its
memory as its budget. Three processes run one after another, the first with empty caches. The
second one measures again what was measured while the machine was busy.
The library's ViT changes its configuration in the first step, so Dynamo traces it again in the
second.

| model | budget, MiB | plain: 1st / 2nd / 3rd process | ckpt | ours |
|---|---|---|---|---|
{rows}

Machine: {machine}. Seconds drift from minute to minute by half and more.
"""


if __name__ == "__main__":
    main()
