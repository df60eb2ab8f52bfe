"""Our optimizers against torch's fused ones on the CPU: bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_runs import (
    KINDS,
    PLACES,
    assert_equal,
    one_thread,
    our_run,
    torch_run,
)
from torch import nn

from offcompile import optim
from offcompile.optim import apply


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("clips", [False, True])
def test_ten_steps_are_those_of_torch(kind: str, states: str, clips: bool) -> None:
    torchs = torch_run(kind, accumulate=3).steps(10)
    ours = our_run(kind, accumulate=3, states=states, clips=clips).steps(10)
    assert min(torchs.norms) > 0.05, "clipping is to clip"
    assert_equal(ours, torchs)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_zeros_and_no_gradient_differ_as_in_torch(kind: str) -> None:
    torchs, ours = torch_run(kind, set_to_none=False), our_run(kind)
    ours.set_to_none = False
    assert_equal(ours.steps(4), torchs.steps(4))


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["AdamW", "Adam", "SGD"]),
    lr=st.floats(1e-5, 1.0),
    tensor_lr=st.booleans(),
    decay=st.sampled_from([0.0, 0.01, 0.3]),
    flag=st.booleans(),
    maximize=st.booleans(),
    a=st.floats(0.0, 0.99),
    b=st.floats(0.5, 0.999),
    eps=st.sampled_from([0.0, 1e-8, 1e-3]),
    numel=st.integers(0, 200),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    tile=st.sampled_from([16, 48, 1 << 18]),
    max_norm=st.sampled_from([None, 0.3]),
    states=st.sampled_from(["host", "device"]),
    seed=st.integers(0, 1000),
)
def test_any_hyper_parameters(
    kind: str,
    lr: float,
    tensor_lr: bool,
    decay: float,
    flag: bool,
    maximize: bool,
    a: float,
    b: float,
    eps: float,
    numel: int,
    dtype: torch.dtype,
    tile: int,
    max_norm: float | None,
    states: str,
    seed: int,
) -> None:
    common: dict[str, Any] = {"weight_decay": decay, "maximize": maximize}
    common["lr"] = torch.tensor(lr) if tensor_lr else lr
    if kind == "SGD":
        common |= {"momentum": a, "nesterov": flag and a > 0}
        common |= {} if common["nesterov"] else {"dampening": b}
    else:
        common |= {"betas": (a, b), "eps": eps, "amsgrad": flag}
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(numel, dtype=dtype, generator=generator)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = getattr(optim, kind)([mine], **common, states=states, max_norm=max_norm)
    torchs = getattr(torch.optim, kind)([theirs], **common, fused=True)
    whole, apply.TILE_ELEMENTS = apply.TILE_ELEMENTS, tile
    try:
        for _ in range(3):
            gradient = torch.randn(numel, dtype=dtype, generator=generator)
            mine.grad, theirs.grad = gradient.clone(), gradient.clone()
            if max_norm is not None:
                nn.utils.clip_grad_norm_([theirs], max_norm)
            ours.step()
            torchs.step()
    finally:
        apply.TILE_ELEMENTS = whole
    assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("numel", [1, 15, 16, 17, 1000, 4099, 40001])
@pytest.mark.parametrize("kind", KINDS)
def test_ranges_add_up_to_the_whole_bit_for_bit(
    kind: str, numel: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "TILE_ELEMENTS", 1024)
    torch.set_num_threads(threads)
    start, gradient = torch.randn(numel), torch.randn(numel)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = getattr(optim, kind)([mine], **KINDS[kind], states="device", max_norm=0.01)
    torchs = getattr(torch.optim, kind)([theirs], **KINDS[kind], fused=True)
    for _ in range(3):
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        nn.utils.clip_grad_norm_([theirs], 0.01)
        ours.step()
        torchs.step()
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("shape", [(4, 6, 5, 3), (2, 3, 1, 7)])
def test_weights_that_are_not_contiguous(shape: tuple[int, ...]) -> None:
    start = torch.randn(shape).to(memory_format=torch.channels_last)
    gradient = torch.randn(shape)  # of another layout
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.contiguous())
    ours = optim.AdamW([mine], states="host")
    torchs = torch.optim.AdamW([theirs], fused=True)
    for _ in range(3):
        mine.grad, theirs.grad = gradient, gradient.clone()
        ours.step()
        torchs.step()
    assert mine.stride() == start.stride() and torch.allclose(mine, theirs, atol=1e-6)
    assert ours.state[mine]["exp_avg"].stride() == start.stride()
    assert torch.allclose(ours.state[mine]["exp_avg"], torchs.state[theirs]["exp_avg"])


def test_a_weight_with_gaps_in_its_memory() -> None:
    base = torch.randn(6, 10)
    mine, theirs = nn.Parameter(base[:, :7]), nn.Parameter(base[:, :7].contiguous())
    untouched = base[:, 7:].clone()
    ours, torchs = optim.AdamW([mine]), torch.optim.AdamW([theirs], fused=True)
    for _ in range(3):
        gradient = torch.randn(6, 7)
        mine.grad, theirs.grad = gradient, gradient.clone()
        ours.step()
        torchs.step()
    assert torch.equal(mine, theirs) and torch.equal(base[:, 7:], untouched)


def test_groups_may_come_later_and_closures_are_called() -> None:
    def train(kind: Any, **more: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        first, second = nn.Linear(5, 5), nn.Linear(5, 5)
        optimizer = kind(first.parameters(), lr=0.1, **more)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = second(torch.tanh(first(torch.ones(2, 5)))).square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        optimizer.add_param_group({"params": second.parameters(), "lr": 0.01})
        optimizer.step(closure)
        optimizer.step(closure)
        return [*first.parameters(), *second.parameters()]

    theirs = train(torch.optim.AdamW, fused=True)
    for more in ({}, {"overlap": True}, {"states": "disk", "overlap": True}):
        for p, q in zip(train(optim.AdamW, **more), theirs, strict=True):
            assert torch.equal(p, q)


def test_momentum_that_begins_later() -> None:
    mine, theirs = nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(20))
    ours, torchs = optim.SGD([mine], 0.1), torch.optim.SGD([theirs], 0.1, fused=True)
    for number in range(5):
        if number == 2:
            ours.param_groups[0]["momentum"] = torchs.param_groups[0]["momentum"] = 0.9
        gradient = torch.randn(20)
        mine.grad, theirs.grad = gradient, gradient.clone()
        ours.step()
        torchs.step()
    assert torch.equal(mine, theirs)
