"""A training step as MemFerry sees it: weights on the host, gradients, updates that may run there.

Used by the tests of `hybrid_access`, `gradient_reserve` and `near_memory_update`.
"""

from __future__ import annotations

from collections.abc import Sequence

from offcompile.ir import DEVICE, HOST, Infeasible, Lane, Machine, Op, Plan, Problem, Tensor, Tier
from offcompile.ir.verify import check_structure
from offcompile.passes.registry import make
from offcompile.planning.planner import judge_for
from offcompile.simulate import simulate

RATE = 100.0  # bytes per microsecond


def machine(device: int | None = None, host: int | None = None, rate: float = RATE) -> Machine:
    return Machine(
        (Tier(DEVICE, device), Tier(HOST, host)),
        (Lane("h2d", HOST, DEVICE, rate), Lane("d2h", DEVICE, HOST, rate)),
    )


def step(
    weights: Sequence[int],
    *,
    steady: bool = True,
    compute_us: float = 10.0,
    slower: float = 0.5,
    update_us: float = 2.0,
    host_update_us: float | None = 5.0,
    updates: bool = True,
) -> Problem:
    """Layers with these weight bytes. In place an op takes `slower` times the load longer."""
    tensors = [Tensor("x", 10, "input", DEVICE)]
    forward, backward, update = [], [], []
    source = "x"
    for i, nbytes in enumerate(weights):
        tensors += [
            Tensor(f"w{i}", nbytes, "weight", HOST),
            Tensor(f"a{i}", 10, "activation"),
            Tensor(f"g{i}", nbytes, "gradient"),
            Tensor(f"s{i}", 2 * nbytes, "state", HOST),
        ]
        extra = slower * nbytes / RATE
        forward.append(
            Op(
                f"F{i}",
                "forward",
                compute_us,
                (f"w{i}", source),
                (f"a{i}",),
                direct={f"w{i}": compute_us + extra},
            )
        )
        own = 2 * compute_us
        backward.append(
            Op(
                f"B{i}",
                "backward",
                own,
                (f"w{i}", f"a{i}"),
                (f"g{i}",),
                direct={f"w{i}": own + 0.2 * extra, f"g{i}": own + 0.4 * extra},
            )
        )
        update.append(
            Op(
                f"U{i}",
                "update",
                update_us,
                (f"w{i}", f"g{i}", f"s{i}"),
                (f"w{i}", f"s{i}"),
                host_duration_us=host_update_us,
            )
        )
        source = f"a{i}"
    ops = [*forward, *reversed(backward), *(reversed(update) if updates else ())]
    return Problem(tuple(tensors), tuple(ops), steady)


def apply(problem: Problem, where: Machine, spec: str, judged: bool = True) -> Plan:
    return make(spec, judge_for(problem, where) if judged else None).apply(problem, where, Plan())


def makespan(problem: Problem, where: Machine, plan: Plan) -> float:
    """The plan's time, after asserting that it is lawful and within the capacities."""
    assert check_structure(problem, where, plan) == ()
    timeline = simulate(problem, where, plan)
    assert timeline.violations == ()
    for tier in where.tiers:
        if tier.capacity_bytes is not None:
            assert timeline.peak_bytes[tier.name] <= tier.capacity_bytes
    return timeline.makespan_us


def stands_the_law(problem: Problem, where: Machine, spec: str) -> None:
    """A lawful plan, the same twice, or `Infeasible` that says something."""
    try:
        plan = apply(problem, where, spec)
    except Infeasible as error:
        assert error.reason and error.smallest_change
        assert error.needed_bytes is None or error.needed_bytes > 0
        return
    makespan(problem, where, plan)
    assert plan == apply(problem, where, spec)
