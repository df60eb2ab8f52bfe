"""A few of the wild programs, what a verdict counts, and that there are enough of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from trust import wild as part
from trust.conformity import Outcome
from wild import judge as judging
from wild import rounding
from wild.families import load
from wild.judge import BROKEN, EQUAL, MISSING, PLAIN_FAILS, REFUSED, Verdict, judge
from wild.program import Program, Run

#: quick ones of several families; `make soak` runs all
QUICK = (
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


class _OnTheEdge(nn.Module):
    """Its ReLU's input is just below zero, by less than a rounding of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.7, 0.1, -0.8]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.weights @ x)


def _gradient(*values: float) -> Outcome:
    return Outcome({"gradient": torch.tensor(values), "unscaled": torch.ones(3)})


def _run_on_the_edge(compiler: judging.Compiler) -> Outcome:
    model = _OnTheEdge()
    compiler(model)(torch.ones(3)).backward()
    assert model.weights.grad is not None
    return _gradient(*model.weights.grad.tolist())


def _explained(mine: Outcome, theirs: Outcome, ours_in_float64: Outcome) -> bool:
    return rounding.explains(
        mine, theirs, _run_on_the_edge, lambda _: ours_in_float64, rounding.uncompiled
    )


def test_rounding_explains_on_which_side_of_zero_a_value_lies_and_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped, passed = _gradient(0, 0, 0), _gradient(1, 1, 1)
    exact = _run_on_the_edge(rounding.in_float64(rounding.uncompiled))
    assert not rounding.far_apart(stopped, exact)

    assert _explained(stopped, passed, passed)  # ours is right, without another look
    assert _explained(passed, stopped, stopped)  # nudged weights pass it too
    assert not _explained(passed, stopped, passed)  # wrong in float64 as well
    assert not _explained(passed, stopped, Outcome(error=ValueError("no")))
    monkeypatch.setattr(rounding, "AS_FAR", 1.0)
    more = Outcome({**passed.values, "unscaled": torch.zeros(3)})
    assert not _explained(more, stopped, stopped)  # what rounding does not change is off too
    monkeypatch.setattr(rounding, "NUDGED_RUNS", 0)
    assert not _explained(passed, stopped, stopped)


def test_a_program_that_cannot_run_in_float64_is_held_against_eager_kernels() -> None:
    def narrow(compiler: judging.Compiler) -> Outcome:
        if compiler is not rounding.uncompiled:
            return Outcome(error=TypeError("float32 is wanted"))
        return _gradient(1)

    def explained(mine: Outcome, theirs: Outcome) -> bool:
        return rounding.explains(mine, theirs, narrow, lambda _: _gradient(1))

    assert explained(_gradient(1.2), _gradient(1.1))
    assert not explained(_gradient(1.7), _gradient(1.2))
    assert not explained(Outcome({"another": torch.ones(1)}), _gradient(1.2))


def test_a_missing_package_is_told() -> None:
    verdict = judge(Program("test", "lacking", _layer, needs=("no-such-package",)))
    assert (verdict.kind, verdict.why) == (MISSING, "no-such-package")


def test_a_row_counts_equal_and_refused_and_names_the_others() -> None:
    verdicts = [Verdict(f"f/{n}", kind) for n, kind in enumerate((EQUAL, REFUSED, MISSING))]
    row, _ = part.row_of("f", verdicts)
    assert (row.done, row.of, row.holds) == (2, 3, True)
    assert not part.row_of("f", [Verdict("f/x", BROKEN)])[0].holds
    assert [e.partition(" ")[0] for e in row.exceptions] == ["f/2:"]
