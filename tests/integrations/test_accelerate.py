"""`Accelerator.prepare` on two gloo ranks: the losses and weights of `aot_eager`, in a budget."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch.distributed as dist

pytest.importorskip("accelerate")

import pair_of_ranks
from rank_accelerate_child import STEPS, WORLD, Case

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
FEW = (Case("minimum", passes=2, clip=0.5, ours=True),)
MORE = (
    Case("minimum"),
    Case("minimum", in_place=False),
    Case("minimum", passes=2, clip=0.5),
    Case("minimum", ours=True),
    Case("minimum", mixed_precision="bf16"),
)


@pytest.mark.long
@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(MORE, marks=pytest.mark.soak)], ids=["few", "more"]
)
def test_two_ranks_train_as_they_do_under_aot_eager(cases: tuple[Case, ...]) -> None:
    ranks = pair_of_ranks.start("rank_accelerate_child.py", [asdict(case) for case in cases])
    assert len(ranks) == WORLD
    for found in ranks:
        for case, said in zip(cases, found, strict=True):
            assert said["losses"] and said["weights"] and said["names"], (case, said)
            assert said["steps"] == STEPS * case.passes
            assert said["changed"] and said["moved"] > 0, (case, said)
    # each rank had its own batches
    for mine, others in zip(*ranks, strict=True):
        assert mine["loss"] != others["loss"]
