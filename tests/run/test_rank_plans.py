"""Ranks ask one question, plan it once, and wait for nobody who does not come."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pair_of_ranks
import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lengths import some
from simulated_store import SimulatedStore

from offcompile.ir import DEVICE, Infeasible, Machine, Op, Problem, SharedLink, Tier
from offcompile.ir.jsonio import plan_from_json, plan_to_json
from offcompile.ir.verify import check_structure
from offcompile.planning.feedback.corrections import with_factors
from offcompile.planning.planner import check_plan, plan_problem
from offcompile.run.ranks import meeting
from offcompile.run.ranks.figures import RankFigures, least_of, structure_of
from offcompile.run.ranks.meeting import Answer, FirstMeeting, LaterMeeting, RankGroup
from offcompile.testing import problems, problems_with_machines

WORLDS = (2, 3, 4, 8, 32, 256, 1024)
#: ranks of a large group whose own machines judge the plan
JUDGES = 8

Drawn = tuple[Problem, Machine]


def measured_anew(problem: Problem, chance: random.Random) -> Problem:
    """Return the problem as another rank measures it."""

    def op(known: Op) -> Op:
        host_us = known.host_duration_us
        return replace(
            known,
            duration_us=known.duration_us * chance.uniform(0.8, 3.0),
            workspace_bytes=known.workspace_bytes * chance.randint(1, 2),
            direct={t: us * chance.uniform(0.8, 3.0) for t, us in known.direct.items()},
            host_duration_us=None if host_us is None else host_us * chance.uniform(0.8, 3.0),
        )

    tensors = tuple(
        replace(t, ratios={c: r * chance.uniform(0.5, 1.0) for c, r in t.ratios.items()})
        for t in problem.tensors
    )
    return replace(problem, tensors=tensors, ops=tuple(map(op, problem.ops)))


def other_machine(machine: Machine, chance: random.Random) -> Machine:
    """Return a machine with the same links, faster or slower."""

    def rate(known: float) -> float:
        return known * chance.uniform(0.5, 2.0)

    return Machine(
        machine.tiers,
        tuple(
            replace(x, bytes_per_us=rate(x.bytes_per_us), latency_us=rate(x.latency_us))
            for x in machine.lanes
        ),
        tuple(replace(c, bytes_per_us=rate(c.bytes_per_us)) for c in machine.codecs),
        tuple(replace(s, bytes_per_us=rate(s.bytes_per_us)) for s in machine.shared),
    )


def group(
    store: SimulatedStore, rank: int, world: int, said: list[object] | None = None
) -> RankGroup:
    tell = (lambda ranks: None) if said is None else said.append
    return RankGroup(store, rank, world, 120.0, tell)


# --- the question -------------------------------------------------------------------------------


@given(problems(), st.randoms(use_true_random=False))
def test_what_was_measured_does_not_change_the_structure(
    problem: Problem, chance: random.Random
) -> None:
    assert structure_of(measured_anew(problem, chance)) == structure_of(problem)


@given(problems(), st.data())
def test_another_structure_has_another_hash(problem: Problem, data: st.DataObject) -> None:
    changed = [replace(problem, steady=not problem.steady)]
    if problem.tensors:
        i = data.draw(st.integers(0, len(problem.tensors) - 1))
        tensor = problem.tensors[i]
        for other in (
            replace(tensor, nbytes=tensor.nbytes + 1),
            replace(tensor, pinned=not tensor.pinned),
            replace(tensor, home=None if tensor.home else DEVICE),
        ):
            tensors = (*problem.tensors[:i], other, *problem.tensors[i + 1 :])
            changed.append(replace(problem, tensors=tensors))
    if problem.ops:
        i = data.draw(st.integers(0, len(problem.ops) - 1))
        op = problem.ops[i]
        for another in (
            replace(op, recompute=not op.recompute),
            replace(op, reads=(*op.reads, "one more")),
            replace(op, writes=(*op.writes, "one more")),
        ):
            ops = (*problem.ops[:i], another, *problem.ops[i + 1 :])
            changed.append(replace(problem, ops=ops))
    found = {structure_of(one) for one in (problem, *changed)}
    assert len(found) == 1 + len(changed)


@given(problems_with_machines(), st.randoms(use_true_random=False))
def test_the_common_question_does_not_depend_on_the_order_of_ranks(
    drawn: Drawn, chance: random.Random
) -> None:
    problem, machine = drawn
    link = SharedLink("root port", 10.0, tuple(machine.lane))
    several = figures((problem, replace(machine, shared=(link,))), 5, chance)
    least = least_of(several)
    assert least is not None
    for _ in range(3):
        chance.shuffle(several)
        found = least_of(several)
        assert found is not None
        assert sorted(map(str, found.machine.lanes)) == sorted(map(str, least.machine.lanes))
        assert found.machine.shared == least.machine.shared
        assert replace(found, machine=least.machine) == least
    assert least_of([least, *several]) == least  # nothing is counted twice
    assert RankFigures.loads(least.dumps()) == least
    slowest = min(one.machine.shared[0].bytes_per_us for one in several)
    assert least.machine.shared == (replace(link, bytes_per_us=slowest),)
    for one in several:
        factors = least.over(one)
        assert min(factors.forward, factors.backward) >= 1
        assert least.budget_bytes is not None and one.budget_bytes is not None
        assert least.budget_bytes <= one.budget_bytes


def test_ranks_with_other_structures_budgets_or_settings_have_no_common_question() -> None:
    problem = Problem((), (Op("a", "forward", 1.0),))
    machine = Machine((Tier(DEVICE),))
    one = RankFigures.of(problem, machine, 100)
    assert least_of([one, RankFigures.of(problem, machine, 50)]) is not None
    assert least_of([one, RankFigures.of(problem, machine, None)]) is None
    assert least_of([one, RankFigures.of(problem, machine, 100, "lossy")]) is None
    assert least_of([one, RankFigures.of(replace(problem, ops=()), machine, 100)]) is None
    root = replace(machine, shared=(SharedLink("root", 1.0),))
    assert least_of([one, RankFigures.of(problem, root, 100)]) is None


# --- many ranks ---------------------------------------------------------------------------------


def figures(drawn: Drawn, world: int, chance: random.Random) -> list[RankFigures]:
    problem, machine = drawn
    capacity = machine.tier[DEVICE].capacity_bytes or sum(t.nbytes for t in problem.tensors)
    found = []
    for _ in range(world):
        own = other_machine(machine, chance)
        budget = capacity + chance.randint(0, 100)
        found.append(RankFigures.of(measured_anew(problem, chance), own, budget))
    return found


class World:
    """The ranks of a group that plan one drawn problem."""

    def __init__(self, drawn: Drawn, several: Sequence[RankFigures]) -> None:
        self.problem, self.figures, self.store = drawn[0], several, SimulatedStore()
        world = len(several)
        self.meetings = [FirstMeeting(group(self.store, r, world), "k") for r in range(world)]
        self.planned = 0

    def plan(self) -> Answer:
        """Let rank 0 read what the others have written, and plan for all."""
        known = self.meetings[0].least(self.figures[0])
        assert known is not None
        machine, pace = known.slowest
        problem = with_factors(self.problem, pace)
        machine = machine.with_capacity(DEVICE, known.least.budget_bytes)
        self.planned += 1
        try:
            made = plan_problem(problem, machine, seconds=0.02)
        except Infeasible as error:
            return {"refused": error.reason}
        assert check_plan(problem, machine, made.plan).valid
        return {"plan": plan_to_json(made.plan)}

    def meet(self) -> list[tuple[str, Answer | None]]:
        """Return what each rank knows of all, and the plan that it takes."""
        pairs = list(zip(self.meetings, self.figures, strict=True))
        assert [one.leads(mine) for one, mine in pairs] == [True] + [False] * (len(pairs) - 1)
        said = self.plan()
        self.meetings[0].answer(said)
        answers = [said, *(one.answered(mine) for one, mine in pairs[1:])]
        return [
            ("" if one.known is None else one.known.least.dumps(), answer)
            for (one, _), answer in zip(pairs, answers, strict=True)
        ]


def check_world(drawn: Drawn, world: int, chance: random.Random) -> None:
    several = figures(drawn, world, chance)
    ranks = World(drawn, several)
    found = ranks.meet()
    assert len({json.dumps(one) for one in found}) == 1
    least, answer = found[0]
    assert least and answer is not None
    assert ranks.planned == 1
    assert ranks.store.asked <= 5 * world  # a rank more is a few questions more
    assert ranks.store.waited_s == 0
    if "plan" not in answer:
        return
    plan = plan_from_json(answer["plan"])
    for one in several[:JUDGES]:
        own = one.machine.with_capacity(DEVICE, one.budget_bytes)
        assert check_structure(measured_anew(drawn[0], chance), own, plan) == ()


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(problems_with_machines(), st.sampled_from(WORLDS), st.randoms(use_true_random=False))
def test_all_ranks_come_to_one_plan(drawn: Drawn, world: int, chance: random.Random) -> None:
    check_world(drawn, world, chance)


@pytest.mark.soak
@settings(max_examples=1000, suppress_health_check=list(HealthCheck))
@given(problems_with_machines(), st.sampled_from(WORLDS), st.randoms(use_true_random=False))
def test_all_ranks_come_to_one_plan_a_thousand_times(
    drawn: Drawn, world: int, chance: random.Random
) -> None:
    check_world(drawn, world, chance)


# --- ranks that do not come ---------------------------------------------------------------------

PROBLEM = Problem((), (Op("a", "forward", 1.0),))
MINE = RankFigures.of(PROBLEM, Machine((Tier(DEVICE),)), 100)


def test_a_rank_that_does_not_come_is_named_once_and_each_plans_for_itself() -> None:
    store, said = SimulatedStore(), list[object]()
    here, late = (FirstMeeting(group(store, r, 3, said), "k") for r in (0, 1))
    assert here.leads(MINE) and not late.leads(MINE)
    assert here.least(MINE) is None
    assert said == [[2]]
    assert store.waited_s == 120
    here.answer(None)
    assert late.answered(MINE) is None
    assert store.waited_s == 120  # no other rank waits for the one that is late
    gone = FirstMeeting(group(store, 2, 3, said), "k")
    assert not gone.leads(MINE)  # it comes after all
    assert gone.answered(MINE) is None
    assert said == [[2]]


def test_ranks_do_not_wait_for_a_leader_with_another_graph() -> None:
    store, said = SimulatedStore(), list[object]()
    other = FirstMeeting(group(store, 1, 2, said), "another graph")
    assert not other.leads(MINE)
    assert other.answered(MINE) is None
    assert (said, store.waited_s, other.known) == ([[0]], 120, None)


def test_a_leader_that_ends_is_not_waited_for() -> None:
    store, said = SimulatedStore(), list[str]()
    ranks = RankGroup(store, 1, 2, 120.0, gone=lambda ranks: f"Rank {ranks[0]} has ended")
    follower = FirstMeeting(ranks, "k")
    FirstMeeting(group(store, 0, 2), "k").leads(MINE)
    follower.leads(MINE)
    with mock.patch.object(meeting, "warn", said.append):
        assert follower.answered(MINE) is None
    assert said == ["Rank 0 has ended. Rank 1 plans for itself"]
    assert store.waited_s == meeting.LOOK_S


def test_a_leader_that_fails_or_cannot_compare_says_so() -> None:
    for theirs in (MINE, replace(MINE, structure="another")):
        store = SimulatedStore()
        here, there = (FirstMeeting(group(store, r, 2), "k") for r in (0, 1))
        assert here.leads(MINE) and not there.leads(theirs)
        known = here.least(MINE)
        assert (known is None) == (theirs is not MINE)
        here.end()  # an error, or no plan for all
        assert there.answered(theirs) is None
        assert store.waited_s == 0


def test_a_rank_that_fails_first_is_not_waited_for() -> None:
    store = SimulatedStore()
    here, there = (FirstMeeting(group(store, r, 2), "k") for r in (0, 1))
    there.end()
    assert here.leads(MINE)
    assert here.least(MINE) is None
    assert store.waited_s == 0


@pytest.mark.parametrize(
    "written", [b"no zlib", b"", "[1, 2", '["a"]', "{}", "7", '[null, "plan"]']
)
def test_what_cannot_be_read_costs_a_warning(written: str | bytes) -> None:
    packed = written if isinstance(written, bytes) else zlib.compress(written.encode())
    # figures of another rank: rank 0 tells all that there is no plan for them
    store, said = SimulatedStore(), list[str]()
    here, there = (FirstMeeting(group(store, r, 2), "k") for r in (0, 1))
    with mock.patch.object(meeting, "warn", said.append):
        assert here.leads(MINE)
        store.set("k/figures/1", packed)
        assert here.least(MINE) is None
        here.answer(None)
        assert there.answered(MINE) is None
        assert len(said) == 1
        # an answer of rank 0, at first or in a ballot
        store.set("k/answer", packed)
        assert there.answered(MINE) is None and there.known is None
        ballot = meeting.Ballot(group(store, 1, 2), "k", meeting.Known(MINE, MINE))
        assert not ballot.offers_another() and ballot.answered(MINE) is None
    assert len(said) == 4
    assert all("cannot be read" in text and "plans for itself" in text for text in said)
    assert store.waited_s == 0


def test_a_store_that_is_gone_costs_a_warning() -> None:
    store, said = SimulatedStore(), list[str]()
    here, there = (FirstMeeting(group(store, r, 2), "k") for r in (0, 1))
    store.gone = True
    with mock.patch.object(meeting, "warn", said.append):
        assert here.leads(MINE) and here.least(MINE) is None
        here.answer(None)
        assert not there.leads(MINE) and there.answered(MINE) is None
    assert said and all("does not answer; this rank plans for itself" in text for text in said)


# --- later plans --------------------------------------------------------------------------------


def test_a_later_plan_is_made_by_the_first_rank_that_asks() -> None:
    store = SimulatedStore()
    few, many = replace(MINE, budget_bytes=80), MINE
    least = least_of([few, many])
    assert least is not None
    known = [meeting.Known(mine, least) for mine in (many, few)]
    assert [one.lacking_bytes for one in known] == [20, 0]
    first, second = (LaterMeeting(group(store, r, 2), "k", known[r]) for r in (0, 1))
    assert second.leads(few) and not first.leads(many)
    second.answer({"plan": 1})
    assert first.answered(many) == {"plan": 1}
    # the same again is another question, and one that a rank asks alone waits for nobody
    alone = LaterMeeting(group(store, 0, 2), "k", known[0])
    assert alone.leads(many) and alone.least(many) is known[0]
    alone.end()
    again = LaterMeeting(group(store, 1, 2), "k", known[1])
    assert not again.leads(few) and again.answered(few) is None
    assert store.waited_s == 0


def test_a_ballot_is_rank_0s() -> None:
    store = SimulatedStore()
    known = meeting.Known(MINE, MINE)
    for call, plan in ((4, None), (8, {"plan": 2})):
        here, there = (meeting.Ballot(group(store, r, 2), f"k/{call}", known) for r in (0, 1))
        assert here.leads(MINE) and not there.leads(MINE)
        if plan is not None:
            here.answer(plan)
        here.end()
        assert there.offers_another() == (plan is not None)
        assert there.answered(MINE) == plan
        there.end()
    assert store.waited_s == 0


#: how the model is wrapped, and the budgets; `test_rank_ballots` has FSDP2 as well
TWO_BUDGETS = (("ddp", "4MiB", "3.25MiB"), ("fsdp", "8MiB", "10MiB"))


@pytest.mark.long
@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("case", some(TWO_BUDGETS, TWO_BUDGETS[0]), ids=lambda case: case[0])
def test_two_ranks_with_two_budgets_run_one_plan(case: tuple[str, ...]) -> None:
    wrap, *budgets = case
    asked = [[wrap, budgets]]
    for here, there in zip(*pair_of_ranks.start("rank_plan_child.py", asked), strict=True):
        assert here["equal"] and there["equal"]
        assert here["plans"] == there["plans"]
        assert any(plan["moves"] for plan in here["plans"])
        assert (here["said"], there["said"]) == ([], [])
