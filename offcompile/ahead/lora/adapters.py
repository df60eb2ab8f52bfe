"""Low-rank adapters on linear layers (Hu et al., LoRA, 2021), without memory for their weights."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn

from .request import LoraRequest, bad_lora

#: names that an error lists
MOST_NAMES = 20


class LowRank(nn.Module):
    """Computes `layer(x) + scale · up(down(x))`, where only `down` and `up` train."""

    def __init__(self, layer: nn.Module, r: int, scale: float) -> None:
        super().__init__()
        weight: Any = layer.weight
        outer, inner = weight.shape
        if _is_conv1d(layer):  # its weight is transposed
            outer, inner = inner, outer
        self.layer, self.scale = layer, scale
        self.down = nn.Linear(inner, r, bias=False, device="meta", dtype=weight.dtype)
        self.up = nn.Linear(r, outer, bias=False, device="meta", dtype=weight.dtype)

    # models look at these of their linear layers
    @property
    def weight(self) -> Any:
        return self.layer.weight

    @property
    def bias(self) -> Any:
        return self.layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) + self.up(self.down(x)) * self.scale
        return found


def with_adapters(model: nn.Module, asked: LoraRequest) -> tuple[nn.Module, int]:
    """Copy the model with all its parameters frozen and adapters on the layers that were asked
    for, and count these. Tensors are shared with the given model, which is unchanged. Raises
    `InvalidInput` if a target matches no linear layer."""
    # tensors in the memo are not copied
    known: dict[int, Any] = {id(b): b for b in model.buffers()}
    known |= {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    made = copy.deepcopy(model, known)
    chosen = _chosen(made, asked)
    adapters = {id(layer): LowRank(layer, asked.r, asked.scale) for layer in chosen}
    for module in list(made.modules()):
        for name, child in module._modules.items():
            if id(child) in adapters:
                module._modules[name] = adapters[id(child)]
    return adapters.get(id(made), made), len(adapters)


def _chosen(model: nn.Module, asked: LoraRequest) -> list[nn.Module]:
    layers = _linear_layers(model)
    if not layers:
        raise bad_lora("the model has no linear layers to put adapters on")
    if not asked.targets:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        found = [layer for layer in layers.values() if layer is not head]
        return found or list(layers.values())
    for target in asked.targets:
        if not any(_matches(path, target) for path in layers):
            names = sorted({path.rpartition(".")[2] for path in layers})
            shown = names[:MOST_NAMES] + ["…"] * (len(names) > MOST_NAMES)
            raise bad_lora(f"{target!r} matches no linear layer; there are {', '.join(shown)}")
    return [
        layer
        for path, layer in layers.items()
        if any(_matches(path, target) for target in asked.targets)
    ]


def _matches(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers by their paths, each once. `nn.MultiheadAttention` does not call its
    layers: it uses their weights, so that adapters would be passed by."""
    passed_by = {
        id(inside)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for inside in module.modules()
    }
    return {
        path: module
        for path, module in model.named_modules()
        if (isinstance(module, nn.Linear) or _is_conv1d(module))
        and id(module) not in passed_by
        and module.weight.dtype.is_floating_point
    }


def _is_conv1d(module: nn.Module) -> bool:
    """True for the linear layers of transformers' GPT-2."""
    source = sys.modules.get("transformers.pytorch_utils")
    return source is not None and isinstance(module, source.Conv1D)
