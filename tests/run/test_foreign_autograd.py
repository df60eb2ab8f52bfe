"""Ways of autograd that cannot go with tensors that move: refused before the step, in words."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

import offcompile
from offcompile.ir import OffloadError

WIDTH, ROWS = 64, 256


def model() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def compiled(net: nn.Module, memory: str) -> nn.Module:
    options = {"memory": memory, "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.1}
    return torch.compile(net, backend="offcompile", options=options)


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def test_hooks_on_saved_tensors_are_refused_and_the_model_still_trains() -> None:
    net = model()
    run, x = compiled(net, "minimum"), torch.randn(ROWS, WIDTH)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(OffloadError, match="saved_tensors"):
        run(x)
    run(x).sum().backward()
    assert len(gradients(net)) == 4


def test_a_hook_without_a_name_is_refused_too() -> None:
    pack = functools.partial(lambda offset, x: x + offset, 0)
    run = compiled(model(), "minimum")
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, pytest.raises(OffloadError, match="saved_tensors"):
        run(torch.randn(ROWS, WIDTH))


def test_hooks_are_let_be_where_nothing_moves_and_where_nothing_is_saved() -> None:
    net = model()
    x = torch.randn(ROWS, WIDTH)
    with torch.autograd.graph.save_on_cpu():
        compiled(net, "1GiB")(x).sum().backward()
        with torch.no_grad():
            compiled(net, "minimum")(x)
    assert len(gradients(net)) == 4


def test_compiled_autograd_is_refused_and_the_model_still_trains() -> None:
    net = model()
    run, x = compiled(net, "minimum"), torch.randn(ROWS, WIDTH)
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(OffloadError, match="compiled autograd is on"),
    ):
        run(x)
    run(x).sum().backward()
    assert len(gradients(net)) == 4


def test_compiled_autograd_around_backward_alone_gives_the_same_gradients() -> None:
    """Forward has its own backward by then; compiled autograd calls it as it is."""
    net = model()
    x = torch.randn(ROWS, WIDTH)
    torch.compile(net, backend="aot_eager")(x).square().mean().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    run, known = compiled(net, "minimum"), len(offcompile.reports())
    loss = run(x).square().mean()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert all(map(torch.equal, gradients(net), expected))
    assert not offcompile.reports()[known].fits
