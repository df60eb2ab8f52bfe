"""Makes a verified and simulated plan for a problem, with a certificate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from offcompile.bounds import lower_bound
from offcompile.ir import (
    HOST,
    UPDATE,
    BrokenPlan,
    Infeasible,
    InvalidInput,
    Machine,
    Plan,
    Problem,
    Timeline,
    Violation,
)
from offcompile.ir.jsonio import check_homes
from offcompile.ir.verify import check_structure, check_timeline
from offcompile.outline import outlines
from offcompile.passes.joint import TRIED_OUTLINE
from offcompile.passes.registry import make
from offcompile.passes.search.program_variant import Choices
from offcompile.passes.search.starts import OutlinedChoices
from offcompile.simulate import Simulator

from .coarsen import Coarse, coarsen
from .ranks.judge import CollectivesBeside, StepJudge

#: share of the time that goes into the proven bound (which also guides the search)
BOUND_SHARE = 0.3
#: time for the bound per op: an argument that was cut short proves next to nothing
BOUND_S_PER_OP = 4e-4
#: a bound is given so much time per op again if the chosen plan is further from it than this
LONGER_BOUND_S_PER_OP, FAR = 2e-3, 0.05
#: minimum for the search, whatever the time spent on bounding
LEAST_SEARCH_SECONDS = 0.1
#: most time spent on a bound for plans without recomputation; no more than on the first bound
KEEPING_SECONDS = 0.5
#: larger problems are planned with merged ops
COARSEN_ABOVE_OPS = 1500

#: searches of larger problems begin with what an outline of the step says, if it promises less than
#: this multiple of what a bound must be below: outlines are nearer to plans than bounds are
OUTLINE_FROM_OPS, WORTH_OUTLINED = 300, 1.03
#: a search of a step of so many ops that goes on from a trial finds something only by outlines that
#: the trial left out
OUTLINES_ONLY_FROM_OPS = 600


class Beaten(Exception):
    """No plan of the problem can cost less than the caller's current one, or none is expected to:
    even an outline of it does not."""


@dataclass(frozen=True)
class Rival:
    """The caller's current plan: only plans that cost less are of use."""

    cost_us: float = float("inf")
    #: a problem is searched only if a plan may take less than this, and less than this multiple of
    #: its ops' time
    bound_us: float = float("inf")
    of_ops: float = float("inf")
    #: its plan, and the weights that this keeps on the device while others are on the host
    plan: Plan | None = None
    stays: frozenset[str] | None = None
    #: True if the caller compares trials, and searches on from the best
    by_trials: bool = False

    @property
    def limits_bounds(self) -> bool:
        return min(self.bound_us, self.of_ops) < float("inf")

    def worth_us(self, problem: Problem) -> float:
        """A search is worth its time if a plan of the problem may cost less than this."""
        least_us = min(self.cost_us, self.bound_us)
        if self.of_ops == float("inf"):
            return least_us
        return min(least_us, self.of_ops * sum(op.duration_us for op in problem.ops))


#: plans of any cost are of use
NO_RIVAL = Rival()


def device_us(problem: Problem) -> float:
    """The time of the ops that only the device can run: all but updates, which the host may make
    where weights are on the host."""
    return sum(op.duration_us for op in problem.ops if op.phase != UPDATE)


@dataclass(frozen=True)
class PlanResult:
    """A plan, its timeline, and the proven lower bound that it is compared with."""

    plan: Plan
    timeline: Timeline
    policy: str
    seconds: float
    lower_bound_us: float
    bound_method: str
    #: True if an earlier run made the plan, in `seconds`
    reused: bool = False
    #: cost of the step with the collectives that the plan was made for; None: it was made for none
    beside_us: float | None = None

    @property
    def planned_in(self) -> str:
        by = " by an earlier run" if self.reused else ""
        return f"planned in {self.seconds:.1f} s{by}"

    @property
    def makespan_us(self) -> float:
        return self.timeline.makespan_us

    @property
    def cost_us(self) -> float:
        """The step's time plus the tolls of its moves, and what collectives add."""
        return self.timeline.cost_us if self.beside_us is None else self.beside_us

    @property
    def gap(self) -> float:
        """Makespan over lower bound, minus one."""
        if self.lower_bound_us <= 0:
            return 0.0 if self.makespan_us <= 0 else float("inf")
        return max(0.0, self.makespan_us / self.lower_bound_us - 1)


@dataclass(frozen=True)
class CheckResult:
    violations: tuple[Violation, ...]
    timeline: Timeline | None

    @property
    def valid(self) -> bool:
        return not self.violations


