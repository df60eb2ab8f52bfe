"""Checks, on the asynchronous device, of where plans put the states of optimizers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from async_device import Controls
from async_own_checks import DEVICE, MIB, settle
from gpu_checks import deterministic
from torch import Tensor, nn

import offcompile
from offcompile import optim
from offcompile.runtime.states.updates import StatesOwner, holders_of

WIDTH, LAYERS, BATCH, STEPS = 512, 6, 1024, 3


class _Model(nn.Module):
    """Returns its loss, so that no other graph follows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


def _trained(
    compiler: Callable[[nn.Module], Any],
    optimizer: Callable[[Any], Any],
    batches: Sequence[int] = (BATCH,) * STEPS,
) -> tuple[list[Tensor], int, Any]:
    """Losses and weights, the peak from the third step on, and the facts of the optimizer."""
    torch._dynamo.reset()
    gc.collect()
    settle()
    before = torch.accelerator.memory_allocated()
    model = _Model().to(DEVICE)
    made, run = optimizer(model.parameters()), compiler(model)
    found = list[Tensor]()
    for step, batch in enumerate(batches):
        if step == 2:
            settle()
            torch.accelerator.reset_peak_memory_stats()
        x = torch.full((batch, WIDTH), step / 10 + 0.1).to(DEVICE)
        loss = run(x)
        loss.backward()
        made.step()
        made.zero_grad()
        found.append(loss.detach().cpu())
        del loss, x
    settle()
    peak = torch.accelerator.max_memory_allocated() - before
    facts = made.facts() if isinstance(made, optim.AdamW) else None
    return [*found, *(p.detach().cpu() for p in model.parameters())], peak, facts


