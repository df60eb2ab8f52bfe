"""Problems and machines that several benchmarks share: the weight-offloading paper's GPT-2 and
Bert families (its Table 1, reconstructed), deep uniform chains, and random cyclic chains.

Reconstruction of Table 1 (hal-03580767, §7). The L2L column is Σu + 2·ΣW/β with β = 12,000 MiB/s:
every weight comes in once for the forward and once for the backward pass, and nothing overlaps.
GPT-2 rows: fp32, hidden 3072, depth − 2 blocks of 12h² + 13h parameters and one embedding layer of
(50257 + 1024)·h. The Bert rows imply 160 MiB a layer, which hidden 3072 does not give; with
`depth` such layers and one of 315 MiB (what is left over, ±6 MiB) all six rows match as well.
Their activations and intermediates shrink with the hidden size, the square root of the weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from offcompile.ir import DEVICE, HOST, Lane, Machine, Op, Problem, Tensor, Tier
from offcompile.passes.build.decisions import Away, Decisions
from offcompile.passes.select.pressure import pressure

MIB, GIB = 1 << 20, 1 << 30
HIDDEN = 3072
GPT_BLOCK_BYTES = 4 * (12 * HIDDEN**2 + 13 * HIDDEN)
BYTES_PER_US = 12_000 * MIB / 1e6
BUDGETS_GIB = (9, 10, 11, 12, 13, 14)
ACTIVATION_BYTES = 20_000_000  # a layer's saved activations at batch 16 (§7)
INTERMEDIATE_BYTES = 1_000_000_000  # recomputed within a layer's backward at batch 16 (§7)
SPARE_BLOCKS = 5  # weights that must fit beside activations and intermediates at 9 GiB


@dataclass(frozen=True)
class Row:
    """One line of the paper's Table 1; durations in milliseconds."""

    network: str
    depth: int
    batch: int
    compute_ms: int
    ilp_ms: int
    greedy_ms: int
    l2l_ms: int
    greedy_star_ms: int

    @property
    def name(self) -> str:
        return f"{self.network} {self.depth} b{self.batch}"


TABLE_1 = (
    Row("GPT-2", 74, 64, 47421, 47421, 47493, 52707, 47493),
    Row("GPT-2", 56, 64, 35553, 35553, 35625, 39542, 35625),
    Row("GPT-2", 38, 64, 23694, 23694, 23838, 26387, 23838),
    Row("GPT-2", 74, 32, 23697, 23697, 23769, 28983, 23769),
    Row("GPT-2", 56, 32, 17762, 17762, 17834, 21751, 17834),
    Row("GPT-2", 38, 32, 11840, 11840, 11948, 14533, 11948),
    Row("GPT-2", 74, 16, 11612, 11612, 11684, 16898, 11715),
    Row("GPT-2", 56, 16, 8697, 8697, 8769, 12686, 8800),
    Row("GPT-2", 38, 16, 5794, 5794, 5902, 8487, 5934),
    Row("Bert", 144, 64, 34486, 34486, 34499, 38379, 34499),
    Row("Bert", 96, 64, 22965, 22965, 22978, 25577, 22978),
    Row("Bert", 144, 32, 17443, 17443, 17483, 21336, 17483),
    Row("Bert", 96, 32, 11617, 11617, 11657, 14230, 11657),
    Row("Bert", 144, 16, 9090, 9090, 9183, 12983, 9215),
    Row("Bert", 96, 16, 6058, 6058, 6085, 8670, 6085),
)


def weights_of(row: Row) -> list[int]:
    """Bytes of each layer's weights, the embedding first."""
    if row.network == "GPT-2":
        return [4 * (50257 + 1024) * HIDDEN] + [GPT_BLOCK_BYTES] * (row.depth - 2)
    return [315 * MIB] + [160 * MIB] * row.depth


def nominal_l2l_ms(row: Row) -> float:
    """The paper's L2L: compute, and every weight in twice with nothing overlapped."""
    return row.compute_ms + 2 * sum(weights_of(row)) / BYTES_PER_US / 1000