def judge_for(
    problem: Problem, machine: Machine, rest: CollectivesBeside | None = None
) -> Callable[[Problem, Machine, Plan], Timeline]:
    """The simulator for passes: one compiled problem, many plans. `rest`: what runs beside them."""

    def judging(p: Problem, m: Machine) -> Callable[[Plan], Timeline]:
        return partial(Simulator(p, m).run, record=False) if rest is None else StepJudge(p, m, rest)

    judge_it = judging(problem, machine)
    others: dict[int, tuple[Problem, Machine, Callable[[Plan], Timeline]]] = {}

    def judge(p: Problem, m: Machine, plan: Plan) -> Timeline:
        if p is problem and m is machine:
            return judge_it(plan)
        found = others.get(id(p))
        if found is None or found[0] is not p or found[1] is not m:
            found = others[id(p)] = (p, m, judging(p, m))
        return found[2](plan)

    return judge


@dataclass(frozen=True)
class PlanAsked:
    """A problem to plan, the machine to plan for, and the way to search.

    known: plans of the same ops with other homes of tensors; their recomputations and host
    updates are tried first.
    worth_us: no plan is of use that takes this long.
    trial: plans are only compared, so that the search ends once it has one.
    begun_us: cost of the newest known plan, if a trial found it for this very problem; only plans
    that cost less are of use, and only choices that the trial left out are tried.
    beside: collectives that run beside the plan; it is judged with them.
    """

    problem: Problem
    machine: Machine
    policy: str = "joint"
    seconds: float = 15.0
    known: Sequence[Plan] = ()
    worth_us: float = float("inf")
    trial: bool = False
    beside: CollectivesBeside | None = None
    begun_us: float = float("inf")


def plan_problem(
    problem: Problem,
    machine: Machine,
    policy: str = "joint",
    seconds: float = 15.0,
    progress: Callable[[str], None] | None = None,
    known: Sequence[Plan] = (),
    worth_us: float = float("inf"),
    trial: bool = False,
) -> PlanResult:
    """Plans, verifies, simulates and bounds. Raises `Infeasible` or `InvalidInput`.

    known: plans of the same ops with other homes of tensors; their recomputations and host
    updates are tried first.
    worth_us: raises `Beaten` if no plan can take less than this.
    trial: plans are only compared, so that the search ends once it has one.
    """
    asked = PlanAsked(problem, machine, policy, seconds, known, worth_us, trial)
    return plan_asked(asked, progress)


def plan_asked(asked: PlanAsked, progress: Callable[[str], None] | None = None) -> PlanResult:
    """See `plan_problem`."""
    problem, machine, seconds = asked.problem, asked.machine, asked.seconds
    began, busy_from = time.monotonic(), time.thread_time()
    wrong = check_homes(problem, machine)
    if wrong:
        raise InvalidInput(wrong)
    _check_made(problem)
    coarse = coarsen(problem) if len(problem.ops) > COARSEN_ABOVE_OPS else Coarse.same(problem)
    outlined, tried_us = _outlined(coarse.problem, asked)
    if progress is not None:
        progress("bounding")
    bounding = _bounding_seconds(problem, seconds)
    bound = lower_bound(problem, machine, seconds=bounding)
    if bound.us >= asked.worth_us:
        raise Beaten
    left = max(seconds - (time.thread_time() - busy_from), (1 - BOUND_SHARE) * seconds)
    if progress is not None:
        progress(f"searching, {left:.0f} s left at most")
    chosen = make(
        asked.policy,
        judge_for(coarse.problem, machine, asked.beside),
        seconds=max(LEAST_SEARCH_SECONDS, 0.95 * left),
        progress=progress,
        hints=bound.away_hints,
        floor_us=max(bound.us, _least_us(coarse.problem, asked)),
        kept_floor_us=partial(
            _floor_of_keeping, problem, machine, bound.us, min(KEEPING_SECONDS, bounding)
        ),
        trial=asked.trial,
        known_choices=_choices_of(asked.known, coarse),
        outlines=outlined,
        tried_us=tried_us,
    )
    try:
        plan = coarse.expand(chosen.apply(coarse.problem, machine, Plan()))
    finally:
        coarse.problem.forget()
    timeline = certify(problem, machine, plan, chosen.name)
    return PlanResult(
        plan=plan,
        timeline=timeline,
        policy=asked.policy,
        seconds=time.monotonic() - began,
        lower_bound_us=bound.us,
        bound_method=bound.method,
        beside_us=beside_us(asked, plan),
    )


def beside_us(asked: PlanAsked, plan: Plan) -> float | None:
    """The cost of the step with its collectives; None if there are none to know of."""
    if asked.beside is None:
        return None
    timeline = StepJudge(asked.problem, asked.machine, asked.beside)(plan)
    return timeline.cost_us if timeline.valid else float("inf")


def _least_us(problem: Problem, asked: PlanAsked) -> float:
    """A step of this problem with its collectives is hardly faster. 0 if there are none."""
    if asked.beside is None:
        return 0.0
    return StepJudge(problem, asked.machine, asked.beside).least_us()


def _bounding_seconds(problem: Problem, seconds: float) -> float:
    """The part of the planning time that goes into the bound."""
    return max(BOUND_SHARE * seconds, BOUND_S_PER_OP * len(problem.ops))


