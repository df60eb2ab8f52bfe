"""Plans that leave little on the device between forward and backward, or at the end.

They serve three kinds of graph that share a budget with others. For the first, the budget is too
tight for the policy `turnover`, which holds as much within forward and within backward as the step
takes alone. The second has its weights on the host because they do not fit beside those of others;
its gradients would not fit either. The third is planned again in training, when it is known how
much it may keep for backward. The planner sees the memory of the others as an op at the turn, or at
the end, whose workspace is the whole budget except the bytes that cannot leave or may stay. So
every policy and the verifier treat it like any other op. These ops are removed before anything
runs. What the program itself holds between forward and backward, such as its loss, is such an op,
too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offcompile.ir import (
    BACKWARD,
    DEVICE,
    FORWARD,
    Infeasible,
    Machine,
    Op,
    Plan,
    Problem,
    Timeline,
)
from offcompile.simulate import Simulator

from .fit_budget import Decided, Holes, PlanSearch, fit_budget
from .floors import floors_by_run
from .order import Order, RunStep
from .replay import worst_case

Decide = Callable[[Problem], Decided]


def decide_emptied(
    problem: Problem,
    search: PlanSearch,
    budget_bytes: int,
    offload_saved: bool = True,
    offload_gradients: bool = False,
) -> Decided:
    """Like `fit_budget`, with every evictable tensor off the device at the turn
    (`offload_saved`), or at the end (`offload_gradients`). Raises `Infeasible`.

    The problem has a forward and a backward.
    """
    capacity = budget_bytes - search.reserve_for(budget_bytes)
    emptied, gone = problem, []
    if offload_saved:
        at = _turn(problem)
        emptied, name = with_others_at(emptied, search.machine_for, capacity, at, FORWARD)
        gone.append(name)
    if offload_gradients:
        at = len(emptied.ops)
        emptied, name = with_others_at(emptied, search.machine_for, capacity, at, BACKWARD)
        gone.append(name)
    found = fit_budget(emptied, search, budget_bytes, may_fit=False)
    return _without(gone, emptied, problem, found)


def keeping_at_most(
    keeps_bytes: int, problem: Problem, search: PlanSearch, budget_bytes: int, made: Decided
) -> Decided:
    """The plan `made`, if it keeps no more for backward; otherwise another that does not, with as
    much room for holes. Raises `Infeasible`."""
    kept = kept_at_turn(problem, made.result.timeline)
    if made.fits or sum(t.nbytes for t in problem.tensors if t.id in kept) <= keeps_bytes:
        return made
    capacity = budget_bytes - search.reserve_for(budget_bytes) - made.holes_bytes
    at = _turn(problem)
    used_later = {t for op in problem.ops[at:] for t in op.operands}
    made_before = {t for op in problem.ops[:at] for t in op.writes}
    last = {t for t in made_before if t in used_later or problem.must_survive(t)}
    cannot_leave = (t for t in problem.tensors if t.id in last and t.pinned and t.home is None)
    stays = sum(t.nbytes for t in cannot_leave)
    more_bytes = max(0, keeps_bytes - stays)
    limited, name = with_others_at(problem, search.machine_for, capacity - more_bytes, at, FORWARD)
    found = fit_budget(limited, search, budget_bytes, 0, Holes(made.holes_bytes), may_fit=False)
    return _without([name], limited, problem, found)


def _turn(problem: Problem) -> int:
    """The place of an op that runs between forward and backward. It is in the phase forward, so
    that evicted tensors have left when forward is over."""
    return max(i for i, op in enumerate(problem.ops) if op.phase == FORWARD) + 1


def with_others_at(
    problem: Problem,
    machine_for: Callable[[int], Machine],
    capacity_bytes: int,
    at: int,
    phase: str,
) -> tuple[Problem, str]:
    """Inserts an op before the one at `at` that leaves room only for the tensors that cannot
    leave; returns the problem and the op's name."""
    empty, name = _with_op_at(problem, at, phase, 0)
    stands = floors_by_run(empty, machine_for)[name]
    return _with_op_at(problem, at, phase, max(0, capacity_bytes - stands))


