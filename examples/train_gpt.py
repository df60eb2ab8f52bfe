"""GPT from scratch, in about half the memory it takes, beside the plain and the checkpointed run.

    python examples/train_gpt.py            # or: make demo
    python examples/train_gpt.py --layers 12 --width 512 --memory 400MiB --lowering inductor
    python examples/train_gpt.py --ranks 2  # DDP over gloo, optimizer states shared out

The model learns to continue Python source, byte by byte (that of the standard library, as it lies
on this machine). Each run is a process of its own, so that the account of its peak memory is clean:
what the process had before the model was built is taken off. They run one step each in turn. A GPU
is used if there is one. The report and the trace of the run go to `demo/`. With `--ranks` a run is
several processes under DistributedDataParallel, on the processor; figures are of the one that takes
most.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

from offcompile.runtime.memory.malloc.launch import environment

MIB = 1 << 20
#: the most that losses of two runs may differ by where bits may differ, as a share
CLOSE = 1e-3
#: the demo's default sizes on a processor, on a GPU, and with --quick
SIZES = {
    "cpu": {"layers": 6, "width": 256, "batch": 16, "length": 256, "steps": 10},
    "cuda": {"layers": 12, "width": 768, "batch": 16, "length": 512, "steps": 20},
    "quick": {"layers": 1, "width": 64, "batch": 16, "length": 128, "steps": 3},
}


@dataclass
class Team:
    """The processes that train one model: one, or the ranks of a group."""

    processes: list[subprocess.Popen[str]]

    def ask(self, console: Console, said: str, task: dict[str, Any], of: int = 0) -> dict[str, Any]:
        """Have the first `of` processes (0: all) do something, show how it goes, and return what
        came of it: losses are means, other figures those of the process that takes most."""
        asked = self.processes[: of or None]
        for process in asked:
            assert process.stdin is not None
            print(json.dumps(task), file=process.stdin, flush=True)
        with console.status(said) as status:
            found = [self._answer(process, status, said) for process in asked]
        if None in found:
            console.print(f"[red]{said}: stopped with an error")
            sys.exit(1)
        return together([told for told in found if told is not None])

    def _answer(
        self, process: subprocess.Popen[str], status: Status, said: str
    ) -> dict[str, Any] | None:
        assert process.stdout is not None
        for line in process.stdout:
            told: dict[str, Any] = json.loads(line)
            if told["event"] == "done":
                return told
            status.update(f"{said}: {told['text']}")
        return None


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    found = dict(ranks[0])
    if "loss" in found:
        found["loss"] = statistics.fmean(rank["loss"] for rank in ranks)
    if "losses" in found:
        found["losses"] = [
            statistics.fmean(of) for of in zip(*(r["losses"] for r in ranks), strict=True)
        ]
    for name in ("seconds", "peak_bytes", "reserved_bytes"):
        if name in found:
            found[name] = max(rank[name] for rank in ranks)
    return found


@contextmanager
def team(console: Console, ranks: int) -> Iterator[Team]:
    """Processes that train; what the first warns of is shown when it ends."""
    started = environment(os.environ)  # as `offcompile run` would start it
    if ranks > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        started |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryDirectory() as folder:
        group = [str(ranks), str(Path(folder) / "store")]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "demo.one_run", str(rank), *group],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if rank else errors,
                text=True,
                cwd=Path(__file__).parent,
                env=started,
            )
            for rank in range(ranks)
        ]
        try:
            yield Team(processes)
        finally:
            for process in processes:
                assert process.stdin is not None
                process.stdin.close()
            for process in processes:
                process.wait()
            errors.seek(0)
            console.print(errors.read(), end="", markup=False, highlight=False)


def calibrate(console: Console, workers: Team, spill: str | None) -> str:
    """Measure this machine if that was not done before; returns where to train."""
    found = workers.ask(console, "measuring this machine", {"calibrate": spill}, of=1)
    console.print(
        f"measured, and kept for next time: moves out at {found['out_gbps']:.1f} GB/s, "
        f"back at {found['back_gbps']:.1f} GB/s"
    )
    return str(found["device"])


def start(console: Console, workers: Team, name: str, task: dict[str, Any]) -> dict[str, Any]:
    """Have the processes make the model and run two steps."""
    began = time.perf_counter()
    found = workers.ask(console, f"{name}: starting", {"start": {**task, "name": name}})
    spent = time.perf_counter() - began
    console.print(f"{name}: made, compiled and run twice in {spent:.0f} s")
    return found


def train(
    console: Console,
    teams: dict[str, Team],
    runs: dict[str, dict[str, Any]],
    steps: int,
) -> None:
    """The other steps, each run one step in turn, so that what else the machine does hits all."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(3, steps + 1):
        for name, workers in teams.items():
            found = workers.ask(console, f"step {number} of {steps}: {name}", {"step": name})
            seconds[name].append(found["seconds"])
            runs[name]["losses"].append(found["loss"])
    for name, workers in teams.items():
        runs[name] |= workers.ask(console, f"{name}: ending", {"finish": name})
        runs[name]["seconds"] = statistics.median(seconds[name])
        ratios = [a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)]
        runs[name]["slower"] = statistics.median(ratios)