def bounded(problem: Problem, machine: Machine, made: PlanResult, seconds: float) -> PlanResult:
    """The same plan, with the bound that a search of so many seconds would prove."""
    bound = lower_bound(problem, machine, seconds=_bounding_seconds(problem, seconds))
    return replace(made, lower_bound_us=bound.us, bound_method=bound.method)


def may_take_less(problem: Problem, machine: Machine, than_us: float, seconds: float) -> bool:
    """True if the bound that a search of so many seconds would prove leaves room for a plan that
    takes less time."""
    bound = lower_bound(problem, machine, seconds=_bounding_seconds(problem, seconds))
    return bound.us < than_us and not bound.infeasible


def bounded_longer(problem: Problem, machine: Machine, made: PlanResult) -> PlanResult:
    """The same plan; if it is far from its bound, with what more time can prove."""
    if made.gap <= FAR:
        return made
    bound = lower_bound(problem, machine, seconds=LONGER_BOUND_S_PER_OP * len(problem.ops))
    if bound.us <= made.lower_bound_us:
        return made
    return replace(made, lower_bound_us=bound.us, bound_method=bound.method)


def _choices_of(plans: Sequence[Plan], coarse: Coarse) -> tuple[Choices, ...]:
    """The recomputations and host updates of plans, the newest first."""
    found = (
        Choices(
            recomputes=coarse.reruns(plan),
            hosted=frozenset(u.weight for u in plan.updates if u.where == HOST),
        )
        for plan in reversed(plans)
    )
    return tuple(dict.fromkeys(choices for choices in found if choices != Choices()))


def _outlined(problem: Problem, asked: PlanAsked) -> tuple[Iterable[OutlinedChoices], float]:
    """Outlines of a large step, whose choices a search could not try one by one; and the time that
    the first promises, if a trial has tried it, so that it is left out. Raises `Beaten`."""
    if len(problem.ops) < OUTLINE_FROM_OPS or asked.policy.partition(":")[0] != "joint":
        return (), 0.0
    found = (
        OutlinedChoices(o.choices, o.cost_us, o.away) for o in outlines(problem, asked.machine)
    )
    first = next(found, None)
    goes_on = asked.begun_us < float("inf") and len(problem.ops) >= OUTLINES_ONLY_FROM_OPS
    if first is None:
        if goes_on or (asked.trial and asked.worth_us < float("inf")):
            raise Beaten
        return (), 0.0
    if first.cost_us >= asked.worth_us * WORTH_OUTLINED:
        raise Beaten
    if not goes_on:
        return chain([first], found), 0.0
    if asked.begun_us > first.cost_us * TRIED_OUTLINE:  # the trial has tried all of them
        raise Beaten
    return found, first.cost_us


def _floor_of_keeping(problem: Problem, machine: Machine, floor_us: float, seconds: float) -> float:
    """A lower bound of the time of plans without recomputation."""
    if not any(op.recompute for op in problem.ops):
        return floor_us
    ops = tuple(replace(op, recompute=False) for op in problem.ops)
    once = lower_bound(replace(problem, ops=ops), machine, seconds=seconds)
    return max(floor_us, once.us)


def _check_made(problem: Problem) -> None:
    """Checks that every tensor required at the end has a source."""
    if problem.steady:
        return
    written = {t for op in problem.ops for t in op.writes}
    for tensor in problem.tensors:
        if problem.must_survive(tensor.id) and tensor.home is None and tensor.id not in written:
            raise Infeasible(
                f"The {tensor.kind} {tensor.id} must be there at the end of the step, but it has"
                " no home and no op writes it.",
                None,
                f"Give {tensor.id} a home, let an op write it, or leave it out.",
            )


def certify(problem: Problem, machine: Machine, plan: Plan, who: str) -> Timeline:
    """Verifies and times a pass's plan. Raises if the plan is invalid or cannot run."""
    broken = check_structure(problem, machine, plan)
    if broken:
        raise BrokenPlan(f"{who} made an unlawful plan: {broken[0]}. Please report this problem.")
    timeline = Simulator(problem, machine).run(plan)
    if timeline.violations:
        first = timeline.violations[0]
        raise Infeasible(
            f"The plan of {who} cannot go on within the capacities given: {first.detail}.",
            None,
            "Raise the capacity of the tier named, or use the policy joint.",
        )
    audit = check_timeline(problem, machine, plan, timeline)
    if audit:
        raise BrokenPlan(
            f"the plan of {who} does not stand its audit: {audit[0]}. Please report this problem."
        )
    return timeline


def check_plan(problem: Problem, machine: Machine, plan: Plan) -> CheckResult:
    """Checks and simulates a plan from any source."""
    broken = check_structure(problem, machine, plan)
    if broken:
        return CheckResult(broken, None)
    timeline = Simulator(problem, machine).run(plan)
    if timeline.violations:
        return CheckResult(timeline.violations, timeline)
    return CheckResult(check_timeline(problem, machine, plan, timeline), timeline)
