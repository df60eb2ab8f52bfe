"""The simulator against the naive executor, on random steps and plans that often are legal."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import run
from oracle_cases import case

from offcompile.ir import Machine, Plan, Problem, Tier, Timeline
from offcompile.simulate import simulate


def differences(problem: Problem, machine: Machine, plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """The oracle's verdict on the plan, and where the simulator's differs."""
    naive, timeline = run(problem, machine, plan), simulate(problem, machine, plan)
    if naive["valid"] != timeline.valid:
        return naive, [f"oracle {naive['rules'] or 'valid'}, simulator {timeline.violations}"]
    if not naive["valid"]:
        return naive, []
    figures = {
        "makespan": (naive["makespan_ns"], round(timeline.makespan_us * 1000)),
        "peak": (naive["peak"], dict(timeline.peak_bytes)),
        # a move that outlasts the record has no end yet
        "spans": (
            {k: s if k not in naive["under way"] else s[0] for k, s in naive["spans"].items()},
            {k: s if k not in naive["under way"] else s[0] for k, s in spans(timeline).items()},
        ),
        "steps": (naive["steps"], list(timeline.steps)),
        "settled": (naive["settled"], timeline.settled),
    }
    return naive, [f"{k}: oracle {a}, simulator {b}" for k, (a, b) in figures.items() if a != b]


def spans(timeline: Timeline) -> dict[tuple[str, int], tuple[int, int]]:
    return {(s.id, s.step): (s.start_ns, s.end_ns) for s in timeline.spans}


def tightened(rng: Any, machine: Machine, peak: dict[str, int]) -> Machine:
    """The machine with budgets at or a little under what the plan took when it had no limits."""
    device = Tier("device", max(0, peak["device"] - rng.choice((0, 1, 1, 2, 3, 5))))
    host = machine.tier["host"]
    if rng.random() < 0.3:
        host = Tier("host", max(0, peak["host"] - rng.choice((0, 1, 2))))
    return replace(machine, tiers=(device, host, machine.tier["disk"]))


def check(rng: Any) -> Counter[str]:
    problem, machine, plan = case(rng)
    seen: Counter[str] = Counter()
    naive, found = differences(problem, machine, plan)
    assert not found, found
    seen["valid" if naive["valid"] else "invalid"] += 1
    if naive["valid"]:
        seen["unsettled"] += not naive["settled"]
        for _ in range(2):
            tight = tightened(rng, machine, naive["peak"])
            again, found = differences(problem, tight, plan)
            assert not found, (tight.tiers, found)
            seen["tight"] += again["valid"]
            seen["slower"] += again.get("makespan_ns", 0) > naive["makespan_ns"]
    return seen


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_simulator_and_oracle_agree(rng):
    check(rng)


def test_they_agree_on_plain_seeds_and_these_say_something():
    seen: Counter[str] = Counter()
    for seed in range(200):
        seen += check(random.Random(seed))
    assert seen["valid"] > 80 and seen["invalid"] > 40, seen
    assert seen["tight"] > 20 and seen["slower"] and seen["unsettled"], seen
