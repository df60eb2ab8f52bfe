"""Updates inside compiled backward graphs: gradients taken where they are made."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import offcompile
from offcompile import OffloadError
from offcompile.report.modes import TAKEN
from offcompile.runtime.states import updates

WIDTH = 64


class Descent:
    """Plain gradient descent during backward, and a note of how each gradient came."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.taken: list[int] = []
        self.brought: list[int] = []
        self.willing = True
        updates.register(self.parameters, self)
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self.bring)

    def takes(self, parameter: torch.Tensor) -> bool:
        return self.willing

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self.taken.append(self.index(parameter))
        self.descend(parameter, gradient)

    def held_bytes(self) -> int:
        return 0

    def reduced(self) -> None:
        raise AssertionError("there are no ranks")

    def index(self, parameter: torch.Tensor) -> int:
        return next(i for i, p in enumerate(self.parameters) if p is parameter)

    @torch.no_grad()
    def descend(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        parameter.add_(gradient, alpha=-self.lr)

    def bring(self, parameter: torch.Tensor) -> None:
        if not updates.arrived(parameter):
            return
        self.brought.append(self.index(parameter))
        if self.willing:
            assert parameter.grad is not None
            self.descend(parameter, parameter.grad)
            parameter.grad = None

    def step(self) -> None:
        self.taken.clear()
        self.brought.clear()


def mlp(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(32, WIDTH) for _ in range(count)]


def compiled(
    model: nn.Module, memory: object = "minimum", lowering: str = "aot_eager"
) -> nn.Module:
    torch._dynamo.reset()
    found: nn.Module = torch.compile(
        model,
        backend="offcompile",
        options={"memory": memory, "lowering": lowering, "hardware": "cpu"},
    )
    return found


def plain_steps(model: nn.Module, inputs: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in inputs:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)]
)
def test_gradients_are_taken_from_the_second_step_on(lowering: str) -> None:
    model, reference = mlp(), mlp()
    optimizer = Descent(model.parameters())
    run = compiled(model, lowering=lowering)
    wanted = plain_steps(reference, batches(4))
    for i, x in enumerate(batches(4)):
        loss = run(x).square().mean()
        loss.backward()
        assert bool(optimizer.taken) == (i > 0)
        assert sorted(optimizer.taken + optimizer.brought) == list(range(8))
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        if lowering == "aot_eager":
            assert loss.item() == wanted[i]
        else:
            assert loss.item() == pytest.approx(wanted[i], rel=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if lowering == "aot_eager":
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs)


def warmed(memory: object = "minimum") -> tuple[nn.Sequential, nn.Module, Descent, torch.Tensor]:
    """A compiled model whose gradients are being taken."""
    model = mlp()
    optimizer = Descent(model.parameters())
    run = compiled(model, memory)
    (x,) = batches(1)
    run(x).square().mean().backward()
    optimizer.step()
    return model, run, optimizer, x


def large(optimizer: Descent) -> list[int]:
    """Parameters whose gradients are worth an offer: biases are not."""
    return [i for i, p in enumerate(optimizer.parameters) if p.dim() > 1]


def test_only_large_gradients_are_taken() -> None:
    _, run, optimizer, x = warmed()
    run(x).square().mean().backward()
    assert sorted(optimizer.taken) == large(optimizer)


def test_last_layers_come_first_and_each_after_its_weight_was_read() -> None:
    _, run, optimizer, x = warmed()
    run(x).square().mean().backward()
    assert optimizer.taken == sorted(optimizer.taken, reverse=True)


def test_when_everything_fits_graphs_stay_as_they_are() -> None:
    _, run, optimizer, x = warmed(memory=None)
    run(x).square().mean().backward()
    assert optimizer.taken == []
    assert sorted(optimizer.brought) == list(range(8))


