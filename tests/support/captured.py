"""Real graphs for tests of the fx edges: what AOTAutograd makes of small models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from offcompile.graph.graphs import Graphs
from offcompile.graph.lowering.lower import lower


class Spy:
    """Hooks that keep the graphs as they come by."""

    no_buffer_reuse = False

    def __init__(self, parameters: frozenset[int]) -> None:
        self.parameters = parameters
        self.seen: list[Graphs] = []

    def training(self, forward: fx.GraphModule, backward: fx.GraphModule, n: int, _: Any) -> None:
        self.seen.append(Graphs(forward, backward, n, self.parameters))

    def inference(self, graph: fx.GraphModule, _: Any) -> None:
        (out,) = graph.graph.find_nodes(op="output")
        self.seen.append(Graphs(graph, None, len(out.args[0]), self.parameters))

    def ready(self, phase: str, compiled: Callable[..., Any]) -> Callable[..., Any]:
        return compiled


def capture(model: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> list[Graphs]:
    """The graphs that one forward of `model` is compiled to, under aot_eager."""
    found: list[Graphs] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        spy = Spy(frozenset(i for i, x in enumerate(example_inputs) if isinstance(x, nn.Parameter)))
        run = lower(gm, example_inputs, "aot_eager", spy)
        found.extend(spy.seen)
        return run

    torch._dynamo.reset()
    torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
    return found


class Perceptron(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Attention(nn.Module):
    """Its saved q, k and v are three views of one storage."""

    def __init__(self, width: int = 32, heads: int = 2, depth: int = 1) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, w)
            x = x + out(y)
        return x.square().mean()
