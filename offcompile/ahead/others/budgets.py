"""Plans a step under other budgets, starting from the plan under one.

The plan that is there was the best of many: the step whole or in pieces, its weights on the device,
on the host, or some on each. Under another budget only places next to its own are tried: the same
one, with more or fewer weights on the device, and with more memory the step with nothing on the
host. Each has a lower bound, which takes a tenth of a search; the search begins with the lowest,
from the choices of the plan that is there, and leaves out places that cannot gain.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from offcompile.ahead.answers.fit_report import BudgetPoint
from offcompile.ahead.plan import Ahead, Tell
from offcompile.bounds import lower_bound
from offcompile.ir import HOST, Infeasible, Plan, Problem
from offcompile.ir.units import size
from offcompile.machine.in_place import InPlace
from offcompile.passes.select.pinned_weights import spread, weights_in_use_order
from offcompile.planning.fit_budget import Decided, KnownPlans
from offcompile.planning.floors import floor_of
from offcompile.planning.planner import Beaten
from offcompile.run.plan.candidates import Candidate

from .processes import Beside

#: time of a lower bound
BOUND_SECONDS = 0.3
#: no further budgets are planned after this processor time
TABLE_SECONDS = 10.0
#: budgets to plan, as shares of the way from the floor to the peak when nothing moves
SHARES = (0.5, 0.25, 0.75, 0.1)
#: budgets closer to the one with a plan, as a share of that way, are left out
NEAR = 0.1
#: another place is searched if its bound is below this share of the best plan's cost
WORTH_TRYING = 0.995


@dataclass(frozen=True, eq=False)
class BudgetPlan:
    """A plan under a budget, to start others from."""

    made: Candidate
    budget: int


def under_other_budgets(
    ahead: Ahead,
    start: BudgetPlan | None,
    between: tuple[int, int],
    seconds: float,
    tell: Tell,
    forks: bool = False,
) -> list[BudgetPoint]:
    """Plan for budgets between the floor and the peak if nothing moves. start: None to begin with a
    search for the budget in the middle. seconds: of each search. forks: True to plan some of them
    in a process beside this one."""
    until = time.thread_time() + TABLE_SECONDS
    low, high = between
    memories = [int(low + share * (high - low)) for share in SHARES] if low < high else []
    found: list[BudgetPoint] = []
    while start is None and memories and time.thread_time() < until:
        memory = memories.pop(0)
        tell(f"planning for {size(memory)}")
        with suppress(Infeasible):
            made = ahead.candidate(memory, tell, seconds, explains=False)
            found.append(_point(memory, made.choice.decided))
            start = BudgetPlan(made, memory)
    if start is None:
        return found
    memories = [m for m in memories if abs(m - start.budget) >= NEAR * (high - low)]
    others = OtherBudgets(ahead, start.made, start.budget, seconds, tell)
    less = sorted((m for m in memories if m < start.budget), reverse=True)
    more = sorted(m for m in memories if m > start.budget)
    beside = Beside(lambda: others.points(more), begins=forks and bool(more))
    return [*found, *others.points(less), *beside.result()]


def _point(memory: int, made: Decided) -> BudgetPoint:
    return BudgetPoint(memory, made.cost_us, True, made.result.policy)


@dataclass(frozen=True)
class Place:
    """A step to plan. `at_home`: its weights are on the device, and nothing has to move if it
    fits."""

    problem: Problem
    at_home: bool = False


@dataclass(frozen=True, eq=False)
class OtherBudgets:
    """Other budgets for a model with a plan under `budget` bytes. seconds: of each search."""

    ahead: Ahead
    made: Candidate
    budget: int
    seconds: float
    tell: Tell

    def points(self, memories: Sequence[int]) -> list[BudgetPoint]:
        """Plan for these budgets in turn, each also from the plans before it."""
        found: list[BudgetPoint] = []
        known: list[Plan] = []
        until = time.thread_time() + TABLE_SECONDS
        for memory in memories:
            if time.thread_time() > until:
                break
            self.tell(f"planning for {size(memory)}")
            with suppress(Infeasible):
                made = self._plan_or_search(memory, known)
                known.append(made.result.plan)
                found.append(_point(memory, made))
        return found

    def _plan_or_search(self, memory: int, known: Sequence[Plan]) -> Decided:
        try:
            return self.plan(memory, known)
        except Infeasible:  # e.g. if it fits in more pieces only
            return self.ahead.choose(memory, self.tell, self.seconds, explains=False).decided

    def plan(self, memory: int, known: Sequence[Plan] = ()) -> Decided:
        """The plan within `memory`. known: plans under budgets in between, the nearest last. Raises
        `Infeasible`."""
        options = replace(self.ahead.survey.options, memory=memory, seconds=self.seconds)
        planner = self.ahead.planner(options, self.tell, explains=False)
        plans = KnownPlans((self.made.choice.decided.result.plan, *known))
        places = list(self.places(memory))
        if len(places) > 1:
            places = self._promising(places, memory - planner.source.target.reserve_bytes(memory))
        best: Decided | None = None
        refused: Infeasible | None = None
        for place in places:
            worth_us = float("inf") if best is None else best.cost_us * WORTH_TRYING
            try:
                found = planner.decide(
                    place.problem,
                    memory,
                    may_fit=place.at_home,
                    known=plans,
                    worth_us=worth_us,
                    trial=True,
                )
            except Beaten:
                continue
            except Infeasible as error:
                refused = error
                continue
            if best is None or found.cost_us < best.cost_us:
                best = found
        if best is None:
            assert refused is not None
            raise refused
        return best

    def _promising(self, places: Sequence[Place], capacity: int) -> list[Place]:
        """The places whose floor fits, or all if none does; those with a lower bound first."""
        machine_for = self.made.source.machine

        def fits(place: Place) -> bool:
            with suppress(Infeasible):
                return floor_of(place.problem, machine_for) <= capacity
            return False

        fitting = [place for place in places if fits(place)] or places
        if len(fitting) == 1:
            return list(fitting)
        machine = machine_for(capacity)
        bounds = [lower_bound(p.problem, machine, BOUND_SECONDS).us for p in fitting]
        return [fitting[i] for i in sorted(range(len(fitting)), key=bounds.__getitem__)]

    def places(self, memory: int) -> Iterator[Place]:
        """The steps to plan, each once."""
        made, choice, more = self.made, self.made.choice, memory - self.budget
        in_place, stays = self._in_place, choice.stays
        if in_place is not None and (stays is not None or more < 0):
            all_there = made.source.problem(made.graphs, in_place).problem
            kept = [self._staying(all_there, stays or frozenset(), more)]
            for one in dict.fromkeys([*kept, frozenset[str]()] if more < 0 else kept):
                yield Place(made.source.problem(made.graphs, in_place, one).problem)
        if more > 0 or choice.stays is None:
            yield Place(made.source.problem(made.graphs).problem, at_home=True)
        if more > 0 and made.pieces is not None:
            yield Place(self.ahead.survey.problem(self.ahead.graphs).problem, at_home=True)

    @cached_property
    def _in_place(self) -> InPlace | None:
        """The cost of weights and gradients on the host; None if they cannot be there."""
        made = self.made
        if made.in_place is not None:
            return made.in_place
        tensors = made.choice.annotated.problem.tensors
        weights = sum(t.nbytes for t in tensors if t.kind == "weight")
        in_place = made.source.target.in_place(2 * weights)
        if in_place is not None:
            made.source.measure_in_place(made.graphs, in_place)
        return in_place

    def _staying(self, all_there: Problem, stays: frozenset[str], more: int) -> frozenset[str]:
        """Weights on the device with so many bytes more, or less, than these."""
        plan = self.made.choice.decided.result.plan
        hosted = {u.weight for u in plan.updates if u.where == HOST}
        sizes = [w for w in weights_in_use_order(all_there) if w[0] not in hosted]
        total = sum(nbytes for _, nbytes in sizes)
        here = sum(nbytes for name, nbytes in sizes if name in stays) + more
        return spread(sizes, min(Fraction(1), Fraction(max(0, here), max(1, total))))
