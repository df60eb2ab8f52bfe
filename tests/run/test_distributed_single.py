"""FSDP2 and DDP in a world of one: what they own stays theirs, and steps are the plain ones."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lengths import some
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from weights_runs import clean_slate, on_host, seeded

import offcompile
from offcompile.backend import compile_graph
from offcompile.ir import OffloadError
from offcompile.runtime.ranks.gradient_reducer import reducer_in_place_of

WIDTH = 64
OPTIONS = {"lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]


class ListeningStore(dist.Store):  # type: ignore[misc]
    """Keeps values as its kind does, and notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self._kept, self.asked = dist.HashStore(), list[tuple[str, str]]()

    def _asked(self, what: str, key: object, *more: Any) -> Any:
        self.asked.append((what, str(key)))
        return getattr(self._kept, what)(key, *more)

    set = partialmethod(_asked, "set")
    get = partialmethod(_asked, "get")
    add = partialmethod(_asked, "add")
    check = partialmethod(_asked, "check")
    wait = partialmethod(_asked, "wait")
    compare_set = partialmethod(_asked, "compare_set")


@pytest.fixture(scope="module", autouse=True)
def store() -> Iterator[ListeningStore]:
    found = ListeningStore()
    dist.init_process_group("gloo", store=found, rank=0, world_size=1)
    yield found
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield from clean_slate()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()


def train(forward: Any, model: nn.Module, width: int = WIDTH) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    seen = []
    for seed in range(3):
        x = torch.randn(32, width, generator=torch.Generator().manual_seed(seed))
        loss = forward(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return [*seen, *(_whole(p).detach().clone() for p in model.parameters())]


def _whole(parameter: Tensor) -> Tensor:
    full = getattr(parameter, "full_tensor", None)
    return parameter if full is None else full()


def how(memory: str | None) -> dict[str, Any]:
    if memory is None:
        return {"backend": "aot_eager"}
    return {"backend": "offcompile", "options": {"memory": memory, **OPTIONS}}


def sharded(memory: str | None, way: str) -> list[Tensor]:
    torch._dynamo.reset()
    model = seeded(Stack)
    if way == "blocks, then sharded":
        for block in model.blocks:
            block.compile(**how(memory))
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if way == "sharded, then blocks":
        for block in model.blocks:
            block.compile(**how(memory))
    forward = torch.compile(model, **how(memory)) if way == "whole" else model
    return train(forward, model)


WAYS = ("whole", "sharded, then blocks", "blocks, then sharded")


@pytest.mark.parametrize("way", some(WAYS, "whole", "blocks, then sharded"))
def test_fsdp2_keeps_its_parameters(way: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = sharded(None, way)
    for memory in ("minimum", "1600KiB") if way == "whole" else ("minimum",):
        with caplog.at_level(logging.INFO, "offcompile"):
            found = sharded(memory, way)
        said = [one for one in caplog.records if "stay on the device" in one.getMessage()]
        assert said and all("FSDP2 gathers it there" in one.getMessage() for one in said)
        assert all(one.levelno < logging.WARNING for one in said)  # nothing the user can change
        assert all(map(torch.equal, found, expected)), memory
        report = offcompile.reports()[-1]
        assert not any(t.home == "host" for t in report.problem.tensors)
        if memory == "minimum":
            assert not report.fits


def replicated(memory: str | None, cut: bool = False, **settings: Any) -> list[Tensor]:
    """Train a model of more than one bucket; `cut`: behind a function that torch does not know to
    be offcompile, so that DDPOptimizer cuts the graph."""
    torch._dynamo.reset()
    width = 192
    model = seeded(lambda: Stack(width))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1, **settings)
    found_by = how(memory)
    if cut and memory is not None:
        found_by = {"backend": partial(compile_graph, options=found_by["options"])}
    found = train(torch.compile(wrapped, **found_by), model, width)
    if memory == "minimum":
        assert on_host(model)
    return found


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("views", some([False, True], True))
def test_ddp_with_its_optimizer(views: bool, cut: bool) -> None:
    assert torch._dynamo.config.optimize_ddp
    expected = replicated(None, gradient_as_bucket_view=views)
    for memory in ("minimum", "24MiB"):
        before = len(offcompile.reports())
        found = replicated(memory, cut, gradient_as_bucket_view=views)
        assert all(map(torch.equal, found, expected)), memory
        graphs = {r.name.partition(",")[0] for r in offcompile.reports()[before:]}
        assert (len(graphs) > 1) == cut  # parts of it, each planned by itself


@pytest.mark.parametrize("unused", [False, True])
def test_ddp_of_one_rank_has_nothing_to_reduce(unused: bool) -> None:
    """So it needs no buckets, and gradients are final when they come, unless DDP was asked to look
    for parameters without one."""

    def trained(budget: str | None) -> tuple[list[Tensor], Any, Any]:
        torch._dynamo.reset()
        model = seeded(lambda: Stack(WIDTH))
        step = torch.compile(model, **how(budget)) if budget else model
        wrapped = DistributedDataParallel(step, find_unused_parameters=unused)
        optimizer = offcompile.optim.AdamW(model.parameters(), 1e-2, overlap=budget is not None)
        for seed in range(3):
            x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))
            wrapped(x).pow(2).mean().backward()
            if budget is not None:
                early = all(p.grad is None for p in model.parameters())
                assert early != unused  # updated in backward
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], wrapped, optimizer

    expected = trained(None)[0]
    found, wrapped, _ = trained("minimum")
    assert all(map(torch.equal, found, expected))
    assert (reducer_in_place_of(wrapped) is None) == unused
    if not unused:
        assert wrapped.reducer.held_bytes() == 0
        with pytest.raises(OffloadError, match="before its first forward"):
            wrapped.register_comm_hook(None, lambda state, bucket: None)


def test_ddp_whose_parameters_are_all_frozen_later_runs_on() -> None:
    torch._dynamo.reset()
    model = seeded(lambda: Stack(WIDTH))
    wrapped = DistributedDataParallel(torch.compile(model, **how("minimum")))
    model.requires_grad_(False)
    x = torch.randn(4, WIDTH, requires_grad=True)
    wrapped(x).sum().backward()
    assert x.grad is not None and reducer_in_place_of(wrapped) is None


def test_one_rank_asks_nothing_of_the_store(store: ListeningStore) -> None:
    for run in (replicated, partial(sharded, way="whole")):
        asked = []
        for memory in (None, "minimum"):
            store.asked.clear()
            run(memory)
            asked.append(Counter(what for what, _ in store.asked))
            assert not any("offcompile" in key for _, key in store.asked)
        assert asked[0] == asked[1]  # what torch asks, and nothing else
    dist.distributed_c10d._get_default_store().check(["offcompile"])
    assert store.asked[-1][0] == "check" and "offcompile" in store.asked[-1][1]
