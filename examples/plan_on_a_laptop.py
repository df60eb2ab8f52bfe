"""Plan a training step for a card that is not there: nothing is allocated, nothing runs.

    python examples/plan_on_a_laptop.py
    python examples/plan_on_a_laptop.py --layers 80 --width 8192 --hardware h100-sxm

The model lies on the meta device, which has shapes and no memory. The answer is the report that a
compiled model has: budget, peak, step time with its bound, what moves. A budget that cannot be kept
is refused with the smallest change that would do.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import offcompile
from offcompile.ir.units import show_bytes

VOCABULARY = 32000


class Layer(nn.Module):
    """One layer of a Llama: attention and a gated MLP, without position encoding."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        hidden = 8 * width // 3 // 64 * 64
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, width // 64) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each token from those before it."""
        x = self.tokens(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--hardware", default="rtx4090", help="a profile: `offcompile hardware`")
    parser.add_argument("--memory", help="budget (default: all of the card)")
    parser.add_argument("--quick", action="store_true", help="one small layer")
    asked = parser.parse_args()
    options = {}
    if asked.quick:
        asked.layers, asked.width, asked.batch, asked.length = 1, 128, 2, 128
        asked.memory, options = "110MiB", {"seconds": 0.2}

    with torch.device("meta"):
        model = Llama(asked.layers, asked.width).bfloat16()
        tokens = torch.empty(asked.batch, asked.length + 1, dtype=torch.long)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:,.0f} M parameters in bfloat16, nothing of it allocated")
    given = {"hardware": asked.hardware, "optimizer": "adamw", "options": options}
    report = offcompile.plan(model, tokens, memory=asked.memory, **given)
    print(report)

    too_little = report.floor_bytes // 2
    try:
        offcompile.plan(model, tokens, memory=too_little, **given)
    except offcompile.Infeasible as error:
        print(f"\nand in {show_bytes(too_little)}: {error}")


if __name__ == "__main__":
    main()
