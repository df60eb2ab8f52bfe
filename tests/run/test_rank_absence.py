"""A rank that ends in the middle of training is named on the others, and so is the reason."""

from __future__ import annotations

import pair_of_ranks
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

SAID = {
    "raises": "Rank 1 has ended: ValueError: a bad batch.",
    "killed": "of this machine) has died.",
    "leaves": "Rank 1 has ended: its program is over.",
}


@pytest.mark.parametrize(
    "how", ["raises", "killed", pytest.param("leaves", marks=pytest.mark.soak)]
)
def test_a_rank_that_ends_is_named(how: str) -> None:
    (other,), _ = pair_of_ranks.start("rank_absence_child.py", [2, how], 2, may_fail=[1])
    assert "Rank 1" in other["said"] and SAID[how] in other["said"]


@pytest.mark.long
def test_a_rank_that_is_late_is_there() -> None:
    found = pair_of_ranks.start("rank_absence_child.py", [2, "late"])
    assert found == [[{"said": "nothing"}]] * 2


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", pytest.param("leaves", marks=pytest.mark.soak)])
def test_a_rank_that_ends_before_its_first_graph_is_named(how: str) -> None:
    """Nothing of offcompile has run on it: the others see that its connection is closed. They would
    wait for it without end."""
    asked = [2, f"{how} first"]
    (other,), _ = pair_of_ranks.start("rank_absence_child.py", asked, 2, may_fail=[1])
    assert "Rank 1 has ended before it ran anything of offcompile" in other["said"]
