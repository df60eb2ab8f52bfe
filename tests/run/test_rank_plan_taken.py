"""A rank carries out the plan of another: the same moves and bits, and no search of its own."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any
from unittest import mock

import planned_cases
import pytest
import torch
from lengths import some
from planned_cases import CASES
from simulated_store import SimulatedStore
from torch import Tensor
from weights_runs import clean_slate

from offcompile.report.report import PlanReport
from offcompile.run.plan import together
from offcompile.run.plan.answers import TheirPlan, Unreadable, read_answer
from offcompile.run.ranks.agreement import Agreement
from offcompile.run.ranks.figures import RankFigures
from offcompile.run.ranks.meeting import Answer, Known, Meeting, RankGroup

clean = pytest.fixture(autouse=True)(clean_slate)


class Leads(Meeting):
    """Rank 0, of a group whose other ranks have what it has. `answers`: what it has told them."""

    answers: list[str]

    def leads(self, mine: RankFigures) -> bool:
        self.known = Known(mine, mine)
        return True

    def answer(self, said: Answer | None) -> None:
        if said is not None:
            self.answers.append(json.dumps(said))


class Follows(Leads):
    """Rank 1, which is told the same."""

    def leads(self, mine: RankFigures) -> bool:
        return False

    def answered(self, mine: RankFigures) -> Answer | None:
        return dict(json.loads(self.answers.pop(0))) if self.answers else None


#: every run of the tests has these
ALWAYS = ("weights, updated in backward", "ops in two parts")


def trained(case: str, meets: type[Leads] | None, answers: list[str]) -> tuple[Any, Any, int]:
    """Losses and weights, the reports, and the number of searches."""

    def meeting(agreement: Agreement) -> Meeting | None:
        if meets is None:
            return None
        found = meets(RankGroup(SimulatedStore(), 0, 2), "k")
        found.answers = answers
        return found

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Agreement, "meeting", meeting))
        searching = mock.Mock(side_effect=together.best_candidate)
        stack.enter_context(mock.patch.object(together, "best_candidate", searching))
        return *planned_cases.trained(case), searching.call_count


def moves(reports: list[PlanReport]) -> list[object]:
    return [(r.plan, r.planned_us, r.problem, r.splitting, r.memory) for r in reports]


@pytest.mark.parametrize("case", some(CASES, *ALWAYS))
def test_a_plan_is_taken_as_it_was_made(case: str) -> None:
    answers: list[str] = []
    plain, _, _ = trained(case, None, [])
    values, reports, searched = trained(case, Leads, answers)
    assert searched == len(answers) == len(reports)
    told = list(answers)
    theirs, taken, searched_there = trained(case, Follows, answers)
    assert (searched_there, answers) == (0, [])
    assert moves(taken) == moves(reports)
    for one in (values, theirs):
        assert len(one) == len(plain) and all(map(torch.equal, one, plain))
    said = json.loads(told[0])
    assert bool(said["plan"]["moves"] or said["plan"]["directs"]) == (case != "all fits")
    drops = case in ("masks as bits", "ops in two parts")
    assert (said["apart"], said["bits"]) == (drops, drops)
    assert said["pieces"] == (4 if case == "a loss in pieces" else None)
    assert (said["withheld"] is not None) == ("updated" in case)
    if case.startswith("weights"):
        assert said["stays"] is not None
    if case == "ops in two parts":
        again = {one["op"] for one in said["plan"]["recomputes"]}
        assert again and all(name.startswith("getitem") for name in again), again


def refused(case: str, answers: list[str]) -> tuple[list[Tensor], str, int]:
    said: list[str] = []
    with mock.patch.object(together, "warn", said.append):
        values, _, searched = trained(case, Follows, answers)
    (text,) = said
    return values, text, searched


def answer_of(case: str) -> list[str]:
    answers: list[str] = []
    list(trained(case, Leads, answers))
    return answers


@pytest.mark.long
def test_a_plan_that_is_not_for_this_rank_costs_a_warning() -> None:
    plain, _, _ = trained("activations", None, [])
    # another graph
    values, text, searched = refused("activations", answer_of("masks as bits")[:1])
    assert all(map(torch.equal, values, plain)) and searched
    assert "cannot carry out the plan of another rank, and plans for itself: it " in text
    # a budget that is not there
    (found,) = answer_of("all fits")
    values, text, searched = refused("activations", [found])
    assert all(map(torch.equal, values, plain)) and searched
    assert "it needs " in text and " here. This is harmless" in text
    # no plan at all
    said = json.loads(answer_of("activations")[0])
    said["plan"]["start"][0]["tier"] = "attic"
    values, text, searched = refused("activations", [json.dumps(said)])
    assert all(map(torch.equal, values, plain)) and searched
    assert "it is not lawful: unknown-id" in text


def test_an_answer_of_another_version_costs_a_warning() -> None:
    """Each part of an answer is left out, or is something else."""
    (found,) = answer_of("activations")
    broken = [{k: v for k, v in json.loads(found).items() if k != key} for key in json.loads(found)]
    broken += [json.loads(found) | {key: "odd"} for key in ("order", "kept", "pieces", "bits")]
    broken += [json.loads(found) | {"order": [[["run", "a node of its own"]], [], 0, {}, 0]}]
    broken += [{"refused": ["why"], "budget_bytes": 1}, {"refused": ["why", None, "do"]}, {}]
    for said in broken:
        with pytest.raises(Unreadable, match="it cannot be read"):
            read_answer(said)
    assert isinstance(read_answer(json.loads(found)), TheirPlan)
    plain, _, _ = trained("activations", None, [])
    for said in (broken[0], broken[-2]):
        values, text, searched = refused("activations", [json.dumps(said)])
        assert all(map(torch.equal, values, plain)) and searched == 1
        assert "plans for itself: it cannot be read" in text


def test_ranks_of_two_versions_ask_two_questions() -> None:
    asked = []

    class Asks(Leads):
        def leads(self, mine: RankFigures) -> bool:
            asked.append(mine.structure)
            return super().leads(mine)

    list(trained("all fits", Asks, []))
    with mock.patch.object(together, "VERSION", "0.0.9"):
        list(trained("all fits", Asks, []))
    with mock.patch.object(together, "FORMAT", together.FORMAT + 1):
        list(trained("all fits", Asks, []))
    assert len(set(asked)) == len(asked) == 3
