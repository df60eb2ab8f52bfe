"""Small models, and hooks that note what is asked of them, for tests of lowering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from offcompile.graph.lowering.lower import lower

LOWERINGS = ("aot_eager", "inductor")


class Hooks:
    """Does nothing but note what is asked; `change` says that the graphs were replaced."""

    no_buffer_reuse = False

    def __init__(self, change: Callable[..., None] | None = None) -> None:
        self.change = change
        self.asked: list[str] = []

    def training(self, forward: Any, backward: Any, num_outputs: int, inputs: Any) -> Any:
        self.asked.append("training")
        if self.change is None:
            return None
        self.change(forward, backward, num_outputs)
        return forward, backward

    def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.asked.append("inference")
        return None

    def ready(self, phase: str, compiled: Any) -> Any:
        self.asked.append(phase)
        return compiled


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.square().mean()


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh().sum()


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)])
        self.norm = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.conv, self.norm, strict=True):
            x = F.relu(norm(conv(x)))
        return x.mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        return (x + self.out(F.dropout(a, 0.0))).square().mean()


NETS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "net": (Net, (8, 32)),
    "conv": (ConvNet, (2, 3, 8, 8)),
    "attention": (Attention, (2, 16, 32)),
}


def fresh(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net, shape = (Tiny, (4, 8)) if name == "tiny" else NETS[name]
    return net(), torch.randn(shape)


def backend(lowering: Any, hooks: Hooks) -> Callable[..., Any]:
    return lambda graph, inputs: lower(graph, inputs, lowering, hooks)


def step(model: nn.Module, x: Tensor, compiler: Any, **how: Any) -> list[Tensor]:
    """Loss and gradients of one compiled step."""
    torch._dynamo.reset()
    loss = torch.compile(model, backend=compiler, **how)(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
