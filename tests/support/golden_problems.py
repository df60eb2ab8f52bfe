"""Three problems small enough to check every plan by hand."""

from __future__ import annotations

from chains import chain, link

from offcompile.ir import Lane, Machine, Op, Problem, Tensor, Tier


def rotation() -> tuple[Problem, Machine]:
    """Three layers of 100 bytes, 10 bytes of activation; 10 µs forward, 20 µs backward.

    All resident: 300 of weights, 40 of activations and input, 100 of workspace and the deltas.
    The device has 380: some weight must be away while the others run. One move takes 2 µs.
    """
    return chain([100] * 3, [10] * 4, [10.0] * 3), link(380, 50.0)


def spill() -> tuple[Problem, Machine]:
    """One forward and backward pass, not steady: weights of 20 bytes, activations of 100.

    With everything on the device 700 bytes; there are 650. An activation waits on the host (5 µs
    each way), a weight leaves, or an op runs again.
    """
    problem = chain([20] * 4, [100] * 5, [10.0] * 4, steady=False, recompute=True, direct=1.4)
    return problem, link(650, 20.0)


def mixed() -> tuple[Problem, Machine]:
    """Four layers, weights as large as activations (60 bytes, 3 µs): 566 bytes of 620."""
    problem = chain([60] * 4, [60] * 5, [10.0] * 4, workspace=[20] * 4, recompute=True, direct=1.4)
    return problem, link(566, 20.0)


def stack() -> tuple[Problem, Machine]:
    """Five layers of small weights and large activations on a slow link (8 µs an activation)."""
    problem = chain([30] * 5, [80] * 6, [10.0] * 5, recompute=True, direct=1.2)
    return problem, link(660, 10.0)


def training() -> tuple[Problem, Machine]:
    """Two layers with gradients, an optimizer state each, and updates that may run on the host."""
    tensors = [Tensor("x", 10, "input", "device")]
    for i in range(2):
        tensors += [
            Tensor(f"w{i}", 40, "weight", "host"),
            Tensor(f"s{i}", 80, "state", "host"),
            Tensor(f"g{i}", 40, "gradient"),
            Tensor(f"a{i}", 10, "activation"),
        ]
    tensors.append(Tensor("d", 10, "temporary"))
    ops = (
        Op("F0", "forward", 10.0, ("w0", "x"), ("a0",), direct={"w0": 14.0}),
        Op("F1", "forward", 10.0, ("w1", "a0"), ("a1",), direct={"w1": 14.0}),
        Op("B1", "backward", 20.0, ("w1", "a0", "a1"), ("d", "g1"), direct={"g1": 23.0}),
        Op("B0", "backward", 20.0, ("w0", "x", "d"), ("g0",), direct={"g0": 23.0}),
        Op("U1", "update", 5.0, ("w1", "s1", "g1"), ("w1", "s1"), host_duration_us=15.0),
        Op("U0", "update", 5.0, ("w0", "s0", "g0"), ("w0", "s0"), host_duration_us=15.0),
    )
    machine = Machine(
        (Tier("device", 200), Tier("host")),
        (Lane("h2d", "host", "device", 20.0), Lane("d2h", "device", "host", 20.0)),
    )
    return Problem(tuple(tensors), ops, True), machine


PROBLEMS = {
    "rotation": rotation,
    "spill": spill,
    "mixed": mixed,
    "stack": stack,
    "training": training,
}
