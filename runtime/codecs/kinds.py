"""The codecs by name. Each packs a piece by itself, so a tensor can be split at any rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offcompile.ir import OffloadError

from .engines import engine
from .layout import MASK_BYTES, ROW, PackedLayout
from .refusals import check_flat, check_room

STASHES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SIGNED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Bitmask:
    """Omits elements whose bits are all zero; with a stash, rounds float32 to 16 bits first."""

    name: str = "bitmask"
    stash: torch.dtype | None = None

    @property
    def lossless(self) -> bool:
        return self.stash is None

    def takes(self, dtype: torch.dtype) -> bool:
        return self.stash is None or dtype == torch.float32

    def layout(self, numel: int, dtype: torch.dtype) -> PackedLayout:
        _check_type(self.name, self.takes(dtype), dtype, "torch.float32")
        return PackedLayout.of(numel, self.stash or dtype)

    def worst_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.layout(numel, dtype).worst_bytes

    def packed_bytes(self, numel: int, dtype: torch.dtype, density: float) -> int:
        layout = self.layout(numel, dtype)
        return layout.bytes_for(round(density * layout.elements))

    def pack(self, x: torch.Tensor, out: torch.Tensor) -> int:
        _check_packing(x, out, self.worst_bytes(x.numel(), x.dtype))
        return engine().pack(x.detach(), out, self.stash)

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        layout = self.layout(out.numel(), out.dtype)
        _check_unpacking(packed, out, layout.values_at)
        engine().unpack(packed, out.detach(), self.stash)


@dataclass(frozen=True)
class Stash:
    """Rounds float32 to 16 bits, to nearest even; values beyond float16's range become infinite."""

    name: str
    stash: torch.dtype
    lossless: bool = False

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    def worst_bytes(self, numel: int, dtype: torch.dtype) -> int:
        _check_type(self.name, self.takes(dtype), dtype, "torch.float32")
        return numel * self.stash.itemsize

    def packed_bytes(self, numel: int, dtype: torch.dtype, density: float) -> int:
        return self.worst_bytes(numel, dtype)

    def pack(self, x: torch.Tensor, out: torch.Tensor) -> int:
        used = self.worst_bytes(x.numel(), x.dtype)
        _check_packing(x, out, used)
        engine().cast(x.detach(), out[:used].view(self.stash))
        return used

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        used = self.worst_bytes(out.numel(), out.dtype)
        _check_unpacking(packed, out, used)
        engine().cast(packed[:used].view(self.stash), out.detach())


@dataclass(frozen=True)
class Sign:
    """Packs one bit per element, 16 bytes per row: 0 where x <= 0, else 1, NaN included. Unpacks
    to 0 and 1.

    Exact for consumers that only test x <= 0, as the gradient of a ReLU does.
    """

    name: str = "sign"
    lossless: bool = False

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype in SIGNED

    def worst_bytes(self, numel: int, dtype: torch.dtype) -> int:
        _check_type(self.name, self.takes(dtype), dtype, ", ".join(map(str, SIGNED)))
        return MASK_BYTES * -(-numel // ROW)

    def packed_bytes(self, numel: int, dtype: torch.dtype, density: float) -> int:
        return self.worst_bytes(numel, dtype)

    def pack(self, x: torch.Tensor, out: torch.Tensor) -> int:
        used = self.worst_bytes(x.numel(), x.dtype)
        _check_packing(x, out, used)
        engine().pack_signs(x.detach(), out[:used])
        return used

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        used = self.worst_bytes(out.numel(), out.dtype)
        _check_unpacking(packed, out, used)
        engine().unpack_signs(packed[:used], out.detach())


Kind = Bitmask | Stash | Sign
_ALL: tuple[Kind, ...] = (
    Bitmask(),
    *(Stash(name, dtype) for name, dtype in STASHES.items()),
    *(Bitmask(f"bitmask+{name}", dtype) for name, dtype in STASHES.items()),
    Sign(),
)
KINDS = {kind.name: kind for kind in _ALL}


def _check_type(name: str, takes: bool, dtype: torch.dtype, known: str) -> None:
    if not takes:
        raise OffloadError(f'codec "{name}" takes {known}, not {dtype}: use "bitmask" or none')


def _check_packing(x: torch.Tensor, out: torch.Tensor, worst_bytes: int) -> None:
    check_flat(x, "what is to be packed")
    check_room(out, worst_bytes, "the room for packed bytes")


def _check_unpacking(packed: torch.Tensor, out: torch.Tensor, least_bytes: int) -> None:
    check_flat(out, "what is unpacked into")
    check_room(packed, least_bytes, "what is to be unpacked")
