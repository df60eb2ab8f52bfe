"""Small models whose activations, or whose weights, take nearly all that there is; and budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import offcompile
from offcompile.runtime.moves.weights import is_on_host

# the profile is given, and the policy searches little: plans do not depend on the machine
PLANNING = {"hardware": "cpu", "policy": "gradient_reserve", "seconds": 0.05}
LAYERS = 4


@dataclass(frozen=True)
class Case:
    """Which tensors are large, and how little memory there is."""

    name: str
    width: int
    rows: int
    #: share of the way from the floor to the step's peak with no limit; 0: "minimum"
    share: float
    #: so much more where the budget is a figure
    times: float = 1.0

    @property
    def on_host(self) -> bool:
        """True if weights do not fit; else activations do not."""
        return self.width > self.rows

    def __str__(self) -> str:
        return self.name

    def batch(self, seed: int, rows: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows or self.rows, self.width, generator=generator)

    @property
    def memory(self) -> int | str:
        if self.share == 0:
            return "minimum"
        return int(self.times * _between(self.width, self.rows, self.share))

    def for_several_runs(self) -> Case:
        """With room for what several forwards keep."""
        return self if self.on_host else replace(self, times=3)

    def ours(self, model: Any, **more: Any) -> Any:
        options = {**PLANNING, "memory": self.memory, "lowering": "aot_eager"}
        return torch.compile(model, backend="offcompile", options=options, **more)


#: matrices of 2.25 KiB stay where they are; of 256 KiB they do not fit
CASES = (
    Case("activations, minimum", 24, 6144, 0),
    Case("activations, middling", 24, 6144, 0.5),
    Case("weights, minimum", 256, 8, 0),
    Case("weights, middling", 256, 8, 0.6),
)


class Deep(nn.Module):
    """Many equal layers; what it takes is nearly all in one kind of tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@cache
def _between(width: int, rows: int, share: float) -> int:
    """Bytes between the floor of a `Deep` and what it takes with no limit."""
    torch._dynamo.reset()
    peaks = []
    for memory in ("minimum", None):
        case = Case("", width, rows, 0)
        options = {**PLANNING, "memory": memory, "lowering": "aot_eager"}
        compiled = torch.compile(Deep(width), backend="offcompile", options=options)
        loss_of(compiled(case.batch(0)))
        peaks.append(offcompile.reports()[-1].planned_peak_bytes)
        torch._dynamo.reset()
    floor, ample = peaks
    assert ample > 1.2 * floor, peaks
    return floor + int(share * (ample - floor))


def loss_of(out: Tensor) -> Tensor:
    return (out.float() * torch.arange(out.numel()).view(out.shape).cos()).sum()


def descend(model: nn.Module) -> None:
    """SGD by hand, dropping gradients."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.01)
                p.grad = None


def left_by(model: nn.Module) -> list[Tensor]:
    """Gradients, and all that a state_dict has."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (*grads, *model.state_dict().values())]


Train = Callable[[Any, Any], list[Tensor]]


def same(
    case: Case,
    train: Train,
    build: Callable[[int], nn.Module] = Deep,
    compiler: Callable[[Any], Any] | None = None,
    against: str | None = None,
) -> None:
    """All that `train(forward, model)` gives and leaves behind is the plain run's, bit for bit, and
    something moved.

    `compiler`: in place of `case.ours`. `against`: the backend of the plain run, where that alone
    changes last bits; None: it is not compiled.
    """
    found = []
    known = len(offcompile.reports())
    for ours in (False, True):
        case.memory  # noqa: B018  # computed before anything is compiled here
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = build(case.width)
        forward: Any = model
        if ours:
            known = len(offcompile.reports())
            forward = (compiler or case.ours)(model)
        elif against is not None:
            forward = torch.compile(model, backend=against)
        torch.manual_seed(1)
        found.append([*train(forward, model), *left_by(model)])
        if ours:
            on_host = any(is_on_host(p) for p in model.parameters())
            assert on_host == case.on_host
    plain, mine = found
    assert len(mine) == len(plain)
    for i, (a, b) in enumerate(zip(mine, plain, strict=True)):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), i
        assert torch.equal(a, b), f"tensor {i}: {(a != b).sum()} of {a.numel()} elements differ"
    assert any(not report.fits for report in offcompile.reports()[known:])
