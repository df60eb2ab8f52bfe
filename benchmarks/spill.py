"""Spilling activations: as they are, packed, in half precision; codecs and files by themselves.

Run `python -m benchmarks.spill` (`--quick`: small models, print only) for the table in `results/`.
Every variant is a process of its own; they run one step each in turn, so that whatever the machine
does between minutes hits all alike. Compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from benchmarks.turns import LOWERINGS, MIB, Child, machine, ratio, run_in_turn

RESULT = Path(__file__).parent / "results" / "spill.md"
#: variant → what all activations that leave are packed with
CODECS: dict[str, str | None] = {
    "disk": None,
    "disk + bitmask": "bitmask",
    "disk + fp16": "fp16",
    "disk + both": "bitmask+fp16",
    "disk, planner's choice": "chosen",
}
LOSSLESS = (None, "bitmask", "chosen")
#: share of the bytes that the plain step holds beside weights and gradients
SHARE = 0.5


def measure(case: str, lowering: str, asked: argparse.Namespace) -> list[Child]:
    """All variants of one model, warmed up one by one and then run in turn."""
    children: list[Child] = []

    def start(name: str, kind: str, codec: str | None, memory: int | str | None) -> Child:
        task = {
            "case": case,
            "kind": kind,
            "codec": codec,
            "lowering": lowering,
            "memory": memory,
            "spill": asked.spill,
            "quick": asked.quick,
            "returns_freed": False,
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
        for name, codec in CODECS.items():
            start(name, "ours", codec, "minimum" if asked.quick else memory)
        plain.steps.clear()
        run_in_turn(children, asked.rounds)
    finally:
        for child in children:
            child.end()
    return children


def table(children: list[Child]) -> list[str]:
    plain = children[0]
    heads = (
        "variant",
        "step, s",
        "× plain",
        "budget",
        "peak",
        "of plain",
        "out",
        "written",
        "loss",
    )
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for child in children:
        fact = child.facts
        budget = raw = out = loss = ""
        if child is not plain:
            steps = len(child.all_losses)
            budget = f"{fact['budget_bytes'] / MIB:,.0f}{' (floor)' if fact['at_floor'] else ''}"
            raw = f"{fact['raw_bytes_out'] / steps / MIB:,.0f}"
            out = f"{fact['bytes_out'] / steps / MIB:,.0f}"
            loss = _loss(child, plain)
        cells = (
            child.name,
            f"{statistics.median(child.seconds):.2f}",
            f"{ratio(child, plain):.3f}",
            budget,
            f"{fact['peak_bytes'] / MIB:,.0f}",
            f"{fact['peak_bytes'] / plain.facts['peak_bytes']:.0%}",
            *(raw, out, loss),
        )
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _loss(child: Child, plain: Child) -> str:
    """How far the losses are from those of plain training over the same steps."""
    both = zip(child.losses, plain.losses, strict=True)
    far = max(abs(a - b) / abs(b) for a, b in both)
    return "same" if far == 0 else f"{far:.0e}"


def codec_table(quick: bool) -> list[str]:
    from benchmarks.spill_child import codec_rates

    rows = ["| codec | zeros | pack, × memcpy | unpack, × memcpy |", "|---|---|---|---|"]
    for name, zeros, pack, unpack in codec_rates((4 if quick else 32) * MIB, 3 if quick else 9):
        rows.append(f"| {name} | {zeros:.0%} | {pack:.2f} | {unpack:.2f} |")
    return rows


def file_table(directory: str, quick: bool) -> list[str]:
    from benchmarks.spill_child import file_rates

    found = file_rates(directory, (64 if quick else 512) * MIB, 2 if quick else 9)
    return [
        "| | sequential, GB/s | ours, GB/s | share |",
        "|---|---|---|---|",
        f"| write | {found['write']:.2f} | {found['out']:.2f} | {found['out share']:.0%} |",
        f"| read | {found['read']:.2f} | {found['back']:.2f} | {found['back share']:.0%} |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, print only")
    parser.add_argument("--case", choices=["gpt", "resnet"], action="append")
    parser.add_argument("--lowering", choices=LOWERINGS, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spill", default="/var/tmp", help="directory on a disk")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    # the child's module imports torch and the models, which the parent does without
    from benchmarks import activations_child, spill_child

    if asked.child:
        spill_child.serve(json.loads(asked.child))
        return
    cases = activations_child.QUICK_CASES if asked.quick else activations_child.CASES
    sections = []
    for case in asked.case or cases:
        for lowering in asked.lowering or ("aot_eager",):
            title = f"{cases[case].title}; {lowering}"
            print(title, file=sys.stderr, flush=True)
            sections += [f"## {title}", "", *table(measure(case, lowering, asked)), ""]
    text = TEXT.format(
        rounds=asked.rounds,
        share=f"{SHARE:.0%}",
        sections="\n".join(sections),
        codecs="\n".join(codec_table(asked.quick)),
        files="\n".join(file_table(asked.spill, asked.quick)),
        machine=machine(),
    )
    print(text)
    if not asked.quick:
        RESULT.write_text(text)


TEXT = """\
# Spilling

Training steps (forward, backward, plain SGD) with saved activations on disk. Each variant is a
process of its own; the variants of a table run one step each in turn, {rounds} rounds. Ratios are
medians over the rounds of two steps of the same round. Peak memory is what the operating system
measured over these steps, less what the process held before the model.

The budget is weights, gradients and {share} of what plain training holds beside them. The variants
with a named codec run the same plan, with every fp32 activation that leaves packed so, whether it
pays or not; "planner's choice" packs what profiling finds worth it. On the CPU target the host tier
is a file as well, so there is no row for it.

"budget", "peak", "out" (raw, per step), "written" (packed, per step): MiB. "loss": the first two
steps against plain training; fp16 rounds what backward reads.

{sections}
## Codecs, one thread

Raw bytes of 32 MiB fp32 tensors over `copy_` of the same.

{codecs}

## Files

Moves of tensors of 1 to 24 MiB, back in reverse order, beside sequential direct I/O in 8 MiB calls
of the same amount from as much memory, one thread each.

{files}

Machine: {machine}.
"""

if __name__ == "__main__":
    main()
