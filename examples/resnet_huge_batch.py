"""How large a batch fits, without offcompile and with it; then a step of the largest one.

    python examples/resnet_huge_batch.py --memory 512MiB

`offcompile.max_batch` plans step after step on tensors without memory, so nothing can run out of
it. The net has batch norms: a large batch is not the same as several small ones added up.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

import offcompile

MIB = 1 << 20
CLASSES = 10


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.two = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm_one(self.one(x)))
        return F.relu(x + self.norm_two(self.two(y)))


class ResNet(nn.Module):
    def __init__(self, blocks: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(x), labels)


def inputs(batch: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of noise, a little brighter for higher labels."""
    labels = torch.arange(batch) % CLASSES
    images = torch.randn(batch, 3, side, side) + (labels / CLASSES)[:, None, None, None]
    return images, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--memory", default="512MiB", help="as the option 'memory'")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--side", type=int, default=32, help="of the images, in pixels")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small net, two steps")
    asked = parser.parse_args()
    options: dict[str, object] = {"lowering": "aot_eager"}
    hardware, most = None, 1 << 16
    if asked.quick:
        asked.memory, asked.blocks, asked.channels = "3MiB", 1, 8
        asked.side, asked.steps, most = 32, 2, 8
        # a shipped profile: nothing is measured; a short search
        hardware, options["seconds"] = "cpu", 0.1

    torch.manual_seed(0)
    model = ResNet(asked.blocks, asked.channels)

    def largest(policy: str | None) -> int:
        report = offcompile.max_batch(
            model,
            lambda batch: inputs(batch, asked.side),
            asked.memory,
            policy=policy,
            hardware=hardware,
            most=most,
            options=options,
        )
        print(f"{policy or 'without offcompile'}:\n{report}\n")
        return report.largest.batch

    plain, ours = largest(None), largest("joint")
    print(f"{ours} at most, {ours / plain:.1f} times as many as the {plain} without offcompile")

    step = torch.compile(
        model,
        backend="offcompile",
        options={**options, "memory": asked.memory, "hardware": hardware},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = inputs(ours, asked.side)
    for number in range(1, asked.steps + 1):
        began = time.perf_counter()
        loss = step(images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
        also = " (compiling included)" if number == 1 else ""
        print(f"step {number}: loss {loss.item():.4f}, {ours / seconds:,.0f} images/s{also}")
    report = offcompile.reports()[-1]
    print(f"planned peak {report.planned_peak_bytes / MIB:.1f} MiB in {asked.memory}")


if __name__ == "__main__":
    main()
