"""Training chains for tests: layers with a weight and a saved activation each."""

from __future__ import annotations

import random

from offcompile.ir import Codec, Lane, Machine, Op, Problem, Tensor, Tier
from offcompile.passes.build.decisions import Decisions
from offcompile.passes.build.schedule import Builder
from offcompile.passes.search.program_variant import Choices, ProgramVariant


def chain(
    weights: list[int],
    activations: list[int],
    forward_us: list[float],
    *,
    steady: bool = True,
    workspace: list[int] | None = None,
    direct: float | None = None,
    recompute: bool = False,
    ratios: dict[str, float] | None = None,
) -> Problem:
    """Forward F0…, backward …B0 with the weight updated in place by its backward op."""
    n = len(weights)
    tensors = [Tensor(f"w{i}", w, "weight", "host") for i, w in enumerate(weights)]
    tensors.append(Tensor("x", activations[0], "input", "device"))
    acts = ["x"] + [f"a{i}" for i in range(1, n + 1)]
    for i in range(1, n + 1):
        tensors.append(Tensor(acts[i], activations[i], "activation", None, ratios or {}))
    for i in range(n):
        tensors.append(Tensor(f"d{i}", activations[i], "temporary"))
    ops = []
    for i in range(n):
        figures = {} if direct is None else {f"w{i}": forward_us[i] * direct}
        ops.append(
            Op(
                f"F{i}",
                "forward",
                forward_us[i],
                (f"w{i}", acts[i]),
                (acts[i + 1],),
                direct=figures,
                recompute=recompute,
            )
        )
    for i in reversed(range(n)):
        delta = f"d{i + 1}" if i < n - 1 else acts[n]
        ops.append(
            Op(
                f"B{i}",
                "backward",
                2 * forward_us[i],
                (f"w{i}", acts[i], delta),
                (f"d{i}", f"w{i}"),
                workspace_bytes=(workspace or weights)[i],
            )
        )
    return Problem(tuple(tensors), tuple(ops), steady)


def link(
    capacity: int | None,
    rate: float,
    *,
    latency_us: float = 0.0,
    disk: bool = False,
    codecs: tuple[Codec, ...] = (),
) -> Machine:
    """Device, host and perhaps disk; one lane each way."""
    tiers = [Tier("device", capacity), Tier("host")]
    lanes = [
        Lane("h2d", "host", "device", rate, latency_us),
        Lane("d2h", "device", "host", rate, latency_us),
    ]
    if disk:
        tiers.append(Tier("disk"))
        lanes += [
            Lane("disk_write", "host", "disk", rate / 2, latency_us),
            Lane("disk_read", "disk", "host", rate / 2, latency_us),
        ]
    return Machine(tuple(tiers), tuple(lanes), codecs)


def bytes_range(problem: Problem, machine: Machine) -> tuple[int, int]:
    """(least, most) device bytes: with everything that can leave away, and with nothing away."""
    roomy = machine.with_capacity("device", None)
    kept = Builder(problem, roomy, Decisions()).kept_bytes
    return max(ProgramVariant(problem, roomy, Choices()).floor, default=0), max(kept, default=0)


def random_chain(
    rng: random.Random, layers: int, tightness: float, load: float
) -> tuple[Problem, Machine]:
    """A steady chain; `load`: link time of moving every weight in twice, over compute time."""
    weights = [rng.randint(20, 100) for _ in range(layers)]
    acts = [rng.randint(5, 60) for _ in range(layers + 1)]
    times = [float(rng.randint(5, 20)) for _ in range(layers)]
    problem = chain(weights, acts, times)
    rate = 2 * sum(weights) / (3 * sum(times) * load)
    machine = link(None, rate)
    low, high = bytes_range(problem, machine)
    return problem, machine.with_capacity("device", int(low + tightness * (high - low)))