def show(console: Console, runs: dict[str, dict[str, Any]]) -> None:
    """The table, and what it rests on."""
    plain, ours = runs["plain"], runs["offcompile"]
    table = Table("", "peak memory", "of plain", "step", "× plain", "last loss")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, found in runs.items():
        table.add_row(
            name,
            show_bytes(found["peak_bytes"]),
            f"{found['peak_bytes'] / plain['peak_bytes']:.0%}",
            f"{found['seconds']:.3f} s",
            f"{found['slower']:.2f}",
            f"{found['losses'][-1]:.4f}",
        )
    console.print(table)
    for name, found in runs.items():
        if name != "plain":
            console.print(agreement(name, plain["losses"], found["losses"]))
    if "reserved_bytes" in ours:
        held = ", ".join(f"{n} {show_bytes(r['reserved_bytes'])}" for n, r in runs.items())
        console.print(f"Peak memory is what torch's allocator gave out; it reserved: {held}.")
    else:
        console.print(
            "Peak memory is what the operating system measured after the first step, less what the "
            "process held before the model; × plain is the median over steps run in turn."
        )
    console.print(
        f"The compiled step had a budget of {show_bytes(ours['budget_bytes'])}; "
        f"per step {show_bytes(ours['out_bytes'])} left the device."
    )


def agreement(name: str, plain: list[float], other: list[float]) -> str:
    far = max(abs(a - b) / abs(a) for a, b in zip(plain, other, strict=True))
    if far == 0:
        return f"{name}: the losses of all {len(plain)} steps equal plain's to the last bit."
    verdict = "agree with" if far < CLOSE else "DO NOT AGREE with"
    return f"{name}: the losses {verdict} plain's: at most {far:.1e} apart."


def show_bytes(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f} MiB"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help="a multiple of 64, or below it")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int, help="bytes of text in each sample")
    parser.add_argument("--steps", type=int, help="at least 3")
    parser.add_argument(
        "--memory",
        help="the budget: bytes, '300MiB' or 'minimum'; by default half of the plain run's peak "
        "after what the optimizer keeps, which no graph holds, is taken off",
    )
    parser.add_argument(
        "--lowering",
        choices=["aot_eager", "inductor"],
        default="aot_eager",
        help="aot_eager compiles in seconds and gives the same bits; inductor takes a minute",
    )
    parser.add_argument("--spill", help="directory on a disk (default: the temporary directory)")
    parser.add_argument("--output", default="demo", help="folder for report and trace")
    parser.add_argument("--quick", action="store_true", help="a tiny model, all in one process")
    parser.add_argument("--ranks", type=int, default=1, help="processes that train one model")
    asked = parser.parse_args()
    if asked.steps is not None and asked.steps < 3:
        parser.error("--steps: at least 3; the first compiles, the second warms up")
    if asked.ranks < 1:
        parser.error("--ranks: at least 1")
    if asked.lowering == "inductor" and not shutil.which("g++"):
        parser.error("--lowering: inductor needs g++, which is not there; use aot_eager")
    return asked


def half(plain: dict[str, Any]) -> int:
    """Half of what the plain run held, less AdamW's two moments, which no graph holds."""
    peak: int = plain["peak_bytes"]
    return max(peak // 2 - 2 * plain["weight_bytes"], peak // 4)


def settings(asked: argparse.Namespace, device: str) -> dict[str, Any]:
    """The settings that all runs have in common."""
    sizes = SIZES["quick" if asked.quick else device]
    return {
        **{name: getattr(asked, name) or value for name, value in sizes.items()},
        "device": device,
        "lowering": asked.lowering,
        "spill": asked.spill,
        "output": str(Path(asked.output).absolute()),
        "quick": asked.quick,
        "memory": None,
    }


def main() -> None:
    asked = arguments()
    console = Console()
    output = Path(asked.output).absolute()
    output.mkdir(parents=True, exist_ok=True)
    runs: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        workers = stack.enter_context(team(console, asked.ranks))
        task = settings(asked, calibrate(console, workers, asked.spill))
        console.print(
            "A GPT of {layers} layers, width {width}, on {batch} × {length} bytes of Python "
            "source; AdamW, {steps} steps, {lowering}, on {device}.".format(**task)
        )
        if asked.ranks > 1:
            console.print(
                f"{asked.ranks} ranks, each with a batch of its own; offcompile's run shares out"
                " the states of its optimizer among them."
            )
        teams: dict[str, Team] = {}
        for name in ("plain", "checkpointed", "offcompile"):
            if runs and not asked.quick:  # each in a process of its own
                workers = stack.enter_context(team(console, asked.ranks))
            task["checkpointed"] = name == "checkpointed"
            if name == "offcompile":
                task["memory"] = asked.memory or ("minimum" if asked.quick else half(runs["plain"]))
            runs[name] = start(console, workers, name, task)
            teams[name] = workers
        train(console, teams, runs, task["steps"])
    show(console, runs)
    if asked.quick:
        console.print("With --quick one process does it all, so these peaks cannot be compared.")
    text = f"\nThe plan that ran:\n{runs['offcompile']['text']}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nreport: {output / 'report.html'}", markup=False, soft_wrap=True)
    console.print(f"trace:  {output / 'trace.json'} (for ui.perfetto.dev)", soft_wrap=True)


if __name__ == "__main__":
    main()
