"""Gathers rows by index, with an optional cast, from a table that may lie in host memory."""

from __future__ import annotations

import torch

from offcompile.ir import OffloadError

from .launch import Launch, why_not
from .shapes import as_integers, castable, has_rows, rows_of
from .tiling import Tiling
from .tuning import Config

INDEX_TYPES = (torch.int64, torch.int32)


def gather_rows(
    table: torch.Tensor,
    indices: torch.Tensor,
    dtype: torch.dtype | None = None,
    most_programs: int | None = None,
) -> torch.Tensor:
    """Returns `table[indices].to(dtype)` for a matrix and indices of any shape, by kernel or torch.

    The table may be an alias of host memory: only the requested rows cross the bus, once per
    request. An index outside the table, or below 0, is an error: on a CUDA device an assertion ends
    the kernel, after which, as with torch's own, the process can no longer use that device. Nothing
    outside the table is read.
    """
    _check(table, indices)
    near = table.device == indices.device and why_not(table.device) is None
    if near and has_rows(table) and castable(dtype or table.dtype, table.dtype):
        flat_indices = indices.reshape(-1)
        out = table.new_empty((indices.numel(), table.shape[1]), dtype=dtype or table.dtype)
        launch = gather_launch(out, table, flat_indices)
        if launch.why_not() is None:
            launch.run(most_programs)
            return out.view(*indices.shape, table.shape[1])
    return gather_torch(table, indices, dtype)


def gather_torch(
    table: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The reference gather: torch's own, which on the CPU raises IndexError for a bad index."""
    _check(table, indices)
    with torch.no_grad():
        rows = table.index_select(0, indices.reshape(-1)).to(dtype or table.dtype)
    return rows.view(*indices.shape, table.shape[1])


def gather_launch(
    target: torch.Tensor,
    table: torch.Tensor,
    indices: torch.Tensor,
    config: Config | None = None,
) -> Launch:
    """Returns the launch for `target[i] = table[indices[i]]`; raises OffloadError if none fits.

    `indices` is dense and one-dimensional; `target` has a row for each.
    """
    _check(table, indices)
    wanted = (indices.numel(), table.shape[1])
    if indices.dim() != 1 or not indices.is_contiguous() or target.shape != wanted:
        raise OffloadError(
            f"the target of a gather has shape {tuple(target.shape)} and the indices "
            f"{tuple(indices.shape)}: flatten the indices and give a target of {wanted}"
        )
    if not castable(target.dtype, table.dtype):
        raise OffloadError(
            f"no kernel gathers {table.dtype} as {target.dtype}: kernels cast between float32, "
            "float16 and bfloat16, and gather anything as its own type; use gather_torch"
        )
    if not (has_rows(table) and target.is_contiguous()):
        raise OffloadError(
            f"no kernel gathers from strides {table.stride()} to strides {target.stride()}: rows "
            "of the table must be dense, and all of the target; use gather_torch"
        )
    table_rows = table.shape[0]
    target, table = rows_of(target), rows_of(table)
    if target.dtype == table.dtype:
        target, table = as_integers(target, table)
    tiling = Tiling.of(target, table, config)
    unit = tiling.unit
    return Launch(
        "movement:gather_pitched",
        {"target": target, "table": table, "indices": indices},
        {
            "count": target.shape[0],
            "table_rows": table_rows,
            "column_units": target.shape[1] // unit,
            "target_pitch_units": target.stride(0) // unit,
            "table_pitch_units": table.stride(0) // unit,
            "column_tiles": tiling.column_tiles,
        },
        tiling.tiles,
        tiling.config.warps,
        tiling.constants,
        # without `debug` the assertion is omitted; 64-bit arithmetic needs no overflow checks
        {"debug": True, "sanitize_overflow": False},
    )


def _check(table: torch.Tensor, indices: torch.Tensor) -> None:
    if table.dim() != 2:
        raise OffloadError(
            f"gather_rows takes rows of a matrix, and the table has shape {tuple(table.shape)}: "
            "view it as one"
        )
    if indices.dtype not in INDEX_TYPES:
        raise OffloadError(f"indices are int64 or int32, not {indices.dtype}")
    if indices.numel() and not table.shape[0]:
        raise OffloadError(f"{indices.numel()} rows are asked of a table that has none")
