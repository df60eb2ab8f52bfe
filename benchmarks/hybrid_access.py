"""MemFerry's forward modes against the exact ones, and the gradient reserve against its optimum.

    python benchmarks/hybrid_access.py

Writes `benchmarks/results/hybrid_access.md`.
"""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from offcompile.passes.gradient_reserve import reserve_dp, reserve_exact, reserve_ratio
from offcompile.passes.select.hybrid_modes import (
    VARIANTS,
    LayerTimes,
    choose_dfgb,
    choose_dfgb_exact,
    exact,
)

RESULT = Path(__file__).parent / "results" / "hybrid_access.md"
KIB, MIB = 1 << 10, 1 << 20


def layers(rng: random.Random, count: int, family: str) -> list[LayerTimes]:
    """Loads of 0.1 to 5 ms, compute of 0.1 to 3 ms, up to 0.3 ms between layers.

    In place a layer takes 0.3 to 1.5 times its load longer ("by load"), or anything up to three
    times its compute and 2 ms ("by compute").
    """
    found = []
    for _ in range(count):
        load, compute = rng.randint(100_000, 5_000_000), rng.randint(100_000, 3_000_000)
        if family == "by load":
            direct = compute + int(load * rng.uniform(0.3, 1.5))
        else:
            direct = rng.randint(compute, 3 * compute + 2_000_000)
        found.append(LayerTimes(load, compute, direct, rng.randint(0, 300_000)))
    return found


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def forward_rows(instances: int) -> list[str]:
    rows = []
    for family in ("by load", "by compute"):
        rng = random.Random(1)
        cases = [layers(rng, 12, family) for _ in range(instances)]
        best = [VARIANTS["exact"](x).end_ns for x in cases]
        deep = {count: layers(random.Random(count), count, family) for count in (48, 200)}
        for name, choose in VARIANTS.items():
            gaps = [choose(x).end_ns / b - 1 for x, b in zip(cases, best, strict=True)]
            timed = [f"{seconds(partial(choose, x)):.3f}" for x in deep.values()]
            cells = [
                family,
                name,
                f"{100 * sum(gaps) / len(gaps):.1f}%",
                f"{100 * max(gaps):.1f}%",
                f"{sum(g == 0 for g in gaps)} of {instances}",
                *timed,
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def quantum_rows() -> list[str]:
    """Thinned fronts at 200 layers: time, and what they lose."""
    case = layers(random.Random(200), 200, "by load")
    best = exact(case)
    assert best is not None
    rows = []
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        ("exact", {}),
        ("quantum 0.05 ms over all layers", {"quantum_ns": 250}),
        ("quantum 0.05 ms a layer", {"quantum_ns": 50_000}),
        ("1,000 points", {"most": 1000}),
        ("500 points", {"most": 500}),
    )
    for label, options in asked:
        found = exact(case, **options)
        assert found is not None
        spent = seconds(partial(exact, case, **options))
        rows.append(f"| {label} | {(found.end_ns - best.end_ns) / 1e6:.3f} | {spent:.3f} |")
    return rows


def dfgb_row(instances: int) -> str:
    rng = random.Random(3)
    losses = []
    for _ in range(instances):
        case = layers(rng, 12, "by load")
        window = sum(x.load_ns for x in case) // 3
        best = choose_dfgb_exact(case, 0, 4_000_000, window).end_ns
        losses.append(choose_dfgb(case, 0, 4_000_000, window).end_ns / best - 1)
    mean, worst = 100 * sum(losses) / len(losses), 100 * max(losses)
    return f"mean {mean:.2f}%, max {worst:.2f}%"


Case = tuple[Sequence[int], Sequence[int], int]


def reserve_case(rng: random.Random) -> Case:
    """200 gradients of 1 to 64 MiB; gains partly proportional to bytes; 10 to 90% may stay."""
    sizes = [rng.randint(MIB, 64 * MIB) for _ in range(200)]
    gains = [s // 12 + rng.randint(0, 2_000_000) for s in sizes]
    return sizes, gains, int(rng.uniform(0.1, 0.9) * sum(sizes))


def reserve_rows(instances: int) -> list[str]:
    rng = random.Random(4)
    cases = [reserve_case(rng) for _ in range(instances)]
    best = [_worth(reserve_exact(*case), case) for case in cases]
    methods: dict[str, Callable[..., frozenset[int]]] = {"ratio, exchanges": reserve_ratio}
    for label, quantum in (
        ("128 KiB", 128 * KIB),
        ("256 KiB", 256 * KIB),
        ("1 MiB", MIB),
        ("8 MiB", 8 * MIB),
        ("64 MiB", 64 * MIB),
    ):
        methods[f"table, {label}"] = partial(reserve_dp, quantum=quantum, fill=False)
        methods[f"table, {label}, filled"] = partial(reserve_dp, quantum=quantum)
    methods["table, default (filled)"] = reserve_dp
    methods["exact"] = reserve_exact
    rows = []
    for name, choose in methods.items():
        began = time.perf_counter()
        losses = [1 - _worth(choose(*c), c) / b for c, b in zip(cases, best, strict=True)]
        spent = (time.perf_counter() - began) / len(cases)
        mean = 100 * sum(losses) / len(losses)
        rows.append(f"| {name} | {mean:.3f}% | {100 * max(losses):.3f}% | {spent:.3f} |")
    return rows


def _worth(chosen: frozenset[int], case: Case) -> int:
    return sum(case[1][n] for n in chosen)


def main(instances: int = 300) -> None:
    text = TEXT.format(
        instances=instances,
        forward="\n".join(forward_rows(instances)),
        quantum="\n".join(quantum_rows()),
        dfgb=dfgb_row(instances),
        reserve="\n".join(reserve_rows(12)),
        machine=f"{platform.machine()}, CPython {platform.python_version()}",
    )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(text)
    print(text)


TEXT = """\
# Hybrid access and gradient reserve

## Forward modes

{instances} random instances of 12 layers in each family; gaps to the exact optimum. `zero_offload`
loads everything, then computes. Seconds for one call.

| in place costs | variant | mean gap | max gap | optimal | s at 48 layers | s at 200 |
|---|---|---|---|---|---|---|
{forward}

200 layers, "by load", with thinned fronts:

| fronts | late by ms | seconds |
|---|---|---|
{quantum}

Backward (DFGB), 12 layers, a window of a third of all loads: the greedy choice loses {dfgb}.

## Gradient reserve

12 random instances of 200 gradients, 1 to 64 MiB each; lost gain against the exact optimum.
"Filled": what rounding sizes up leaves unused is handed to what still fits, with exchanges.

| method | mean loss | max loss | seconds |
|---|---|---|---|
{reserve}

Machine: {machine}.
"""

if __name__ == "__main__":
    main()
