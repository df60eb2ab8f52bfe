"""Weights and gradients on the host: schedules of the papers beside ours, on the same runtime.

Run `python -m benchmarks.weights` (`--quick`: small models, print only) for the table in
`results/`. Every variant is a process of its own, which runs step by step in turn with the plain
one, so that whatever the machine does between minutes hits both alike. Compare ratios, not seconds.
(All at once would dirty more pages than the system lets lie, and measure its disk.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.turns import MIB, Child, loss_line, machine

RESULT = Path(__file__).parent / "results" / "weights.md"
SCHEDULES = {
    "load all, then compute": "hybrid_access:variant=load_all",
    "load all, overlapped": "hybrid_access:variant=zero_offload",
    "L2L": "weight_rotation:variant=l2l",
    "MemFerry as printed": "hybrid_access:variant=printed",
    "ours": "joint",
}
#: budget as a share of the weights' bytes → which schedules can do with it
BUDGETS: dict[float | None, tuple[str, ...]] = {
    1.6: tuple(SCHEDULES),
    0.5: ("L2L", "MemFerry as printed", "ours"),
    None: ("ours",),
}
#: for the run that others are compared with: malloc keeps what is freed, however large
KEEPING = (
    "glibc.malloc.mmap_max=0",
    f"glibc.malloc.trim_threshold={1 << 40}",
    f"glibc.malloc.top_pad={64 << 20}",
)
RESERVES = (0.0, 0.25, 0.5, 0.75, 1.0)


class Table:
    """The variants of one model, warmed up and run in turn."""

    def __init__(self, case: str, asked: argparse.Namespace) -> None:
        self.case, self.asked = case, asked
        self.children: list[Child] = []
        self.refused: dict[str, str] = {}
        #: step time over that of the plain variant in the same rounds, median
        self.ratios: dict[str, float] = {}

    def start_plain(self, **more: Any) -> int:
        """The one that others are compared with, and how it is without settings; returns the bytes
        of its weights."""
        self.start("plain, memory kept", None, None, malloc=KEEPING, **more)
        self.start("plain, as it comes", None, None, **more)
        weight_bytes: int = self.plain.warm_facts["weight_bytes"]
        return weight_bytes

    def start(
        self,
        name: str,
        policy: str | None,
        memory: int | str | None,
        malloc: tuple[str, ...] = (),
        **more: Any,
    ) -> None:
        task = {
            "case": self.case,
            "kind": "plain" if policy is None else "ours",
            "policy": policy,
            "lowering": "aot_eager",
            "memory": memory,
            "spill": self.asked.spill,
            "quick": self.asked.quick,
            **more,
        }
        try:
            child = Child(name, task, module="benchmarks.weights", malloc=malloc)
        except KeyError:  # it said why instead of its losses
            self.refused[name] = "no plan"
            return
        self.children.append(child)
        print(f"  {name}: ready after {child.warm_seconds:.0f} s", file=sys.stderr, flush=True)
        if len(self.children) > 1:
            self.run(child)

    def run(self, child: Child) -> None:
        """A variant in turn with the plain one; then it ends."""
        mark = len(self.plain.seconds)
        try:
            for turn in range(self.asked.rounds):
                for one in (self.plain, child) if turn % 2 == 0 else (child, self.plain):
                    one.step()
            child.facts = child.ask("facts")
            beside = self.plain.seconds[mark:]
            self.ratios[child.name] = statistics.median(
                a / b for a, b in zip(child.seconds, beside, strict=True)
            )
        finally:
            child.end()

    @property
    def plain(self) -> Child:
        return self.children[0]

    def end(self) -> None:
        self.plain.facts = self.plain.ask("facts")
        self.ratios[self.plain.name] = 1.0
        self.plain.end()

    def rows(self) -> list[str]:
        heads = ("schedule", "step, s", "× plain", "budget", "peak", "in", "out", "in place")
        rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for child in self.children:
            fact, cells = child.facts, ["", "", "", ""]
            if child.kind == "ours":
                steps = len(child.all_losses) + 1
                cells = [
                    f"{fact['budget_bytes'] / MIB:,.0f}",
                    f"{fact['bytes_in'] / steps / MIB:,.0f}",
                    f"{fact['bytes_out'] / steps / MIB:,.0f}",
                    f"{fact['direct']}",
                ]
            median = f"{statistics.median(child.seconds):.3f}"
            peak = f"{fact['peak_bytes'] / MIB:,.0f}"
            every = (child.name, median, f"{self.ratios[child.name]:.2f}", cells[0], peak)
            rows.append("| " + " | ".join([*every, *cells[1:]]) + " |")
        rows += [f"| {name} | {why} |  |  |  |  |  |  |" for name, why in self.refused.items()]
        return rows


def training(case: str, asked: argparse.Namespace) -> list[str]:
    table = Table(case, asked)
    weight_bytes = table.start_plain()
    try:
        for share, names in BUDGETS.items():
            memory = "minimum" if share is None else int(share * weight_bytes)
            said = "the floor" if share is None else f"{share:.0%} of the weights"
            for name in names:
                table.start(f"{name}, {said}", SCHEDULES[name], memory)
    finally:
        table.end()
    return [*table.rows(), "", loss_line(table.children)]


def reserves(case: str, asked: argparse.Namespace) -> list[str]:
    table = Table(case, asked)
    weight_bytes = table.start_plain()
    try:
        for reserve in RESERVES:
            name = f"gradient_reserve={reserve}"
            table.start(name, "gradient_reserve", int(1.9 * weight_bytes), reserve=reserve)
    finally:
        table.end()
    return table.rows()


def inference(case: str, asked: argparse.Namespace) -> list[str]:
    table = Table(case, asked)
    weight_bytes = table.start_plain(inference=True)
    try:
        for name in ("load all, overlapped", "ours"):
            table.start(name, SCHEDULES[name], weight_bytes // 3, inference=True)
    finally:
        table.end()
    streamed = table.children[-2]
    fact = streamed.facts
    gb = fact["bytes_in"] / (len(streamed.all_losses) + 1) / 1e9
    rate = gb / statistics.median(streamed.seconds)
    lane = fact["lane_gbps"]
    ours = weight_bytes / 1e9 / statistics.median(table.children[-1].seconds)
    said = (
        f"The lane was measured at {lane:.2f} GB/s. Ours reads the weights where they lie, at"
        f" {ours:.2f} GB/s: {ours / lane:.0%} of the lane. Loading all of them, copies share two"
        f" cores with compute, and bring {rate:.2f} GB/s: {rate / lane:.0%}."
    )
    return [*table.rows(), "", said]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, print only")
    parser.add_argument("--case", choices=["mlp-16", "mlp-256", "gpt"], action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spill", default="/var/tmp", help="directory on a disk")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    from benchmarks import weights_child, weights_layers, weights_reserve

    if asked.child:
        weights_child.serve(json.loads(asked.child))
        return
    cases = weights_child.QUICK_CASES if asked.quick else weights_child.CASES
    sections = []
    for case in asked.case or cases:
        print(cases[case].title, file=sys.stderr, flush=True)
        sections += [f"## {cases[case].title}: training", "", *training(case, asked), ""]
    print("reserves", file=sys.stderr, flush=True)
    sections += [f"## {cases['mlp-16'].title}: gradient reserve", ""]
    sections += [*reserves("mlp-16", asked), ""]
    print("inference", file=sys.stderr, flush=True)
    sections += [f"## {cases['mlp-16'].title}: inference", "", *inference("mlp-16", asked), ""]
    text = TEXT.format(
        rounds=asked.rounds,
        layers="\n".join(weights_layers.rows(asked.spill)),
        sections="\n".join(sections),
        reserves="\n".join(weights_reserve.rows()),
        machine=machine(),
    )
    print(text)
    if not asked.quick:
        RESULT.write_text(text)


TEXT = """\
# Weights and gradients on the host

