"""A small GPT over bytes, and Python source to train it on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

SEED = 0
TEXT_BYTES = 4 << 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_width = min(64, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, self.head_width))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """checkpointed: each block keeps its input only, and computes the rest again in backward."""

    def __init__(self, layers: int, width: int, length: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each byte from those before it."""
        seen, wanted = text[:, :-1], text[:, 1:]
        x = self.token(seen) + self.place(torch.arange(seen.shape[1], device=text.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def batches(batch: int, length: int, device: str, rank: int = 0) -> Iterator[torch.Tensor]:
    """Pieces of the standard library, as it lies on this machine; the same ones for each run, and
    others for each rank."""
    folder = Path(os.__file__).parent
    files = sorted(folder.glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:TEXT_BYTES]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    random = torch.Generator().manual_seed(SEED + rank)
    while True:
        starts = torch.randint(len(data) - length - 1, (batch,), generator=random)
        pieces = torch.stack([data[int(s) : int(s) + length + 1] for s in starts])
        yield pieces.long().to(device)
