"""Low precision with masters, and GradScaler: as torch does it, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from optim_runs import (
    KINDS,
    PLACES,
    Model,
    assert_equal,
    loss_of,
    one_thread,
    our_run,
    scaled_steps,
    torch_run,
)
from torch import nn

from offcompile import optim


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class Masters:
    """Trains bf16 weights with fp32 masters by torch's own classes."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.weights]
        self.optimizer = getattr(torch.optim, kind)(self.masters, fused=True, **KINDS[kind])

    def step(self, max_norm: float | None) -> None:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.weights, max_norm)
        for master, p in zip(self.masters, self.weights, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.weights, strict=True):
                p.copy_(master)
                p.grad = None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_low_precision_weights_follow_masters(
    kind: str, overlap: bool, max_norm: float | None, dtype: torch.dtype
) -> None:
    theirs, mine = Model(dtype), Model(dtype)
    masters = Masters(theirs, kind)
    trained = [p for p in mine.parameters() if p.requires_grad]
    ours = getattr(optim, kind)(trained, **KINDS[kind], overlap=overlap, max_norm=max_norm)
    for number in range(6):
        loss_of(theirs, number).backward()
        masters.step(max_norm)
        loss_of(mine, number).backward()
        ours.step()
        ours.zero_grad()
    for p, q in zip(trained, masters.weights, strict=True):
        assert torch.equal(p, q)
    states = [ours.state[p].get("master") for p in trained if p in ours.state]
    assert all(s is not None and s.dtype == torch.float32 for s in states) and states


def test_a_weight_that_somebody_changed_is_followed_and_the_rest_keeps_its_master() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    ours = optim.SGD([p], lr=1e-4)
    for _ in range(10):
        p.grad = torch.ones_like(p)
        ours.step()
    small = ours.state[p]["master"].clone()
    assert torch.equal(p, torch.ones_like(p)) and (small < 1).all()
    with torch.no_grad():
        p[0] = 5.0
    p.grad = torch.zeros_like(p)
    ours.step()
    assert ours.state[p]["master"][0] == 5.0
    assert torch.equal(ours.state[p]["master"][1:], small[1:])


def test_without_masters_low_precision_is_torchs_own() -> None:
    start = torch.randn(100).bfloat16()
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = optim.AdamW([mine], master=False)
    torchs = torch.optim.AdamW([theirs], fused=True)
    for _ in range(3):
        gradient = torch.randn(100).bfloat16()
        mine.grad, theirs.grad = gradient, gradient.clone()
        ours.step()
        torchs.step()
    assert torch.equal(mine, theirs) and ours.state[mine]["exp_avg"].dtype == torch.bfloat16


def test_lossy_states_take_half_and_come_close() -> None:
    mine, theirs = our_run("AdamW", state_dtype="bf16").steps(5), torch_run("AdamW").steps(5)
    for p, q in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=2e-2)
    weight = mine.model.mix.weight
    assert mine.optimizer.state[weight]["exp_avg"].dtype == torch.bfloat16
    exact = our_run("AdamW", states="host").steps(1).optimizer.facts().stores["host"]
    lossy = our_run("AdamW", states="host", state_dtype="bf16").steps(1).optimizer.facts()
    assert lossy.stores["host"].host_bytes < 0.6 * exact.host_bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ways", ["plain", "unscaled"])
@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("scale", [1024.0, 1000.3])
def test_a_grad_scaler_skips_and_unscales_as_with_torch(
    kind: str, ways: str, states: str, scale: float
) -> None:
    torchs, ours = torch_run(kind), our_run(kind, states=states)
    scales = scaled_steps(torchs, ways, scale)
    assert scaled_steps(ours, ways, scale) == scales
    assert scales[2] == scales[1] / 2, "the infinity is to be found"
    assert_equal(ours, torchs)


@pytest.mark.parametrize("scale", [1024.0, 1000.3])
def test_max_norm_with_a_scaler_is_unscale_and_clip(scale: float) -> None:
    torchs, ours = torch_run("AdamW"), our_run("AdamW", clips=True)
    assert scaled_steps(torchs, "unscaled", scale) == scaled_steps(ours, "plain", scale)
    assert_equal(ours, torchs)


def test_gradients_of_two_types_have_the_norm_that_torch_finds() -> None:
    def parameters() -> list[nn.Parameter]:
        torch.manual_seed(1)
        kinds = [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, torch.float32]
        made = [nn.Parameter(torch.randn(50).to(d)) for d in kinds]
        for p in made:
            p.grad = torch.randn(50).to(p.dtype)
        return made

    mine = parameters()
    ours = optim.SGD(mine, max_norm=0.1)
    ours.step()
    assert ours.last_norm is not None
    assert torch.equal(ours.last_norm, nn.utils.clip_grad_norm_(parameters(), 0.1))
