"""Packs and unpacks bitmask tensors on the device, with casts and signs, like `runtime.codecs`.

Packing queues three launches and needs no size on the host. The packed side may be an alias of host
memory: only packed bytes cross the bus. Their number is stored in the packed tensor itself, as the
last row offset (`kept_at`), and can be read once the stream has run that far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.codecs.layout import MASK_BYTES, OFFSET_BYTES, ROW, PackedLayout, up_to

from .launch import Launch
from .shapes import ACCESS_BYTES
from .tuning import Config, config_for

ROUNDED = {None: 0, torch.float16: 1, torch.bfloat16: 2}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIGNED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: programs with staging at a time: enough to keep a bus busy
PROGRAMS = 128
#: limit on the elements of a tile, since threads keep their positions and counts in registers
MOST_TILE_ELEMENTS = 4096
SCAN_BLOCK = 1024


@dataclass(frozen=True)
class BitmaskPlan:
    """Packs a tensor of `numel` elements of `dtype`, rounded to `stash` first if given.

    `staged`: True if the packed side is host memory, which needs full-width accesses. The plans for
    packing and unpacking may differ in everything but numel, dtype and stash.
    """

    numel: int
    dtype: torch.dtype
    stash: torch.dtype | None = None
    staged: bool = True
    programs: int = PROGRAMS
    config: Config | None = None

    def __post_init__(self) -> None:
        if self.stash is not None and self.dtype != torch.float32:
            raise OffloadError(
                f"{self.dtype} is not rounded to {self.stash}: only torch.float32 is; leave it as "
                "it is"
            )
        if self.stash not in ROUNDED:
            raise OffloadError(
                f"torch.float32 is rounded to torch.float16 or torch.bfloat16, not {self.stash}"
            )
        if self.programs < 1:
            raise OffloadError(f"{self.programs} programs run nothing: give 1 or more")
        if self.layout.elements != self.numel:
            raise OffloadError(
                f"kernels take elements of at most 8 bytes, and {self.dtype} has "
                f"{self.dtype.itemsize}: view it as real numbers"
            )

    @property
    def layout(self) -> PackedLayout:
        return PackedLayout.of(self.numel, self.stash or self.dtype)

    @property
    def stages(self) -> bool:
        """True if staging is used. Never on AMD: there Triton's barrier does not wait for writes to
        memory, and one thread could read before another's write."""
        return self.staged and torch.version.hip is None

    @property
    def rows_per_tile(self) -> int:
        config = self.config or config_for(self.numel * self.dtype.itemsize)
        return max(1, min(config.tile_bytes // self.dtype.itemsize, MOST_TILE_ELEMENTS) // ROW)

    @property
    def tiles(self) -> int:
        return -(-self.layout.rows // self.rows_per_tile)

    @property
    def staging_units(self) -> int:
        """Size of a program's staging in accesses: a tile's, plus one for its alignment."""
        return self.rows_per_tile * ROW * self.layout.width // ACCESS_BYTES + 1

    @property
    def starts_bytes(self) -> int:
        return up_to(4 * self.tiles, ACCESS_BYTES)

    @property
    def workspace_bytes(self) -> int:
        """Device memory that packing or unpacking needs until its kernels have run."""
        staged = min(self.programs, self.tiles) * self.staging_units * ACCESS_BYTES
        return self.starts_bytes + (staged if self.stages else 0)

    def pack(self, x: torch.Tensor, packed: torch.Tensor, workspace: torch.Tensor) -> None:
        """Queue packing on the current stream. `packed` holds worst_bytes, `workspace`
        workspace_bytes."""
        for launch in self.pack_launches(x, packed, workspace):
            launch.run(self.programs if self.stages else None)

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> None:
        """Queue unpacking on the current stream. `packed` needs only the bytes in use. They are not
        checked: damaged ones give arbitrary results, or even a device fault."""
        self.unpack_launch(packed, out, workspace).run(self.programs if self.stages else None)

    def pack_launches(
        self, x: torch.Tensor, packed: torch.Tensor, workspace: torch.Tensor
    ) -> Sequence[Launch]:
        bits = self._elements(x)
        self._check_packed(packed, self.layout.worst_bytes)
        starts = self._workspace(workspace)[: self.starts_bytes].view(torch.int32)
        words, _ = _twice(packed, self.layout.width)
        numbers = {"length": self.numel}
        rows = {"rows": self.layout.rows}
        constants = {"ROWS": self.rows_per_tile, "ROUND": ROUNDED[self.stash]}
        warps = (self.config or config_for(self.numel * self.dtype.itemsize)).warps
        count = Launch(
            "packing:count_tiles",
            {"x": bits, "starts": starts},
            numbers,
            self.tiles,
            warps,
            constants,
        )
        scan = Launch(
            "packing:scan_tiles",
            {"starts": starts, "words": words},
            {"count": self.tiles, **rows},
            1,
            4,
            {"BLOCK": SCAN_BLOCK},
        )
        return count, scan, self._tiles_launch("pack", bits, packed, workspace, {"starts": starts})

    def unpack_launch(
        self, packed: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor
    ) -> Launch:
        self._check_packed(packed, self.layout.values_at)
        return self._tiles_launch("unpack", self._elements(out), packed, workspace, {})

    def _tiles_launch(
        self,
        what: str,
        elements: torch.Tensor,
        packed: torch.Tensor,
        workspace: torch.Tensor,
        more: dict[str, torch.Tensor],
    ) -> Launch:
        layout = self.layout
        side = packed if not self.stages else self._workspace(workspace)[self.starts_bytes :]
        words, values = _twice(packed, layout.width)
        staging_words, staging_values = _twice(side, layout.width)
        config = self.config or config_for(self.numel * self.dtype.itemsize)
        return Launch(
            f"packing:{what}_tiles",
            {
                "x" if what == "pack" else "out": elements,
                "words": words,
                "values": values,
                "staging_words": staging_words,
                "staging_values": staging_values,
                **more,
            },
            {
                "length": self.numel,
                "rows": layout.rows,
                "masks_units": layout.masks_at // ACCESS_BYTES,
                "values_units": layout.values_at // ACCESS_BYTES,
            },
            self.tiles,
            config.warps,
            {
                "ROWS": self.rows_per_tile,
                "ROUND": ROUNDED[self.stash],
                "UNIT": ACCESS_BYTES // layout.width,
                "STAGED": int(self.stages),
                "STAGING_UNITS": self.staging_units,
            },
        )

    def _elements(self, x: torch.Tensor) -> torch.Tensor:
        _check_flat(x, self.dtype, self.numel)
        flat = x.detach()
        return flat if self.stash is not None else flat.view(INTEGERS[flat.itemsize])

    def _check_packed(self, packed: torch.Tensor, least_bytes: int) -> None:
        _check_bytes(packed, least_bytes, "the packed side")

    def _workspace(self, workspace: torch.Tensor) -> torch.Tensor:
        _check_bytes(workspace, self.workspace_bytes, "the workspace")
        return workspace[: self.workspace_bytes]


def kept_at(numel: int, dtype: torch.dtype, stash: torch.dtype | None = None) -> int:
    """Returns the byte offset, in a packed tensor, of the uint32 number of its values."""
    return OFFSET_BYTES * PackedLayout.of(numel, stash or dtype).rows


def signs_launch(x: torch.Tensor, packed: torch.Tensor, config: Config | None = None) -> Launch:
    """Returns the launch that packs signs: 16 bytes per row of 128, see `codecs.kinds.Sign`."""
    return _signs("pack_signs", "x", x, packed, config)


def unsigns_launch(packed: torch.Tensor, out: torch.Tensor, config: Config | None = None) -> Launch:
    """Returns the launch that unpacks signs to 1 and 0."""
    return _signs("unpack_signs", "out", out, packed, config)


def _signs(
    kernel: str, name: str, tensor: torch.Tensor, packed: torch.Tensor, config: Config | None
) -> Launch:
    if tensor.dtype not in SIGNED:
        raise OffloadError(
            f"signs are packed of {', '.join(map(str, SIGNED))}, not of {tensor.dtype}"
        )
    numel = tensor.numel()
    _check_flat(tensor, tensor.dtype, numel)
    rows = -(-numel // ROW)
    _check_bytes(packed, MASK_BYTES * rows, "the packed side")
    config = config or config_for(tensor.nbytes)
    per_tile = max(1, min(config.tile_bytes // tensor.itemsize, MOST_TILE_ELEMENTS) // ROW)
    return Launch(
        f"packing:{kernel}",
        {name: tensor.detach(), "words": packed[: MASK_BYTES * rows].view(torch.int32)},
        {"length": numel, "rows": rows},
        -(-rows // per_tile),
        config.warps,
        {"ROWS": per_tile},
    )


def _twice(memory: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of the same bytes as 4-byte words and as elements, without partial ones."""
    words, values = (memory[: memory.numel() // n * n] for n in (4, width))
    return words.view(torch.int32), values.view(INTEGERS[width])


def _check_flat(x: torch.Tensor, dtype: torch.dtype, numel: int) -> None:
    if x.dim() != 1 or not x.is_contiguous() or x.dtype != dtype or x.numel() != numel:
        raise OffloadError(
            f"a tensor of shape {tuple(x.shape)}, {x.dtype} and strides {x.stride()} was given: it "
            f"must be flat, contiguous, of {numel} elements of {dtype}"
        )


def _check_bytes(memory: torch.Tensor, least_bytes: int, what: str) -> None:
    short = memory.dtype != torch.uint8 or memory.dim() != 1 or memory.numel() < least_bytes
    if short or memory.data_ptr() % ACCESS_BYTES or not memory.is_contiguous():
        raise OffloadError(
            f"{what} is {memory.numel()} elements of {memory.dtype} at address "
            f"{memory.data_ptr():#x}: give at least {least_bytes} contiguous torch.uint8 at a "
            f"multiple of {ACCESS_BYTES}"
        )
