"""Weights on the host that are changed, copied, saved and shared from outside of the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weights_runs import (
    ACCESS,
    COPIED,
    LAYERS,
    WIDTH,
    Pair,
    batch,
    clean_slate,
    descend,
    loss_of,
    on_host,
    ours,
    pair,
    results,
    same,
    seeded,
    some_steps,
)

from offcompile.runtime.moves.weights import is_on_host


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield from clean_slate()


# --- weights changed from outside -----------------------------------------------------------------


def test_weights_changed_by_their_owner() -> None:
    saved = {k: v.clone() for k, v in seeded(pair).state_dict().items()}

    def train(forward: Any, model: Pair) -> list[Tensor]:
        seen = []

        def step() -> None:
            loss = loss_of(forward(batch(0)))
            loss.backward()
            seen.extend([loss.detach(), *results(model)])
            descend(model)

        step()
        model.up.weight.data.add_(0.1)
        step()
        model.down.weight.data = torch.full((WIDTH, WIDTH), 0.01)  # other memory altogether
        step()
        with torch.no_grad():
            model.up.weight.copy_(model.down.weight.t())
        step()
        nn.init.orthogonal_(model.up.weight, generator=torch.Generator().manual_seed(1))
        step()
        model.load_state_dict(saved)
        step()
        model.load_state_dict({k: v * 0.5 for k, v in saved.items()}, assign=True)
        step()
        model.up = nn.Linear(WIDTH, WIDTH)  # another parameter
        nn.init.constant_(model.up.weight, 0.02)
        nn.init.zeros_(model.up.bias)
        step()
        return seen

    same(train, hosted=LAYERS)


def test_weights_on_the_host_are_changed_through_what_looks_at_them() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        loss_of(forward(batch(0))).backward()
        flat = model.up.weight.data.view(-1)
        state = model.state_dict()
        array = model.down.weight.detach().numpy()
        flat[::3] = 0.5
        state["norm.bias"].fill_(0.25)
        array *= 2.0
        loss_of(forward(batch(1))).backward()
        return []

    same(train, hosted=LAYERS)


@pytest.mark.parametrize("policy", ACCESS)
def test_a_weight_replaced_between_forward_and_backward(policy: str) -> None:
    """Backward sees the new weight, as the plain one does, or still has forward's copy of it."""

    def train(forward: Any, model: Pair) -> list[Tensor]:
        forward(batch(0))
        loss = loss_of(forward(batch(1)))
        model.down.weight.data = torch.ones(WIDTH, WIDTH)
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model, plain, untouched = seeded(pair), seeded(pair), seeded(pair)
    found = train(ours(model, policy), model)
    as_new = train(torch.compile(plain, backend="aot_eager"), plain)
    loss_of(untouched(batch(1))).backward()
    as_old = [p.grad for p in untouched.parameters()]
    assert any(all(map(torch.equal, found, wanted)) for wanted in (as_new, as_old))
    assert torch.equal(model.down.weight, torch.ones(WIDTH, WIDTH))
    loss_of(ours(model, policy)(batch(2)))
    assert on_host(model) == LAYERS


