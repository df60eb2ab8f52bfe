"""Random chains of layers whose saved activations do not fit: problems for the spill policies."""

from __future__ import annotations

import random

from offcompile.ir import Codec, Lane, Machine, Op, Problem, Tensor, Tier
from offcompile.passes.build.decisions import Decisions
from offcompile.passes.select.pressure import pressure


def chain(
    layers: int,
    seed: int = 0,
    *,
    load: float = 1.0,
    fraction: float = 0.4,
    host_share: float | None = None,
    disk: bool = False,
    recompute: float = 0.8,
    steady: bool = True,
) -> tuple[Problem, Machine]:
    """A chain and a machine whose budget is `fraction` of the way from a floor to the peak.

    `load`: time to move what does not fit, uncompressed, over the forward pass. `host_share`:
    room on the host over what does not fit (None: unlimited). `recompute`: share of the forward
    ops that may run again.
    """
    rng = random.Random(seed)
    tensors = [Tensor("x", 1000, "input", "device")]
    forward_us = [rng.uniform(50, 500) for _ in range(layers)]
    ops = []
    for i, duration_us in enumerate(forward_us):
        ratios = {"bitmask": rng.uniform(0.2, 1.0), "fp16": 0.5} if rng.random() < 0.6 else {}
        tensors += [
            Tensor(f"w{i}", rng.randint(100, 400), "weight", "device"),
            Tensor(f"a{i}", rng.randint(2000, 20000), "activation", None, ratios),
            Tensor(f"g{i}", rng.randint(2000, 5000), "temporary"),
        ]
        taken = (f"a{i - 1}" if i else "x", f"w{i}")
        again = rng.random() < recompute
        ops.append(Op(f"F{i}", "forward", duration_us, taken, (f"a{i}",), recompute=again))
    for i in reversed(range(layers)):
        made = (f"g{i + 1}",) if i < layers - 1 else ()
        reads = (f"a{i}", f"w{i}", f"a{i - 1}" if i else "x", *made)
        ops.append(Op(f"B{i}", "backward", 2 * forward_us[i], reads, (f"g{i}",)))
    ops.append(Op("U", "update", 10.0, ("g0", "w0"), ("w0",)))
    problem = Problem(tuple(tensors), tuple(ops), steady)
    peak = max(pressure(problem, Decisions()).kept_bytes)
    floor = 4 * max(t.nbytes for t in tensors)
    floor += sum(t.nbytes for t in tensors if t.kind in ("weight", "input"))
    capacity = min(peak, int(floor + fraction * (peak - floor)))
    rate = max(1, peak - capacity) / (load * sum(forward_us))
    room = None if host_share is None else int(host_share * (peak - capacity))
    tiers = [Tier("device", capacity), Tier("host", room)]
    lanes = [Lane("d2h", "device", "host", rate, 1.0), Lane("h2d", "host", "device", rate, 1.0)]
    if disk:
        tiers.append(Tier("disk"))
        lanes += [Lane("write", "host", "disk", rate / 2, 2.0)]
        lanes += [Lane("read", "disk", "host", rate / 2, 2.0)]
    codecs = (Codec("bitmask", True, rate * 20), Codec("fp16", False, rate * 40))
    return problem, Machine(tuple(tiers), tuple(lanes), codecs)
