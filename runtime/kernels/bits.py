"""Packs, unpacks and applies masks of one bit per element, in rows of 128.

`x_torch` is the reference; `x_launch` is the kernel launch for given tensors; the plain name runs
the kernel if it can, and torch otherwise. Tensors are flat; a mask has 16 bytes per row
(`mask_bytes`).
"""

from __future__ import annotations

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.codecs.layout import MASK_BYTES, ROW

from .bitmask import INTEGERS, MOST_TILE_ELEMENTS, SIGNED, signs_launch
from .launch import Launch, why_not
from .tuning import Config, config_for


def mask_bytes(numel: int) -> int:
    return MASK_BYTES * ((numel + ROW - 1) // ROW)


def pack_bits(x: torch.Tensor, mask: torch.Tensor) -> None:
    """Pack one bit per element: not (x <= 0) for floating point, the value itself for booleans."""
    if why_not(x.device, x.dtype) is None:
        pack_bits_launch(x, mask).run()
    else:
        mask.copy_(pack_bits_torch(x))


def unpack_bits(mask: torch.Tensor, out: torch.Tensor, negated: bool) -> None:
    """Unpack bits into the booleans `out`, inverted if `negated`."""
    if why_not(out.device, out.dtype) is None:
        unpack_bits_launch(mask, out, negated).run()
    else:
        out.copy_(unpack_bits_torch(mask, out.numel(), negated))


def keep(x: torch.Tensor, mask: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = x[i] where the bit is 1, and 0 elsewhere."""
    if why_not(x.device, x.dtype) is None:
        keep_launch(x, mask, out).run()
    else:
        out.copy_(keep_torch(x, mask))


def pack_bits_torch(x: torch.Tensor) -> torch.Tensor:
    truths = torch.zeros(8 * mask_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    truths[: x.numel()] = x if x.dtype == torch.bool else ~(x <= 0)
    eights = truths.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=x.device)
    return eights.sum(1, dtype=torch.uint8)


def unpack_bits_torch(mask: torch.Tensor, numel: int, negated: bool = False) -> torch.Tensor:
    bits = mask[:, None] >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    return (bits.view(-1)[:numel] != 0) ^ negated


def keep_torch(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(unpack_bits_torch(mask, x.numel()), x, 0)


def pack_bits_launch(x: torch.Tensor, mask: torch.Tensor, config: Config | None = None) -> Launch:
    if x.dtype != torch.bool:
        return signs_launch(x, mask, config)
    return _launch("pack_truths", {"x": x.detach().view(torch.uint8)}, mask, config)


def unpack_bits_launch(
    mask: torch.Tensor, out: torch.Tensor, negated: bool, config: Config | None = None
) -> Launch:
    tensors = {"out": out.detach().view(torch.uint8)}
    return _launch("unpack_truths", tensors, mask, config, {"NEGATED": int(negated)})


def keep_launch(
    x: torch.Tensor, mask: torch.Tensor, out: torch.Tensor, config: Config | None = None
) -> Launch:
    if x.dtype != out.dtype or x.dtype not in SIGNED:
        raise OffloadError(
            f"{x.dtype} is to be kept in {out.dtype}: give twice the same of "
            f"{', '.join(map(str, SIGNED))}"
        )
    integers = INTEGERS[x.itemsize]
    tensors = {"x": x.detach().view(integers), "out": out.detach().view(integers)}
    return _launch("keep", tensors, mask, config)


def _launch(
    kernel: str,
    tensors: dict[str, torch.Tensor],
    mask: torch.Tensor,
    config: Config | None,
    constants: dict[str, int] | None = None,
) -> Launch:
    first = next(iter(tensors.values()))
    numel = first.numel()
    if any(t.dim() != 1 or not t.is_contiguous() or t.numel() != numel for t in tensors.values()):
        shapes = ", ".join(f"{name} of shape {tuple(t.shape)}" for name, t in tensors.items())
        raise OffloadError(f"masks lie over flat, contiguous tensors of one length, not {shapes}")
    if mask.dtype != torch.uint8 or mask.numel() != mask_bytes(numel):
        raise OffloadError(
            f"{numel} elements have a mask of {mask_bytes(numel)} torch.uint8, and {mask.numel()} "
            f"of {mask.dtype} were given"
        )
    config = config or config_for(first.nbytes)
    per_tile = max(1, min(config.tile_bytes // first.itemsize, MOST_TILE_ELEMENTS) // ROW)
    rows = -(-numel // ROW)
    return Launch(
        f"bits:{kernel}",
        {**tensors, "words": mask.view(torch.int32)},
        {"length": numel, "rows": rows},
        -(-rows // per_tile),
        config.warps,
        {"ROWS": per_tile, **(constants or {})},
    )
