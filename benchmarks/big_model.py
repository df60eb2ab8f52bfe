"""Forward alone with weights on disk: accelerate's `disk_offload` beside ours.

Run `python -m benchmarks.big_model` (`--quick`: small models, print only) for the table in
`results/`. Each variant is a process of its own and runs step by step in turn with the plain one.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks import weights_child
from benchmarks.turns import loss_line, machine
from benchmarks.weights import SCHEDULES, Table

RESULT = Path(__file__).parent / "results" / "big_model.md"
CASES = ("mlp-16", "mlp-256")
TEXT = """# Forward alone, weights on disk

`python -m benchmarks.big_model`. Each variant is a process of its own, which runs {rounds} steps in
turn with the plain one; ratios are medians over the rounds of two steps of the same round.
"budget", "peak" (most anonymous memory, by the operating system, less what the process held before
the model), "in", "out" (per step): MiB. "in place": operands that ops use on the host.

- plain, memory kept: all weights in memory, and malloc keeps what is freed.
- accelerate: `disk_offload(model, folder, execution_device=torch.device("cpu"))`, in eager mode.
- ours: `torch.compile`, `lowering="aot_eager"`, the policy `joint`.

Files of both are in the page cache, as they are while there is memory to spare. Other programs ran
on the machine: seconds differ from row to row, and ratios by a tenth mean nothing.

{sections}
Machine: {machine}; accelerate {accelerate}; compute on {threads} of the cores.
"""


def rows(case: str, asked: argparse.Namespace) -> list[str]:
    table = Table(case, asked)
    weight_bytes = table.start_plain(inference=True)
    try:
        table.start("accelerate, disk_offload", None, None, kind="accelerate", inference=True)
        for name, memory in (("a third", weight_bytes // 3), ("the floor", "minimum")):
            said = f"ours, {name}" + (" of the weights" if memory != "minimum" else "")
            table.start(said, SCHEDULES["ours"], memory, inference=True)
    finally:
        table.end()
    return [*table.rows(), "", loss_line(table.children)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, print only")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--spill", default="/var/tmp", help="directory on a disk")
    asked = parser.parse_args()
    cases = weights_child.QUICK_CASES if asked.quick else weights_child.CASES
    sections = []
    for case in CASES:
        print(cases[case].title, file=sys.stderr, flush=True)
        sections += [f"## {cases[case].title}", "", *rows(case, asked), ""]
    text = TEXT.format(
        rounds=asked.rounds,
        sections="\n".join(sections),
        machine=machine(),
        accelerate=version("accelerate"),
        threads=torch.get_num_threads(),
    )
    print(text)
    if not asked.quick:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
