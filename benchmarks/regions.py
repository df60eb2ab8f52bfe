"""One graph, three, or one for each block: what graphs that share a budget cost.

Run `python -m benchmarks.regions` (`--quick`: small models, print only) for the table in
`results/`. Every variant is a process of its own; they run one step each in turn, so that whatever
the machine does between minutes hits all alike. Compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.turns import LOWERINGS, MIB, Child, machine, ratio, run_in_turn

RESULT = Path(__file__).parent / "results" / "regions.md"
#: shares of the bytes that the plain step holds beside weights and gradients; all variants and ways
#: run with the first
SHARES = (0.5, 0.25)
#: name → kind, and what is done otherwise
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "checkpointing each block": ("checkpoint", {}),
    "whole": ("ours", {}),
    "two graph breaks": ("breaks", {}),
    "block by block": ("blocks", {}),
    "block by block, eval every 4": ("blocks", {"eval_every": 4}),
}
#: those that run with less than the first share, too
WITH_LESS = ("checkpointing each block", "whole", "block by block")
#: rounds after which the order of graphs counts as learnt, and those until the step's plan has
#: settled, too
LEARNING_ROUNDS, SETTLING_ROUNDS = 2, 12
#: the same model in ways that need plain rows of their own; only block by block
WAYS: dict[str, dict[str, Any]] = {
    "three lengths": {"lengths": True},
    "experts": {"routed": True},
}


class Group:
    """Processes that run one step each in turn: few, since each one's memory costs the others."""

    def __init__(self, case: str, lowering: str, asked: argparse.Namespace) -> None:
        self.children: list[Child] = []
        self.rounds = asked.rounds
        self.task: dict[str, Any] = {
            "case": case,
            "lowering": lowering,
            "spill": asked.spill,
            "quick": asked.quick,
            "returns_freed": False,
        }

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.children:
            child.end()

    def start(self, name: str, kind: str, memory: int | None, **otherwise: Any) -> Child:
        task = self.task | {"kind": kind, "memory": memory} | otherwise
        child = Child(name, task, module="benchmarks.regions")
        self.children.append(child)
        print(f"  {name}: ready after {child.warm_seconds:.0f} s", file=sys.stderr, flush=True)
        return child

    def run(self) -> list[Child]:
        for child in self.children:
            child.steps.clear()
        run_in_turn(self.children, self.rounds)
        return self.children


def measure(case: str, lowering: str, share: float, asked: argparse.Namespace) -> list[Child]:
    """The variants of one model, warmed up one by one and then run in turn."""
    every = share == SHARES[0]
    with Group(case, lowering, asked) as group:
        plain = group.start("no offload", "plain", None)
        plain.step()
        found = plain.ask("facts")
        fixed = 2 * found["weight_bytes"]
        memory = fixed + int(share * max(found["peak_bytes"] - fixed, 0))
        for name, (kind, otherwise) in VARIANTS.items():
            if not (every or name in WITH_LESS):
                continue
            group.start(name, kind, None if kind == "checkpoint" else memory, **otherwise)
        children = group.run()
    for name, way in WAYS.items() if case == "gpt" and every else ():
        with Group(case, lowering, asked) as group:
            group.start(f"no offload, {name}", "plain", None, **way)
            group.start(f"block by block, {name}", "blocks", memory, **way)
            children += group.run()
    return children


