"""The gradient reserve where writing a gradient on the host is slower than making it on the device.

On the CPU target it is not, so the sweep is planned: 24 layers of 48 MB on a card whose link takes
12.5 GB/s of direct writes. Times are the simulator's.
"""

from __future__ import annotations

from offcompile.ir import DEVICE, HOST, Lane, Machine, Op, Problem, Tensor, Tier
from offcompile.planning.planner import plan_problem

LAYERS, WEIGHT_BYTES = 24, 48_000_000
FORWARD_US, BACKWARD_US, WRITE_BYTES_PER_US = 1000.0, 2000.0, 12_500.0
RESERVES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def step() -> Problem:
    weights = [Tensor(f"w{i}", WEIGHT_BYTES, "weight", DEVICE, pinned=True) for i in range(LAYERS)]
    gradients = [Tensor(f"g{i}", WEIGHT_BYTES, "gradient") for i in range(LAYERS)]
    saved = [Tensor(f"a{i}", 8_000_000, "activation") for i in range(LAYERS)]
    ops = [
        Op(f"F{i}", "forward", FORWARD_US, (f"w{i}", *((f"a{i - 1}",) if i else ())), (f"a{i}",))
        for i in range(LAYERS)
    ]
    written_us = BACKWARD_US + WEIGHT_BYTES / WRITE_BYTES_PER_US
    ops += [
        Op(
            f"B{i}",
            "backward",
            BACKWARD_US,
            (f"w{i}", f"a{i}"),
            (f"g{i}",),
            direct={f"g{i}": written_us},
        )
        for i in reversed(range(LAYERS))
    ]
    return Problem((*weights, *gradients, *saved), tuple(ops), steady=False)


def rows() -> list[str]:
    problem = step()
    room = sum(t.nbytes for t in problem.tensors)
    machine = Machine(
        (Tier(DEVICE, room), Tier(HOST, None)),
        (Lane("h2d", HOST, DEVICE, 25_000.0, 10.0), Lane("d2h", DEVICE, HOST, 25_000.0, 10.0)),
    )
    found = []
    for reserve in RESERVES:
        result = plan_problem(problem, machine, f"gradient_reserve:reserve={reserve}")
        peak = result.timeline.peak_bytes[DEVICE]
        found.append(f"| {reserve} | {result.makespan_us / 1000:,.1f} | {peak / 1e9:,.2f} |")
    return found
