"""The optimizer beside its states: how fast updates go, and what overlap saves of a step.

Run `python -m benchmarks.optimizer` (`--quick`: small, print only) for the table in `results/`.
Rates are shares of what the machine does in the same round. Whole steps: each variant is a process
of its own, which runs step by step in turn with the plain one. Compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.turns import MIB, Child, loss_line, machine

RESULT = Path(__file__).parent / "results" / "optimizer.md"
#: budget as a share of the weights' bytes, and the optimizer
VARIANTS: dict[str, tuple[float | None, dict[str, Any]]] = {
    "plain, torch fused": (None, {"torch": True, "fused": True}),
    "plain, torch's default": (None, {"torch": True}),
    "offloaded, torch fused": (0.5, {"torch": True, "fused": True}),
    "offloaded, ours, after backward": (0.5, {"states": "host"}),
    "offloaded, ours, overlap": (0.5, {"states": "host", "overlap": True}),
    "offloaded, ours, disk, after backward": (0.5, {"states": "disk"}),
    "offloaded, ours, disk, overlap": (0.5, {"states": "disk", "overlap": True}),
}
CLIPPED: dict[str, tuple[float | None, dict[str, Any], float | None]] = {
    "plain, torch fused, clip_grad_norm_": (None, {"torch": True, "fused": True}, 1.0),
    "offloaded, torch fused, clip_grad_norm_": (0.5, {"torch": True, "fused": True}, 1.0),
    "offloaded, ours, max_norm": (
        0.5,
        {"states": "host", "overlap": True, "max_norm": 1.0},
        None,
    ),
}


def steps(case: str, asked: argparse.Namespace, clipped: bool) -> list[str]:
    variants = CLIPPED if clipped else {name: (*how, None) for name, how in VARIANTS.items()}
    children: list[Child] = []
    ratios: list[float] = []
    for name, (share, optimizer, clip) in variants.items():
        task = {
            "case": case,
            "kind": "plain" if share is None else "ours",
            "lowering": "aot_eager",
            "share": share,
            "optimizer": optimizer,
            "clip": clip,
            "spill": asked.spill,
            "quick": asked.quick,
        }
        child = Child(name, task, module="benchmarks.optimizer")
        print(f"  {name}: ready after {child.warm_seconds:.0f} s", file=sys.stderr, flush=True)
        children.append(child)
        plain, mark = children[0], len(children[0].steps)
        if child is plain:
            ratios.append(1.0)
            continue
        for turn in range(asked.rounds):
            for one in (plain, child) if turn % 2 == 0 else (child, plain):
                one.step()
        child.facts = child.ask("facts")
        pairs = zip(child.seconds, plain.seconds[mark:], strict=True)
        ratios.append(statistics.median(a / b for a, b in pairs))
        child.end()
    plain.facts = plain.ask("facts")
    plain.end()
    rows = ["| | step, s | × plain | peak, MiB |", "|---|---|---|---|"]
    for child, ratio in zip(children, ratios, strict=True):
        median, peak = statistics.median(child.seconds), child.facts["peak_bytes"] / MIB
        rows.append(f"| {child.name} | {median:.3f} | {ratio:.2f} | {peak:,.0f} |")
    return [*rows, "", loss_line(children)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small, print only")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--spill", default="/var/tmp", help="directory on a disk")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    from benchmarks import optimizer_child, optimizer_rates

    if asked.child:
        optimizer_child.serve(json.loads(asked.child))
        return
    numel = 4_000_000 if asked.quick else 100_000_000
    rates = optimizer_rates.rows(numel, asked.rounds, asked.spill)

    from benchmarks.weights_child import CASES, QUICK_CASES

    text = TEXT.format(
        rates="\n".join(rates),
        numel=numel // 1_000_000,
        title=(QUICK_CASES if asked.quick else CASES)["gpt"].title,
        whole="\n".join(steps("gpt", asked, False)),
        clipped="\n".join(steps("gpt", asked, True)),
        rounds=asked.rounds,
        machine=machine(),
    )
    print(text)
    if not asked.quick:
        RESULT.write_text(text)


TEXT = """\
# The optimizer beside its states

## Updates by themselves: AdamW, {numel} M fp32 parameters

{rates}

An update reads p, g, m and v and writes p, m and v: 28 bytes a parameter. "Of memory's rate" is
28 bytes × parameters/s over that rate; from disk m and v are read and written, 16 bytes.

## Whole steps: {title}

{whole}

"Plain" has everything in memory. "Offloaded": the compiled step has half of its weights' bytes as
its budget. Forward, backward, update, `zero_grad`; `aot_eager`; ratios are medians over {rounds}
rounds of two steps of the same round. "Peak": most anonymous memory by the operating system, the
compiler's included.

## With clipping by the norm of all gradients

{clipped}

Machine: {machine}.
"""

if __name__ == "__main__":
    main()
