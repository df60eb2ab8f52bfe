"""Three architectures of Hugging Face, trained under budgets as they are trained without."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from lengths import some
from trust import models

#: words, running statistics, channels that lie last
NAMES = some(("opt", "resnet", "convnext"), "opt")


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_trains_as_ever(name: str) -> None:
    least, middle = models.counted([models.BY_NAME[name]], seed=0)
    assert least.done == middle.done == 1
    assert dict(least.figures)["with another graph than the plain one"] == "1"
    assert dict(least.figures)["moves planned"] != "0"


def test_there_are_enough_architectures_and_no_two_of_a_name() -> None:
    assert len(models.BY_NAME) == len(models.ARCHITECTURES) >= 75
