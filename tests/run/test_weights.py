"""Weights that live on the host, gradients that leave for it: the same training, bit for bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offcompile
from offcompile.report.report import PlanReport
from offcompile.runtime.moves.weights import is_on_host

WIDTH, LAYERS, ROWS = 128, 4, 32


class Tower(nn.Module):
    """Linear layers, one of them shared, one frozen, one never used; a norm and biases besides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.again = self.layers[0]
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(self.frozen(self.again(x))).square().mean()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower()


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def compiled(model: nn.Module, spill: Path, **more: Any) -> Any:
    options = {"memory": "minimum", "lowering": "aot_eager", "spill": str(spill)} | more
    return torch.compile(model, backend="offcompile", options=options)


Train = Callable[[Any, nn.Module], list[torch.Tensor]]


def both(spill: Path, train: Train) -> tuple[Tower, Tower]:
    """Train the plain model and ours the same way; every tensor that `train` gives is equal."""
    plain, ours = tower(), tower()
    expected = train(torch.compile(plain, backend="aot_eager"), plain)
    torch._dynamo.reset()
    found = train(compiled(ours, spill), ours)
    assert any(is_on_host(p) for p in ours.parameters()), "no weight left"
    assert len(found) == len(expected) > 0
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {i}"
    return plain, ours


def everything(model: nn.Module) -> list[torch.Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (*model.state_dict().values(), *grads)]


def steps(
    optimizer: Callable[[Any], torch.optim.Optimizer], to_none: bool = True, clip: bool = False
) -> Train:
    def train(forward: Any, model: nn.Module) -> list[torch.Tensor]:
        stepper = optimizer([p for p in model.parameters() if p.requires_grad])
        seen = []
        for step in range(5):
            stepper.zero_grad(set_to_none=to_none)
            loss = forward(batch(step))
            loss.backward()
            if clip:
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            stepper.step()
            seen += [loss.detach(), *everything(model)]
        return seen

    return train


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_train_as_ever(name: str, tmp_path: Path) -> None:
    plain, ours = both(tmp_path, steps(OPTIMIZERS[name], clip=name == "adamw"))
    for (key, mine), (other, theirs) in zip(
        ours.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert key == other and torch.equal(mine, theirs)


@pytest.mark.parametrize(("host_memory", "hosted"), [("1KiB", 0), ("64KiB", 1), ("200KiB", 3)])
def test_a_small_host_tier_takes_the_weights_that_it_has_room_for(
    host_memory: str, hosted: int, tmp_path: Path
) -> None:
    train, models, found = steps(OPTIMIZERS["sgd"]), (tower(), tower()), []
    for model, compiler in zip(
        models, (lambda m: m, lambda m: compiled(m, tmp_path, host_memory=host_memory)), strict=True
    ):
        found.append(train(compiler(model), model))
    assert sum(map(is_on_host, models[1].parameters())) == hosted
    assert all(map(torch.equal, *found))


def test_gradients_that_are_zeroed_and_not_dropped(tmp_path: Path) -> None:
    both(tmp_path, steps(OPTIMIZERS["sgd"], to_none=False))


def test_different_micro_batches_add_up(tmp_path: Path) -> None:
    def train(forward: Any, model: nn.Module) -> list[torch.Tensor]:
        seen = []
        for step in range(3):
            for micro in range(3):
                forward(batch(10 * step + micro)).backward()
                seen += everything(model)
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
                    p.grad = None
        return seen

    both(tmp_path, train)


def test_hooks_see_and_change_gradients(tmp_path: Path) -> None:
    def train(forward: Any, model: nn.Module) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        assert isinstance(model, Tower)
        weight = model.layers[1].weight
        weight.register_hook(lambda grad: grad * 2)
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for step in range(2):
            forward(batch(step)).backward()
        return [*seen, *everything(model)]

    both(tmp_path, train)


def test_graph_kept_two_forwards_and_a_dropped_loss(tmp_path: Path) -> None:
    def train(forward: Any, model: nn.Module) -> list[torch.Tensor]:
        first, second = forward(batch(0)), forward(batch(1))
        forward(batch(2))
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        return everything(model)

    both(tmp_path, train)


def test_weights_changed_between_steps(tmp_path: Path) -> None:
    saved = {k: v.clone() for k, v in tower().state_dict().items()}

    def train(forward: Any, model: nn.Module) -> list[torch.Tensor]:
        assert isinstance(model, Tower)
        seen = [forward(batch(0)).detach()]
        with torch.no_grad():
            model.layers[2].weight.mul_(0.5)
        seen.append(forward(batch(0)).detach())
        model.load_state_dict({k: v * 0.9 for k, v in saved.items()})
        forward(batch(0)).backward()
        model.layers[1].weight.data = torch.full((WIDTH, WIDTH), 0.01)  # other memory altogether
        seen.append(forward(batch(0)).detach())
        with torch.no_grad():
            seen.append(forward(batch(3)))
        return seen + everything(model)

    _, ours = both(tmp_path, train)
    assert is_on_host(ours.layers[1].weight)


def test_copies_are_models_of_their_own(tmp_path: Path) -> None:
    ours = tower()
    forward = compiled(ours, tmp_path)
    forward(batch(0)).backward()
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1.0)
    assert all(
        torch.equal(p + 1.0, q) for p, q in zip(ours.parameters(), twin.parameters(), strict=True)
    )
    file = tmp_path / "model.pt"
    torch.save(ours.state_dict(), file)
    for key, value in torch.load(file).items():
        assert torch.equal(value, ours.state_dict()[key])
    loss = compiled(twin, tmp_path)(batch(0))
    assert torch.equal(loss, twin(batch(0)))


