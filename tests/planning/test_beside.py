"""Plans judged with collectives beside them: the judge, the search, and plans that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from chains import bytes_range, chain, link

from offcompile.ir import BACKWARD, Machine, Plan, Problem
from offcompile.planning import plan_cache
from offcompile.planning.plan_cache import Question, plan_once
from offcompile.planning.planner import PlanAsked, PlanResult, certify, judge_for, plan_asked
from offcompile.planning.ranks.beside import REDUCE, Collective, Ring, with_collectives
from offcompile.planning.ranks.judge import CollectivesBeside, StepJudge

RATE, POLICY = 10.0, "joint:evaluations=60,seconds=60"
PROBLEM = chain(
    [40, 30, 20, 50, 40, 30],
    [60, 50, 40, 30, 20, 40, 50],
    [5.0, 8.0, 6.0, 4.0, 6.0, 5.0],
    steady=False,
)
LEAST, MOST = bytes_range(PROBLEM, link(None, RATE))


@dataclass(frozen=True)
class Rest(CollectivesBeside):
    """Sends so many bytes after each of the last ops of a step."""

    sent_bytes: int
    bytes_per_us: float = RATE
    shares: bool = True

    @property
    def ring(self) -> Ring:
        return Ring(self.bytes_per_us, 0.5, self.shares)

    def collectives(self, problem: Problem, plan: Plan) -> Sequence[Collective]:
        late = [op for op in problem.ops if op.phase == BACKWARD] or problem.ops[-3:]
        return [
            Collective(f"bucket {i}", REDUCE, self.sent_bytes, 1, op.id)
            for i, op in enumerate(late)
            if self.sent_bytes
        ]


def planned(
    capacity: int, rest: CollectivesBeside | None, problem: Problem = PROBLEM
) -> PlanResult:
    machine = link(capacity, RATE)
    return plan_asked(PlanAsked(problem, machine, POLICY, 60.0, beside=rest))


def step_us(problem: Problem, machine: Machine, plan: Plan, rest: CollectivesBeside) -> float:
    some = rest.collectives(problem, plan)
    return with_collectives(problem, machine, plan, rest.ring, some).cost_us


CAPACITIES = [LEAST + (MOST - LEAST) * i // 4 for i in range(1, 4)]


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("rest", [Rest(60), Rest(60, 4.0, False)], ids=["shared link", "own link"])
def test_a_plan_is_judged_by_the_step_with_its_collectives(capacity: int, rest: Rest) -> None:
    made = planned(capacity, rest)
    machine = link(capacity, RATE)
    assert made.beside_us == made.cost_us == step_us(PROBLEM, machine, made.plan, rest)
    # the report shows the plan by itself
    assert certify(PROBLEM, machine, made.plan, "joint") == made.timeline
    assert made.lower_bound_us <= made.makespan_us <= made.beside_us
    ignoring = planned(capacity, None)
    assert ignoring.beside_us is None
    assert made.beside_us <= step_us(PROBLEM, machine, ignoring.plan, rest)


def test_a_plan_avoids_collectives_on_its_link() -> None:
    capacity, rest = CAPACITIES[0], Rest(120)
    made, ignoring = planned(capacity, rest), planned(capacity, None)
    assert made.beside_us is not None and made.makespan_us >= ignoring.makespan_us
    assert made.beside_us < step_us(PROBLEM, link(capacity, RATE), ignoring.plan, rest)


def test_without_collectives_nothing_changes() -> None:
    capacity = CAPACITIES[1]
    made, ignoring = planned(capacity, Rest(0)), planned(capacity, None)
    assert (made.plan, made.timeline) == (ignoring.plan, ignoring.timeline)
    assert made.cost_us == ignoring.cost_us


def test_no_plan_is_faster_than_a_step_in_which_nothing_moves() -> None:
    for rest in (Rest(60), Rest(600), Rest(60, 1.0, False)):
        least_us = StepJudge(PROBLEM, link(CAPACITIES[0], RATE), rest).least_us()
        for capacity in CAPACITIES:
            beside_us = planned(capacity, rest).beside_us
            assert beside_us is not None and 0 < least_us <= beside_us


def test_the_judge_of_a_search_takes_other_machines_too() -> None:
    rest, machine = Rest(60), link(CAPACITIES[0], RATE)
    judge, plan = judge_for(PROBLEM, machine, rest), planned(CAPACITIES[0], rest).plan
    wide = machine.with_capacity("device", None)
    for one in (machine, wide, machine):
        assert judge(PROBLEM, one, plan).cost_us == step_us(PROBLEM, one, plan, rest)
    cramped = machine.with_capacity("device", 1)
    assert not judge(PROBLEM, cramped, plan).valid


def test_a_kept_plan_is_for_the_same_collectives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(plan_cache, "WORTH_KEEPING_SECONDS", 0.0)
    asked = Question(PROBLEM, link(CAPACITIES[0], RATE), POLICY, 60.0, beside=Rest(60))
    keys = {replace(asked, beside=b).key for b in (None, Rest(60), Rest(61), Rest(60, 9.0))}
    assert len(keys) == 4 and replace(asked, beside=Rest(60)).key == asked.key
    first, again = plan_once(asked), plan_once(asked)
    assert again.reused and not first.reused
    assert (again.plan, again.beside_us) == (first.plan, first.beside_us)
