"""Memory of DDP and FSDP2 is counted beside the graphs that they wrap, in a world of one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from offcompile.optim import AdamW
from offcompile.run.accounts.rank_memory import RankMemory
from offcompile.run.accounts.usage import DeviceUsage, ParameterSet

WIDTH, WIDE = 16, 64
WEIGHTS = 4 * (WIDTH * WIDE + WIDE + WIDE * WIDTH + WIDTH)
HEAD = 4 * (WIDTH * WIDTH + WIDTH)

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Looking(nn.Module):
    """Asks in the middle of its forward, as a compiled graph does."""

    def __init__(self, memory: RankMemory) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.memory = memory
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.seen.append(self.memory.held_bytes(()))
        return self.down(self.up(x)).sum()


@pytest.mark.parametrize("views", [False, True])
def test_buckets_count_once(views: bool) -> None:
    memory = RankMemory()
    model = Looking(memory)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    assert memory.held_bytes(()) == 0  # it may be of another model, so far
    ddp(torch.ones(2, WIDTH)).backward()
    assert model.seen == [WEIGHTS]
    # with views, the gradients that lie in the buckets are counted with their parameters
    assert memory.held_bytes(()) == (0 if views else WEIGHTS)
    model.zero_grad()
    assert memory.held_bytes(()) == WEIGHTS
    del ddp
    gc.collect()
    assert memory.held_bytes(()) == 0


def test_shards_and_what_moves_count() -> None:
    memory = RankMemory()
    before = memory.held_bytes(())
    model = nn.Sequential(Looking(RankMemory()), nn.Linear(WIDTH, WIDTH))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    # shards and their gradients; the root's weights, which stand; the largest group ahead and back
    shards, standing, moving = 2 * (WEIGHTS + HEAD), HEAD, 2 * WEIGHTS
    assert memory.held_bytes(()) - before == shards + standing + moving
    known = {id(p) for p in model.parameters()}
    assert memory.held_bytes(known) - before == standing + moving


def test_states_of_shards_count() -> None:
    usage = DeviceUsage()
    entry, nobody = usage.open(), ParameterSet(())
    model = nn.Linear(WIDTH, WIDE)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    before = usage.held_beside(entry, nobody).now
    optimizer = AdamW(model.parameters(), states="device")
    usage.invalidate()
    states = sum(2 * p.numel() * 4 for p in model.parameters())
    assert usage.held_beside(entry, nobody).now - before == states
    del optimizer
