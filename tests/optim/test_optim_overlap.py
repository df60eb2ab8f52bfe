"""Updates during backward: the same bits, and loud refusals of what would not be the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from optim_runs import (
    KINDS,
    PLACES,
    TRAINED,
    Model,
    Run,
    assert_equal,
    assert_same_states,
    batch,
    loss_of,
    one_thread,
    our_run,
    scaled_steps,
    torch_run,
)
from torch import nn

from offcompile import OffloadError, optim
from offcompile.optim.update_paths import TRIALS, WARM_STEPS, UpdatePaths
from offcompile.runtime.states import updates
from offcompile.runtime.states.update_workers import UpdateWorkers


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("channels", [False, True])
def test_ten_steps_are_those_of_torch(kind: str, states: str, clips: bool, channels: bool) -> None:
    torchs = torch_run(kind, accumulate=3, max_norm=0.05 if clips else None).steps(10)
    beside = {"states": states, "clips": clips, "overlap": True, "channels": channels}
    ours = our_run(kind, accumulate=3, **beside)
    ours.max_norm = torchs.max_norm
    assert_equal(ours.steps(10), torchs)
    facts = ours.optimizer.facts()
    assert facts.channels is channels
    assert (facts.updated_in_backward, facts.updated_in_step) == (
        (0, TRAINED) if clips else (TRAINED, 0)
    )


def test_gradients_are_freed_as_they_come_and_norms_are_taken_then() -> None:
    run = our_run("AdamW", overlap=True)
    before = [p.detach().clone() for p in run.model.parameters()]
    loss_of(run.model, 0).backward()
    assert all(p.grad is None for p in run.model.parameters())
    changed = [not torch.equal(p, q) for p, q in zip(run.model.parameters(), before, strict=True)]
    assert sum(changed) == TRAINED
    clipped = our_run("AdamW", clips=True, overlap=True)
    loss_of(clipped.model, 0).backward()
    measured = [a.norm for a in clipped.optimizer._arrivals.arrived.values()]
    assert len(measured) == TRAINED and None not in measured
    clipped.optimizer.step()
    assert all(p.grad is None for p in clipped.model.parameters())


def test_a_gradient_changed_after_its_norm_was_taken_is_measured_again() -> None:
    torchs, ours = torch_run("SGD"), our_run("SGD", clips=True, overlap=True)
    for run in (torchs, ours):
        loss_of(run.model, 0).backward()
        with torch.no_grad():
            run.model.mix.weight.grad.mul_(3.0)
    ordered = [p for g in torchs.optimizer.param_groups for p in g["params"]]
    nn.utils.clip_grad_norm_(ordered, 0.05)
    torchs.optimizer.step()
    ours.optimizer.step()
    assert_equal(ours, torchs)


@pytest.mark.parametrize("ways", ["plain", "unscaled"])
@pytest.mark.parametrize("scale", [1024.0, 1000.3])
def test_a_scaler_that_is_named(ways: str, scale: float) -> None:
    torchs, ours = torch_run("AdamW"), our_run("AdamW", overlap=True, scaler=True)
    assert scaled_steps(ours, ways, scale) == scaled_steps(torchs, ways, scale)
    assert_equal(ours, torchs)
    clipping = our_run("AdamW", overlap=True, scaler=True, clips=True)
    unscaled = torch_run("AdamW")
    scaled_steps(unscaled, "unscaled", scale)
    scaled_steps(clipping, "plain", scale)
    assert_equal(clipping, unscaled)


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_scaler_that_is_not_named(unscale_first: bool) -> None:
    run, scaler = our_run("AdamW", overlap=True), torch.amp.GradScaler("cpu", 8.0)
    scaler.scale(loss_of(run.model, 0)).backward()
    if unscale_first:
        scaler.unscale_(run.optimizer)
    with pytest.raises(OffloadError, match=r"AdamW\(…, overlap=True, scaler=scaler\)"):
        scaler.step(run.optimizer)


def test_a_short_last_batch_is_applied_by_step() -> None:
    torchs, ours = torch_run("AdamW", max_norm=None), our_run("AdamW", accumulate=3, overlap=True)
    for run in (torchs, ours):
        for number in range(5):
            loss_of(run.model, number).backward()
            if number in (2, 4):
                run.optimizer.step()
                run.optimizer.zero_grad()
    assert_equal(ours, torchs)
    assert ours.optimizer.facts().updated_in_step == TRAINED


def test_another_gradient_after_the_update_is_refused() -> None:
    run = our_run("AdamW", overlap=True)
    loss_of(run.model, 0).backward()
    with pytest.raises(OffloadError, match="updated in this step: accumulate=1"):
        loss_of(run.model, 1).backward()
    run.optimizer.discard()
    run.steps(2)
    assert run.made == 2


def test_step_twice_is_refused() -> None:
    run = our_run("AdamW", overlap=True).steps(1)
    with pytest.raises(OffloadError, match="without a gradient since the last one"):
        run.optimizer.step()
    fresh = our_run("AdamW", overlap=True).optimizer
    fresh.step()  # before any backward pass: nothing, as in torch
    assert fresh.facts().updated_in_step == 0


@pytest.mark.parametrize("change", [{"lr": 0.5}, {"betas": (0.1, 0.2)}, {"weight_decay": 3.0}])
def test_hyper_parameters_changed_in_between_are_refused(change: dict[str, Any]) -> None:
    run = our_run("AdamW", overlap=True)
    loss_of(run.model, 0).backward()
    run.optimizer.param_groups[0].update(change)
    with pytest.raises(OffloadError, match=r"changed .* from .* to .* before step\(\)"):
        run.optimizer.step()


def test_a_gradient_put_there_in_between_is_refused() -> None:
    run = our_run("AdamW", overlap=True)
    loss_of(run.model, 0).backward()
    run.model.mix.weight.grad = torch.ones(13, 13)
    with pytest.raises(OffloadError, match="has a new gradient before step"):
        run.optimizer.step()


def test_zero_grad_in_the_middle_is_refused_and_discard_is_the_way() -> None:
    run = our_run("AdamW", overlap=True)
    loss_of(run.model, 0).backward()
    with pytest.raises(OffloadError, match=r"zero_grad\(\) was called between backward and step"):
        run.optimizer.zero_grad()
    run.optimizer.discard()
    run.optimizer.zero_grad()
    deferred = our_run("AdamW", accumulate=2, overlap=True)
    loss_of(deferred.model, 0).backward()
    deferred.optimizer.zero_grad()  # nothing was updated yet
    assert not deferred.optimizer._arrivals.arrived


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")


def test_an_exception_in_backward_leaves_the_optimizer_usable() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    parameters = [*first.parameters(), *second.parameters()]
    ours = optim.SGD(parameters, 0.1, overlap=True)
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(ArithmeticError, match="on purpose"):
        second(Fails.apply(first(torch.ones(1, 3)))).sum().backward()
    same = [torch.equal(p, q) for p, q in zip(parameters, before, strict=True)]
    assert same == [True, True, False, False], "what came before the failure was applied"
    ours.discard()
    assert all(p.grad is None for p in parameters)
    second(first(torch.ones(1, 3))).sum().backward()
    ours.step()
    assert not any(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))


def test_hooks_of_the_user_come_first() -> None:
    def hooked(run: Run, late: bool) -> Run:
        weight: Any = run.model.mix.weight

        def double(p: torch.Tensor) -> None:
            p.grad.mul_(2.0)

        weight.register_hook(lambda g: g * 3.0)
        weight.register_post_accumulate_grad_hook(double)
        return run.steps(3)

    torchs = hooked(torch_run("AdamW", max_norm=None), late=True)
    ours = our_run("AdamW", overlap=True)
    ours.max_norm = None
    assert_equal(hooked(ours, late=True), torchs)
    facts = ours.optimizer.facts()
    assert (facts.updated_in_backward, facts.updated_in_step) == (TRAINED - 1, 1)
    assert not ours.optimizer._arrivals.takes(ours.model.mix.weight)


def test_a_parameter_that_is_thawed_later() -> None:
    torchs, ours = torch_run("AdamW", max_norm=None), our_run("AdamW", overlap=True)
    ours.max_norm = None
    for run in (torchs, ours):
        run.steps(2)
        run.model.frozen.bias.requires_grad_(True)
        run.steps(3)
    assert_equal(ours, torchs)
    assert ours.optimizer.facts().updated_in_backward == TRAINED + 1


def test_a_graph_that_is_run_through_again_finds_that_its_weights_changed() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    ours = optim.SGD([weight], 0.1, overlap=True)
    x = torch.ones(2, 3, requires_grad=True)
    loss = (x @ weight).square().sum()
    loss.backward(retain_graph=True)
    ours.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def taken(
    optimizer: Any, model: nn.Module, gradients: list[torch.Tensor]
) -> Callable[[], list[bool]]:
    """Offer gradients as a compiled graph does, and overwrite them afterwards."""
    updater: updates.Updater = optimizer._arrivals

    def give() -> list[bool]:
        given = []
        for p, g in zip(model.parameters(), gradients, strict=True):
            given.append(p.requires_grad and updater.takes(p))
            if given[-1]:
                lent = g.clone()
                updater.take(p, lent)
                lent.fill_(float("nan"))
        return given

    return give


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("channels", [False, True])
def test_gradients_taken_from_a_graph(
    accumulate: int, max_norm: float | None, channels: bool
) -> None:
    def gradients(number: int) -> list[torch.Tensor]:
        torch.manual_seed(number)
        return [torch.randn(3, 4), torch.randn(3), torch.randn(3, 3).t(), torch.randn(3)]

    def model() -> nn.Module:
        torch.manual_seed(9)
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))

    mine, theirs = model(), model()
    ours = optim.AdamW(
        mine.parameters(),
        overlap=True,
        accumulate=accumulate,
        max_norm=max_norm,
        channels=channels,
    )
    torchs = torch.optim.AdamW(theirs.parameters(), fused=True)
    for step in range(4):
        for micro in range(accumulate):
            fresh = gradients(10 * step + micro)
            assert taken(ours, mine, fresh)() == [True] * 4
            for p, g in zip(theirs.parameters(), fresh, strict=True):
                p.grad = g.contiguous() if p.grad is None else p.grad + g
        if max_norm is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        ours.step()
        torchs.step()
        torchs.zero_grad()
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q) and p.grad is None
    assert ours.facts().taken_from_graphs == 4 * accumulate
    assert_same_states(ours.state_dict(), torchs.state_dict())


def test_what_is_updated_already_is_not_taken_again() -> None:
    run = our_run("AdamW", overlap=True)
    weight = run.model.mix.weight
    updater: updates.Updater = run.optimizer._arrivals
    assert updates.updater_of(weight) is updater and updater.takes(weight)
    updater.take(weight, torch.ones(13, 13))
    assert not updater.takes(weight)
    assert not updater.takes(nn.Parameter(torch.ones(1)))
    plain = our_run("AdamW")
    assert updates.updater_of(plain.model.mix.weight) is None


def test_states_on_the_device_count_and_those_on_the_host_do_not() -> None:
    def held(**beside: Any) -> int:
        updater: updates.Updater = our_run("AdamW", overlap=True, **beside).optimizer._arrivals
        return updater.held_bytes()

    nbytes = sum(p.numel() * 8 for p in Model().parameters() if p.requires_grad)
    assert held(states="device") == nbytes and held(states="host") == 0
    assert held(states="disk") > 0


def test_the_way_is_measured_and_then_kept() -> None:
    torchs, ours = torch_run("SGD", max_norm=None), our_run("SGD", overlap=True, channels="measure")
    ours.max_norm = None
    assert ours.optimizer.facts().channels is None
    count = WARM_STEPS + 2 * TRIALS
    assert_equal(ours.steps(count), torchs.steps(count))
    chosen = ours.optimizer.facts().channels
    assert chosen in (True, False)
    ours.steps(2)
    assert ours.optimizer.facts().channels is chosen


def test_a_failed_update_in_a_channel_is_told_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = our_run("AdamW", overlap=True, channels=True)
    rule = run.optimizer.rule

    def fail(*_: object) -> None:
        raise ArithmeticError("on purpose")

    monkeypatch.setattr(rule, "update", fail)
    loss_of(run.model, 0).backward()
    with pytest.raises(OffloadError, match=r"failed.*on purpose"):
        run.optimizer.step()
    monkeypatch.undo()
    run.optimizer.discard()
    run.steps(1)
    assert run.made == 1


def test_a_failed_update_that_was_told_holds_its_weight_no_longer() -> None:
    def fail() -> None:
        raise ArithmeticError("on purpose")

    waits: list[Callable[[], None]] = []
    device = SimpleNamespace(hold=lambda parameter, wait: waits.append(wait))
    settings = SimpleNamespace(channels=True, tail=True)
    ways = UpdatePaths(SimpleNamespace(settings=settings, finish=lambda: None))  # type: ignore[arg-type]
    ways._channels = UpdateWorkers()
    entry: Any = Mock()
    ways._hold(entry, device, ways._channels.submit(lambda: None, fail, "w"))  # type: ignore[arg-type]
    for use in (waits[0], waits[0], ways.settle):
        with pytest.raises(OffloadError, match="on purpose"):
            use()
    waits[0]()
    ways.close()


def test_batches_are_alike_for_both() -> None:
    for one, other in zip(batch(3), batch(3), strict=True):
        assert torch.equal(one, other)
