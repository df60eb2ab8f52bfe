"""A few of the wild programs, what a verdict counts, and that there are enough of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from trust import wild as part
from wild import judge as judging
from wild.families import load
from wild.judge import BROKEN, EQUAL, MISSING, PLAIN_FAILS, REFUSED, Verdict, judge
from wild.program import Program, Run

#: quick ones of several families; `make soak` runs all
QUICK = (
    "loops/allocates_gradients_itself",
    "loops/evaluates_between_steps",
    "generative/trains_adversaries_with_two_optimizers",
    "parameters/freezes_and_unfreezes",
    "compiling/breaks_its_graph",
)
WANTED, WANTED_OF_TIMM = 150, 60


@pytest.mark.parametrize("name", QUICK)
def test_a_program_gives_the_same_bits(name: str) -> None:
    verdict = judge(load()[name])
    assert (verdict.kind, verdict.why) == (EQUAL, "")
    assert verdict.moves and verdict.bytes_out


@pytest.mark.parametrize("name", ["saves_tensors_on_the_cpu", "compiles_autograd"])
def test_a_program_is_refused_in_words(name: str) -> None:
    assert judge(load()[f"compiling/{name}"]).kind == REFUSED


def test_a_program_that_torch_cannot_compile_fails_alike() -> None:
    assert judge(load()["generative/penalizes_gradients"]).kind == PLAIN_FAILS


def test_there_are_enough_programs() -> None:
    programs = load()
    assert len(programs) >= WANTED
    counted = Counter(p.family for p in programs.values())
    assert counted["timm"] >= WANTED_OF_TIMM and len(counted) >= 12


def _layer(run: Run) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    forward = run.compile(model)
    run.train(model, lambda n: forward(torch.ones(2, 4)).sum(), steps=1)


def test_a_program_that_differs_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(9))

    def unlike(run: Run) -> None:
        run.keep("call", torch.tensor(next(calls)))
        _layer(run)

    assert judge(Program("test", "same", _layer)).kind == EQUAL
    assert judge(Program("test", "unlike", unlike)).kind == BROKEN
    # a refusal that nobody asked for, and none where one was due
    assert judge(Program("test", "wary", _layer, refused="words")).kind == BROKEN

    def refused(module: nn.Module) -> nn.Module:
        raise judging.offcompile.OffloadError("no")

    monkeypatch.setattr("trust.conformity.ours", lambda memory: refused)
    assert judge(Program("test", "refused", _layer)).kind == BROKEN


def test_a_program_that_moves_nothing_is_broken_unless_it_says_so() -> None:
    def still(run: Run) -> None:
        run.keep("x", torch.ones(3))

    assert judge(Program("test", "still", still)).kind == BROKEN
    assert judge(Program("test", "still", still, moves=False)).kind == EQUAL


def test_a_missing_package_is_told() -> None:
    verdict = judge(Program("test", "lacking", _layer, needs=("no-such-package",)))
    assert (verdict.kind, verdict.why) == (MISSING, "no-such-package")


def test_a_row_counts_equal_and_refused_and_names_the_others() -> None:
    verdicts = [Verdict(f"f/{n}", kind) for n, kind in enumerate((EQUAL, REFUSED, MISSING))]
    row, _ = part.row_of("f", verdicts)
    assert (row.done, row.of, row.holds) == (2, 3, True)
    assert not part.row_of("f", [Verdict("f/x", BROKEN)])[0].holds
    assert [e.partition(" ")[0] for e in row.exceptions] == ["f/2:"]