On the CPU target the host is a mapped file: its pages are the system's, not the process's.

## A layer: its weight on the device, copied there first, or used in place

| layer | weight, MiB | on the device, µs | copied, × | in place, × |
|---|---|---|---|---|
{layers}

The file is in the page cache, as it is while there is memory to spare; "copied" waits for the copy.

## Gradient reserve, planned for a card

24 layers of 48 MB; a backward op of 2 ms takes 3.84 ms longer if its gradient is written on the
host.

| reserve | step, ms | peak of the device, GB |
|---|---|---|
{reserves}

{sections}
Training: forward and backward (`aot_eager`), then plain SGD outside of the time. Each variant is a
process of its own, which runs {rounds} steps in turn with the plain one; ratios are medians over
the rounds of two steps of the same round. "budget", "peak" (most anonymous memory, by
the operating system, less what the process held before the model), "in", "out" (per step): MiB.
"in place": operands that ops use on the host. Every schedule is a plan of the same planner run by
the same runtime.

"plain, memory kept": malloc was told to keep what is freed, so that gradients find memory that is
there already. By default it maps each block of more than 32 MiB anew, and the system clears its
pages every step; what that takes differs from minute to minute on a virtual machine.

- load all, then compute: as ZeRO-Offload has it; nothing is computed before all weights are there.
- load all, overlapped: each op waits for its own weight only, and all are loaded (GFGB).
- L2L: weights leave after each use, and the next one's load waits for that.
- MemFerry as printed: Algorithm 1 of the paper.
- ours: the policy `joint`.

Machine: {machine}.
"""

if __name__ == "__main__":
    main()