@pytest.mark.parametrize("policy", ACCESS)
def test_a_weight_changed_in_place_between_forward_and_backward(policy: str) -> None:
    """Refused, as by the plain run, unless backward still has forward's copy: never wrong."""
    model, untouched = seeded(pair), seeded(pair)
    forward = ours(model, policy)
    loss = loss_of(forward(batch(0)))
    with torch.no_grad():
        model.down.weight.mul_(2.0)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert policy == COPIED, "an op used the new weight for the old loss"
        loss_of(untouched(batch(0))).backward()
        pairs = zip(model.parameters(), untouched.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    model.zero_grad()
    loss_of(forward(batch(0))).backward()
    assert on_host(model) == LAYERS


# --- several models -------------------------------------------------------------------------------


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        loss_of(forward(batch(0))).backward()
        twin = copy.deepcopy(model)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
        descend(model)
        again = twin if forward is model else ours(twin)
        for seed in range(2):
            loss_of(forward(batch(seed))).backward()
            loss_of(again(batch(seed + 5))).backward()
            descend(twin)
        assert on_host(model) == on_host(twin)
        return results(twin)

    same(train, hosted=LAYERS)


def test_two_models_take_turns() -> None:
    def build() -> nn.Module:
        return nn.ModuleList([Pair(), Pair()])

    def alternate(first: Any, second: Any, models: Any) -> list[Tensor]:
        seen = []
        for step in range(3):
            middle = first(batch(step))
            loss = loss_of(second(middle)) + loss_of(second(batch(step + 5)))
            loss.backward()
            seen.append(loss.detach())
            descend(models)
        return [*seen, *results(models)]

    plain = seeded(build)
    expected = alternate(*plain, plain)
    models = seeded(build)
    halves = [ours(m, policy) for m, policy in zip(models, ACCESS, strict=True)]
    for mine, theirs in zip(alternate(*halves, models), expected, strict=True):
        assert torch.equal(mine, theirs)
    assert len(on_host(models)) == 4


class Broken(nn.Module):
    """One weight in two graphs, for Dynamo breaks between its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        torch._dynamo.graph_break()
        return self.after(torch.tanh(self.layer(x)))


def test_one_weight_in_two_graphs() -> None:
    same(some_steps, Broken, {"layer.weight", "after.weight"})


def test_two_compilations_of_one_model() -> None:
    model, plain = seeded(pair), seeded(pair)
    forwards = [ours(model, policy) for policy in ACCESS]
    for step in range(4):
        for forward, of in ((forwards[step % 2], model), (plain, plain)):
            loss_of(forward(batch(step))).backward()
            descend(of)
    assert on_host(model) == LAYERS
    for mine, theirs in zip(results(model), results(plain), strict=True):
        assert torch.equal(mine, theirs)


def test_a_plain_run_and_a_compiled_one_take_turns() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        for step in range(4):
            (loss_of(forward(batch(step))) + loss_of(model(batch(step + 9)))).backward()
            descend(model)
        return []

    same(train, hosted=LAYERS, against="aot_eager")


# --- functions ------------------------------------------------------------------------------------


def functions(compiler: Callable[[Any], Any], model: Pair) -> list[Tensor]:
    """Compiled functions around the model, with torch.func inside."""

    def scaled(x: Tensor, factor: Tensor) -> Tensor:
        weights = {name: p * factor for name, p in model.named_parameters()}
        return torch.func.functional_call(model, weights, (x,))

    def inner(x: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        of = lambda w: torch.func.functional_call(model, w, (x,)).square().mean()  # noqa: E731
        slopes = torch.func.grad(of)(weights)
        return sum(slope.sum() for slope in slopes.values()) + model(x).sum()

    one, two = compiler(scaled), compiler(inner)
    for step in range(2):
        loss_of(one(batch(step), torch.tensor(1.5))).backward()
    with torch.no_grad():
        slope = two(batch(3))
    return [slope, *results(model)]


def test_functional_calls_and_gradients_inside() -> None:
    plain, model = seeded(pair), seeded(pair)
    expected = functions(lambda f: torch.compile(f, backend="aot_eager"), plain)
    torch._dynamo.reset()
    found = functions(ours, model)
    assert on_host(model) == LAYERS
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


# --- processes and files --------------------------------------------------------------------------


class Batches(torch.utils.data.Dataset[Tensor]):
    """Batches made by the model itself, in a worker forked when its weights are on the host."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.model(batch(index))
        return out


def test_workers_forked_while_weights_are_on_the_host() -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        loss_of(forward(batch(0))).backward()
        loader = torch.utils.data.DataLoader(
            Batches(copy.deepcopy(model)),
            batch_size=None,
            num_workers=1,
            multiprocessing_context="fork",
        )
        for x in loader:
            loss_of(forward(x)).backward()
            descend(model)
        direct = torch.utils.data.DataLoader(
            Batches(model), batch_size=None, num_workers=1, multiprocessing_context="fork"
        )
        return [x.clone() for x in direct]

    same(train, hosted=LAYERS, access=(COPIED,))


def test_checkpoints_are_those_of_the_plain_model(tmp_path: Path) -> None:
    model, plain = seeded(pair), seeded(pair)
    loss_of(ours(model)(batch(0)))
    assert on_host(model) == LAYERS
    torch.save(model.state_dict(), tmp_path / "ours.pt")
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    size = (tmp_path / "plain.pt").stat().st_size
    assert abs((tmp_path / "ours.pt").stat().st_size - size) < 1024
    found, expected = torch.load(tmp_path / "ours.pt"), torch.load(tmp_path / "plain.pt")
    assert list(found) == list(expected)
    for name, value in found.items():
        assert torch.equal(value, expected[name]) and not is_on_host(value)
    plain.load_state_dict(torch.load(tmp_path / "ours.pt", mmap=True), assign=True)
    loss_of(ours(plain)(batch(1))).backward()
    assert on_host(plain) == LAYERS
