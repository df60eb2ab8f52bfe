"""Models of Hugging Face within a budget: offcompile beside the library's own checkpointing.

Run `python -m benchmarks.models` for the table in `results/`. Models are built from configurations,
as large as two cores train in a second or two a step. Every variant is a process of its own; they
run one step each in turn (`benchmarks.turns`). Compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.activations import OVERHEAD_BYTES
from benchmarks.turns import LOWERINGS, MIB, Child, loss_line, machine, ratio, run_in_turn

#: steps of ours before the rounds: some plans are made anew after 7 and after 20 steps, and blocks
#: get their places 4 steps later
SETTLING = 28
#: models under Inductor, which takes minutes to compile the variants of one
INDUCTOR = ("gpt2", "llama", "bert", "vit")
#: other ways of compiling → heading and models
WAYS = {
    "layers": ("aot_eager, layers compiled one by one", ("gpt2", "llama", "vit")),
    "outside": ("aot_eager, the loss outside of the compiled model", ("gpt2", "llama", "bert")),
}
RESULT = Path(__file__).parent / "results" / "models.md"


def task_of(
    case: str, kind: str, lowering: str, memory: int | None = None, way: str = ""
) -> dict[str, Any]:
    """The task of a child that trains one variant of a model."""
    return {
        "case": case,
        "kind": kind,
        "lowering": lowering,
        "memory": memory,
        "spill": None,
        "quick": False,
        "returns_freed": False,
        "way": way,
        "each": bool(way),
    }


def measure(case: str, lowering: str, way: str, rounds: int) -> list[Child]:
    """All variants of one model and lowering, warmed up one by one and then run in turn. way: see
    `WAYS`."""
    children: list[Child] = []
    ours = "blocks" if way else "ours"

    def start(name: str, kind: str, memory: int | None = None) -> Child:
        task = task_of(case, kind, lowering, memory, way)
        task["settling"] = SETTLING if kind == ours else 2
        child = Child(name, task, module="benchmarks.models")
        children.append(child)
        print(f"  {name}: ready after {child.warm_seconds:.0f} s", file=sys.stderr, flush=True)
        return child

    def peak_bytes(child: Child) -> int:
        child.losses.append(child.ask("step")["loss"])
        return int(child.ask("facts")["peak_bytes"])

    try:
        plain = start("plain", "plain")
        same = peak_bytes(start("checkpointing", "checkpoint")) - OVERHEAD_BYTES
        start("ours, checkpointing's memory", ours, same)
        start("ours, half of plain's", ours, peak_bytes(plain) // 2 - OVERHEAD_BYTES)
        run_in_turn(children, rounds)
    finally:
        for child in children:
            child.end()
    return children


def row(title: str, children: list[Child]) -> str:
    plain = children[0]
    cells = [title, f"{plain.facts['peak_bytes'] / MIB:,.0f}"]
    for child in children[1:]:
        floor = " (floor)" if child.facts["at_floor"] else ""
        share = child.facts["peak_bytes"] / plain.facts["peak_bytes"]
        cells.append(f"{ratio(child, plain):.3f} × in {share:.0%}{floor}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append")
    parser.add_argument("--lowering", choices=LOWERINGS, action="append")
    parser.add_argument("--way", choices=("", *WAYS), action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    # the child's module imports torch and the models, which the parent does without
    from benchmarks import models_child

    if asked.child:
        models_child.serve_library(json.loads(asked.child))
        return
    sections: list[str] = []
    for way, lowering in [("", low) for low in LOWERINGS] + [(way, LOWERINGS[0]) for way in WAYS]:
        if lowering not in (asked.lowering or LOWERINGS) or way not in (asked.way or ("", *WAYS)):
            continue
        usual = tuple(models_child.CASES) if lowering == LOWERINGS[0] else INDUCTOR
        head, cases = WAYS.get(way, (lowering, usual))
        rows, lines = [], []
        for name in asked.case or cases:
            title = models_child.CASES[name].title
            print(f"{title}; {head}", file=sys.stderr, flush=True)
            children = measure(name, lowering, way, asked.rounds)
            rows.append(row(title, children))
            lines.append(loss_line(children))
            print(rows[-1], lines[-1], file=sys.stderr, flush=True)
            whole = [f"## {head}", "", HEAD, *rows, "", *dict.fromkeys(lines), ""]
            found = "\n".join([*sections, *whole])
            text = TEXT.format(rounds=asked.rounds, sections=found, machine=machine())
            if not (asked.case or asked.lowering or asked.way):
                RESULT.write_text(text)  # a run of an hour keeps what it has measured
        sections += whole
    print(text)


HEAD = """\
| model | plain, MiB | checkpointing | ours, in its memory | ours, in half of plain's |
|---|---|---|---|---|"""

TEXT = """\
# Models of Hugging Face

Training steps (forward, backward, plain SGD) of models from transformers, built from
configurations. × is the step's time over plain's, the median over {rounds} rounds in which each
variant runs one step; % is the peak that the operating system measured, of plain's. Checkpointing
is the library's own, `gradient_checkpointing_enable()`. Budgets are the measured peaks less 32 MiB
for what a process holds beside tensors. Where no plan can do with the budget, it is the floor. All
variants run under `torch.use_deterministic_algorithms(True)`: without it, two plain runs of Whisper
differ in the last bit.

{sections}
Machine: {machine}.
"""


if __name__ == "__main__":
    main()
