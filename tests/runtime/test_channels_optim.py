"""Optimizers with a device that runs on its own: played by memory that nobody may use too early."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from offcompile import optim
from offcompile.optim import core
from offcompile.optim.state_placement import Places
from offcompile.runtime.states.gradient_transport import Brought

Weights = list[torch.Tensor]


class Far:
    """Stands in for a Carrier: gradients are there after `arrive`, weights after `finish`."""

    def __init__(self) -> None:
        self.homes: dict[torch.Tensor, torch.Tensor] = {}
        self.returning: list[torch.Tensor] = []
        self.calls: list[str] = []
        self.held: list[weakref.ref[torch.Tensor]] = []

    def place(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self.homes:
            self.homes[parameter] = parameter.detach().clone()
        return self.homes[parameter]

    def bring(
        self, parameter: torch.Tensor, gradient: torch.Tensor, label: str, lent: bool = False
    ) -> Brought:
        sent, there = gradient.detach().clone(), torch.full_like(gradient, float("nan"))
        self.calls.append(label)
        # memory that goes with what `bring` has returned
        held = torch.zeros(1)
        self.held.append(weakref.ref(held))
        weakref.finalize(held, there.fill_, float("nan"))
        return Brought(there, lambda: there.copy_(sent), held)

    def updated(self, parameter: torch.Tensor, label: str) -> None:
        assert not self.homes[parameter].isnan().any(), f"{label} was updated too early"
        torch.autograd.graph.increment_version(parameter)
        self.returning.append(parameter)

    def finish(self) -> None:
        for parameter in self.returning:
            parameter.detach().copy_(self.homes[parameter])
        self.returning.clear()


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Far:
    made = Far()
    monkeypatch.setattr(core, "carrier_of", lambda parameter: made)
    return made


def train(make: Callable[[nn.Module], torch.optim.Optimizer], clip: float | None = None) -> Weights:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7))
    optimizer = make(model)
    for step in range(5):
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("overlap", [True, False])
def test_weights_come_back_whole_and_in_time(
    far: Far, overlap: bool, max_norm: float | None
) -> None:
    expected = train(
        lambda m: torch.optim.AdamW(m.parameters(), 0.05, weight_decay=0.1, fused=True), max_norm
    )
    found = train(
        lambda m: optim.AdamW(
            m.parameters(),
            0.05,
            weight_decay=0.1,
            overlap=overlap,
            max_norm=max_norm,
            channels=True,
            states="host",
        )
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    # each gradient crosses once, in backward or, where it has to wait, in step()
    assert len(far.calls) == 5 * 4
    assert all(gone() is None for gone in far.held)


def test_a_gradient_stays_where_advice_moves_its_update(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's advice is taken when states are made, which the first gradient does."""
    monkeypatch.setattr(Places, "advised", lambda places, parameter, nbytes, place: "device cpu")
    expected = train(lambda m: torch.optim.AdamW(m.parameters(), 0.05, fused=True))
    found = train(
        lambda m: optim.AdamW(
            m.parameters(), 0.05, weight_decay=0.01, overlap=True, channels=True, states="host"
        )
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert far.calls == []


def test_a_failed_update_is_told_by_step_and_names_the_parameter(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    optimizer = optim.AdamW(model.named_parameters(), overlap=True, channels=True, states="host")

    def lost() -> None:
        raise OSError("the copy was lost")

    monkeypatch.setattr(
        far, "bring", lambda p, g, label, lent=False: Brought(g, lost, g), raising=True
    )
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(Exception, match=r"update of (weight|bias) failed.*the copy was lost"):
        optimizer.step()
