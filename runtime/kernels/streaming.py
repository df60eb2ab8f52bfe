"""Matrix products over the bus: read weights in host memory once, write gradients once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offcompile.ir import OffloadError

from .launch import Launch, why_not
from .shapes import ACCESS_BYTES, CASTS, has_rows, next_power_of_two, rows_apart, unit_of

#: scratch memory, as much as the libraries that these kernels replace use themselves
MOST_SCRATCH_BYTES = 32 << 20
#: with more rows than this, a product is as fast from a copy of the weight, a piece at a time
MOST_ROWS = 256
#: columns of such a piece are a multiple of this
COLUMNS_STEP = 64
#: the minimum side of a tile in a product
LEAST_SIDE = 16


@dataclass(frozen=True)
class Blocks:
    """The most rows, inner elements and columns of a product that a program takes at a time.

    Tiles of the matrix in host memory span whole bus lines in both of its layouts.
    """

    rows: int = 128
    inner: int = 64
    columns: int = 64
    warps: int = 4
    #: tiles in flight at a time if the compiler pipelines
    stages: int = 3

    def __post_init__(self) -> None:
        for what in ("rows", "inner", "columns"):
            value = getattr(self, what)
            if value < LEAST_SIDE or value & (value - 1):
                raise OffloadError(f"{what}={value} is not possible: a power of two >= 16")


STREAM = Blocks()
#: wide output tiles: each row of a tile is a bus line or more
WRITE = Blocks(rows=64, inner=32, columns=128)


def stream_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    most_programs: int | None = None,
) -> torch.Tensor:
    """Returns `a @ b + bias`, with `b` (a weight or its transpose) in host memory; kernel or torch.

    Each byte of `b` crosses the bus once, however many rows `a` has: beyond `MOST_ROWS` torch
    multiplies copies of its columns. Sums are float32, in another order than torch's, so results
    differ in the last bits. Many rows need up to `MOST_SCRATCH_BYTES` on the device, which no plan
    accounts for. Invisible to autograd.
    """
    _check(a, b, bias)
    near = a.device == b.device and why_not(a.device) is None
    if near and a.shape[0] > MOST_ROWS:
        return matmul_of_copies(a, b, bias)
    fits = scratch_bytes(a, b) <= MOST_SCRATCH_BYTES
    if near and fits and _streams(a, b, bias):
        out = a.new_empty((a.shape[0], b.shape[1]))
        launch = stream_launch(out, a, b, bias)
        if launch.why_not() is None:
            launch.run(most_programs)
            return out
    return stream_torch(a, b, bias)


def matmul_of_copies(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    most_bytes: int = MOST_SCRATCH_BYTES,
) -> torch.Tensor:
    """Returns `a @ b + bias` by torch, from copies of columns of `b` that take `most_bytes`."""
    (inner, columns), out = b.shape, a.new_empty((a.shape[0], b.shape[1]))
    wide = most_bytes // (max(1, inner) * b.element_size())
    wide = max(1, wide // COLUMNS_STEP * COLUMNS_STEP or wide)
    with torch.no_grad():
        for at in range(0, columns, wide):
            # the copy keeps the order of the weight's elements
            part, target = b[:, at : at + wide].clone(), out[:, at : at + wide]
            if bias is None:
                torch.mm(a, part, out=target)
            else:
                torch.addmm(bias[at : at + wide], a, part, out=target)
    return out


def stream_torch(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The reference: torch's own."""
    _check(a, b, bias)
    with torch.no_grad():
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def stream_launch(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    blocks: Blocks = STREAM,
) -> Launch:
    """Returns the launch for `out = a @ b + bias`, one program per tile.

    Raises OffloadError if no kernel fits.
    """
    _check(a, b, bias)
    if not _streams(a, b, bias):
        raise OffloadError(
            f"no kernel streams {b.dtype} of strides {tuple(b.stride())} beside {a.dtype}: all must"
            " be of one type of float32, float16 and bfloat16, and rows or columns of the matrix on"
            " the host be dense and apart; use stream_torch"
        )
    (rows, inner), columns = a.shape, b.shape[1]
    if out.shape != (rows, columns) or out.dtype != a.dtype or not out.is_contiguous():
        raise OffloadError(
            f"the target of a product is of {out.dtype}, shape {tuple(out.shape)} and strides"
            f" {out.stride()}: give a dense one of {a.dtype} and shape {(rows, columns)}"
        )
    turned = not has_rows(b)
    dense_width, pitch = (inner, _pitch(b.t())) if turned else (columns, _pitch(b))
    unit = _unit(b, dense_width, pitch)
    few = rows <= blocks.rows
    row_block = _block(rows, blocks.rows)
    tensors = {"out": out, "a": a.detach(), "b": b.detach(), "bias": a if bias is None else bias}
    if not few:
        # float32 sums can accumulate in the output itself
        own = out.dtype == torch.float32
        tensors["sums"] = out if own else out.new_empty(out.shape, dtype=torch.float32)
    inner_block = _block(inner, blocks.inner)
    return Launch(
        "streaming:stream_few" if few else "streaming:stream_many",
        tensors,
        {
            "rows": rows,
            "inner_units": inner // (unit if turned else 1),
            "column_units": columns // (1 if turned else unit),
            "a_row_step": a.stride(0),
            "a_column_step": a.stride(1),
            "b_pitch_units": pitch // unit,
        },
        -(-columns // blocks.columns) if rows else 0,
        blocks.warps,
        {
            "INNER_UNIT": unit if turned else 1,
            "COLUMN_UNIT": 1 if turned else unit,
            "UNIT": unit,
            "TURNED": int(turned),
            "BIASED": int(bias is not None),
            "STEPS": max(1, -(-inner // inner_block)),
            "ROWS": row_block,
            "INNER": inner_block,
            "COLUMNS": blocks.columns,
        },
        {"num_stages": blocks.stages},
    )


def write_matmul(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, most_programs: int | None = None
) -> None:
    """Run `out.copy_(a @ b)`, with `out` (a weight's gradient) in host memory; by kernel or torch.

    Each byte of `out` is written once, in whole lines if its rows are long enough. Sums are
    float32, in another order than torch's. Invisible to autograd.
    """
    _check_written(out, a, b)
    near = len({out.device, a.device, b.device}) == 1 and why_not(a.device) is None
    if near and _writes(out, a, b):
        launch = write_launch(out, a, b)
        if launch.why_not() is None:
            return launch.run(most_programs)
    write_torch(out, a, b)


def write_torch(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """The reference: torch's own."""
    _check_written(out, a, b)
    with torch.no_grad():
        out.copy_(torch.mm(a, b))


def write_launch(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, blocks: Blocks = WRITE
) -> Launch:
    """Returns the launch for `out = a @ b`; raises OffloadError if none fits."""
    _check_written(out, a, b)
    if not _writes(out, a, b):
        raise OffloadError(
            f"no kernel writes {out.dtype} of strides {tuple(out.stride())} from {a.dtype} and"
            f" {b.dtype}: all must be of one type of float32, float16 and bfloat16, and rows of the"
            " result dense and apart; use write_torch"
        )
    (rows, inner), columns = a.shape, b.shape[1]
    pitch = _pitch(out)
    unit = _unit(out, columns, pitch)
    column_tiles = -(-columns // blocks.columns)
    inner_block = _block(inner, blocks.inner)
    return Launch(
        "streaming:write_product",
        {"out": out, "a": a.detach(), "b": b.detach()},
        {
            "rows": rows,
            "inner": inner,
            "column_units": columns // unit,
            "a_row_step": a.stride(0),
            "a_column_step": a.stride(1),
            "b_row_step": b.stride(0),
            "b_column_step": b.stride(1),
            "out_pitch_units": pitch // unit,
            "column_tiles": column_tiles,
        },
        -(-rows // blocks.rows) * column_tiles,
        blocks.warps,
        {
            "UNIT": unit,
            "STEPS": max(1, -(-inner // inner_block)),
            "ROWS": blocks.rows,
            "INNER": inner_block,
            "COLUMNS": blocks.columns,
        },
        {"num_stages": blocks.stages},
    )


def _block(size: int, most: int) -> int:
    return min(most, max(LEAST_SIDE, next_power_of_two(size)))


def _pitch(matrix: torch.Tensor) -> int:
    """Returns the elements from row to row, even if a size of 1 left the stride undefined."""
    rows, columns = matrix.shape
    return int(matrix.stride(0)) if rows > 1 else columns


def _unit(matrix: torch.Tensor, width: int, pitch: int) -> int:
    """Returns the number of elements that a thread accesses at once in the matrix."""
    most = ACCESS_BYTES // matrix.itemsize
    start = matrix.data_ptr() // matrix.itemsize
    return unit_of(most, width, pitch, start)


def scratch_bytes(a: torch.Tensor, b: torch.Tensor, blocks: Blocks = STREAM) -> int:
    """Returns the device memory that `a @ b` needs besides its result."""
    if a.shape[0] <= blocks.rows or a.dtype == torch.float32:
        return 0
    return 4 * a.shape[0] * b.shape[1]


def streamable(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if a kernel supports the types and layouts of `a @ b`."""
    dense = any(has_rows(m) and rows_apart(m) for m in (b, b.t()))
    return dense and a.dtype == b.dtype and a.dtype in CASTS


def _streams(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> bool:
    if bias is None:
        return streamable(a, b)
    beside = bias.device == a.device and bias.is_contiguous() and bias.dtype == a.dtype
    return beside and streamable(a, b)


def _writes(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    one_type = {out.dtype, a.dtype, b.dtype}
    return len(one_type) == 1 and a.dtype in CASTS and has_rows(out) and rows_apart(out)


def _check(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise OffloadError(
            f"no product of shapes {tuple(a.shape)} and {tuple(b.shape)}: give two matrices, as"
            " many columns in the first as rows in the second"
        )
    if bias is not None and bias.shape != (b.shape[1],):
        raise OffloadError(
            f"a bias of shape {tuple(bias.shape)} does not fit a product of {b.shape[1]} columns:"
            " give one value for each"
        )


def _check_written(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    _check(a, b, None)
    if out.shape != (a.shape[0], b.shape[1]):
        raise OffloadError(
            f"a product of shapes {tuple(a.shape)} and {tuple(b.shape)} does not fit a target of "
            f"{tuple(out.shape)}: the target must be of {(a.shape[0], b.shape[1])}"
        )
