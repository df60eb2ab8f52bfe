"""Graphs of small models, with their gradients, and the model that estimates their costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from offcompile.graph.costs.op_costs import CostModel
from offcompile.machine.hardware import load_profile

CPU = load_profile("cpu")


def model(lowering: str = "aot_eager", **more: object) -> CostModel:
    return CostModel(CPU, False, lowering, **more)  # type: ignore[arg-type]


def hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def graph_of(fn: Callable[..., object], *inputs: torch.Tensor, mode: str = "fake") -> fx.Graph:
    return make_fx(fn, tracing_mode=mode)(*inputs).graph


def gradients(loss: Callable[..., torch.Tensor]) -> Callable[..., object]:
    """The loss and its gradients, traced in one graph."""

    def step(*inputs: torch.Tensor) -> object:
        taken = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        result = loss(*taken)
        wanted = [x for x in taken if x.requires_grad]
        return result, torch.autograd.grad(result, wanted)

    return step


def mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ a).mm(b).square().sum()


def conv(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = nn.functional.max_pool2d(torch.relu(nn.functional.conv2d(x, w, padding=1)), 2)
    return nn.functional.cross_entropy(z.mean((2, 3)), y)


def attention(i: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    x = nn.functional.embedding(i, table).unflatten(-1, (4, 32)).transpose(1, 2)
    x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    return nn.functional.layer_norm(x.transpose(1, 2).flatten(2), (128,)).square().mean()


def mlp_graph(rows: int = 256) -> fx.Graph:
    return graph_of(gradients(mlp), *(torch.rand(s) for s in ((rows, 256), (256, 512), (512, 64))))


def conv_graph() -> fx.Graph:
    inputs = torch.rand(8, 16, 48, 48), torch.rand(32, 16, 3, 3), torch.zeros(8, dtype=torch.int64)
    return graph_of(gradients(conv), *inputs)


def attention_graph() -> fx.Graph:
    return graph_of(
        gradients(attention), torch.zeros(2, 128, dtype=torch.int64), torch.rand(500, 128)
    )


GRAPHS = {"mlp": mlp_graph, "conv": conv_graph, "attention": attention_graph}


def node_of(graph: fx.Graph, target: object, place: int = 0) -> fx.Node:
    return [n for n in graph.nodes if n.target is target][place]
