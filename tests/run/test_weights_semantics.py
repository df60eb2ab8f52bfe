"""Gradients, optimizers and modes with weights on the host: the plain training, bit for bit."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weights_runs import (
    COPIED,
    IN_PLACE,
    LAYERS,
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

import offcompile
from offcompile.runtime.moves.weights import is_on_host


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield from clean_slate()


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
def test_different_micro_batches_add_up(to_none: bool) -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen: list[Tensor] = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            for micro in range(3):
                (loss_of(forward(batch(10 * step + micro))) / 3).backward()
                seen += results(model)
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
        return seen

    same(train, hosted=LAYERS)


def test_gradients_are_ordinary_tensors_on_the_host() -> None:
    model = seeded(pair)
    forward = ours(model)
    loss_of(forward(batch(0))).backward()
    kept = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in kept]
    assert is_on_host(model.up.weight.grad) and is_on_host(model.down.weight.grad)
    assert all(type(g) is Tensor and g.is_leaf and not g.requires_grad for g in kept)
    for step in range(3):  # room of gradients that somebody holds is not given to others
        model.zero_grad(set_to_none=True)
        loss_of(forward(batch(1 + step))).backward()
    assert all(torch.equal(g, c) for g, c in zip(kept, copies, strict=True))


def test_gradients_asked_for_by_autograd_grad() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        x = batch(0).requires_grad_()
        found = torch.autograd.grad(loss_of(forward(x)), [x, *model.parameters()])
        some = torch.autograd.grad(loss_of(forward(x)), [model.down.weight])
        return [*found, *some]

    same(train, hosted=LAYERS)


def test_hooks_see_and_change_gradients() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        seen: list[Tensor] = []
        model.up.weight.register_hook(lambda g: g * 2)
        model.down.weight.register_hook(lambda g: seen.append(g.clone()))
        model.down.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for step in range(2):
            loss_of(forward(batch(step))).backward()
        return seen

    same(train, hosted=LAYERS)


def test_weights_updated_by_hooks_while_backward_runs() -> None:
    """Each update changes the weight in place, and its gradient dies, before backward is over."""

    def train(forward: Any, model: Pair) -> list[Tensor]:
        def update(p: Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        seen = []
        for step in range(3):
            loss = loss_of(forward(batch(step)))
            loss.backward()
            seen.append(loss.detach())
        return seen

    same(train, hosted=LAYERS)


class Interrupted(Exception):
    pass


def test_training_goes_on_after_an_exception_in_a_hook() -> None:
    def interrupt(gradient: Tensor) -> None:
        raise Interrupted

    def train(forward: Any, model: Pair) -> list[Tensor]:
        for layer in (model.up, model.down):
            handle = layer.weight.register_hook(interrupt)
            with pytest.raises(Interrupted):
                loss_of(forward(batch(0))).backward()
            handle.remove()
            model.zero_grad()
            loss_of(forward(batch(1))).backward()
            descend(model)
        return []

    same(train, hosted=LAYERS)
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0


def test_graphs_kept_two_forwards_and_a_dropped_loss() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        first, second = loss_of(forward(batch(0))), loss_of(forward(batch(1)))
        loss_of(forward(batch(2)))
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        both = loss_of(forward(batch(3))) + 2 * loss_of(forward(batch(4)))
        both.backward()
        return [first.detach(), second.detach(), both.detach()]

    same(train, hosted=LAYERS)


# --- optimizers -----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": ("Adam", {"lr": 1e-2, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 1e-2, "foreach": False}),
    "AdamW foreach": ("AdamW", {"lr": 1e-2, "foreach": True}),
    "AdamW fused": ("AdamW", {"lr": 1e-2, "fused": True}),
    "Adagrad": ("Adagrad", {"lr": 1e-2}),
    "Adadelta": ("Adadelta", {}),
    "RMSprop": ("RMSprop", {"lr": 1e-2, "momentum": 0.5}),
    "Rprop": ("Rprop", {"lr": 1e-2}),
    "NAdam": ("NAdam", {"lr": 1e-2}),
    "RAdam": ("RAdam", {"lr": 1e-2}),
    "Adamax": ("Adamax", {"lr": 1e-2, "foreach": True}),
    "ASGD": ("ASGD", {"lr": 1e-2}),
    "Adafactor": ("Adafactor", {"lr": 1e-2}),
    "Muon": ("Muon", {"lr": 1e-2}),
    "LBFGS": ("LBFGS", {"lr": 0.1, "max_iter": 3, "line_search_fn": "strong_wolfe"}),
}


def test_every_optimizer_of_torch() -> None:
    start = {k: v.clone() for k, v in seeded(pair).state_dict().items()}

    def train(forward: Any, model: Pair) -> list[Tensor]:
        seen: list[Tensor] = []
        for kind, settings in OPTIMIZERS.values():
            if not hasattr(torch.optim, kind):
                continue
            model.load_state_dict(start)
            matrices = [p for p in model.parameters() if p.dim() == 2]
            moved = matrices if kind == "Muon" else model.parameters()
            optimizer = getattr(torch.optim, kind)(moved, **settings)
            for step in range(3):

                def closure(seed: int = step, optimizer: Any = optimizer) -> Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(forward(batch(seed)))
                    loss.backward()
                    return loss

                seen.append(optimizer.step(closure).detach())
            seen += results(model)
        return seen

    same(train, hosted=LAYERS)


def test_an_optimizer_s_state_goes_across() -> None:
    """A checkpoint of ours goes on in the plain model, and the other way, as if never changed."""

    def step(forward: Any, model: nn.Module, optimizer: Any, seed: int) -> None:
        optimizer.zero_grad()
        loss_of(forward(batch(seed))).backward()
        optimizer.step()

    def begin(compiler: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
        torch._dynamo.reset()
        model = seeded(pair)
        return compiler(model), model, torch.optim.AdamW(model.parameters(), 1e-2)

    def through(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        return torch.load(io.BytesIO(file.getvalue()))

    one = begin(lambda m: m)
    for seed in range(4):
        step(*one, seed)
    for first, second in [(ours, lambda m: m), (lambda m: m, ours), (ours, ours)]:
        before = begin(first)
        for seed in range(2):
            step(*before, seed)
        weights, states = through(*before[1:])
        after = begin(second)
        if second is ours:
            loss_of(after[0](batch(9)))  # its weights are on the host when they are loaded
            assert on_host(after[1]) == LAYERS
        after[1].load_state_dict(weights)
        after[2].load_state_dict(states)
        for seed in range(2, 4):
            step(*after, seed)
        for mine, theirs in zip(results(after[1]), results(one[1]), strict=True):
            assert torch.equal(mine, theirs)


# --- other modes ----------------------------------------------------------------------------------


def test_scores_between_steps() -> None:
    def build() -> nn.Module:
        return nn.Sequential(Pair(), nn.Dropout(0.3), Pair())

    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        seen = []
        for step in range(2):
            torch.manual_seed(step)
            loss_of(forward(batch(step))).backward()
            descend(model)
            model.eval()
            with torch.no_grad():
                seen.append(forward(batch(step)))
            with torch.inference_mode():
                seen.append(forward(batch(step)).clone())
            loss_of(forward(batch(step + 5))).backward()
            model.train()
        return seen

    same(train, build, access=(COPIED,))


def test_scores_alone() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        model.requires_grad_(False).eval()
        seen = [forward(batch(0))]
        with torch.inference_mode():
            seen += [forward(batch(1)).clone(), forward(batch(2)).clone()]
        with torch.no_grad():
            model.up.weight.mul_(0.5)
            seen.append(forward(batch(1)))
        return seen

    same(train, hosted=LAYERS)


def test_weights_that_scores_brought_to_the_host_are_trained() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        with torch.no_grad():
            seen = [forward(batch(0))]
        with torch.inference_mode():
            seen.append(forward(batch(0)).clone())
        return [*seen, *some_steps(forward, model)]

    same(train, hosted=LAYERS, access=(COPIED,))


def test_weights_first_placed_in_inference_mode_are_trained() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        with torch.inference_mode():
            seen = [forward(batch(0)).clone()]
        assert not any(p.is_inference() for p in model.parameters())
        return [*seen, *some_steps(forward, model)]

    same(train, hosted=LAYERS, access=(COPIED,))


def test_autocast() -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        seen = []
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(forward(batch(step)))
            loss.backward()
            seen += [loss.detach(), *results(model)]
            descend(model)
        return seen

    same(train, hosted=LAYERS, against="aot_eager")


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [(torch.float64, COPIED), (torch.bfloat16, IN_PLACE), (torch.float16, COPIED)],
)
def test_another_type_after_the_first_step(dtype: torch.dtype, policy: str) -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        loss_of(forward(batch(0))).backward()
        descend(model)
        model.to(dtype)
        seen = []
        for step in range(2):
            loss_of(forward(batch(step).to(dtype))).backward()
            seen += results(model)
            descend(model)
        return seen

    same(train, lambda: nn.Sequential(Pair(), Pair()), access=(policy,))


def test_batches_of_many_sizes() -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        seen = []
        for step, rows in enumerate((8, 40, 3, 200, 8)):
            loss = loss_of(forward(batch(step, rows)))
            loss.backward()
            seen += [loss.detach(), *results(model)]
            descend(model)
        return seen

    same(train, hosted=LAYERS, dynamic=True)
