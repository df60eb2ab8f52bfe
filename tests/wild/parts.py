"""Small networks and data that several programs share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, ROWS, CLASSES, WORDS, LENGTH = 24, 6, 5, 40, 8


def mlp(wide: int = WIDTH, out: int = CLASSES, into: int | None = None) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(into or wide, 2 * wide),
        nn.GELU(),
        nn.LayerNorm(2 * wide),
        nn.Linear(2 * wide, wide),
        nn.ReLU(),
        nn.Linear(wide, out),
    )


def conv_net(out: int = CLASSES, channels: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, out),
    )


class Block(nn.Module):
    """A transformer's layer, norms first."""

    def __init__(self, width: int = WIDTH, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.into(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        grown: Tensor = x + self.mlp(self.after(x))
        return grown


class Gpt(nn.Module):
    """A language model of a few blocks, its head tied to its embedding."""

    def __init__(self, layers: int = 2, dropout: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def points(n: int, rows: int = ROWS, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(n))


def images(n: int, rows: int = 4, side: int = 12, channels: int = 3) -> Tensor:
    return torch.randn(rows, channels, side, side, generator=torch.Generator().manual_seed(n))


def labels(n: int, rows: int = ROWS, classes: int = CLASSES) -> Tensor:
    return torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(50 + n))


def words(n: int, rows: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(n))


def next_word_loss(scores: Tensor, given: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), given[:, 1:].flatten())
