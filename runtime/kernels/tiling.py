"""Divides the rows that a kernel processes into tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .shapes import ACCESS_BYTES, next_power_of_two, unit_of
from .tuning import Config, config_for


@dataclass(frozen=True)
class Tiling:
    """Tiles of ROWS × COLUMNS elements, in row-major order.

    Widths and pitches are multiples of `unit` elements, which a thread accesses at once.
    """

    config: Config
    unit: int
    rows: int
    columns: int
    column_tiles: int
    tiles: int

    @staticmethod
    def of(target: torch.Tensor, source: torch.Tensor, config: Config | None) -> Tiling:
        """Returns the tiling for writing all of `target` from equally wide rows of `source`."""
        count, width = target.shape
        itemsize = max(target.itemsize, source.itemsize)
        config = config or config_for(target.numel() * itemsize)
        elements = config.tile_bytes // itemsize
        columns = min(next_power_of_two(width), elements)
        rows = elements // columns
        column_tiles = -(-width // columns)
        unit = unit_of(ACCESS_BYTES // itemsize, width, target.stride(0), source.stride(0))
        return Tiling(config, unit, rows, columns, column_tiles, -(-count // rows) * column_tiles)

    @property
    def constants(self) -> dict[str, int]:
        return {"UNIT": self.unit, "ROWS": self.rows, "COLUMNS": self.columns}
