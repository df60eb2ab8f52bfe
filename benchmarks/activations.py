"""Saved activations within a budget: offcompile beside what PyTorch has for the same end.

Run `python -m benchmarks.activations` (`--quick`: small models, print only) for the table in
`results/`. Every variant is a process of its own; the parent lets them run one step each in turn,
so that whatever the machine does between minutes hits all alike. Compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from benchmarks.turns import LOWERINGS, MIB, Child, loss_line, machine, ratio, run_in_turn

RESULT = Path(__file__).parent / "results" / "activations.md"

# Beside the tensors, a process holds compiled code, small blocks and packed operands; so much is
# taken off checkpointing's measured memory to make the budget that should come to the same.
OVERHEAD_BYTES = 32 * MIB
#: steps before the first that counts: ours are planned again and get places for their blocks
SETTLING = 12


def measure(case: str, lowering: str, asked: argparse.Namespace) -> list[Child]:
    """All variants of one model and lowering, warmed up one by one and then run in turn."""
    children: list[Child] = []

    def start(
        name: str, kind: str, memory: int | None = None, lean: bool = False, bare: bool = False
    ) -> Child:
        task = {
            "case": case,
            "kind": kind,
            "lowering": lowering,
            "memory": memory,
            "spill": asked.spill,
            "quick": asked.quick,
            "returns_freed": lean,
            "settling": SETTLING if kind == "ours" else 2,
        }
        child = Child(name, task, bare)
        children.append(child)
        print(f"  {name}: ready after {child.warm_seconds:.0f} s", file=sys.stderr, flush=True)
        return child

    try:
        start("plain", "plain")
        fast = start("checkpoint per block", "checkpoint")
        start("activation_memory_budget", "torch budget")
        lean = start("checkpoint per block, lean", "checkpoint", lean=True)
        same, fixed = memory_of(fast, asked.quick)
        start("ours, checkpoint's memory", "ours", same)
        start("the same, bare", "ours", same, bare=True)
        start("ours, half its activations", "ours", fixed + (same - fixed) // 2)
        start("ours, lean checkpoint's memory", "ours", memory_of(lean, asked.quick)[0])
        run_in_turn(children, asked.rounds)
    finally:
        for child in children:
            child.end()
    return children


def memory_of(checkpoint: Child, quick: bool) -> tuple[int, int]:
    """The budget that comes to what checkpointing takes, and the weights and gradients in it."""
    checkpoint.ask("step")
    found = checkpoint.ask("facts")
    return found["peak_bytes"] - (0 if quick else OVERHEAD_BYTES), 2 * found["weight_bytes"]


def table(children: list[Child]) -> list[str]:
    plain, checkpoint = children[:2]
    heads = (
        *("variant", "step, s", "× plain", "× checkpoint", "budget", "peak, MiB", "of plain"),
        *("out; again", "waited, s", "planned"),
    )
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for child in children:
        fact, median = child.facts, statistics.median(child.seconds)
        moved = waited = planned = budget = ""
        if child.kind == "ours":
            budget = f"{fact['budget_bytes'] / MIB:,.0f}{' (floor)' if fact['at_floor'] else ''}"
            out = fact["bytes_out"] / len(child.all_losses) / MIB
            moved = f"{out:,.0f}; {fact['ops_again']}"
            waited = f"{fact['wait_us'] / len(child.all_losses) / 1e6:.2f}"
            planned = f"{fact['planned_us'] / 1e6 / median:.2f} ×"
        cells = (
            child.name,
            f"{median:.2f}",
            f"{ratio(child, plain):.3f}",
            f"{ratio(child, checkpoint):.3f}",
            budget,
            f"{fact['peak_bytes'] / MIB:,.0f}",
            f"{fact['peak_bytes'] / plain.facts['peak_bytes']:.0%}",
            *(moved, waited, planned),
        )
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, print only")
    parser.add_argument("--case", choices=["gpt", "resnet"], action="append")
    parser.add_argument("--lowering", choices=LOWERINGS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spill", help="directory on a disk (default: the temporary directory)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    # the child's module imports torch and the models, which the parent does without
    from benchmarks import activations_child

    if asked.child:
        activations_child.serve(json.loads(asked.child))
        return
    cases = activations_child.QUICK_CASES if asked.quick else activations_child.CASES
    sections = []
    for case in asked.case or cases:
        for lowering in asked.lowering or LOWERINGS:
            title = f"{cases[case].title}; {lowering}"
            print(title, file=sys.stderr, flush=True)
            children = measure(case, lowering, asked)
            sections += [f"## {title}", "", *table(children), "", loss_line(children), ""]
    text = TEXT.format(
        rounds=asked.rounds,
        overhead=OVERHEAD_BYTES // MIB,
        sections="\n".join(sections),
        machine=machine(),
    )
    print(text)
    if not asked.quick:
        RESULT.write_text(text)


TEXT = """\
# Activations

Training steps (forward, backward, plain SGD) with saved activations kept, recomputed or moved to
disk. Each variant is a process of its own; the variants of a table run one step each in turn,
{rounds} rounds. Ratios are medians over the rounds of two steps of the same round. Peak memory is
what the operating system measured over these steps, less what the process held before the model.
It includes pages of files that the process maps, which the system may drop: weights and gradients
that a plan puts on the host (no ops run again and fewer bytes out tell such a row).

- checkpoint per block: `torch.utils.checkpoint` (not reentrant) around every block, compiled.
- `activation_memory_budget`: `torch._functorch.config`, the share that comes nearest to
  checkpointing's memory.
- Every process is started as `offcompile run` starts it, that is with malloc's cache for small
  blocks off, the peers too; "bare": as Python starts.
- lean: malloc gives freed tensors back at once. For the other peers it keeps them, as offcompile
  has it do within its budget: faster, and more is held, in holes between blocks.
- ours, checkpoint's memory: `options={{"memory": …}}` is the measured peak of checkpointing less
  {overhead} MiB for what a process holds beside tensors; likewise for the lean checkpointing.
- ours, half its activations: weights and gradients, and half of the rest of that budget.
  Where no plan can do with the budget, it is the floor.

"budget": MiB. "out; again": MiB that left per step, and ops that ran twice. "waited": for lanes,
per step. "planned": the plan's step time over the measured one.

{sections}
Machine: {machine}.
"""

if __name__ == "__main__":
    main()
