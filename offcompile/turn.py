"""A plan under which as little as can be stands between forward and backward.

For a graph among others whose budget is too tight for the policy `turnover`, which holds as much
within forward and within backward as the step takes alone. To the planner the room of the others is
an op at the turn: it wants, for itself, all of the budget but what cannot leave. So every policy
and the verifier keep to it as they keep to any op. Before anything runs the op is taken out again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offcompile.ir import DEVICE, Infeasible, Machine, Op, Plan, Problem, Timeline
from offcompile.simulate import Simulator

from .decide import Decided, decide, floors_by_run
from .graphs import BACKWARD, FORWARD
from .order import Order, ProgramStep, Run
from .replay import worst_case


def decide_turning(
    problem: Problem,
    machine_for: Callable[[int], Machine],
    budget_bytes: int,
    reserve_for: Callable[[int], int],
    policy: str,
    seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Decided:
    """As `decide`; of what may leave, nothing stands at the turn. Raises `Infeasible`.

    The problem has a forward and a backward.
    """
    capacity = budget_bytes - reserve_for(budget_bytes)
    turning, turn = with_turn(problem, machine_for, capacity)
    found = decide(
        turning, machine_for, budget_bytes, reserve_for, policy, seconds, progress, may_fit=False
    )
    return _without(turn, turning, problem, found)


def with_turn(
    problem: Problem, machine_for: Callable[[int], Machine], capacity_bytes: int
) -> tuple[Problem, Op]:
    """The same problem with an op at the turn that leaves room only for what cannot leave."""
    name = "turn"
    while name in problem.op or name in problem.tensor:
        name += "'"
    at = max(i for i, op in enumerate(problem.ops) if op.phase == FORWARD) + 1

    def made(workspace_bytes: int) -> tuple[Problem, Op]:
        # of forward: what leaves has left when forward is over
        turn = Op(name, FORWARD, 0.0, workspace_bytes=workspace_bytes)
        return replace(problem, ops=(*problem.ops[:at], turn, *problem.ops[at:])), turn

    stands = floors_by_run(made(0)[0], machine_for)[name]
    return made(max(0, capacity_bytes - stands))


def _without(turn: Op, turning: Problem, problem: Problem, found: Decided) -> Decided:
    """The plan and the order for the problem as it was."""
    at = turning.op_index[turn.id]
    before, after = turning.ops[at - 1].id, turning.ops[at + 1].id

    def start(name: str | None) -> str | None:
        return before if name == turn.id else name

    plan = found.result.plan
    plan = replace(
        plan,
        moves=tuple(
            replace(
                m,
                start_after=start(m.start_after),
                ready_before=after if m.ready_before == turn.id else m.ready_before,
            )
            for m in plan.moves
        ),
        drops=tuple(replace(d, after=start(d.after)) for d in plan.drops),
    )
    timeline = Simulator(problem, found.machine).run(plan)
    if timeline.violations:
        raise Infeasible(
            "A plan under which nothing stands at the turn does not run within the budget:"
            f" {timeline.violations[0].detail}.",
            None,
            "Set memory to a little more.",
        )
    return replace(
        found,
        result=replace(found.result, plan=plan, timeline=timeline),
        order=_order_without(turn.id, found.order, problem, plan),
        kept=kept_at_turn(turning, found.result.timeline),
    )


def _order_without(turn: str, order: Order, problem: Problem, plan: Plan) -> Order:
    """The same steps but for the one: what was waited for at the turn still is."""
    names = [s.name for s in order.steps if isinstance(s, Run)]
    gone: ProgramStep = Run(turn)
    steps = tuple(s for s in order.steps if s != gone)
    at = names.index(turn)
    return replace(
        order,
        steps=steps,
        device_bytes=order.device_bytes[:at] + order.device_bytes[at + 1 :],
        peak_bytes=worst_case(problem, plan, steps),
        split=order.split - 1,
    )


def kept_at_turn(problem: Problem, timeline: Timeline) -> frozenset[str]:
    """What forward leaves on the device for backward, but for weights and inputs."""
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
