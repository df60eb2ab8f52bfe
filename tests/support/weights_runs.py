"""Training a model plainly and with its weights on the host, and comparing all that comes out.

The model is trained as it is, then compiled with all that may leave on the host: by a policy that
uses weights in place, by one that copies them to the device, or by both in turn.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import offcompile
from offcompile.runtime.moves.weights import is_on_host

WIDTH, ROWS, WORDS = 48, 8, 64
#: the weights of a `Pair` that move
LAYERS = {"up.weight", "down.weight"}
#: how ops get at weights: in place, or from copies
IN_PLACE, COPIED = "joint", "gradient_reserve"
ACCESS = (IN_PLACE, COPIED)

Train = Callable[[Any, Any], list[Tensor]]
Build = Callable[[], nn.Module]


def clean_slate() -> Iterator[None]:
    """For a fixture: nothing compiled before, one thread, and no ticket left behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0
    torch.set_num_threads(threads)


class Pair(nn.Module):
    """Two layers of 9 KiB, with a norm and biases that are too small to move."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def pair() -> Pair:
    return Pair()


def seeded(build: Build) -> Any:
    torch.manual_seed(0)
    return build()


def batch(seed: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int) -> Tensor:
    return torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(seed))


def ours(model: Any, policy: str = COPIED, **more: Any) -> Any:
    options = {"memory": "minimum", "lowering": "aot_eager", "hardware": "cpu"}
    options |= {"policy": policy, "seconds": 0.05}
    return torch.compile(model, backend="offcompile", options=options, **more)


def loss_of(out: Tensor) -> Tensor:
    return (out.float() * torch.arange(out.numel()).view(out.shape).cos()).sum()


def results(model: nn.Module) -> list[Tensor]:
    """Gradients and all that a state_dict has."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (*grads, *model.state_dict().values())]


def on_host(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if is_on_host(p)}


def descend(model: nn.Module) -> None:
    """SGD by hand, dropping gradients."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.05)
                p.grad = None


def same(
    train: Train,
    build: Build = pair,
    hosted: set[str] | None = None,
    against: str | None = None,
    access: tuple[str, ...] = ACCESS,
    **more: Any,
) -> None:
    """All tensors that `train(forward, model)` gives, and the model it leaves, are the plain ones.

    `hosted`: names of the parameters that must be on the host after it; None: some are. `against`:
    the backend of the plain model, where that alone changes last bits; None: it is not compiled.
    """
    plain = seeded(build)
    forward = plain if against is None else torch.compile(plain, backend=against)
    expected = [*train(forward, plain), *results(plain)]
    for policy in access:
        torch._dynamo.reset()
        model = seeded(build)
        found = [*train(ours(model, policy, **more), model), *results(model)]
        where = on_host(model)
        assert where == hosted if hosted is not None else where, f"{policy}: {where} on the host"
        assert len(found) == len(expected)
        for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert mine.dtype == theirs.dtype and mine.device == theirs.device
            assert mine.stride() == theirs.stride(), f"{policy}, tensor {i}"
            assert torch.equal(mine, theirs), f"{policy}, tensor {i}"
        assert [p.requires_grad for p in model.parameters()] == [
            p.requires_grad for p in plain.parameters()
        ]


def some_steps(forward: Any, model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    seen: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(forward(batch(step)))
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *results(model)]
    return seen