def _plain(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", dynamic=False)


def _within(memory: int, dynamic: bool = False) -> Callable[[nn.Module], Any]:
    options = {"memory": memory, "lowering": "aot_eager", "seconds": 0.3}
    return lambda model: torch.compile(
        model, backend="offcompile", options=options, dynamic=dynamic
    )


def _adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def _ours(parameters: Any) -> Any:
    return optim.AdamW(parameters, lr=1e-2, overlap=True)


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def _kept_bytes(facts: Any) -> int:
    """Bytes of states on the device."""
    return sum(s.host_bytes for name, s in facts.stores.items() if name.startswith("device"))


def placed_by_the_plan(controls: Controls) -> None:
    """States stay on the device while the budget lets them; graphs offer gradients as they come."""
    del controls
    states_bytes = 2 * 4 * LAYERS * WIDTH * (WIDTH + 1)
    with deterministic():
        expected, plain_bytes, _ = _trained(_plain, _adamw)
        kept = []
        for share in (0.9, 0.55):
            budget = int(share * plain_bytes)
            found, peak, facts = _trained(_within(budget), _ours)
            assert _same(found, expected), f"at {share:.0%} of plain's memory"
            assert peak <= budget, f"{peak} bytes were given out of {budget}"
            kept.append(_kept_bytes(facts))
            assert facts.taken_from_graphs >= LAYERS, facts
            # biases wait for step(), where they are one call
            assert facts.updated_in_step == LAYERS, facts
    assert kept[0] == states_bytes and kept[-1] < states_bytes / 4, kept


def way_given(controls: Controls) -> None:
    """States that a plan has kept on the device leave when a larger batch needs their room."""
    del controls
    batches = (BATCH // 4, BATCH // 4, BATCH // 4, BATCH)
    with deterministic():
        expected, plain_bytes, _ = _trained(_plain, _adamw, batches)
        budget = int(0.42 * plain_bytes)
        found, _, facts = _trained(_within(budget), _ours, batches)
    assert _same(found, expected)
    assert _kept_bytes(facts) < 2 * MIB, facts
    text = [report.to_text() for report in offcompile.reports()]
    assert len(text) >= 2, text


def of_several_graphs(controls: Controls) -> None:
    """Where no graph has all parameters, states begin on the host and take the room that a whole
    step has left."""
    del controls
    states_bytes = 2 * 4 * LAYERS * WIDTH * (WIDTH + 1)

    def in_parts(compiler: Callable[[nn.Module], Any]) -> Callable[[_Model], Any]:
        def compiled(model: _Model) -> Any:
            parts = [compiler(model.layers[:LAYERS]), compiler(model.layers[LAYERS:])]
            return lambda x: parts[1](parts[0](x)).square().mean()

        return compiled

    batches = (BATCH // 2,) * 5
    with deterministic():
        expected, plain_bytes, _ = _trained(in_parts(_plain), _adamw, batches)
        kept = []
        for share in (1.3, 0.75):
            budget = int(share * plain_bytes)
            found, peak, facts = _trained(in_parts(_within(budget)), _ours, batches)
            assert _same(found, expected), f"at {share:.0%} of plain's memory"
            assert peak <= budget, f"{peak} bytes were given out of {budget}"
            kept.append(_kept_bytes(facts))
    assert kept[0] == states_bytes and kept[1] < states_bytes / 4, kept


def little_room_filled(controls: Controls) -> None:
    """The first states move to the device as far as the room goes, and training goes on."""
    del controls

    def trained(optimizer: Callable[[Any], Any], room_bytes: int) -> tuple[list[Tensor], int]:
        model = _Model().to(DEVICE)
        made = optimizer(model.parameters())
        for step in range(3):
            model(torch.full((8, WIDTH), step / 10 + 0.1).to(DEVICE)).backward()
            made.step()
            made.zero_grad()
            if step == 1 and room_bytes:
                (owner,) = holders_of(model.parameters())
                assert isinstance(owner, StatesOwner)
                there = next(model.parameters()).device
                before, moved = owner.beside_bytes(there), owner.fill(there, room_bytes)
                assert 0 < moved < before and owner.beside_bytes(there) < before
                assert not owner.beside_bytes(torch.device("cuda"))
        kept = _kept_bytes(made.facts()) if room_bytes else 0
        return [p.detach().cpu() for p in model.parameters()], kept

    with deterministic():
        expected, _ = trained(_adamw, 0)
        layer_bytes = 2 * 4 * WIDTH * WIDTH
        room_bytes = 3 * layer_bytes // 2
        found, kept = trained(partial(optim.AdamW, lr=1e-2), room_bytes)
    assert _same(found, expected)
    assert layer_bytes < kept < room_bytes, kept


def offered_in_vain(controls: Controls) -> None:
    """Gradients of a model that runs twice before its backward are soon offered no more."""
    del controls

    def trained(compiler: Callable[[nn.Module], Any], optimizer: Callable[[Any], Any]) -> Any:
        torch._dynamo.reset()
        gc.collect()
        model = _Model().to(DEVICE)
        made, run = optimizer(model.parameters()), compiler(model)
        found = list[Tensor]()
        for step in range(6):
            x = torch.full((BATCH // 4, WIDTH), step / 10 + 0.1).to(DEVICE)
            loss = run(x) + run(x + 1)
            loss.backward()
            made.step()
            made.zero_grad()
            found.append(loss.detach().cpu())
        return [*found, *(p.detach().cpu() for p in model.parameters())]

    with deterministic():
        expected = trained(_plain, _adamw)
        found = trained(_within(20 * MIB), _ours)
    assert _same(found, expected)
    profile = offcompile.reports()[-1].profile
    said = [] if profile is None else [line for line in profile.said if "in vain" in line]
    assert len(said) == 1, offcompile.reports()[-1].to_text()


CHECKS = {
    "states placed by the plan": placed_by_the_plan,
    "states give way": way_given,
    "states of several graphs": of_several_graphs,
    "states fill little room": little_room_filled,
    "offers in vain": offered_in_vain,
}
#: those that every run of the tests makes; `make soak` has the others
ALWAYS = ("states placed by the plan", "states fill little room")
