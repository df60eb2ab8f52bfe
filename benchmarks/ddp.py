"""Data-parallel training on two ranks: how long a step takes, what a rank holds, what a link costs.

Run `python -m benchmarks.ddp` (`--quick`: small, print only) for the tables in `results/`. Both
ranks run on this machine over gloo, with a core each. Variants take steps in turn, so compare
ratios, not seconds. For the second table a collective takes as long as over a link of 0.05 GB/s in
every other step, which is simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.turns import MIB, machine
from offcompile.runtime.memory.malloc.launch import environment

RESULT = Path(__file__).parent / "results" / "ddp.md"
WORLD = 2
#: share of the plain run's peak that the others get
SHARE = 2 / 3
#: name → who compiles, whose AdamW updates, and its arguments
PLAIN = "DDP"
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {"kind": "plain"},
    "DDP, blocks checkpointed": {"kind": "checkpoint"},
    "offcompile, torch's AdamW": {"kind": "ours"},
    "offcompile, its AdamW in backward": {"kind": "ours", "how": {"overlap": True}},
    "the same, states shared out": {"kind": "ours", "how": {"overlap": True, "sharded": True}},
}
LINK_GBPS = 0.05


@dataclass(eq=False)
class Pair:
    """Two ranks of one variant, warmed up and waiting."""

    name: str
    task: dict[str, Any]
    steps: list[list[dict[str, Any]]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=self.task["spill"])
        found = environment(os.environ) | {"OMP_NUM_THREADS": "1"}
        told = self.task | {"world": WORLD, "folder": self._folder.name}
        command = [sys.executable, "-m", "benchmarks.ddp_child", json.dumps(told)]
        self._ranks = [
            subprocess.Popen(
                [*command, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=found,
            )
            for rank in range(WORLD)
        ]
        self.warm = self.ask("warm")
        print(f"  {self.name}: ready", file=sys.stderr, flush=True)

    def ask(self, what: str) -> list[dict[str, Any]]:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(what + "\n")
            rank.stdin.flush()
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(lines):
            self.end()
            raise SystemExit(f"a rank of {self.name} has failed")
        return [json.loads(line) for line in lines]

    def step(self, link: bool) -> None:
        self.steps.append(self.ask("slow" if link else "step"))

    def end(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait()
        self._folder.cleanup()

    @property
    def seconds(self) -> list[float]:
        """A step is over when the slower rank's is."""
        return [max(rank["seconds"] for rank in step) for step in self.steps]

    @property
    def losses(self) -> list[list[float]]:
        return [[rank["loss"] for rank in step] for step in self.steps]

    def most(self, name: str) -> Any:
        return max(rank[name] for rank in self.facts)

    def over(self, other: Pair) -> float:
        """Median over the rounds of its step over the other's."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(a / b for a, b in pairs)

    def link_costs(self) -> list[float]:
        """What the link adds to every other step, over those before and after it."""
        s = self.seconds
        return [s[i] - (s[i - 1] + s[i + 1]) / 2 for i in range(1, len(s) - 1, 2)]


def budget_bytes(plain: Pair, task: dict[str, Any]) -> int:
    """What is left for a rank's graph beside the states, which do not count against its budget."""
    states_bytes = 2 * plain.warm[0]["weight_bytes"]
    if task.get("how", {}).get("sharded"):
        states_bytes //= WORLD
    return int(SHARE * max(rank["peak_bytes"] for rank in plain.warm)) - states_bytes


def taken_in_turn(names: Sequence[str], task: dict[str, Any], link: bool) -> list[Pair]:
    """Run the variants in turn; with `link`, over it in every other step."""
    pairs: list[Pair] = []
    try:
        for name in names:
            told = task | VARIANTS[name] | {"link": link, "memory": None}
            if pairs:
                told["memory"] = budget_bytes(pairs[0], told)
            pairs.append(Pair(name, told))
        for turn in range(task["rounds"]):
            for pair in pairs if turn % 2 == 0 else reversed(pairs):
                pair.step(link and turn % 2 == 1)
        for pair in pairs:
            pair.facts = pair.ask("facts")
    finally:
        for pair in pairs:
            pair.end()
    return pairs


