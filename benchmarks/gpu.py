"""Training on a GPU within a budget: offcompile beside what PyTorch has for the same end.

`python -m benchmarks.gpu` writes `results/gpu.md` and `gpu.json`. Every variant is a process of its
own; those that fit the card together run in turns, plain among them in every such block. Rows that
the time given does not reach are left out, and said to be. `--cpu-check` runs the same code with
tiny models on the CPU target, to see that it works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.bare import NEEDED as NEEDED_PACKAGES
from benchmarks.bare import driver, environment, missing
from benchmarks.gpu_process import Child, Failed, Variant, say
from benchmarks.gpu_table import text_of
from offcompile.machine.cost_cache import cache_folder

RESULTS = Path(__file__).parent / "results"
#: parts in their order, and how the time is shared out among those that are left
PARTS = {"gpt-1.3b": 4, "optimizer": 3, "weights": 2, "resnet": 2, "gpt-124m": 2, "largest": 2}
CASES = tuple(PARTS)[:-1]
GIB = 1 << 30
#: steps on end that are timed together, and what they take at least
MOST_STEPS, LEAST_MS = 10, 900.0
#: shares of the card and of the machine for all processes of a block together
DEVICE_SHARE, HOST_SHARE = 0.95, 0.7
#: between two looks at whether the first process has measured its ops
LOOK_SECONDS = 0.2
#: a CUDA context, libraries and their workspaces
CONTEXT_BYTES = 3 * GIB // 2
#: the card that the search for the largest batch pretends to have, and what it may move to
CAP_BYTES, CAP_HOST_BYTES = 4 * GIB, 32 * GIB
#: bytes of that card that libraries take, and that are lost between blocks
CAP_SLACK_BYTES = GIB // 2


def ours(share: float) -> Variant:
    # a budget under the floor becomes the floor, which is a guess here
    return Variant(f"ours, {share:.0%}", "ours", share, max(share, 0.3) + 0.1, 1.3 * (1 - share))


PLAIN = Variant("plain", "plain")
#: in the order in which they are dropped last; host memory of torch's pinning is powers of two
VARIANTS = (
    Variant("checkpoint per block", "checkpoint", device_share=0.35),
    ours(0.5),
    ours(0.25),
    replace(ours(0.5), name="ours, 50%, CUDA graphs", cudagraphs=True),
    Variant("torch offload, streams", "torch offload, streams", host_share=2.0),
    Variant("activation_memory_budget 0.5", "torch budget", 0.5),
    ours(0.75),
    ours(0.12),
    Variant("save_on_cpu, pinned", "save_on_cpu", host_share=2.5),
    Variant("torch offload", "torch offload", host_share=2.0),
    Variant("activation_memory_budget 0.2", "torch budget", 0.2),
)
LOAD_ALL = "hybrid_access:variant=load_all"


def on_host(share: float, load_all: bool = False) -> Variant:
    """Budgets below what weights and gradients take."""
    name, policy = ("load all, then compute", LOAD_ALL) if load_all else ("ours", None)
    return Variant(f"{name}, {share:.0%}", "ours", share, share + 0.1, 1.5, policy)


#: variants of the case whose weights and gradients are nearly all there is
WEIGHT_VARIANTS = (
    on_host(0.4),
    on_host(0.4, load_all=True),
    on_host(0.2),
    on_host(0.2, load_all=True),
    Variant("torchao, gradients and optimizer", "torchao", host_share=2.0),
    Variant("DeepSpeed ZeRO-3, all offloaded", "deepspeed", host_share=4.0),
)
#: variants with AdamW: states where the plan has them, or on the host; updates beside backward.
#: Plain graphs bring their gradients when they are over; ours, with a budget to keep, one by one
OPTIMIZER_VARIANTS = (
    Variant("our optimizer, 50%", "ours", 0.5, 0.55, 1.0),
    Variant("our optimizer, 35%", "ours", 0.35, 0.4, 1.0),
    Variant("our optimizer, 50%, states on the host", "ours", 0.5, 0.55, 1.0, states="host"),
    Variant("our optimizer, plain graphs", "optimizer", host_share=1.0, states="host"),
    Variant("torchao, AdamW and gradients", "torchao, AdamW", host_share=1.5),
    Variant("our optimizer, 50%, masters", "ours", 0.5, 0.55, 1.5, masters=True),
)
OF_CASE = {"weights": WEIGHT_VARIANTS, "optimizer": OPTIMIZER_VARIANTS}
NAMES = tuple(v.name for v in (*VARIANTS, *WEIGHT_VARIANTS, *OPTIMIZER_VARIANTS))


@dataclass
class Measurement:
    """All variants of one model."""

    case: str
    asked: argparse.Namespace
    env: dict[str, str]
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> list[dict[str, Any]]:
        plain = self.start(PLAIN, None)
        try:
            plain.tell("warm")
            self.ready([plain])
            if plain.note:
                self.rows.append(plain.row())
                return self.rows
            count = self.steps_on_end(plain)
            facts = plain.ask("facts", self.deadline)
            for block in self.blocks(self.chosen(), facts):
                self.block(plain, block, facts["peak_bytes"], count)
            plain.facts = plain.ask("facts", time.monotonic() + 60)
        except Failed as error:
            plain.note = str(error)
        finally:
            plain.end()
        self.rows.insert(0, plain.row())
        return self.rows

    def chosen(self) -> list[Variant]:
        known = OF_CASE.get(self.case, VARIANTS)
        return [v for v in known if not self.asked.variant or v.name in self.asked.variant]

    def steps_on_end(self, plain: Child) -> int:
        found = plain.ask("steps 2", self.deadline)
        plain.losses += found["losses"]
        least_ms = 1.0 if self.asked.cpu_check else LEAST_MS
        return max(1, min(MOST_STEPS, round(least_ms / found["ms"])))

    def start(self, variant: Variant, plain_bytes: int | None) -> Child:
        memory = None
        if variant.kind == "ours" and plain_bytes is not None:
            memory = int(variant.share * plain_bytes)
        task = {
            "case": self.case,
            "kind": variant.kind,
            "share": variant.share,
            "memory": memory,
            "device": "cpu" if self.asked.cpu_check else "cuda",
            "tiny": self.asked.cpu_check or self.asked.quick,
            "lowering": "aot_eager" if self.asked.cpu_check else "inductor",
            "spill": self.asked.spill,
            "hardware": self.asked.hardware,
            "policy": variant.policy or self.quick_policy,
            "masters": variant.masters,
            "states": variant.states,
            "cudagraphs": variant.cudagraphs,
            "host_memory": int(HOST_SHARE * self.asked.host_gib * GIB) or None,
        }
        return Child(variant, task, self.env)

    @property
    def quick_policy(self) -> str | None:
        """Where figures mean nothing, one that plans at once."""
        if not self.asked.cpu_check:
            return None
        return "hybrid_access" if self.case in OF_CASE else "activation_spill"

    def blocks(self, variants: Iterable[Variant], facts: dict[str, Any]) -> Iterator[list[Variant]]:
        """Variants that fit together beside plain; a row that comes first is measured first."""
        peak = facts["peak_bytes"]
        device_left = DEVICE_SHARE * (facts["free_bytes"] if "free_bytes" in facts else 64 * GIB)
        host_left = HOST_SHARE * (self.asked.host_gib * GIB or available_bytes())
        waiting = list(variants)
        while waiting:
            block: list[Variant] = []
            device, host = device_left, host_left
            for variant in list(waiting):
                device_takes = variant.device_share * peak + CONTEXT_BYTES
                host_takes = variant.host_share * peak
                # one that fits nowhere runs alone: its failure says why
                if not block or (device_takes <= device and host_takes <= host):
                    device, host = device - device_takes, host - host_takes
                    block.append(variant)
                    waiting.remove(variant)
            yield block

    def block(self, plain: Child, block: list[Variant], plain_bytes: int, count: int) -> None:
        children: list[Child] = []
        try:
            # the first of ours measures ops, and the others of ours find what it measured; by a
            # profile that is named nothing is measured
            others = [] if self.asked.hardware else [v for v in block if v.kind == "ours"][1:]
            for together in ([v for v in block if v not in others], others):
                if together and time.monotonic() < self.deadline:
                    began = time.time()
                    started = [self.start(v, plain_bytes) for v in together]
                    children += started
                    for child in started:
                        child.tell("warm")
                    if together is not others:
                        self.measured(started, began)
            self.ready(children)
            self.turns(plain, [c for c in children if not c.note], count)
        finally:
            for child in children:
                child.end()
        begun = {c.variant for c in children}
        dropped = [v for v in block if v not in begun]
        self.rows += [c.row() for c in sorted(children, key=lambda c: block.index(c.variant))]
        self.rows += [
            {"name": v.name, "kind": v.kind, "note": "not reached in the time given"}
            for v in dropped
        ]

    def measured(self, children: list[Child], began: float) -> None:
        """Wait until one of ours has kept what its ops took, or has answered."""
        ours = [c for c in children if c.variant.kind == "ours"]
        while time.monotonic() < self.deadline and not any(c.has_answered() for c in ours):
            kept = cache_folder().glob("costs-*.json")
            if any(path.stat().st_mtime >= began for path in kept):
                return
            time.sleep(LOOK_SECONDS)

    def ready(self, children: list[Child]) -> None:
        for child in children:
            try:
                warm = child.answer(self.deadline)
            except Failed as error:
                child.note = str(error)
                child.end(1.0)
            else:
                child.losses, child.compile_seconds = warm["losses"], warm["seconds"]
            say(f"  {child.variant.name}: {child.note or f'ready, {child.compile_seconds:.0f} s'}")

    def turns(self, plain: Child, children: list[Child], count: int) -> None:
        for turn in range(self.asked.rounds):
            if turn and time.monotonic() > self.deadline:
                break
            # the first and last of a round see the machine as the others leave it: so alternate
            order = [plain, *children]
            for child in order if turn % 2 == 0 else reversed(order):
                if child.note:
                    continue
                try:
                    # a round that has begun is ended: steps are short
                    found = child.ask(f"steps {count}", time.monotonic() + 60)
                except Failed as error:
                    child.note = str(error)
                    if child is plain:
                        raise
                else:
                    child.rounds.append(found["ms"])
                    child.losses += found["losses"]
            for child in children:
                if not child.note:
                    child.beside_plain.append(child.rounds[-1] / plain.rounds[-1])
        for child in children:
            if not child.note:
                try:
                    child.facts = child.ask("facts", time.monotonic() + 60)
                except Failed as error:
                    child.note = str(error)


def search(asked: argparse.Namespace, env: dict[str, str], deadline: float) -> list[dict[str, Any]]:
    """The largest batch of the deep conv net on a card of `CAP_BYTES`, plain and ours."""
    rows: list[dict[str, Any]] = []
    for kind in ("plain", "ours"):
        known = rows[0]["largest"] if rows else 0
        task = {
            "case": "resnet",
            "kind": kind,
            "memory": None if kind == "plain" else CAP_BYTES - CAP_SLACK_BYTES,
            "device": "cpu" if asked.cpu_check else "cuda",
            "tiny": asked.cpu_check or asked.quick,
            # compiled anew for each batch: the lowering that compiles fast
            "lowering": "aot_eager",
            "spill": asked.spill,
            "hardware": asked.hardware,
            "host_memory": None if kind == "plain" else CAP_HOST_BYTES,
            "cap_bytes": None if asked.cpu_check else CAP_BYTES,
        }
        start, most = (4 * known, 64 * known) if known else (8, 1 << 14)
        if asked.cpu_check:  # nothing bounds it there: two sizes will do
            start, most = 8, 16
        left = deadline - time.monotonic()
        seconds = left * (0.25 if kind == "plain" else 0.9)
        row: dict[str, Any] = {"kind": kind, "cap_bytes": task["cap_bytes"], "largest": 0}
        if seconds < 1:
            rows.append(row | {"note": "not reached in the time given"})
            continue
        child = Child(Variant(f"largest batch, {kind}", kind), task, env)
        try:
            answer = child.ask(f"largest {start} {most} {int(seconds)}", deadline)
            while "so_far" in answer:
                row["largest"] = answer["so_far"]
                answer = child.answer(deadline)
            row |= answer
        except Failed as error:
            row["note"] = str(error)
        finally:
            child.end()
        say(f"  largest batch, {kind}: {row['largest']} {row.get('note', '')}")
        rows.append(row)
    return rows


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say how much memory is available")


def machine(env: dict[str, str]) -> dict[str, Any]:
    child = Child(Variant("machine", "machine"), {"kind": "machine"}, env)
    try:
        return child.answer(time.monotonic() + 120) | {"driver": driver()}
    finally:
        child.end()


def main() -> int:
    asked = arguments()
    if asked.child:
        # the child's module imports torch and the models, which the parent does without
        from benchmarks.gpu_child import serve

        serve(json.loads(asked.child))
        return 0
    if absent := missing(NEEDED_PACKAGES):
        print("\n".join(absent))
        return 1
    began = time.monotonic()
    with environment() as env:
        # several children compile side by side, each with workers of its own
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
        found: dict[str, Any] = {"machine": machine(env), "cases": {}, "largest": []}
        if found["machine"]["gpu"] is None and not asked.cpu_check:
            print(
                "No CUDA device here. On one, this would train "
                f"{', '.join(asked.case or CASES)} as {PLAIN.name}, "
                f"{', '.join(v.name for v in VARIANTS)}, and search for the largest batch of the "
                "ResNet. --cpu-check runs the same code on the CPU with tiny models."
            )
            return 0
        parts = [*(asked.case or CASES), *([] if asked.no_search else ["largest"])]
        for n, part in enumerate(parts):
            now = time.monotonic()
            left = began + asked.seconds - now
            deadline = now + left * PARTS[part] / sum(PARTS[p] for p in parts[n:])
            say(f"{part}: {deadline - now:.0f} s")
            if part == "largest":
                found["largest"] = search(asked, env, deadline)
            else:
                found["cases"][part] = Measurement(part, asked, env, deadline).run()
    found["seconds"] = time.monotonic() - began
    found["cpu_check"], found["quick"] = asked.cpu_check, asked.quick
    text = text_of(found)
    print(text)
    folder = asked.output or (None if asked.cpu_check or asked.quick else RESULTS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu.md").write_text(text)
        (folder / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny models, print only")
    parser.add_argument("--cpu-check", action="store_true", help="tiny models on the CPU target")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--variant", choices=NAMES, action="append")
    parser.add_argument("--no-search", action="store_true", help="no search for the largest batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300.0, help="for everything (default 300)")
    parser.add_argument("--spill", help="directory on a disk (default: the temporary directory)")
    parser.add_argument(
        "--host-gib", type=float, default=0.0, help="RAM, where /proc/meminfo does not tell all"
    )
    parser.add_argument("--hardware", help="plan by this profile or file; nothing is measured")
    parser.add_argument("--output", type=Path, help="folder for gpu.md and gpu.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
