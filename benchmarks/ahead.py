"""Planning without the hardware: how long it takes, and what it holds.

    python -m benchmarks.ahead [--quick]

Each row is `offcompile fit` in a process of its own, imports and building the model included.
Nothing is compared: what else says beforehand whether a step fits runs it on the card.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from offcompile.ir.units import show_us

from .turns import machine

RESULTS = Path(__file__).parent / "results" / "ahead.md"
GIB = 1 << 30
FITS = 0
NO_FIT = 3


@dataclass(frozen=True)
class Case:
    model: str
    hardware: str
    length: int
    batch: int
    memory: str | None = None
    optimizer: str | None = None
    #: the project's own goal for such a model
    goal_seconds: float | None = None

    @property
    def arguments(self) -> list[str]:
        given = [f"hf:{self.model}", "--hardware", self.hardware, "--quick", "--json"]
        given += ["--length", str(self.length), "--batch", str(self.batch)]
        if self.memory is not None:
            given += ["--memory", self.memory]
        if self.optimizer is not None:
            given += ["--optimizer", self.optimizer]
        return given


CASES = (
    Case("gpt-1.3b", "rtx4090", 1024, 8, goal_seconds=15),
    Case("gpt-1.3b", "rtx4090", 1024, 8, "8GiB", goal_seconds=15),
    Case("gpt-1.3b", "rtx4090", 1024, 8, "12GiB", "adamw"),
    Case("llama-3.1-70b", "h100", 4096, 1, goal_seconds=60),
    Case("llama-3.1-70b", "rtx4090", 4096, 1, goal_seconds=60),
    Case("llama-3.1-8b", "rtx4090", 2048, 1, None, "adamw"),
)
QUICK = (Case("gpt2", "rtx4090", 128, 1, "1GiB"),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small model, no file")
    quick = parser.parse_args().quick
    rows = [_row(case) for case in (QUICK if quick else CASES)]
    text = "\n".join([*_head(), *rows, ""])
    print(text)
    if not quick:
        RESULTS.write_text(text, "utf-8")


def _head() -> list[str]:
    return [
        "# Planning without the hardware",
        "",
        "`python -m benchmarks.ahead`: one `offcompile fit hf:MODEL --quick` each, as a process of",
        "its own; its whole time with imports, and the most memory that it held. Models are bf16.",
        "",
        machine(),
        "",
        "| model, batch × length | for | optimizer | predicted step | device peak | host peak |"
        " planned in | process held |",
        "|---|---|---|---|---|---|---|---|",
    ]


def _row(case: Case) -> str:
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "offcompile", "fit", *case.arguments], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    if os.waitstatus_to_exitcode(status) not in (FITS, NO_FIT):
        raise SystemExit(f"{case} stopped")
    busy = usage.ru_utime + usage.ru_stime
    found = json.loads(said)
    tiers = found.get("tier_bytes", {})
    sizes = [f"{tiers.get(t, 0) / GIB:.1f} GiB" for t in ("device", "host")]
    step = show_us(found["step_us"]) if found["fits"] else "does not fit"
    goal = "" if case.goal_seconds is None else f" (goal {case.goal_seconds:.0f})"
    memory = f", {case.memory}" if case.memory else ""
    cells = (
        f"{case.model}, {case.batch} × {case.length}",
        f"{case.hardware}{memory}",
        case.optimizer or "none",
        step,
        *sizes,
        f"{seconds:.0f} s{goal}, {busy:.0f} s of processor time",
        f"{usage.ru_maxrss / (1 << 20):.2f} GiB",
    )
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
