"""What is predicted of a step, beside what is measured of it: memory and time.

Run `python -m benchmarks.forecast` (`--quick`: small models, print only) for the table in
`results/`. A process plans before anything has run; others then run those plans.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.turns import MIB, Child, machine
from offcompile.launch import environment

RESULT = Path(__file__).parent / "results" / "forecast.md"
MODULE = "benchmarks.forecast"
#: budgets as shares of what the plain step is planned to hold; the first has to be None: plain
SHARES: tuple[float | str | None, ...] = (None, 0.5, "minimum")
MORE_SHARES: dict[str, tuple[float | str | None, ...]] = {"mlp": (None, 0.5, 0.25, "minimum")}
LOWERINGS = {
    "gpt": ("aot_eager", "inductor"),
    "resnet": ("aot_eager",),
    "mlp": ("aot_eager", "inductor"),
    "bert": ("aot_eager",),
}
LOOK_S = 0.001
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: steps until costs are put right, and steps that are watched and timed
WARM_STEPS, TIMED_STEPS = 6, 5
PEAK_FROM, PEAK_TO, TIME_WITHIN = -0.01, 0.05, 0.15


class Held:
    """The most anonymous memory that another process holds meanwhile, by the operating system."""

    def __init__(self, pid: int) -> None:
        self.statm = Path(f"/proc/{pid}/statm")
        self.most_bytes = 0

    def __enter__(self) -> Held:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            _, resident, shared, *_ = self.statm.read_text().split()
            self.most_bytes = max(self.most_bytes, (int(resident) - int(shared)) * PAGE_BYTES)


@dataclass(frozen=True)
class Row:
    """One plan, and what came of it."""

    budget: str
    foreseen: dict[str, Any]
    facts: dict[str, Any]
    most_bytes: int
    seconds: list[float]
    pace: float

    @property
    def own_bytes(self) -> int:
        return self.most_bytes - int(self.facts["left_bytes"])

    @property
    def peak_off(self) -> float:
        return float(self.foreseen["peak_bytes"] / self.own_bytes - 1)

    @property
    def measured_us(self) -> float:
        return statistics.median(self.seconds) * 1e6

    def cells(self) -> Iterator[str]:
        facts, ahead = self.facts, self.foreseen
        yield self.budget
        yield f"{ahead['peak_bytes'] / MIB:,.0f}"
        yield f"{self.own_bytes / MIB:,.0f}"
        yield f"{self.peak_off:+.1%}"
        yield f"{facts['left_bytes'] / MIB:,.0f}"
        yield f"{ahead['planned_us'] / 1e3:,.0f}"
        yield f"{facts['predicted_us'] / 1e3:,.0f}"
        yield f"{self.measured_us / 1e3:,.0f}"
        yield f"{ahead['planned_us'] / self.measured_us - 1:+.0%}"
        yield f"{facts['predicted_us'] / self.measured_us - 1:+.0%}"
        yield f"{self.pace:.2f}"


def foreseen(task: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", MODULE, "--plan", json.dumps(task)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measured(task: dict[str, Any], ahead: dict[str, Any], planned_probe: float) -> Row:
    began = time.perf_counter()
    child = Child(task["name"], task, module=MODULE)
    try:
        for _ in range(WARM_STEPS):
            child.step()
        child.steps.clear()
        with Held(child.process.pid) as held:
            for _ in range(TIMED_STEPS):
                child.step()
        facts = child.ask("facts")
    finally:
        child.end()
    most = held.most_bytes - facts["before_bytes"]
    print(f"  {task['name']}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    if "debug" in os.environ:
        print(f"    {ahead}\n    {facts} {most}\n    {child.seconds}", file=sys.stderr)
    return Row(task["name"], ahead, facts, most, child.seconds, facts["probe"] / planned_probe)


def rows_of(case: str, lowering: str, asked: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["OFFCOMPILE_CACHE_DIR"] = cache
        task = {"case": case, "lowering": lowering, "quick": asked.quick, "spill": asked.spill}
        shares = MORE_SHARES.get(case, SHARES)
        ahead = foreseen(task | {"shares": shares})
        print(f"  planned in {ahead['seconds']:.0f} s", file=sys.stderr, flush=True)
        rows = []
        for share, row in zip(shares, ahead["rows"], strict=True):
            name = "fits" if share is None else share if isinstance(share, str) else f"{share:.0%}"
            todo = task | {"kind": "ours", "memory": row["memory"], "name": name}
            rows.append(measured(todo, row, ahead["probe"]))
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, print only")
    parser.add_argument("--case", choices=sorted(LOWERINGS), action="append")
    parser.add_argument("--lowering", choices=("aot_eager", "inductor"), action="append")
    parser.add_argument("--spill", default="/var/tmp", help="directory on a disk")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    from benchmarks import forecast_child

    if asked.child:
        forecast_child.serve(json.loads(asked.child))
        return
    if asked.plan:
        forecast_child.foresee(json.loads(asked.plan))
        return
    for case in asked.case or LOWERINGS:
        for lowering in asked.lowering or LOWERINGS[case]:
            print(case, lowering, file=sys.stderr, flush=True)
            for row in rows_of(case, lowering, asked):
                print(" | ".join(row.cells()), flush=True)


if __name__ == "__main__":
    main()
