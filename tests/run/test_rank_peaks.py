"""Two ranks keep their budget by the system's count."""

from __future__ import annotations

import pair_of_ranks
import pytest
import torch.distributed as dist

MIB = 1 << 20
#: pages of blocks that are not full, threads of gloo, and what a look every 2 ms misses
TOLERANCE_BYTES = 4 * MIB

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.long,
]


@pytest.mark.parametrize(
    ("wrap", "budget_mib"),
    [
        ("ddp_parts", 90),
        pytest.param("ddp_whole", 90, marks=pytest.mark.soak),
        pytest.param("ddp_sharded", 90, marks=pytest.mark.soak),
        pytest.param("fsdp", 75, marks=pytest.mark.soak),
    ],
)
def test_a_rank_keeps_its_budget(wrap: str, budget_mib: int) -> None:
    for (found,) in pair_of_ranks.start("rank_peaks_child.py", [[wrap, f"{budget_mib}MiB"]]):
        assert found["changed"]
        taken = found["peak_bytes"] - found["left_bytes"]
        assert taken <= budget_mib * MIB + TOLERANCE_BYTES
        assert taken > budget_mib * MIB // 2  # the measure sees what it is to see