def test_an_unwilling_optimizer_gets_gradients_in_grad() -> None:
    model, run, optimizer, x = warmed()
    reference = copy.deepcopy(model)
    optimizer.willing = False
    run(x).square().mean().backward()
    reference(x).square().mean().backward()
    assert optimizer.taken == []
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_without_its_optimizer_a_graph_gives_gradients_as_ever() -> None:
    model, run, optimizer, x = warmed()
    updates.unregister(model.parameters(), optimizer)
    optimizer.willing = False
    run(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_grad_of_a_loss_updates_nothing() -> None:
    model, run, optimizer, x = warmed()
    before = [p.detach().clone() for p in model.parameters()]
    found = torch.autograd.grad(run(x).square().mean(), list(model.parameters()))
    assert optimizer.taken == []
    reference = copy.deepcopy(model)
    wanted = torch.autograd.grad(reference(x).square().mean(), list(reference.parameters()))
    for mine, theirs, p, old in zip(found, wanted, model.parameters(), before, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(p, old)


def test_backward_for_some_inputs_updates_those() -> None:
    model, run, optimizer, x = warmed()
    wanted = model[2].weight
    run(x).square().mean().backward(inputs=[wanted])
    assert optimizer.taken == [optimizer.index(wanted)]
    assert optimizer.brought == []


def test_two_forwards_before_a_backward_are_summed_by_autograd() -> None:
    model, run, optimizer, x = warmed()
    reference = copy.deepcopy(model)
    for m in (run, reference):
        (m(x).square().mean() + m(x + 1).square().mean()).backward()
    assert optimizer.taken == []
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(p.grad, alpha=-optimizer.lr)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_forward_that_was_dropped_does_not_count() -> None:
    _, run, optimizer, x = warmed()
    run(x)  # lost at once
    run(x).square().mean().backward()
    assert sorted(optimizer.taken) == large(optimizer)


def test_a_penalty_outside_of_the_graph_from_the_start_is_added_before_the_update() -> None:
    model, reference = mlp(), mlp()
    optimizer = Descent(model.parameters())
    run = compiled(model)
    descent = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x in batches(3):
        penalty = model[0].weight.square().sum()
        (run(x).square().mean() + penalty).backward()
        assert optimizer.index(model[0].weight) not in optimizer.taken
        optimizer.step()
        (reference(x).square().mean() + reference[0].weight.square().sum()).backward()
        descent.step()
        descent.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_penalty_that_comes_later_is_an_error() -> None:
    model, run, _, x = warmed()
    with pytest.raises(OffloadError, match=r"second gradient.*overlap=False"):
        (run(x).square().mean() + model[0].weight.square().sum()).backward()


def test_the_graph_may_be_kept_and_run_again() -> None:
    model, run, optimizer, x = warmed()
    reference = copy.deepcopy(model)
    optimizer.willing = False
    loss = run(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    plain = reference(x).square().mean()
    plain.backward(retain_graph=True)
    plain.backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


class Tied(nn.Module):
    """The first and the last matrix are one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(100, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.middle(self.table(tokens)).relu())
        return found


class Poisoner(Descent):
    """Leaves no weight readable between its update and the step."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters)
        self.updated: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        super().take(parameter, gradient)
        self.updated.append((parameter, parameter.detach().clone()))
        parameter.fill_(float("nan"))

    @torch.no_grad()
    def step(self) -> None:
        for parameter, value in self.updated:
            parameter.copy_(value)
        self.updated.clear()
        super().step()


class Attending(nn.Module):
    """A norm and attention if asked for, and a gate: weights that fused kernels read too."""

    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attends, self.out = attends, nn.Linear(WIDTH, WIDTH)
        if attends:
            self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.gate = nn.Parameter(torch.randn(32, WIDTH))
        self.scale = nn.Parameter(torch.randn(32, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x * self.scale
        if self.attends:
            q, k, v = self.qkv(self.norm(mixed)).chunk(3, -1)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed)
        found: torch.Tensor = x * torch.sigmoid(self.gate) + self.gate
        return found


@pytest.mark.parametrize(("lowering", "layers"), [("aot_eager", 3), ("inductor", 1)])
def test_no_op_reads_a_weight_that_was_updated(lowering: str, layers: int) -> None:
    torch.manual_seed(0)
    # to compile a norm and attention takes Inductor seconds
    attends = lowering == "aot_eager"
    model = nn.Sequential(*(Attending(attends) for _ in range(layers)))
    reference = copy.deepcopy(model)
    optimizer = Poisoner(model.parameters())
    run = compiled(model, lowering=lowering)
    inputs = [torch.randn(4, 32, WIDTH) for _ in range(3)]
    for x in inputs:
        run(x).square().mean().backward()
        optimizer.step()
    plain_steps(reference, inputs)
    assert all(p.isfinite().all() for p in model.parameters())
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tied_weights_get_one_gradient() -> None:
    torch.manual_seed(2)
    tokens = torch.randint(0, 100, (3, 4, 16))
    model, reference = Tied(), Tied()
    optimizer = Descent(model.parameters())
    run = compiled(model)
    descent = torch.optim.SGD(reference.parameters(), lr=0.1)
    for i in range(3):
        run(tokens[i]).square().mean().backward()
        assert (optimizer.index(model.table.weight) in optimizer.taken) == (i > 0)
        optimizer.step()
        reference(tokens[i]).square().mean().backward()
        descent.step()
        descent.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_weight_of_two_graphs_waits_for_both_gradients() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.shared, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.own(self.shared(x).relu())
            torch._dynamo.graph_break()
            found: torch.Tensor = self.shared(x).relu()
            return found

    model, reference = Broken(), Broken()
    optimizer = Descent(model.parameters())
    run = compiled(model)
    descent = torch.optim.SGD(reference.parameters(), lr=0.1)
    for i, x in enumerate(batches(4)):
        run(x).square().mean().backward()
        assert optimizer.index(model.shared.weight) not in optimizer.taken
        assert (optimizer.index(model.own.weight) in optimizer.taken) == (i > 0)
        optimizer.step()
        reference(x).square().mean().backward()
        descent.step()
        descent.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x).relu()
        return found


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def test_one_artefact_for_several_layers_updates_the_layer_that_was_called() -> None:
    model, reference = blocks(), blocks()
    optimizer = Descent(model.parameters())
    torch._dynamo.reset()
    options = {"memory": "minimum", "lowering": "aot_eager"}
    for layer in model:
        layer.compile(backend="offcompile", options=options)
    wanted = plain_steps(reference, batches(3))
    for i, x in enumerate(batches(3)):
        loss = model(x).square().mean()
        loss.backward()
        assert sorted(optimizer.taken) == (large(optimizer) if i else [])
        optimizer.step()
        assert loss.item() == wanted[i]
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_that_are_taken_are_not_held() -> None:
    """A gradient that is written on the host leaves out even the one that is being made."""
    plain, taking = mlp(8), mlp(8)
    (x,) = batches(1)
    compiled(plain, "minimum")(x).square().mean().backward()
    left = offcompile.reports()[-1]
    optimizer = Descent(taking.parameters())
    compiled(taking, "minimum")(x).square().mean().backward()
    taken = offcompile.reports()[-1]
    assert taken.memory.worst_peak_bytes <= left.memory.worst_peak_bytes + 4 * WIDTH**2
    kinds = {t.id: t.kind for t in taken.problem.tensors}
    assert not any(kinds[m.tensor] == "gradient" for m in taken.plan.moves)
    assert len(optimizer.brought) == 16
    assert TAKEN in taken.modules()
