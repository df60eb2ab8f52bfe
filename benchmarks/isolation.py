"""Spilling beside a neighbour that takes the memory's bandwidth.

Run `python -m benchmarks.isolation` (`--quick`: small models, print only) for the table in
`results/`. Training computes on one core; on the other one a process copies memory as fast as it
can, or is stopped. Every variant is a process of its own; they run one step each in turn, without
and with the neighbour. Compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.turns import MIB, Child, machine

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULT = Path(__file__).parent / "results" / "isolation.md"
#: share of the bytes that the plain step holds beside weights and gradients
SHARE = 0.5
HOG_BYTES = 128 * MIB
#: copies between two arrays that no cache holds, on the last core
HOG = f"""
import os, numpy as np
os.sched_setaffinity(0, {{max(os.sched_getaffinity(0))}})
a = np.ones({HOG_BYTES} // 8); b = np.ones_like(a)
print("ready", flush=True)
while True:
    np.copyto(a, b)
"""


class Neighbour:
    """A process that is stopped but within `busy()`."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOG], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.process.send_signal(signal.SIGSTOP)

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(case: str, asked: argparse.Namespace) -> list[tuple[Child, list[float], list[float]]]:
    """(variant, seconds of its steps alone, and beside the neighbour)."""
    children: list[Child] = []
    neighbour = Neighbour()

    def start(name: str, kind: str, codec: str | None, memory: int | None) -> Child:
        task = {
            "case": case,
            "kind": kind,
            "codec": codec,
            "lowering": "aot_eager",
            "memory": memory,
            "spill": asked.spill,
            "quick": asked.quick,
            "returns_freed": False,
            "threads": 1,
        }
        child = Child(name, task, module="benchmarks.spill")
        children.append(child)
        print(f"  {name}: ready after {child.warm_seconds:.0f} s", file=sys.stderr, flush=True)
        return child

    try:
        plain = start("no offload", "plain", None, None)
        plain.step()
        found = plain.ask("facts")
        fixed = 2 * found["weight_bytes"]
        memory = fixed + int(SHARE * max(found["peak_bytes"] - fixed, 0))
        start("disk", "ours", None, memory)
        start("disk + bitmask", "ours", "bitmask", memory)
        plain.steps.clear()
        alone: dict[str, list[float]] = {child.name: [] for child in children}
        beside: dict[str, list[float]] = {child.name: [] for child in children}
        for turn in range(asked.rounds):
            for child in children if turn % 2 == 0 else reversed(children):
                alone[child.name].append(child.ask("step")["seconds"])
                with neighbour.busy():
                    beside[child.name].append(child.ask("step")["seconds"])
    finally:
        neighbour.end()
        for child in children:
            child.end()
    return [(child, alone[child.name], beside[child.name]) for child in children]


def table(rows: list[tuple[Child, list[float], list[float]]]) -> list[str]:
    _, plain_alone, plain_beside = rows[0]
    heads = (
        "variant",
        "alone, s",
        "× plain",
        "beside, s",
        "× plain",
        "slower beside",
        "than plain",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    base = statistics.median(b / a for a, b in zip(plain_alone, plain_beside, strict=True))
    for child, alone, beside in rows:
        slower = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
        cells = (
            child.name,
            f"{statistics.median(alone):.2f}",
            f"{_ratio(alone, plain_alone):.3f}",
            f"{statistics.median(beside):.2f}",
            f"{_ratio(beside, plain_beside):.3f}",
            f"{slower - 1:+.1%}",
            f"{slower / base - 1:+.1%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _ratio(mine: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, print only")
    parser.add_argument("--case", choices=["gpt", "resnet"], action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--spill", default="/var/tmp", help="directory on a disk")
    asked = parser.parse_args()
    # compute keeps to one core; lanes are threads beside it, wherever there is room
    os.environ["OMP_NUM_THREADS"] = "1"
    from benchmarks import activations_child

    cases = activations_child.QUICK_CASES if asked.quick else activations_child.CASES
    sections = []
    for case in asked.case or cases:
        print(cases[case].title, file=sys.stderr, flush=True)
        sections += [f"## {cases[case].title}", "", *table(measure(case, asked)), ""]
    text = TEXT.format(
        rounds=asked.rounds,
        share=f"{SHARE:.0%}",
        hog=HOG_BYTES // MIB,
        sections="\n".join(sections),
        machine=machine(),
    )
    print(text)
    if not asked.quick:
        RESULT.write_text(text)


TEXT = """\
# Isolation

Training on one core, saved activations on disk (budget: weights, gradients and {share} of what
plain training holds beside them), `aot_eager`. "beside": on the other core a process copies
{hog} MiB to and fro without end. Every variant is a process of its own; they run one step alone and
one beside in turn, {rounds} rounds, medians of ratios within a round. "than plain": how much more
(or less) the neighbour slows this variant down than it slows compute alone.

{sections}
Machine: {machine}.
"""

if __name__ == "__main__":
    main()
