"""Copies, with an optional cast, between dense tensors or matrices with a row pitch.

Either side may be an alias of host memory: every byte crosses the bus once, in coalesced accesses.
"""

from __future__ import annotations

import torch

from offcompile.ir import OffloadError

from .launch import Launch, why_not
from .shapes import (
    ACCESS_BYTES,
    as_integers,
    castable,
    dense_alike,
    flat,
    has_rows,
    rows_apart,
    rows_of,
)
from .tiling import Tiling
from .tuning import Config, config_for


def copy_into(target: torch.Tensor, source: torch.Tensor, most_programs: int | None = None) -> None:
    """Run `target.copy_(source)` for equal shapes, with a kernel if one fits, with torch otherwise.

    Both give the same bits, except that a cast NaN becomes any NaN. The tensors must not overlap.
    A kernel accesses host memory in place through its alias; autograd does not see the write.
    """
    _check_shapes(target, source)
    near = target.device == source.device and why_not(target.device) is None
    if near and _fits(target, source):
        launch = copy_launch(target, source)
        if launch.why_not() is None:
            return launch.run(most_programs)
    copy_torch(target, source)


def copy_torch(target: torch.Tensor, source: torch.Tensor) -> None:
    """The reference copy: torch's own."""
    _check_shapes(target, source)
    with torch.no_grad():
        target.copy_(source)


def copy_launch(target: torch.Tensor, source: torch.Tensor, config: Config | None = None) -> Launch:
    """Returns the launch for a copy; raises OffloadError if none fits these types or layouts."""
    _check_shapes(target, source)
    if not _takes(target, source):
        raise OffloadError(
            f"no kernel copies {source.dtype} to {target.dtype}: kernels cast between float32, "
            "float16 and bfloat16, and copy anything to its own type; use copy_torch"
        )
    if dense_alike(target, source):
        return _blocks(flat(target), flat(source), config)
    if not _fits(target, source):
        raise OffloadError(
            f"no kernel copies from strides {source.stride()} to strides {target.stride()}: both "
            "must be dense in the same order, or matrices with dense rows of which none that is "
            "written overlaps another; use copy_torch"
        )
    return _pitched(rows_of(target), rows_of(source), config)


def _check_shapes(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.shape != source.shape:
        raise OffloadError(
            f"a copy from shape {tuple(source.shape)} to {tuple(target.shape)} is not possible: "
            "the shapes must be equal"
        )


def _takes(target: torch.Tensor, source: torch.Tensor) -> bool:
    marked = any(t.is_conj() or t.is_neg() for t in (target, source))
    return castable(target.dtype, source.dtype) and not marked


def _fits(target: torch.Tensor, source: torch.Tensor) -> bool:
    pitched = has_rows(target) and has_rows(source) and rows_apart(target)
    return _takes(target, source) and (pitched or dense_alike(target, source))


def _blocks(target: torch.Tensor, source: torch.Tensor, config: Config | None) -> Launch:
    if target.dtype == source.dtype:
        target, source = as_integers(target, source)
    itemsize = max(target.itemsize, source.itemsize)
    config = config or config_for(target.numel() * itemsize)
    block = config.tile_bytes // itemsize
    return Launch(
        "movement:copy_blocks",
        {"target": target, "source": source},
        {"length": target.numel()},
        -(-target.numel() // block),
        config.warps,
        # one full-width access per thread, sized by the wider type, so that accesses coalesce
        {"UNIT": min(block, ACCESS_BYTES // itemsize), "BLOCK": block},
    )


def _pitched(target: torch.Tensor, source: torch.Tensor, config: Config | None) -> Launch:
    if target.dtype == source.dtype:
        target, source = as_integers(target, source)
    rows, columns = target.shape
    tiling = Tiling.of(target, source, config)
    unit = tiling.unit
    return Launch(
        "movement:copy_pitched",
        {"target": target, "source": source},
        {
            "rows": rows,
            "column_units": columns // unit,
            "target_pitch_units": target.stride(0) // unit,
            "source_pitch_units": source.stride(0) // unit,
            "column_tiles": tiling.column_tiles,
        },
        tiling.tiles,
        tiling.config.warps,
        tiling.constants,
    )
