"""A spread over PyTorch's own modules: what they give under budgets is what they give without."""

from __future__ import annotations

import pytest

pytest.importorskip("expecttest", reason="the database of modules is torch's own test code")

import torch
from trust import conformity, modules
from trust.conformity import Outcome, Planned, Tally

#: share of some 930 cases, which makes 14
SHARE = 0.015


def test_a_spread_of_modules_conforms_at_the_minimum_and_in_between() -> None:
    least, middle = modules.rows(SHARE, seed=0)
    assert least.holds and middle.holds
    assert least.of >= 12 and middle.of >= 3
    assert len(least.exceptions) <= least.of // 8
    # most of what is trained has something to move at the minimum
    changed = int(dict(least.figures)["with another graph than the plain one"])
    assert changed >= least.of // 4


def test_the_database_leaves_flags_of_backends_as_they_were() -> None:
    assert modules.module_db()
    assert not torch.backends.flags_frozen()


def outcome(*values: float) -> Outcome:
    return Outcome({"x": torch.tensor(values)})


def test_a_difference_is_an_exception_only_where_the_plain_backend_has_it_too() -> None:
    tally, found = Tally(7), Planned(outcome(2.0), (), 0)
    tally.count("same", found, outcome(2.0), lambda compiler: outcome(9.0))
    tally.count("justified", found, outcome(1.0), lambda compiler: outcome(2.0))
    tally.count("ours", found, outcome(1.0), lambda compiler: outcome(1.0))
    tally.count("both", found, outcome(1.0), lambda compiler: outcome(3.0))
    assert (tally.of, tally.done, len(tally.exceptions), len(tally.failures)) == (4, 1, 1, 2)
    with pytest.raises(AssertionError, match=r"ours \(--seed 7\): x"):
        conformity.rows_of({"what": tally})


def test_bits_are_compared_and_one_nan_is_as_good_as_another() -> None:
    assert not outcome(float("nan"), 1.0).differences(outcome(float("nan"), 1.0))
    assert outcome(0.0).differences(outcome(-0.0))
    assert outcome(1.0).differences(Outcome({"x": torch.tensor([1.0], dtype=torch.float64)}))
    assert outcome(1.0).differences(Outcome({"y": torch.tensor([1.0])}))
    failed = Outcome(error=ValueError("no"))
    assert outcome(1.0).differences(failed) and not failed.differences(Outcome(error=ValueError()))
