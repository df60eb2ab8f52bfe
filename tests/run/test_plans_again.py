"""A plan that replaces another in the middle of training leaves other graphs their room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offcompile.ir import Infeasible
from offcompile.run.accounts.graph_runs import GraphRuns
from offcompile.run.plan.contract import EMPTIED, USUAL, GraphFacts, PlanKind, PlanRequest
from offcompile.run.variants import plans as module
from offcompile.run.variants.plans import Plans

KEPT, WANTED, BUDGET = 100, 300, 340


class Made(Plans):
    """Plans that keep so many bytes for backward."""

    def __init__(self, kept_bytes: int, in_turn: bool, budget_bytes: int | None) -> None:
        entry = SimpleNamespace(in_turn=in_turn, most_kept_bytes=KEPT, most_wanted_bytes=WANTED)
        runs = SimpleNamespace(budget_bytes=budget_bytes, entry=entry, encloses=False)
        self.facts: Any = SimpleNamespace(runs=runs, kind_again=lambda kind: kind)
        self.variants, self.kinds = [], []
        self.kept_bytes = kept_bytes

    def held(self, call: Any) -> int:
        return 0

    def make(self, call: Any, held: int, kind: Any = USUAL, *_: Any, **settled: Any) -> Any:
        needs = SimpleNamespace(kept_bytes=self.kept_bytes)
        variant: Any = SimpleNamespace(needs_at=lambda sizes: needs)
        self.variants.append(variant)
        self.kinds.append(kind)
        return variant


CALL: Any = SimpleNamespace(sizes=())


@pytest.mark.parametrize(
    ("kept_bytes", "in_turn", "budget_bytes"),
    [
        (KEPT + BUDGET - WANTED, True, BUDGET),
        (KEPT - 1, True, WANTED - 50),
        (10 * KEPT, False, BUDGET),
        (10 * KEPT, True, None),
    ],
)
def test_a_plan_is_taken_that_leaves_others_their_room(
    kept_bytes: int, in_turn: bool, budget_bytes: int | None
) -> None:
    plans = Made(kept_bytes, in_turn, budget_bytes)
    made = plans.make_again(CALL, EMPTIED)
    assert plans.variants == [made] and plans.kinds == [EMPTIED]


def test_a_plan_is_refused_beside_which_others_would_not_fit() -> None:
    plans = Made(KEPT + BUDGET - WANTED + 1, True, BUDGET)
    with pytest.raises(Infeasible, match="graphs that run before its backward would lack 1 bytes"):
        plans.make_again(CALL)
    assert not plans.variants


@pytest.mark.parametrize(
    ("in_turn", "budget_bytes", "wanted_bytes", "keeps_bytes"),
    [
        (True, BUDGET, WANTED, KEPT + BUDGET - WANTED),
        (True, BUDGET, BUDGET + KEPT + 1, 0),
        (False, BUDGET, WANTED, None),
        (True, None, WANTED, None),
    ],
)
def test_a_plan_may_keep_what_others_have_left(
    in_turn: bool, budget_bytes: int | None, wanted_bytes: int, keeps_bytes: int | None
) -> None:
    entry = SimpleNamespace(in_turn=in_turn, most_kept_bytes=KEPT, most_wanted_bytes=wanted_bytes)
    runs: Any = SimpleNamespace(budget_bytes=budget_bytes, entry=entry, encloses=False)
    runs.may_keep_bytes = lambda: GraphRuns.may_keep_bytes(runs)
    facts: Any = SimpleNamespace(runs=runs)
    assert GraphFacts.kind_again(facts, USUAL) == PlanKind(keeps_bytes=keeps_bytes)
    assert GraphFacts.kind_again(facts, EMPTIED) == EMPTIED


@pytest.mark.parametrize(("kind", "places"), [(PlanKind(keeps_bytes=KEPT), True), (EMPTIED, False)])
def test_a_plan_with_a_limit_may_place_states_like_a_usual_one(
    monkeypatch: pytest.MonkeyPatch, kind: PlanKind, places: bool
) -> None:
    requests: list[PlanRequest] = []
    free: Any = object()

    class Hooked:
        def __init__(self, facts: Any, request: PlanRequest, meeting: Any, instead: Any) -> None:
            requests.append(request)

    def lower(hooks: Hooked, inputs: Any) -> Any:
        raise Infeasible("enough is known", None, "")

    monkeypatch.setattr(module, "CompileHooks", Hooked)
    monkeypatch.setattr(Plans, "host_held", lambda plans, call: 0)
    monkeypatch.setattr(Plans, "_free_states", lambda plans, call: free)
    runs = SimpleNamespace(name="a graph")
    facts: Any = SimpleNamespace(profile=SimpleNamespace(replans=0), runs=runs, symbols=())
    traced: Any = SimpleNamespace(lower=lower)
    fixed: Any = SimpleNamespace(indices=frozenset(), explained=lambda error: error)
    agreement: Any = SimpleNamespace(meeting=lambda: None)
    call: Any = SimpleNamespace(sizes=(), inputs=None)
    with pytest.raises(Infeasible, match="enough is known"):
        Plans(facts, traced, fixed, agreement, False).make(call, 0, kind)
    assert (requests[0].states is free) is places and requests[0].kind == kind
