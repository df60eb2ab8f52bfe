"""When the planner splits a graph, into how many pieces, and what it says of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from split_losses import furthest
from torch import nn
from torch.nn import functional as F

import offcompile
from offcompile.graph.split.decision import LADDER, Ways
from offcompile.ir import Infeasible
from offcompile.machine.options import Options
from offcompile.planning.planner import Beaten, Rival
from offcompile.planning.splitting import SplitPart, StepEstimate

WORDS, WIDTH, TOKENS = 2048, 32, 512
MIB = 1 << 20
LOGITS_BYTES = WORDS * TOKENS * 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(1))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.words(tokens)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return F.cross_entropy(self.head(h[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tokens(batch: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, WORDS, (batch, TOKENS // 4), generator=generator)


def gradients(model: Model, run: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = run(tokens())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def trained(**options: object) -> tuple[list[torch.Tensor], Any]:
    """Gradients and the report of a compiled model."""
    torch._dynamo.reset()
    given = {"lowering": "aot_eager", "hardware": "cpu", "seconds": 0.1} | options
    model = Model()
    run = torch.compile(model, backend="offcompile", options=given)
    found = gradients(model, run)
    return found, offcompile.reports()[-1]


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    model = Model()
    return gradients(model, model)


# --- the choice by itself -------------------------------------------------------------------


FLOORS = {None: 200, 4: 90, 8: 70, 16: 50, 32: 49, 64: 49}


def ways(costs: dict[int | None, float | None], **more: Any) -> tuple[Ways[Any], list[Any]]:
    """Ways in which pieces → what a plan costs, over 100 of compute; None: there is no plan."""
    asked: list[Any] = []
    floors = FLOORS | more.get("floors", {})

    def made(pieces: int | None, explains: bool, rival: Rival) -> Any:
        asked.append(pieces)
        cost = costs[pieces]
        bound = more.get("bounds", {}).get(pieces, 50)
        if bound >= rival.worth_us(problem) or (cost is not None and cost >= rival.cost_us):
            raise Beaten
        if cost is None:
            raise Infeasible(f"The floor of {pieces} is high.", 1, "Set memory to more.")
        peak = more.get("peaks", {}).get(pieces, 0)
        return SimpleNamespace(
            pieces=pieces,
            trial=rival.by_trials,
            stays=None,
            annotated=SimpleNamespace(problem=problem),
            decided=SimpleNamespace(
                fits=cost <= 100,
                cost_us=cost,
                order=SimpleNamespace(peak_bytes=peak),
                result=SimpleNamespace(gap=cost / bound - 1, lower_bound_us=bound, plan=None),
            ),
        )

    times = more.get("ops", {"forward": 100.0})
    ops = [SimpleNamespace(duration_us=us, phase=phase) for phase, us in times.items()]
    problem = SimpleNamespace(ops=ops)
    parts = (SplitPart("loss", 512, 2048, 4, ("mm",), 1), SplitPart("chain", 9, 9, 2, ("mm",), 3))
    return (
        Ways(
            Options.read(more.get("options", {}), {}),
            more.get("budget", 100),
            lambda explains, rival: made(None, explains, rival),
            made,
            lambda pieces: StepEstimate(problem, floors[pieces]),  # type: ignore[arg-type]
            lambda pieces: parts,
            lambda: more.get("most", 1000),
            lambda: more.get("largest", 50),
            lambda found: found,
            lambda found: SimpleNamespace(**vars(found) | {"trial": False}),
        ),
        asked,
    )


def chosen(costs: dict[int | None, float | None], **more: Any) -> tuple[int | None, list[Any]]:
    found, asked = ways(costs, **more)
    made, splitting = found.best()
    pieces = None if splitting is None else splitting.pieces
    assert made.pieces == pieces
    assert not made.trial  # which only serves to compare
    return pieces, asked


def test_what_fits_stays_whole() -> None:
    assert chosen({None: 100}) == (None, [None])


def test_a_plan_that_hardly_costs_more_than_its_ops_stays_whole() -> None:
    assert chosen({None: 101}) == (None, [None])


def test_the_fewest_pieces_with_room_to_spare_are_planned_first() -> None:
    assert chosen({None: None, 8: 101}) == (8, [None, 8])
    assert chosen({None: None, 4: 101}, budget=130) == (4, [None, 4])


def test_more_pieces_are_planned_only_if_they_may_gain() -> None:
    costs = {None: None, 8: 130, 16: 115}
    assert chosen(costs) == (16, [None, 8, 16])
    assert chosen(costs | {16: 140}) == (8, [None, 8, 16])
    high = {16: 69, 32: 69, 64: 69}
    assert chosen(costs, floors=high) == (8, [None, 8])


def test_without_room_to_spare_the_lowest_floor_is_planned() -> None:
    assert chosen({None: None, 32: 130}, floors={16: 60}, budget=55) == (32, [None, 32])


def test_where_a_plan_fails_the_next_number_of_pieces_is_planned() -> None:
    assert chosen({None: None, 8: None, 16: 110}) == (16, [None, 8, 16])


def test_pieces_that_beat_moving_are_taken() -> None:
    assert chosen({None: 150, 8: 99}) == (8, [None, 8])
    assert chosen({None: 110, 8: 130, 16: 140})[0] is None


def test_the_whole_is_searched_first_only_if_it_may_be_nearly_free() -> None:
    may_be = {None: 101}
    assert chosen({None: 101, 8: 100}, bounds=may_be) == (None, [None])
    never = {None: 120, 8: 110}
    costs = {None: 150, 8: 112}
    # asked first without a search, then not searched as its bound is above the plan in pieces
    assert chosen(costs, bounds=never) == (8, [None, 8, None])
    assert chosen(costs, bounds=never | {None: 105}) == (8, [None, 8, None])
    assert chosen(costs | {None: 108}, bounds=never | {None: 105}) == (None, [None, 8, None])


def test_a_step_that_only_updates_make_dear_is_planned_in_all_ways() -> None:
    ops = {"forward": 105.0, "update": 15.0}
    costs = {None: 122, 8: 112, 16: 115}
    assert chosen(costs, ops=ops) == (8, [None, 8, 16, None])
    assert chosen(costs | {8: 130, 16: 130}, ops=ops) == (None, [None, 8, 16, None])
    assert chosen({None: 108}, ops=ops) == (None, [None])


def test_the_whole_is_planned_after_all_if_no_pieces_have_a_plan() -> None:
    never = {None: 120}
    costs = {None: 150, 8: None, 16: None}
    assert chosen(costs, bounds=never) == (None, [None, 8, 16, None])
    found, asked = ways(costs | {None: None}, bounds=never)
    with pytest.raises(Infeasible, match="Even with the loss"):
        found.best()
    assert asked == [None, 8, 16, None, 16]


def test_more_pieces_have_to_lower_the_bound_of_a_plan_that_is_near_it() -> None:
    costs = {None: None, 8: 130, 16: 115}
    assert chosen(costs, bounds={8: 121, 16: 122}) == (8, [None, 8, 16])
    assert chosen(costs, bounds={8: 121, 16: 112}) == (16, [None, 8, 16])
    assert chosen(costs, bounds={8: 110, 16: 112}) == (16, [None, 8, 16])
    assert chosen(costs, bounds={8: 128}) == (8, [None, 8])


def test_a_loss_that_is_small_beside_the_budget_is_not_tried() -> None:
    assert chosen({None: 150}, largest=12) == (None, [None])


def test_no_more_pieces_than_tokens() -> None:
    assert chosen({None: None, 8: 120}, most=12) == (8, [None, 8])
    with pytest.raises(Infeasible, match="The floor of None"):
        chosen({None: None}, most=3)


def test_at_the_floor_the_least_memory_is_taken_if_asked_for() -> None:
    costs = {None: 200, 16: 210}
    peaks = {None: 90, 16: 30}
    more = {"budget": None, "peaks": peaks}
    assert chosen(costs, **more, options={"memory": "minimum", "split": True})[0] == 16
    assert chosen(costs, **more, options={"memory": "minimum"}) == (None, [None])


def test_a_number_is_taken_at_its_word() -> None:
    assert chosen({6: 500}, options={"split": 6}, floors={6: 80}) == (6, [6])
    assert chosen({3: 500}, options={"split": 6}, most=3, floors={3: 80}) == (3, [3])
    assert chosen({None: 100}, options={"split": 6}, most=0) == (None, [None])


@pytest.mark.parametrize("options", [{"split": False}, {"lowering": "aot_eager"}])
def test_a_refusal_says_if_splitting_would_do(options: dict[str, object]) -> None:
    found, asked = ways({None: None}, options=options)
    with pytest.raises(Infeasible) as caught:
        found.best()
    assert caught.value.reason == "The floor of None is high."
    advice = (
        "Or set split=True: with the loss and 3 chains in 8 pieces the step fits. Its floor is"
        " then 70 B instead of 200 B"
    )
    assert advice in caught.value.smallest_change
    assert asked == [None]

    hopeless, asked = ways(dict.fromkeys([None, *LADDER]), options=options, budget=55)
    with pytest.raises(Infeasible) as caught:
        hopeless.best()
    assert "split" not in caught.value.smallest_change
    assert asked == [None, 16]


def test_a_refusal_that_nobody_reads_estimates_no_pieces() -> None:
    def estimate(pieces: int | None) -> StepEstimate:
        raise AssertionError(f"{pieces} pieces were estimated")

    found, asked = ways({None: None}, options={"split": False})
    with pytest.raises(Infeasible) as caught:
        replace(found, explains=False, estimate=estimate).best()
    assert caught.value.smallest_change == "Set memory to more."
    assert asked == [None]


def test_a_refusal_of_pieces_names_their_floor() -> None:
    found, asked = ways(dict.fromkeys([None, *LADDER]), budget=40)
    with pytest.raises(Infeasible) as caught:
        found.best()
    reason = "Even with the loss and 3 chains in 16 pieces, the floor of 16 is high."
    assert caught.value.reason == reason
    assert asked == [None, 16, 16]


# --- with the backend -----------------------------------------------------------------------


def test_a_budget_below_the_whole_loss_is_kept_in_pieces(plain: list[torch.Tensor]) -> None:
    budget = 6 * MIB
    assert budget < 2 * LOGITS_BYTES
    found, report = trained(memory=budget, split=True)
    assert furthest(found, plain) < 1e-5
    assert "508 tokens by 2,048" in report.split
    assert report.planned_peak_bytes <= budget
    assert report.split in report.to_text()
    assert max(t.nbytes for t in report.problem.tensors) < LOGITS_BYTES / 2


def test_a_roomy_budget_leaves_the_loss_whole(plain: list[torch.Tensor]) -> None:
    found, report = trained(memory="1GiB", split=True)
    assert report.split == ""
    assert "split" not in report.to_text()
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_aot_eager_refuses_unasked_and_says_what_would_do() -> None:
    with pytest.raises(Infeasible, match=r"Or set split=True: with the loss in \d+ pieces"):
        trained(memory=6 * MIB)


#: `test_a_forecast_takes_the_same_way` always asks it, `test_split_chains` always runs Inductor
@pytest.mark.soak
def test_inductor_splits_unasked(plain: list[torch.Tensor]) -> None:
    found, report = trained(memory=6 * MIB, lowering="inductor")
    assert furthest(found, plain) < 1e-5
    assert "pieces" in report.split


def test_a_number_splits_what_fits_too(plain: list[torch.Tensor]) -> None:
    found, report = trained(split=8)
    assert "in 8 pieces" in report.split
    assert "nothing moves" in report.to_text()
    assert furthest(found, plain) < 1e-5


def test_a_verified_split_step_may_differ_in_the_last_bits(plain: list[torch.Tensor]) -> None:
    found, report = trained(split=8, verify=True)
    assert furthest(found, plain) < 1e-5
    assert report.verified is not None
    assert not report.verified.exact


def test_the_floor_of_a_split_loss_is_a_fraction() -> None:
    _, whole = trained(memory="minimum")
    _, split = trained(memory="minimum", split=True)
    assert split.floor_bytes < whole.floor_bytes / 3


# --- ahead ----------------------------------------------------------------------------------


def ahead(**options: object) -> Any:
    given = {"memory": "7MiB", "hardware": "cpu", "options": {"seconds": 0.1, **options}}
    return offcompile.plan(Model(), tokens(), **given)  # type: ignore[arg-type]


def test_a_forecast_takes_the_same_way() -> None:
    report = ahead()
    assert "pieces" in report.split
    with pytest.raises(Infeasible, match="with the loss in"):
        ahead(split=False)
    with pytest.raises(Infeasible, match="with the loss in"):
        ahead(lowering="aot_eager")


#: `test_max_batch_counts_on_pieces` is alike
@pytest.mark.soak
def test_fit_knows_larger_batches_in_pieces() -> None:
    def largest(**options: object) -> int | None:
        given = {"seconds": 0.1, **options}
        found = offcompile.fit(
            Model(), tokens, 4, memory="40MiB", hardware="cpu", table=False, options=given
        )
        return found.largest_batch

    split, whole = largest(), largest(split=False)
    assert split is not None
    assert whole is not None
    assert split > whole


def test_max_batch_counts_on_pieces() -> None:
    def largest(split: bool) -> int:
        options = {"lowering": "aot_eager", "split": split, "seconds": 0.1}
        found = offcompile.max_batch(
            Model(), tokens, memory="8MiB", hardware="cpu", most=8, options=options
        )
        return found.largest.batch

    assert largest(True) > largest(False)