def memory_rows(pairs: Sequence[Pair]) -> list[str]:
    plain = pairs[0]
    lines = [
        "| | step, s | × DDP | rank holds, MiB | of DDP's | moved, MiB a step | losses |",
        "|---|---|---|---|---|---|---|",
    ]
    for pair in pairs:
        peak_bytes, moved_bytes = pair.most("peak_bytes"), pair.most("bytes_out")
        cells = (
            pair.name,
            f"{statistics.median(pair.seconds):.2f}",
            "" if pair is plain else f"**{pair.over(plain):.3f}**",
            f"{peak_bytes / MIB:,.0f}",
            "" if pair is plain else f"{peak_bytes / plain.most('peak_bytes'):.0%}",
            f"{moved_bytes / MIB:,.0f}" if moved_bytes else "",
            "" if pair is plain else "same" if pair.losses == plain.losses else "OTHER",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def link_rows(pairs: Sequence[Pair]) -> list[str]:
    plain = pairs[0]
    lines = ["| | step, s | the link adds, s | of its time |", "|---|---|---|---|"]
    link_s = plain.most("weight_bytes") / LINK_GBPS / 1e9
    for pair in pairs:
        here, added = statistics.median(pair.seconds[::2]), statistics.median(pair.link_costs())
        if pair.losses != plain.losses:
            raise SystemExit(f"losses of {pair.name} are not those of {plain.name}")
        lines.append(f"| {pair.name} | {here:.2f} | **{added:.3f}** | {added / link_s:.0%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small, print only")
    parser.add_argument("--rounds", type=int, default=19)
    parser.add_argument("--spill", default="/var/tmp", help="directory on a disk")
    asked = parser.parse_args()
    rounds = 3 if asked.quick else asked.rounds
    task = {"spill": asked.spill, "rounds": rounds, "layers": 2 if asked.quick else 8}
    large = task | ({"width": 64, "batch": [1, 64]} if asked.quick else LARGE)
    small = task | ({"width": 64, "batch": [1, 64]} if asked.quick else SMALL)
    small["rounds"] = 2 * rounds + 1
    memory = taken_in_turn(list(VARIANTS), large, link=False)
    link = taken_in_turn([name for name in VARIANTS if "check" not in name], small, link=True)
    text = TEXT.format(
        large=memory[0].facts[0]["title"],
        weights=memory[0].most("weight_bytes") / MIB,
        budget=memory[-1].task["memory"] / MIB,
        memory_rows="\n".join(memory_rows(memory)),
        rounds=rounds,
        small=link[0].facts[0]["title"],
        sent=link[0].most("weight_bytes") / MIB,
        link_s=link[0].most("weight_bytes") / LINK_GBPS / 1e9,
        rate=LINK_GBPS,
        link_rows="\n".join(link_rows(link)),
        machine=machine(),
        load=os.getloadavg()[0],
    )
    print(text)
    if not asked.quick:
        RESULT.write_text(text)


LARGE = {"width": 512, "batch": [2, 512]}
#: a batch whose backward takes as long as its gradients do over the link: more cannot hide there
SMALL = {"width": 256, "batch": [6, 256]}

TEXT = """\
# Two ranks

Two ranks with a core each, over gloo, lowered with `aot_eager`: DistributedDataParallel, with all
its defaults, around a compiled model; AdamW.

## {large}

{weights:,.0f} MiB of weights. Where offcompile compiles, a rank gets two thirds of what it holds
under plain DDP. Of this its budget is what AdamW's states leave, which do not count against it
(with shared states {budget:,.0f} MiB). AdamW is torch's fused one, or `offcompile.optim.AdamW` with
`overlap=True`, which updates a weight while backward goes on, once ranks have reduced its gradient.

{memory_rows}

A step is forward, backward, update and `zero_grad`, of the slower rank; ratios are medians over
{rounds} rounds of a step of each kind. "Rank holds" is by the system's account, at most, less what
the process held before the model.

## {small}, over a link of {rate} GB/s

Gradients of {sent:,.0f} MiB take {link_s:.2f} s over the link. Ranks reduce
them as if on two machines. In every other step each all-reduce is real, and over no sooner than
there; in the others, it is over when this machine is through. "The link adds" is the median over
{rounds} steps of what such a step takes beyond the mean of its neighbours. Losses are the same.

{link_rows}

Machine: {machine}; load average {load:.0f} when it ended.
"""

if __name__ == "__main__":
    main()
