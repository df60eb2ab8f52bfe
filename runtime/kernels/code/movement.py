"""Kernels that move bytes, with an optional cast; always called through `Launch`.

Offsets of a tile are 64 bits wide, offsets within one 32, so tensors may have any size. A program
processes tile after tile, so the grid may be smaller than the number of tiles. (With a `while`: the
interpreter of Triton 3.6 does not support a `range` with bounds known only at run time.)

Loads use `evict_first`: streamed data is read once and should not evict other data from the caches.
Stores use no policy: compute reads the written data next. (`.cg` cannot be added: the assembler
refuses both together.)
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["length", "tiles"])
def copy_blocks(target, source, length, tiles, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """target[i] = source[i], cast, for i < length."""
    lanes = tl.arange(0, BLOCK)
    units_end = tl.cast(length, tl.int64) // UNIT * UNIT
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        at = tile * BLOCK + lanes
        inside = at < units_end
        values = tl.load(source + at, mask=inside, eviction_policy="evict_first")
        tl.store(target + at, values.to(target.dtype.element_ty), mask=inside)
        tile += tl.num_programs(0)
    # the rest, less than a unit, is apart: a mask above that ended anywhere would narrow every
    # access to one element
    if tl.program_id(0) == 0:
        at = units_end + tl.arange(0, UNIT)
        inside = at < length
        values = tl.load(source + at, mask=inside)
        tl.store(target + at, values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _row_and_column(tile, column_tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)
    column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column


@triton.jit(
    do_not_specialize=[
        "rows",
        "column_units",
        "target_pitch_units",
        "source_pitch_units",
        "column_tiles",
        "tiles",
    ]
)
def copy_pitched(
    target,
    source,
    rows,
    column_units,
    target_pitch_units,
    source_pitch_units,
    column_tiles,
    tiles,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """target[r, c] = source[r, c], cast. Widths are in units, so that the compiler sees that UNIT
    divides them, and accesses UNIT elements at once."""
    columns = column_units * UNIT
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        row, column = _row_and_column(tile, column_tiles, ROWS, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        from_row = row * source_pitch_units * UNIT
        here = source + from_row[:, None] + column[None, :]
        values = tl.load(here, mask=inside, eviction_policy="evict_first")
        to_row = row * target_pitch_units * UNIT
        there = target + to_row[:, None] + column[None, :]
        tl.store(there, values.to(target.dtype.element_ty), mask=inside)
        tile += tl.num_programs(0)


@triton.jit(
    do_not_specialize=[
        "count",
        "table_rows",
        "column_units",
        "target_pitch_units",
        "table_pitch_units",
        "column_tiles",
        "tiles",
    ]
)
def gather_pitched(
    target,
    table,
    indices,
    count,
    table_rows,
    column_units,
    target_pitch_units,
    table_pitch_units,
    column_tiles,
    tiles,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """target[r, c] = table[indices[r], c], cast. An index outside the table stops the kernel."""
    columns = column_units * UNIT
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        row, column = _row_and_column(tile, column_tiles, ROWS, COLUMNS)
        asked = row < count
        wanted = tl.load(indices + row, mask=asked, other=0).to(tl.int64)
        known = (wanted >= 0) & (wanted < table_rows)
        tl.device_assert(known, "gather_rows: an index lies outside of the table")
        # the assertion ends the kernel late: mask the reads outside the table until then
        inside = (asked & known)[:, None] & (column < columns)[None, :]
        from_row = wanted * table_pitch_units * UNIT
        here = table + from_row[:, None] + column[None, :]
        values = tl.load(here, mask=inside, eviction_policy="evict_first")
        to_row = row * target_pitch_units * UNIT
        there = target + to_row[:, None] + column[None, :]
        tl.store(there, values.to(target.dtype.element_ty), mask=inside)
        tile += tl.num_programs(0)