def table(children: list[Child]) -> list[str]:
    plain, whole = children[0], next(child for child in children if child.kind == "ours")
    times = ("step, s", "× plain", "× whole", "settled × plain", "settled × whole")
    moves = ("out", "in", "planned out", "found", "back")
    heads = ("variant", *times, "first peak", "peak", *moves, "losses")
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for child in children:
        fact, moved, back = child.facts, ["", ""], ""
        if child.kind == "plain":
            plain = child  # of those that follow
        elif child.kind != "checkpoint":
            steps = len(child.all_losses)
            moved = [f"{fact[n] / steps / MIB:,.0f}" for n in ("bytes_out", "bytes_in")]
            back = f"{fact['heap_trims'] / steps:.1f}"
        ours = child is not plain
        cells = (
            child.name,
            f"{statistics.median(child.seconds):.2f}",
            *_ratios(child, plain, whole if plain is children[0] else None, 0),
            *_ratios(child, plain, whole if plain is children[0] else None, SETTLING_ROUNDS),
            f"{child.warm_facts['peak_bytes'] / MIB:,.0f}",
            f"{fact['peak_bytes'] / MIB:,.0f}",
            *moved,
            _planned(fact),
            _found(child),
            back,
            ("same" if child.losses == plain.losses else "other") if ours else "",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _ratios(child: Child, plain: Child, whole: Child | None, first: int) -> tuple[str, str]:
    """Show the step from round `first` on over plain training's and over the whole graph's."""
    if child is plain or len(child.steps) <= first:
        return "", ""
    over_whole = "" if whole is None else f"{ratio(child, whole, first):.3f}"
    return f"{ratio(child, plain, first):.3f}", over_whole


def _planned(fact: dict[str, Any]) -> str:
    """Show the bytes that the plan of the whole step evicts, and all that graphs save."""
    if "saved_bytes" not in fact:
        return ""
    return f"{fact['planned_out_bytes'] / MIB:,.0f} of {fact['saved_bytes'] / MIB:,.0f}"


def _found(child: Child) -> str:
    """The share of tensors that backward found on the device, in the steps after the first few."""
    seen = [step["ahead"] for step in child.steps if step.get("ahead")]
    if len(seen) <= LEARNING_ROUNDS:
        return ""
    since = {name: n - seen[LEARNING_ROUNDS - 1][name] for name, n in seen[-1].items()}
    wanted = sum(since.values())
    if not wanted:
        return ""
    late = f", {since['late'] / wanted:.0%} on their way" if since["late"] else ""
    return f"{since['hits'] / wanted:.0%}{late}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, print only")
    parser.add_argument("--case", choices=["gpt", "resnet"], action="append")
    parser.add_argument("--lowering", choices=LOWERINGS, action="append")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--spill", default="/var/tmp", help="directory on a disk")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    # imports torch and the models
    from benchmarks import activations_child

    if asked.child:
        activations_child.serve(json.loads(asked.child))
        return
    cases = activations_child.QUICK_CASES if asked.quick else activations_child.CASES
    sections = []
    for case in asked.case or ("gpt",):
        for lowering in asked.lowering or ("aot_eager",):
            for share in SHARES:
                title = f"{cases[case].title}; {lowering}; {share:.0%} of activations"
                print(title, file=sys.stderr, flush=True)
                children = measure(case, lowering, share, asked)
                budget = next(m for child in children if (m := child.task["memory"]))
                title += f", budget {budget / MIB:,.0f} MiB"
                sections += [f"## {title}", "", *table(children), ""]
    text = TEXT.format(
        rounds=asked.rounds,
        settling=SETTLING_ROUNDS,
        shares=" or ".join(f"{share:.0%}" for share in SHARES),
        sections="\n".join(sections),
        machine=machine(),
    )
    print(text)
    if not asked.quick:
        RESULT.write_text(text)


TEXT = """\
# Graphs that share a budget

Training steps (forward, backward, plain SGD) of one model under one budget (weights, gradients and
{shares} of what plain training holds beside them), compiled as one graph, with two graph
breaks, and block by block (`block.compile(…)` for each: one compiled graph with as many sets of
weights as there are blocks). Inside a graph moves are planned. Between graphs the keeper decides
while running, by what it has learnt of their order, until a step has come again: from then on the
step is planned as one. Checkpointing has no budget and runs in one graph.

"Three lengths": batches of the whole length, three quarters and half of it in turn. "Experts": the
data choose which block runs next. Both are compared with plain training of the same steps.

Each variant is a process of its own; those up to the next "no offload" run one step each in turn,
{rounds} rounds. Ratios are medians over the rounds of two steps of the same round; "settled": over
the rounds after the first {settling}, once the plan of the step changes no more. Peak memory (MiB)
is what the operating system measured, less what the process held before the model; "first peak":
that of the first step, which compiles and plans. "out", "in": MiB a step, the first steps included,
in which the order is learnt. "planned out": MiB that the last plan of the whole step lets leave, of
all that graphs save for each other. "found": tensors that backward wanted and found on the device,
from the fifth step on. "back": how often a step the pages of free blocks went back to the system,
to be touched again, the first steps included. "losses": of the first two steps, against plain
training.

{sections}
Machine: {machine}.
"""

if __name__ == "__main__":
    main()
