"""Tensors for codecs: patterns of bits that are easily lost, at densities and sizes of choice."""

from __future__ import annotations

import numpy as np
import torch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (
    F32,
    F16,
    BF16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)
#: bits of each width: −0, infinities, a NaN with a payload, the least denormal, of any float type
SPECIALS = {
    1: (0x80, 0xFF, 0x01, 0x7F),
    2: (0x8000, 0x7C00, 0xFC00, 0x7C01, 0x7F80, 0xFF80, 0xFF81, 0x0001, 0x8001),
    4: (0x8000_0000, 0x7F80_0000, 0xFF80_0000, 0x7FA0_1234, 0xFFC0_0001, 1, 0x8000_0001),
    8: (1 << 63, 0x7FF0 << 48, 0xFFF0 << 48, (0x7FF4 << 48) | 0x1234, 1, (1 << 63) | 1),
}


def bits(dtype: torch.dtype, numel: int, density: float, seed: int) -> torch.Tensor:
    """A flat tensor of random bits, some of them special, the rest zero; booleans are 0 and 1."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    random = np.random.default_rng(seed)
    width = min(dtype.itemsize, 8)
    count = numel * (dtype.itemsize // width)
    words = random.integers(1, 256, (count, width), dtype=np.uint8).view(f"<u{width}").reshape(-1)
    special = np.array(SPECIALS[width], dtype=words.dtype)
    words = np.where(random.random(count) < 0.2, random.choice(special, count), words)
    words = np.where(random.random(count) < density, words, words.dtype.type(0))
    if dtype == torch.bool:
        words = (words != 0).astype(np.uint8)
    return torch.from_numpy(words.view(np.uint8).copy()).view(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8) if x.numel() else torch.empty(0).byte()


def activations(numel: int, seed: int = 0, zeros: float = 0.5) -> torch.Tensor:
    """float32 without NaN as a ReLU leaves it, with some −0.0, denormals and large ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x *= torch.rand(numel, generator=generator) >= zeros
    scale = torch.randint(0, 20, (numel,), generator=generator)
    return torch.where(scale == 0, x * 1e-41, torch.where(scale == 1, x * 1e5, x))
