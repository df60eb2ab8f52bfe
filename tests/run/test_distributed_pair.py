"""Two ranks over gloo: a short run of what `make soak` does at length."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from trust import ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


@pytest.mark.soak  # `test_a_handful_of_the_matrix` has more cases of two ranks
def test_two_ranks_train_as_they_do_plainly() -> None:
    found = ranks.run({"DDP": ["minimum"]})
    assert len(found) == ranks.WORLD
    for (case,) in found:
        assert (case["case"], case["equal"]) == ("DDP at minimum", True)
        assert case["changed"] and len(case["hosted"]) == 5
