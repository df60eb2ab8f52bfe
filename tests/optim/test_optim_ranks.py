"""Two ranks over gloo: shards, replicas and checkpoints are updated and saved as torch's are."""

from __future__ import annotations

import pair_of_ranks
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

CASES = {
    "FSDP2": {"wrap": "fsdp"},
    "FSDP2 clipped": {"wrap": "fsdp", "max_norm": 0.1},
    "FSDP2 overlapped": {"wrap": "fsdp", "overlap": True},
    "FSDP2 overlapped and clipped": {"wrap": "fsdp", "overlap": True, "max_norm": 0.1},
    "FSDP2 on disk": {"wrap": "fsdp", "states": "disk"},
    "tensor parallel": {"wrap": "tp"},
    "tensor parallel clipped": {"wrap": "tp", "max_norm": 0.1},
    "DDP clipped": {"wrap": "ddp", "max_norm": 0.1},
    "DDP overlapped": {"wrap": "ddp", "overlap": True},
    "DDP overlapped and clipped": {"wrap": "ddp", "overlap": True, "max_norm": 0.1},
    "DDP with views, overlapped": {"wrap": "ddp_views", "overlap": True},
    "DDP with views, clipped": {"wrap": "ddp_views", "overlap": True, "max_norm": 0.1},
    "FSDP2 resumed": {"wrap": "resumed"},
    "FSDP2 from torch and back": {"wrap": "from_torch"},
}
#: parameters of the model that FSDP2's hooks update during backward; DDP reduces too late for it
IN_BACKWARD = {"FSDP2 overlapped": 13}


@pytest.mark.long
def test_ranks_update_what_they_hold_as_torch_does() -> None:
    for rank in pair_of_ranks.start("rank_optim_child.py", CASES):
        assert [case["case"] for case in rank] == list(CASES)
        assert [case["case"] for case in rank if not case["equal"]] == []
        updated = {case["case"]: case["last"] for case in rank if case.get("last")}
        assert updated == IN_BACKWARD
