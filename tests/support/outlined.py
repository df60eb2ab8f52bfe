"""A training step whose weights and states are at home on the host, for outlines."""

from __future__ import annotations

from offcompile.ir import DEVICE, HOST, Lane, Machine, Op, Problem, Tensor, Tier

LAYERS, OP_US, MIB = 24, 1000.0, 1 << 20
WEIGHT, SAVED, STATES = 24 * MIB, 16 * MIB, 144 * MIB
EVERYTHING = LAYERS * (2 * WEIGHT + STATES + 2 * SAVED)


def machine(device_bytes: int, rate: float = 25_000.0) -> Machine:
    lanes = Lane("h2d", HOST, DEVICE, rate), Lane("d2h", DEVICE, HOST, rate)
    return Machine((Tier(DEVICE, device_bytes), Tier(HOST, None)), lanes)


def training(updates: bool = True) -> Problem:
    """Layers of two ops; the second is cheap to run again. Weights and states are at home on the
    host, and an update takes the host as long as five ops."""
    tensors = [Tensor("x", MIB, "input", DEVICE, pinned=True)]
    ops, last = list[Op](), "x"
    for i in range(LAYERS):
        tensors += [
            Tensor(f"w{i}", WEIGHT, "weight", HOST),
            Tensor(f"m{i}", SAVED, "activation", None),
            Tensor(f"a{i}", SAVED, "activation", None),
            Tensor(f"g{i}", WEIGHT, "gradient", None),
        ]
        ops.append(Op(f"F{i}", "forward", OP_US, (f"w{i}", last), (f"m{i}",), recompute=True))
        ops.append(Op(f"A{i}", "forward", OP_US / 20, (f"m{i}",), (f"a{i}",), recompute=True))
        last = f"a{i}"
    for i in reversed(range(LAYERS)):
        ops.append(Op(f"B{i}", "backward", 2 * OP_US, (f"w{i}", f"m{i}", f"a{i}"), (f"g{i}",)))
        if updates:
            tensors.append(Tensor(f"s{i}", STATES, "state", HOST))
            kept = f"w{i}", f"s{i}"
            ops.append(
                Op(f"U{i}", "update", 300.0, (f"g{i}", *kept), kept, host_duration_us=5 * OP_US)
            )
    return Problem(tuple(tensors), tuple(ops), steady=False)
