"""A rank whose graphs save less for backward than those of another trains as plain DDP does."""

from __future__ import annotations

from pathlib import Path

import pair_of_ranks
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


@pytest.mark.long
def test_one_rank_may_run_ops_again_that_another_does_not(tmp_path: Path) -> None:
    (here,), (there,) = pair_of_ranks.start("rank_lighter_child.py", str(tmp_path))
    assert here["equal"] and there["equal"]
    assert here["run_again"] > 0 == there["run_again"]
    assert min(here["bytes_out"], there["bytes_out"]) > 0
