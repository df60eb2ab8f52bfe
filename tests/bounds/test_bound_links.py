"""Bounds on machines whose lanes share links with accesses in place."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from oracle_cases import case, shared_links

from offcompile.bounds.moment.cut import cut_bound
from offcompile.bounds.program.grid import full
from offcompile.bounds.program.model import build
from offcompile.bounds.program.solve import solve_lp
from offcompile.bounds.survey import Survey, survey
from offcompile.ir import Lane, Machine, Op, Problem, SharedLink, Tensor, Tier
from offcompile.simulate import simulate

LANES = (Lane("h2d", "host", "device", 10.0), Lane("d2h", "device", "host", 10.0))
LINK_IN = SharedLink("link_in", 10.0, ("h2d",), in_place_reads=True)
LINK_OUT = SharedLink("link_out", 10.0, ("d2h",), in_place_writes=True)
WIDE = SharedLink("wide", 40.0, ("h2d", "d2h"), in_place_reads=True)

#: each weight is read in place at no cost to its op, but F3 needs copies of two more
READS = Problem(
    (*(Tensor(f"w{i}", 100, "weight", "host") for i in range(5)),),
    (
        Op("F0", "forward", 10.0, ("w0",), direct={"w0": 10.0}),
        Op("F1", "forward", 10.0, ("w1",), direct={"w1": 10.0}),
        Op("F2", "forward", 10.0, ("w2",), direct={"w2": 10.0}),
        Op("F3", "forward", 10.0, ("w3", "w4")),
    ),
)
#: two gradients are written in place at no cost, and one leaves by a copy to make room
WRITES = Problem(
    (*(Tensor(f"g{i}", 100, "gradient", None) for i in range(3)), Tensor("x", 100, "input", None)),
    (
        Op("B0", "backward", 10.0, (), ("g0",)),
        Op("B1", "backward", 10.0, (), ("g1",), direct={"g1": 10.0}),
        Op("B2", "backward", 10.0, (), ("g2",), direct={"g2": 10.0}),
        Op("L", "backward", 10.0, (), ("x",), workspace_bytes=100),
    ),
)


def machine(capacity: int, *shared: SharedLink) -> Machine:
    return Machine((Tier("device", capacity), Tier("host")), LANES, shared=shared)


def lp(found: Survey) -> float:
    answer = solve_lp(build(found, full(found)), tuple(o.id for o in found.problem.ops), 10)
    return (answer.ns or 0.0) / 1000


def cut(found: Survey) -> float:
    return cut_bound(found, math.inf) / 1000


def test_reads_in_place_leave_less_of_the_link_to_loads() -> None:
    alone, shared, wide = (
        survey(READS, machine(400, *links)) for links in ((), (LINK_IN,), (WIDE,))
    )
    # five weights cross the link, in place or not; F3 needs two of them before it starts
    assert (lp(alone), cut(alone)) == pytest.approx((40, 40), abs=0.01)
    assert (lp(shared), cut(shared)) == pytest.approx((60, 60), abs=0.01)
    assert (lp(wide), cut(wide)) == pytest.approx((40, 40), abs=0.01)


def test_writes_in_place_leave_less_of_the_link_to_copies() -> None:
    slower = replace(LINK_OUT, bytes_per_us=5.0)
    alone, shared, slow = (
        survey(WRITES, machine(200, *links)) for links in ((), (LINK_OUT,), (slower,))
    )
    # three gradients leave after B0 and before L; the moment counts from the start of the step
    assert (lp(alone), cut(alone)) == pytest.approx((40, 40), abs=0.01)
    assert (lp(shared), cut(shared)) == pytest.approx((50, 40), abs=0.01)
    assert (lp(slow), cut(slow)) == pytest.approx((60, 40), abs=0.01)


@pytest.mark.parametrize("chunk", range(2))
def test_no_valid_plan_beats_a_bound_on_a_machine_with_links(chunk: int) -> None:
    checked = raised = 0
    for seed in range(chunk * 30, chunk * 30 + 30):
        rng = random.Random(seed)
        problem, on, plan = case(rng)
        lanes = [lane.name for lane in on.lanes]
        while not on.shared:
            on = replace(on, shared=shared_links(rng, lanes))
        timeline = simulate(problem, on, plan, record=False)
        if not problem.ops or not timeline.valid or not timeline.settled:
            continue
        tight = on.with_capacity("device", timeline.peak_bytes["device"])
        makespan = simulate(problem, tight, plan, record=False).makespan_us
        found = survey(problem, tight)
        if found.trivial:
            continue
        alone = survey(problem, replace(tight, shared=()))
        for bound in (lp,) if problem.steady else (lp, cut):
            assert bound(found) <= makespan * (1 + 1e-9) + 0.001, (seed, bound)
        raised += lp(found) > lp(alone) * 1.0001
        checked += 1
    assert checked >= 5
    assert raised >= 2
