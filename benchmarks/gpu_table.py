"""The table of `benchmarks.gpu`, made from what it wrote down: `python -m benchmarks.gpu_table
gpu.json` makes it again."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

MIB = 1 << 20
HEADS = (
    *("variant", "step, ms", "× plain", "peak, MiB", "of plain", "reserved", "budget", "planned"),
    *("out; again", "waited, ms", "planned time", "compile, s"),
)
Row = dict[str, Any]


def table(rows: list[Row]) -> list[str]:
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    return lines + ["| " + " | ".join(cells(row, rows[0])) + " |" for row in rows]


def cells(row: Row, plain: Row) -> list[str]:
    if row.get("note") or not row.get("rounds"):
        said = row.get("note") or "no round was reached in the time given"
        return [row["name"], said.replace("|", "/"), *[""] * (len(HEADS) - 2)]
    facts, median = row["facts"], statistics.median(row["rounds"])
    beside = statistics.median(row["beside_plain"]) if row["beside_plain"] else 1.0
    share = facts["peak_bytes"] / plain["facts"]["peak_bytes"] if plain.get("facts") else 0.0
    reserved = mib(facts["reserved_bytes"]) if "reserved_bytes" in facts else ""
    return [
        row["name"],
        f"{median:.1f}",
        f"{beside:.3f}",
        mib(facts["peak_bytes"]),
        f"{share:.0%}" if share else "",
        reserved,
        *mine(row, median),
        f"{row['compile_seconds']:.0f}",
    ]


def mine(row: Row, median_ms: float) -> list[str]:
    """Cells that only our rows have: budget, planned peak, traffic, waits, the plan's time."""
    facts = row["facts"]
    if "budget_bytes" not in facts:
        return [""] * 5
    counters, steps = facts["counters"], facts["counted_steps"]
    planned = facts["planned_us"] / 1e3
    return [
        mib(facts["budget_bytes"]) + (" (floor)" if facts["at_floor"] else ""),
        mib(facts["planned_peak_bytes"]),
        f"{mib(counters['bytes_out'] / steps)}; {facts['ops_again']}",
        f"{counters['wait_us'] / steps / 1e3:.1f}",
        f"{planned:.1f} ({planned / median_ms:.2f} ×)",
    ]


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f}"


def loss_lines(rows: list[Row]) -> list[str]:
    """How far each row's losses are from plain's, step by step."""
    plain, said = rows[0].get("losses") or [], []
    for row in rows[1:]:
        pairs = list(zip(row.get("losses") or [], plain, strict=False))
        if pairs:
            far = max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
            said.append(f"{row['name']} {'same' if far == 0 else f'{far:.1e}'}")
    return [f"Largest distance of a loss from plain's: {'; '.join(said)}."] if said else []


def largest_lines(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = ["## Largest batch of the ResNet; aot_eager", ""]
    plain = rows[0]["largest"]
    for row in rows:
        cap = f" on {row['cap_bytes'] / MIB:,.0f} MiB of the card" if row["cap_bytes"] else ""
        times = f", {row['largest'] / plain:.1f} × plain" if plain and row is not rows[0] else ""
        limit = "" if row.get("ended") else " at least; the search was ended by its limits"
        note = f" ({row['note']})" if row.get("note") else ""
        said = f"{row['largest']}{times}{limit}{note}"
        lines.append(f"- {row['kind']}{cap}: {said}")
    return [*lines, ""]


def text_of(found: dict[str, Any]) -> str:
    sections = []
    for case, rows in found["cases"].items():
        sections += [f"## {case}", "", *table(rows), "", *loss_lines(rows), ""]
    sections += largest_lines(found["largest"])
    machine = found["machine"]
    where = (
        f"{machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda']}"
        if machine["gpu"]
        else "no GPU"
    )
    versions = f"torch {machine['torch']}, Triton {machine['triton']}, Python {machine['python']}"
    warning = WARNING if found["cpu_check"] or found["quick"] else ""
    remarks = "".join(f"\n{remark}\n" for remark in found.get("remarks", ()))
    return TEXT.format(
        warning=warning,
        sections="\n".join(sections) + remarks,
        machine=f"{where}, {machine['cores']} cores, {versions}; {found['seconds']:.0f} s in all",
    )


WARNING = "\n**Tiny models, to see that the code runs: the figures mean nothing.**\n"
TEXT = """\
# Training on a GPU
{warning}
Training steps (forward, backward, plain SGD; bf16; Inductor). Each variant is a process of its own
with its own allocator; variants that fit the card together run in turns, plain among them. `step`
is the median over the rounds of the mean of several steps on end, by CUDA events; `× plain` the
median of the ratios to plain in the same round. `peak` is what the caching allocator gave out at
most (`max_memory_allocated`, workspaces of libraries included), `reserved` what it took of the card
(`max_memory_reserved`). Budgets of ours are shares of plain's peak; (floor): no plan can do with
that, so it is the least that one can. `planned`: the plan's peak. `out; again`: MiB that left per
step, and ops that ran twice. `waited`: what the host waited for copies, per step.
`planned time`: the plan's step, and its share of the measured one. `compile`: until two steps had
run, several variants side by side; the first of ours also measures ops.

- torch offload: `torch._functorch.config.enable_activation_offloading` with every saved tensor of
  1 MiB and more marked; streams: with its separate stream, sunk waits and prefetching too.
- `save_on_cpu(pin_memory=True)` around the compiled forward; it takes saved weights along.
- `weights` is a model of which weights and gradients are nearly all: budgets are below them, so
  they live in pinned host memory. "load all, then compute" is our runtime under the schedule of
  ZeRO-Offload: no op starts before all weights are there. SGD works on them where they lie.
- `optimizer` trains with AdamW: plain has torch's fused one on the card, its gradients and states
  there; our optimizer has states where the plan puts them, and updates while backward computes.
  Masters are float32 copies of the bfloat16 weights; without them it computes what torch's does.
- checkpoint per block: `torch.utils.checkpoint`, not reentrant, compiled.

{sections}
Machine: {machine}.
"""

if __name__ == "__main__":
    print(text_of(json.loads(Path(sys.argv[1]).read_text())))
