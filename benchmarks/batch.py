"""The largest batch of a deep conv net under a fixed budget: by planning, and by running it.

Run `python -m benchmarks.batch` (`--quick`: a smaller model, print only) for the table in
`results/`. Every row that runs is a process of its own; they run one step each in turn. Compare
ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.turns import MIB, Child, machine, run_in_turn

if TYPE_CHECKING:
    from offcompile.ahead.batches.search import BatchReport

RESULT = Path(__file__).parent / "results" / "batch.md"
SIDE = 32
PER_LAYER_CONVOLUTIONS = 2


@dataclass(frozen=True)
class Net:
    blocks: int
    channels: int
    budget_bytes: int

    @property
    def title(self) -> str:
        layers = PER_LAYER_CONVOLUTIONS * self.blocks + 2
        return f"ResNet of {layers} layers, {self.channels} channels, images of {SIDE} × {SIDE}"


FULL = Net(60, 16, 256 * MIB)
QUICK = Net(12, 16, 64 * MIB)
#: planned for a card: the paper's, and one that people have
CARDS = ("v100-16g", "rtx4090")
CARD_NET = Net(160, 64, 0)
GOAL = 12


def case_of(net: Net, batch: int) -> Any:
    from benchmarks.activations_child import resnet

    return resnet([net.channels] * net.blocks, SIDE, batch, 0.0)


def inputs_of(batch: int) -> Any:
    import torch

    return torch.empty(batch, 3, SIDE, SIDE), torch.zeros(batch, dtype=torch.int64)


def planned(net: Net, memory: int | None, spill: str, **more: Any) -> tuple[Any, Any, float]:
    """Batches that fit with plain training and with ours, and the seconds it took to find them."""
    import offcompile

    model = case_of(net, 1).build()
    began = time.perf_counter()
    options = {"lowering": "aot_eager"} | ({"spill": spill} if "hardware" not in more else {})
    plain = offcompile.max_batch(model, inputs_of, memory, policy=None, options=options, **more)
    ours = offcompile.max_batch(model, inputs_of, memory, options=options, **more)
    return plain, ours, time.perf_counter() - began


def measure(
    net: Net, batches: list[tuple[str, str, int]], asked: argparse.Namespace
) -> list[Child]:
    """(name, kind, batch) of each row, warmed up one by one and then run in turn."""
    children: list[Child] = []
    try:
        for name, kind, batch in batches:
            task = {
                "net": [net.blocks, net.channels, net.budget_bytes],
                "batch": batch,
                "kind": kind,
                "lowering": "aot_eager",
                "memory": net.budget_bytes if kind == "ours" else None,
                "spill": asked.spill,
                "returns_freed": False,
            }
            child = Child(name, task, module="benchmarks.batch")
            children.append(child)
            warm = f"{name}, batch {batch}: ready after {child.warm_seconds:.0f} s"
            print(f"  {warm}", file=sys.stderr, flush=True)
        run_in_turn(children, asked.rounds)
    finally:
        for child in children:
            child.end()
    return children


def ran_table(children: list[Child], budget_bytes: int) -> list[str]:
    plain = children[0]
    rows = [
        "| | batch | × plain | step, s | samples/s | × plain | peak, MiB | over the budget |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for child in children:
        batch, base = child.task["batch"], plain.task["batch"]
        pairs = zip(child.seconds, plain.seconds, strict=True)
        rate = statistics.median(batch / mine / (base / its) for mine, its in pairs)
        seconds = statistics.median(child.seconds)
        over = child.facts["peak_bytes"] - budget_bytes
        cells = (
            child.name,
            str(batch),
            f"{batch / base:.1f}",
            f"{seconds:.2f}",
            f"{batch / seconds:.1f}",
            f"{rate:.2f}",
            f"{child.facts['peak_bytes'] / MIB:,.0f}",
            f"{over / MIB:,.0f}",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def planned_row(name: str, plain: BatchReport, ours: BatchReport, seconds: float) -> str:
    base, largest, best = plain.largest, ours.largest, ours.best
    cells = (
        name,
        str(base.batch),
        str(largest.batch),
        f"{largest.batch / base.batch:.1f}",
        f"{largest.samples_per_second / base.samples_per_second:.2f}",
        str(best.batch),
        f"{best.samples_per_second / base.samples_per_second:.2f}",
        f"{seconds:.0f} s",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller model, print only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spill", default="/var/tmp", help="directory on a disk")
    parser.add_argument("--no-cards", action="store_true", help="leave out what is only planned")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    # imports torch and the models
    from benchmarks.activations_child import serve

    if asked.child:
        task = json.loads(asked.child)
        serve(task, case_of(Net(*task["net"]), task["batch"]))
        return
    net = QUICK if asked.quick else FULL
    plain, ours, seconds = planned(net, net.budget_bytes, asked.spill)
    print(plain, ours, sep="\n\n", file=sys.stderr, flush=True)
    plans = [planned_row(f"this machine, {net.budget_bytes // MIB} MiB", plain, ours, seconds)]
    base = plain.largest.batch
    batches = {
        "plain, its largest": ("plain", base),
        "ours, the same batch": ("ours", base),
        "ours, most samples a second": ("ours", ours.best.batch),
        f"ours, {GOAL} × plain": ("ours", min(GOAL * base, ours.largest.batch)),
        "ours, the largest": ("ours", ours.largest.batch),
    }
    rows = [(name, kind, batch) for name, (kind, batch) in batches.items()]
    table = ran_table(measure(net, rows, asked), net.budget_bytes)
    cards = "" if asked.no_cards else f" On cards (planned only): {CARD_NET.title}."
    for card in () if asked.no_cards or asked.quick else CARDS:
        found = planned(CARD_NET, None, asked.spill, hardware=card)
        print(*found[:2], sep="\n\n", file=sys.stderr, flush=True)
        plans.append(planned_row(card, *found))
    text = TEXT.format(
        title=net.title,
        budget=net.budget_bytes // MIB,
        rounds=asked.rounds,
        cards=cards,
        plans="\n".join(plans),
        table="\n".join(table),
        machine=machine(),
    )
    print(text)
    if not asked.quick:
        RESULT.write_text(text)


TEXT = """\
# Largest batch

`offcompile.max_batch` says by planning, before anything is run, which batches fit. The model that
runs: {title}; budget {budget} MiB for weights, gradients and activations.{cards}

## Planned

"speed": samples a second, by simulation, over those of plain training at its largest batch.

| | plain's largest | ours | × | speed | batch of most samples/s | speed | found in |
|---|---|---|---|---|---|---|---|
{plans}

## Run

Each row is a process of its own; they run one step each in turn, {rounds} rounds. "× plain" of
samples a second: median over the rounds. Peak memory is what the operating system measured, less
what the process held before the model. No plan knows of what it holds over the budget: the
leftovers of compiling a graph of so many ops, buffers of the libraries, holes. Plain training
at the batch for which the budget just suffices holds most of it.

{table}

Machine: {machine}.
"""

if __name__ == "__main__":
    main()