def with_outside(problem: Problem, nbytes: int) -> Problem:
    """Inserts an op at the turn that takes so much: what the program itself holds between forward
    and backward. A problem without a backward stays the same."""
    if not nbytes or not any(op.phase == BACKWARD for op in problem.ops):
        return problem
    return _with_op_at(problem, _turn(problem), FORWARD, nbytes)[0]


def decide_beside(nbytes: int, problem: Problem, decide: Decide) -> Decided:
    """Decide on a plan that leaves so much to the program itself between forward and backward."""
    whole = with_outside(problem, nbytes)
    added = [op.id for op in whole.ops if op.id not in problem.op]
    return _without(added, whole, problem, decide(whole)) if added else decide(problem)


def _with_op_at(problem: Problem, at: int, phase: str, nbytes: int) -> tuple[Problem, str]:
    name = "others"
    while name in problem.op or name in problem.tensor:
        name += "'"
    others = Op(name, phase, 0.0, workspace_bytes=nbytes)
    return replace(problem, ops=(*problem.ops[:at], others, *problem.ops[at:])), name


def _without(gone: list[str], emptied: Problem, problem: Problem, found: Decided) -> Decided:
    """Converts the plan and the order to the problem without the added ops."""
    names = [op.id for op in emptied.ops]

    def start(name: str | None) -> str | None:
        return names[names.index(name) - 1] if name in gone else name

    def end(name: str | None) -> str | None:
        if name is None or name not in gone:
            return name
        return next(iter(names[names.index(name) + 1 :]), None)

    plan = found.result.plan
    plan = replace(
        plan,
        moves=tuple(
            replace(m, start_after=start(m.start_after), ready_before=end(m.ready_before))
            for m in plan.moves
        ),
        drops=tuple(replace(d, after=start(d.after)) for d in plan.drops),
    )
    timeline = Simulator(problem, found.machine).run(plan)
    if timeline.violations:
        raise Infeasible(
            "A plan that leaves the device to others between its runs does not run within the"
            f" budget: {timeline.violations[0].detail}.",
            None,
            "Set memory to a little more.",
        )
    return replace(
        found,
        result=replace(found.result, plan=plan, timeline=timeline),
        order=_order_without(gone, found.order, problem, plan),
        kept=kept_at_turn(emptied, found.result.timeline),
    )


def _order_without(gone: list[str], order: Order, problem: Problem, plan: Plan) -> Order:
    """The same steps without those ops; waits that preceded them remain."""
    runs = [s.name for s in order.steps if isinstance(s, RunStep)]
    steps = tuple(s for s in order.steps if not (isinstance(s, RunStep) and s.name in gone))
    held = zip(runs, order.device_bytes, strict=True)
    return replace(
        order,
        steps=steps,
        device_bytes=tuple(nbytes for name, nbytes in held if name not in gone),
        peak_bytes=worst_case(problem, plan, steps),
        split=order.split - sum(name in gone for name in runs[: order.split]),
    )


def kept_at_turn(problem: Problem, timeline: Timeline) -> frozenset[str]:
    """Tensors that forward leaves on the device for backward, except weights and inputs."""
    phases = {op.id: op.phase for op in problem.ops}
    backward = [s.start_ns for s in timeline.spans if phases.get(s.id) == BACKWARD]
    if not backward:
        return frozenset()
    turn = min(backward)
    made = {t for s in timeline.spans if s.start_ns < turn for t in _written_by(problem, s.id)}
    gone = {f.tensor for f in timeline.freed if f.tier == DEVICE and f.time_ns <= turn}
    homeless = {t.id for t in problem.tensors if t.home is None}
    return frozenset((homeless & made) - gone)


def _written_by(problem: Problem, span: str) -> tuple[str, ...]:
    op = problem.op.get(span)
    return op.writes if op is not None else ()