def test_two_models_at_once(tmp_path: Path) -> None:
    first, second = tower(), tower()
    with torch.no_grad():
        second.layers[0].weight.mul_(2.0)
    forwards = [compiled(m, tmp_path) for m in (first, second)]
    losses = [f(batch(0)) for f in forwards]
    for loss in losses:
        loss.backward()
    for model, loss in zip((first, second), losses, strict=True):
        other = copy.deepcopy(model)
        other.zero_grad()
        expected = other(batch(0))
        expected.backward()
        assert torch.equal(loss, expected)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)


def test_weights_stay_where_there_is_room(tmp_path: Path) -> None:
    model = tower()
    compiled(model, tmp_path, memory="1GiB")(batch(0)).backward()
    assert not any(is_on_host(p) for p in model.parameters())
    report: PlanReport = offcompile.reports()[-1]
    assert report.fits


def test_a_budget_below_weights_trains(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    weights = sum(p.nbytes for p in model.parameters())
    x = torch.randn(16, 512)
    expected = model(x).square().mean()
    expected.backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = compiled(model, tmp_path, memory=weights)(x).square().mean()
    loss.backward()
    assert torch.equal(loss, expected)
    report: PlanReport = offcompile.reports()[-1]
    assert report.planned_peak_bytes <= weights
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert gradient is not None and parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    assert any(is_on_host(p) for p in model.parameters())
    assert any(is_on_host(p.grad) for p in model.parameters() if p.grad is not None)


#: `test_direct_ops` always runs Inductor with weights and gradients on the host
@pytest.mark.soak
def test_inductor_trains_within_its_tolerance(tmp_path: Path) -> None:
    plain, ours = tower().double(), tower().double()
    forwards = [plain, compiled(ours, tmp_path, lowering="inductor")]
    for step in range(2):
        for forward, model in zip(forwards, (plain, ours), strict=True):
            forward(batch(step).double()).backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
    assert any(is_on_host(p) for p in ours.parameters())
    for mine, theirs in zip(everything(ours), everything(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_counters_say_what_was_used_in_place_and_held(tmp_path: Path) -> None:
    run = compiled(tower(), tmp_path)
    before = offcompile.counters()["direct_reads"]
    run(batch(0)).backward()
    report = offcompile.reports()[-1]
    reads = [d for d in report.plan.directs if d.tensor in report.problem.op[d.op].reads]
    assert reads
    assert offcompile.counters()["direct_reads"] - before == len(reads)
    assert offcompile.counters()["device_peak_bytes"] > 0
