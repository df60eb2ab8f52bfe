"""Muon with its states elsewhere: torch's numbers, bit for bit, wherever the states are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from optim_runs import (
    MAX_NORM,
    PLACES,
    Model,
    Run,
    assert_equal,
    assert_same_states,
    loss_of,
    one_thread,
    scaled_steps,
)
from torch import nn

import offcompile
from offcompile import optim
from offcompile.ir import OffloadError
from offcompile.optim import state_placement as places
from offcompile.runtime.states.disk_states import DiskStates

SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {"lr": 0.02},
    "as AdamW": {"lr": 3e-3, "adjust_lr_fn": "match_rms_adamw", "nesterov": False, "ns_steps": 3},
}
BLOCK = 16384


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2]


def plain(settings: str = "usual", **more: Any) -> Run:
    model = Model()
    return Run(model, torch.optim.Muon(matrices(model), **SETTINGS[settings]), **more)


def ours(settings: str = "usual", accumulate: int = 1, **beside: Any) -> Run:
    model = Model()
    if beside.get("overlap"):
        beside["accumulate"] = accumulate
    made = optim.Muon(matrices(model), **SETTINGS[settings], **beside)
    return Run(model, made, accumulate, clips="max_norm" in beside)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("states", PLACES)
def test_ten_steps_are_those_of_torch(settings: str, states: str) -> None:
    assert_equal(ours(settings, states=states).steps(10), plain(settings).steps(10))


@pytest.mark.parametrize("states", PLACES)
def test_updates_during_backward_and_clipped_are_those_of_torch(states: str) -> None:
    torchs = plain(accumulate=2).steps(4)
    clipped = ours(accumulate=2, states=states, overlap=True, max_norm=MAX_NORM).steps(4)
    assert min(torchs.norms) > MAX_NORM
    assert_equal(clipped, torchs)
    unclipped = ours(accumulate=2, states=states, overlap=True)
    unclipped.max_norm = None
    assert_equal(unclipped.steps(4), plain(accumulate=2, max_norm=None).steps(4))
    assert unclipped.optimizer.facts().updated_in_backward > 0


def test_a_matrix_whose_states_come_in_blocks_is_updated_whole(
    monkeypatch: pytest.MonkeyPatch, on_a_disk: object
) -> None:
    small = partial(DiskStates, block_bytes=BLOCK, buffers=3, small_bytes=100)
    monkeypatch.setattr(places, "DiskStates", small)
    torch.manual_seed(0)
    theirs = nn.Linear(90, 210, bias=False)
    mine = copy.deepcopy(theirs)
    assert theirs.weight.nbytes > 4 * BLOCK
    by_torch = torch.optim.Muon(theirs.parameters(), lr=0.02)
    by_us = optim.Muon(mine.parameters(), lr=0.02, states="disk")
    for step in range(4):
        x = torch.randn(8, 90, generator=torch.Generator().manual_seed(step))
        for model, optimizer in ((theirs, by_torch), (mine, by_us)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert torch.equal(mine.weight, theirs.weight)
    assert_same_states(by_us.state_dict(), by_torch.state_dict())
    assert by_us.facts().stores["disk"].bytes_written > theirs.weight.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_follow_masters(dtype: torch.dtype) -> None:
    theirs, mine = Model(dtype), Model(dtype)
    weights = matrices(theirs)
    masters = [nn.Parameter(p.detach().float()) for p in weights]
    by_torch = torch.optim.Muon(masters, lr=0.02)
    by_us = optim.Muon(matrices(mine), lr=0.02, states="host")
    for number in range(4):
        loss_of(theirs, number).backward()
        for master, p in zip(masters, weights, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        by_torch.step()
        with torch.no_grad():
            for master, p in zip(masters, weights, strict=True):
                p.copy_(master)
        theirs.zero_grad()
        loss_of(mine, number).backward()
        by_us.step()
        mine.zero_grad()
        if number == 2:  # other code may write to the weights: the masters follow
            with torch.no_grad():
                for a, b, master in zip(matrices(mine), weights, masters, strict=True):
                    a.mul_(0.5), b.mul_(0.5), master.copy_(b)
    for a, b in zip(matrices(mine), weights, strict=True):
        assert torch.equal(a, b)


def test_without_masters_it_is_torchs_update_of_bf16_weights() -> None:
    theirs, mine = Model(torch.bfloat16), Model(torch.bfloat16)
    by_torch = Run(theirs, torch.optim.Muon(matrices(theirs), lr=0.02))
    by_us = Run(mine, optim.Muon(matrices(mine), lr=0.02, master=False))
    assert_equal(by_us.steps(4), by_torch.steps(4))


@pytest.mark.parametrize("ways", ["scaled", "unscaled"])
def test_a_gradient_scaler_works_as_with_torch(ways: str) -> None:
    torchs, mine = plain(), ours(states="host")
    assert scaled_steps(mine, ways, 2.0**12) == scaled_steps(torchs, ways, 2.0**12)
    for a, b in zip(mine.model.parameters(), torchs.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_checkpoints_go_from_torch_to_ours_and_back() -> None:
    torchs, mine = plain().steps(3), ours(states="disk")
    mine.model.load_state_dict(torchs.model.state_dict())
    mine.optimizer.load_state_dict(torchs.optimizer.state_dict())
    mine.made, mine.losses, mine.norms = 3, list(torchs.losses), list(torchs.norms)
    mine.scheduler.load_state_dict(torchs.scheduler.state_dict())
    assert_equal(mine.steps(3), torchs.steps(3))
    back = plain()
    back.model.load_state_dict(mine.model.state_dict())
    back.optimizer.load_state_dict(mine.optimizer.state_dict())
    assert_same_states(back.optimizer.state_dict(), torchs.optimizer.state_dict())


def test_a_vector_is_refused_with_what_to_do() -> None:
    optimizer = optim.Muon([nn.Parameter(torch.ones(2, 2))])
    for given in ([nn.Parameter(torch.ones(3))], [("bias", nn.Parameter(torch.ones(3)))]):
        with pytest.raises(OffloadError, match=r"shape \(3,\): give it to AdamW"):
            optim.Muon(given)
    with pytest.raises(OffloadError, match=r"shape \(3,\): give it to AdamW"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1


def test_beside_adamw_in_a_compiled_step_with_weights_on_the_host() -> None:
    runs = []
    for kind, where in ((torch.optim, {}), (optim, {"states": "host", "overlap": True})):
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU())))
        chosen = matrices(model)
        rest = [p for p in model.parameters() if p.ndim != 2]
        fused = {"fused": True} if kind is torch.optim else {}
        optimizers = [kind.Muon(chosen, lr=0.02, **where), kind.AdamW(rest, **fused, **where)]
        given = {"lowering": "aot_eager", "memory": "minimum"}
        compiled = torch.compile(
            model,
            backend="aot_eager" if kind is torch.optim else "offcompile",
            options=None if kind is torch.optim else given,
        )
        for step in range(4):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
            compiled(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert any(not report.fits for report in offcompile.reports())
