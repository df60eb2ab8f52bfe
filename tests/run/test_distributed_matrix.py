"""Two ranks over gloo train as they do plainly, however a model is wrapped and compiled."""

from __future__ import annotations

from collections.abc import Sequence

import pair_of_ranks
import pytest
import torch.distributed as dist
from rank_cells import CELLS, FEW, MINIMUM, ON_FOUR, Cell

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def check(cells: Sequence[Cell], world: int = pair_of_ranks.WORLD) -> None:
    for rank in pair_of_ranks.run(cells, world):
        assert [found["cell"] for found in rank] == [cell.name for cell in cells]
        assert {f["cell"]: f["error"] for f in rank if f["error"] is not None} == {}
        assert [found["cell"] for found in rank if not found["equal"]] == []
        for cell, found in zip(cells, rank, strict=True):
            assert found["planned"], f"{cell.name}: nothing was compiled here"
            if cell.memory == MINIMUM:
                assert found["changed"] and found["bytes_out"], f"{cell.name}: nothing has moved"


@pytest.mark.long
def test_a_handful_of_the_matrix() -> None:
    check(FEW)


@pytest.mark.soak
def test_the_whole_matrix() -> None:
    assert len(CELLS) >= 40
    check(CELLS)


@pytest.mark.soak
def test_four_ranks() -> None:
    check(ON_FOUR, world=4)
