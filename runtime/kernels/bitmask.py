"""Zeros left out and put back, casts and signs included, as `runtime.codecs` has it on the CPU.

Packing queues three launches and needs no size on the host. The packed side may be an alias of host
memory: only what is packed crosses the bus. How much that is stands in the packed tensor itself,
the last of the row offsets (`kept_at`), for whoever reads it once the stream is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.codecs.layout import MASK_BYTES, OFFSET_BYTES, ROW, Layout, up_to

from .launch import Launch
from .shapes import ACCESS_BYTES
from .tuning import Config, config_for

ROUNDED = {None: 0, torch.float16: 1, torch.bfloat16: 2}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIGNED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: programs that have staging at once: as many as keep a bus busy
PROGRAMS = 128
#: elements of a tile at most, of which threads hold places and counts in registers
MOST_TILE_ELEMENTS = 4096
SCAN_BLOCK = 1024


@dataclass(frozen=True)
class BitmaskPlan:
    """How a tensor of `numel` elements of `dtype` is packed, rounded to `stash` before if given.

    `staged`: the packed side is host memory, which is to be met in whole accesses. Both directions
    may run with plans that differ in everything but numel, dtype and stash.
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
    def layout(self) -> Layout:
        return Layout.of(self.numel, self.stash or self.dtype)

    @property
    def stages(self) -> bool:
        """Whether staging is used: on AMD a barrier, as Triton makes it, does not wait for what was
        written to memory, and one thread could read before another's write."""
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
        """Accesses that a program's staging holds: a tile's, and one for where it begins."""
        return self.rows_per_tile * ROW * self.layout.width // ACCESS_BYTES + 1

    @property
    def starts_bytes(self) -> int:
        return up_to(4 * self.tiles, ACCESS_BYTES)

    @property
    def workspace_bytes(self) -> int:
        """Device memory that packing or unpacking needs until its stream is past it."""
        staged = min(self.programs, self.tiles) * self.staging_units * ACCESS_BYTES
        return self.starts_bytes + (staged if self.stages else 0)

    def pack(self, x: torch.Tensor, packed: torch.Tensor, workspace: torch.Tensor) -> None:
        """Queue it on the current stream. `packed`: worst_bytes; `workspace`: as it says here."""
        for launch in self.pack_launches(x, packed, workspace):
            launch.run(self.programs if self.stages else None)

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> None:
        """Queue it on the current stream. Only the bytes in use need be there. They are not
        checked: from damaged ones anything may come, a fault of the device too."""
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
    """Where in a packed tensor the number of its values stands, as uint32, once it is packed."""
    return OFFSET_BYTES * Layout.of(numel, stash or dtype).rows


def signs_launch(x: torch.Tensor, packed: torch.Tensor, config: Config | None = None) -> Launch:
    """The kernel that packs signs: 16 bytes for each row of 128, see `codecs.kinds.Sign`."""
    return _signs("pack_signs", "x", x, packed, config)


def unsigns_launch(packed: torch.Tensor, out: torch.Tensor, config: Config | None = None) -> Launch:
    """The kernel that unpacks signs, to 1 and 0."""
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
    """The same bytes as words of four and as elements, as far as they fill whole ones."""
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
