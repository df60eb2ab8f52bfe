"""The models that `benchmarks.gpu` trains, and small ones for machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.activations_child import Attention, Residual, Stack


class Embed(nn.Module):
    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.place(places)


@dataclass(frozen=True)
class Case:
    """A model and its batches; `batch` may be replaced by the search for the largest."""

    title: str
    batch: int
    build: Callable[[], Stack]
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def gpt(name: str, width: int, layers: int, vocabulary: int, batch: int, length: int) -> Case:
    def build() -> Stack:
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
        blocks: list[nn.Module] = [
            Attention(width, 128 if width >= 2048 else 64) for _ in range(layers)
        ]
        return Stack(Embed(vocabulary, width, length), blocks, head)

    def draw(batch: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (batch, length + 1), generator=random)
        return tokens[:, :-1], tokens[:, 1:]

    title = f"{name}: width {width}, {layers} layers, batch {batch} × {length}, bf16"
    return Case(title, batch, build, draw)


def resnet(name: str, stages: list[tuple[int, int]], side: int, batch: int) -> Case:
    """`stages`: (channels, blocks); the stem halves the image, and so does each later stage."""
    channels = [c for c, blocks in stages for _ in range(blocks)]

    def build() -> Stack:
        stem = nn.Conv2d(3, channels[0], 3, 2, 1)
        pairs = zip([channels[0], *channels], channels, strict=False)
        blocks: list[nn.Module] = [Residual(a, b) for a, b in pairs]
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return Stack(stem, blocks, nn.Sequential(pool, nn.Linear(channels[-1], 100)))

    def draw(batch: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(batch, 3, side, side, generator=random)
        return images, torch.randint(100, (batch,), generator=random)

    title = f"{name}: {len(channels)} blocks, batch {batch} × {side} × {side}, bf16"
    return Case(title, batch, build, draw)


CASES = {
    # weights and gradients take the memory, and the time on the bus
    "weights": gpt("GPT 1.3B, few tokens", 2048, 24, 50304, 1, 512),
    # small enough that ours fit beside plain on one card
    "optimizer": gpt("GPT 1.3B, AdamW", 2048, 24, 50304, 8, 2048),
    "gpt-124m": gpt("GPT 124M", 768, 12, 50304, 16, 1024),
    "gpt-1.3b": gpt("GPT 1.3B", 2048, 24, 50304, 8, 2048),
    "resnet": resnet("ResNet", [(64, 16), (128, 16), (256, 16)], 128, 256),
}
#: the same code in seconds; large enough that something has to move
TINY_CASES = {
    "weights": gpt("GPT, tiny, few tokens", 64, 4, 96, 1, 16),
    "optimizer": gpt("GPT, tiny, AdamW", 64, 4, 96, 4, 32),
    "gpt-124m": gpt("GPT, tiny", 64, 1, 96, 8, 64),
    "gpt-1.3b": gpt("GPT, tiny and deep", 64, 6, 96, 4, 64),
    "resnet": resnet("ResNet, tiny", [(16, 2), (32, 2)], 32, 16),
}
