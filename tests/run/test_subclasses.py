"""Parameters that are made of other tensors: they stay, the rest moves, and results are plain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from weights_runs import clean_slate, on_host, seeded

import offcompile
from offcompile.runtime.device.owners import address_of, device_bytes, why_it_stays

WIDTH = 64
OPTIONS = {"lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield from clean_slate()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.three, self.four = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.two(torch.relu(self.one(x)))
        return x + self.four(torch.relu(self.three(x)))


def two_tensors() -> Net:
    model = Net()
    for layer in (model.one, model.three):
        data = layer.weight.data
        layer.weight = nn.Parameter(TwoTensor(data, data.clone()))
    return model


def train(build: Any, memory: str | None) -> tuple[list[Tensor], nn.Module]:
    torch._dynamo.reset()
    model = seeded(build)
    how: dict[str, Any] = {"backend": "aot_eager"}
    if memory is not None:
        how = {"backend": "offcompile", "options": {"memory": memory, **OPTIONS}}
    forward, seen = torch.compile(model, **how), []
    for seed in range(3):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = forward(x).pow(2).mean()
        loss.backward()
        seen.append(_plain(loss).detach())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.05)
                    p.grad = None
    return [*seen, *(_plain(p).detach().clone() for p in model.parameters())], model


def _plain(tensor: Tensor) -> Tensor:
    return tensor.a if isinstance(tensor, TwoTensor) else tensor


def test_two_tensors_stay_and_other_weights_leave() -> None:
    expected, _ = train(two_tensors, None)
    for memory in ("minimum", "1300KiB", "400MiB"):
        found, model = train(two_tensors, memory)
        assert all(map(torch.equal, found, expected)), memory
        if memory == "minimum":
            assert on_host(model) == {"two.weight", "four.weight"}
            assert not offcompile.reports()[-1].fits


def test_dtensors_train_as_they_do_plainly() -> None:
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def build() -> Net:
        plan = {"one": ColwiseParallel(), "two": RowwiseParallel()}
        plan |= {"three": ColwiseParallel(), "four": RowwiseParallel()}
        return parallelize_module(Net(), init_device_mesh("cpu", (1,)), plan)  # type: ignore[return-value]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected, plain = train(build, None)
        assert isinstance(plain.one.weight, DTensor)
        for memory in ("minimum", "400MiB"):
            found, _ = train(build, memory)
            assert all(map(torch.equal, map(_local, found), map(_local, expected))), memory
    finally:
        dist.destroy_process_group()


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_weights_in_eight_bits() -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def run(memory: str | None) -> list[Tensor]:
        torch._dynamo.reset()
        model = seeded(Net)
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        how: dict[str, Any] = {"backend": "aot_eager"}
        if memory is not None:
            how = {"backend": "offcompile", "options": {"memory": memory, **OPTIONS}}
        forward = torch.compile(model, **how)
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            seen = [forward(x)]
        x.requires_grad_()
        forward(x).pow(2).mean().backward()
        assert x.grad is not None
        return [*seen, x.grad]

    expected = run(None)
    assert all(map(torch.equal, run("minimum"), expected))
    assert not offcompile.reports()[-1].fits


def test_a_wrapper_counts_by_its_parts() -> None:
    inner = torch.ones(4, 4)
    made = TwoTensor(inner, inner.clone())
    assert address_of(made) is None and why_it_stays(made) is not None
    assert device_bytes(made) == 2 * device_bytes(inner) == 128