def paper_case(row: Row, budget_gib: float) -> tuple[Problem, Machine]:
    """One row of Table 1 as a steady problem, and the machine with that device budget.

    Σu is split evenly over the layers, backward twice forward. A backward op holds its weight's
    gradient and the recomputed intermediates, or as much of these as leaves room for a few blocks
    in the smallest budget (the paper takes them off the budget, by an amount it does not print).
    """
    weights = weights_of(row)
    scale = row.batch / 16 * math.sqrt(weights[-1] / GPT_BLOCK_BYTES)
    saved = int(ACTIVATION_BYTES * scale)
    left = BUDGETS_GIB[0] * GIB - saved * len(weights) - SPARE_BLOCKS * weights[-1]
    recomputed = min(int(INTERMEDIATE_BYTES * scale), left)
    share = 1000 * row.compute_ms / len(weights) / 3
    problem = chain(
        weights,
        activations=[saved] * len(weights),
        forward_us=[share] * len(weights),
        backward_us=[2 * share] * len(weights),
        backward_extra=[0] + [recomputed] * (len(weights) - 1),  # a lookup has none
    )
    return problem, duplex(int(budget_gib * GIB), BYTES_PER_US)


def chain(
    weights: Sequence[int],
    activations: Sequence[int],
    forward_us: Sequence[float],
    backward_us: Sequence[float],
    backward_extra: Sequence[int] | None = None,
    steady: bool = True,
) -> Problem:
    """F0 … Fn, Bn … B0. `F` saves an activation for the next layer's backward op; `B` turns one
    delta into another and updates its weight in place, with the gradient as workspace."""
    n = len(weights)
    extra = backward_extra or [0] * n
    tensors = [Tensor(f"w{i}", weights[i], "weight", HOST) for i in range(n)]
    tensors += [Tensor(f"a{i}", activations[i], "activation") for i in range(n - 1)]
    tensors += [Tensor(f"d{i}", activations[i], "temporary") for i in range(n)]
    ops = []
    for i in range(n):
        reads = (f"w{i}", *([f"a{i - 1}"] if i else []))
        made = f"a{i}" if i < n - 1 else f"d{i}"
        ops.append(Op(f"F{i}", "forward", forward_us[i], reads, (made,)))
    for i in reversed(range(n)):
        reads = (f"w{i}", f"d{i}", *([f"a{i - 1}"] if i else []))
        writes = (f"w{i}", *([f"d{i - 1}"] if i else []))
        space = weights[i] + extra[i]
        ops.append(Op(f"B{i}", "backward", backward_us[i], reads, writes, space))
    return Problem(tuple(tensors), tuple(ops), steady)


def duplex(capacity_bytes: int | None, bytes_per_us: float, latency_us: float = 0.0) -> Machine:
    """A device and an unlimited host, with a lane each way."""
    lanes = (
        Lane("h2d", HOST, DEVICE, bytes_per_us, latency_us),
        Lane("d2h", DEVICE, HOST, bytes_per_us, latency_us),
    )
    return Machine((Tier(DEVICE, capacity_bytes), Tier(HOST)), lanes)


def deep_chain(layers: int, tightness: float, link_load: float) -> tuple[Problem, Machine]:
    """Equal layers, as many as you like (see `random_cyclic` for the two figures)."""
    weights, saved = [100 * MIB] * layers, [MIB] * layers
    problem = chain(weights, saved, [1000.0] * layers, [2000.0] * layers)
    return problem, _machine_for(problem, sum(weights), tightness, link_load)


def random_cyclic(
    seed: int, layers: int, tightness: float, link_load: float
) -> tuple[Problem, Machine]:
    """A steady chain with random weights, activations and durations.

    `tightness` 0: everything fits; 1: the least budget in which weights alone can make room.
    `link_load`: how long a lane needs to bring every weight in twice, over the compute time.
    """
    rng = random.Random(f"{seed} {layers}")
    weights = [rng.randint(20, 200) * MIB for _ in range(layers)]
    saved = [rng.randint(5, 50) * MIB for _ in range(layers)]
    forward = [float(rng.randint(500, 3000)) for _ in range(layers)]
    backward = [us * rng.uniform(1.5, 2.5) for us in forward]
    problem = chain(weights, saved, forward, backward)
    return problem, _machine_for(problem, sum(weights), tightness, link_load)


def _machine_for(problem: Problem, weights: int, tightness: float, link_load: float) -> Machine:
    everything = tuple(
        Away(t.id, o.id)
        for t in problem.tensors
        if t.kind == "weight"
        for o in problem.ops
        if t.id in o.operands
    )
    most = max(pressure(problem, Decisions()).kept_bytes)
    least = max(pressure(problem, Decisions(everything)).kept_bytes)
    compute_us = sum(o.duration_us for o in problem.ops)
    rate = 2 * weights / (link_load * compute_us)
    return duplex(most - int(tightness * (most - least)), rate)
