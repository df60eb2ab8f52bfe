"""Matrix products with one matrix in host memory, each byte of which crosses the bus once.

`stream_few` and `stream_many` compute out = a @ b + bias with b on the host. A program owns a
stripe of b's columns, which no other program reads, and processes it tile by tile, with all rows of
a for each tile. It prefetches the next tile before it uses the last. With few rows all sums stay in
registers; with many they are kept in `sums`, on the device, from tile to tile.

`write_product` computes out = a @ b with out on the host, in tiles written once, in whole lines.

Sums are float32, and float32 is multiplied as such (no TF32). The number of steps is compiled in,
so that loops have fixed ends; offsets are 64 bits wide. `TURNED`: b is stored column by column.
"""

import triton
import triton.language as tl


@triton.jit
def _tile_of_b(b, row, column, rows, columns, b_pitch, TURNED: tl.constexpr, UNIT: tl.constexpr):
    """Returns b[row, column], 0 outside. The dense width is a multiple of UNIT and b_pitch is in
    units, so that the compiler sees it and accesses UNIT elements at once."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if TURNED:
        here = b + row[:, None] + (column * b_pitch * UNIT)[None, :]
    else:
        here = b + (row * b_pitch * UNIT)[:, None] + column[None, :]
    return tl.load(here, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _tile_of_a(a, row, column, rows, columns, row_step, column_step):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    here = a + (row * row_step)[:, None] + (column * column_step)[None, :]
    return tl.load(here, mask=inside, other=0.0)


@triton.jit
def _with_bias(sums, bias, column, columns, BIASED: tl.constexpr):
    if BIASED:
        added = tl.load(bias + column, mask=column < columns, other=0.0)
        sums += added.to(tl.float32)[None, :]
    return sums


@triton.jit(do_not_specialize=["rows", "tiles"])
def stream_few(
    out,
    a,
    b,
    bias,
    rows,
    inner_units,
    column_units,
    a_row_step,
    a_column_step,
    b_pitch_units,
    tiles,
    INNER_UNIT: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    TURNED: tl.constexpr,
    BIASED: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out = a @ b + bias for at most ROWS rows; `out` is dense."""
    inner = inner_units * INNER_UNIT
    columns = column_units * COLUMN_UNIT
    row = tl.arange(0, ROWS).to(tl.int64)
    within = tl.arange(0, INNER).to(tl.int64)
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        # the compiler pipelines a loop of this form: the next tiles are in flight
        for step in range(STEPS):
            at = step * INNER + within
            weights = _tile_of_b(b, at, column, inner, columns, b_pitch_units, TURNED, UNIT)
            values = _tile_of_a(a, row, at, rows, inner, a_row_step, a_column_step)
            sums = tl.dot(values, weights, sums, input_precision="ieee")
        sums = _with_bias(sums, bias, column, columns, BIASED)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        there = out + (row * columns)[:, None] + column[None, :]
        tl.store(there, sums.to(out.dtype.element_ty), mask=inside)
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["rows", "tiles"])
def stream_many(
    out,
    sums,
    a,
    b,
    bias,
    rows,
    inner_units,
    column_units,
    a_row_step,
    a_column_step,
    b_pitch_units,
    tiles,
    INNER_UNIT: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    TURNED: tl.constexpr,
    BIASED: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Like `stream_few` for any number of rows; `sums`, dense float32 like `out`, is scratch."""
    inner = inner_units * INNER_UNIT
    columns = column_units * COLUMN_UNIT
    within = tl.arange(0, INNER).to(tl.int64)
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        coming = _tile_of_b(b, within, column, inner, columns, b_pitch_units, TURNED, UNIT)
        for step in range(STEPS):
            weights = coming
            at = step * INNER + within
            # reads nothing beyond the end
            coming = _tile_of_b(b, at + INNER, column, inner, columns, b_pitch_units, TURNED, UNIT)
            first = tl.zeros((), dtype=tl.int64)
            while first < rows:
                row = first + tl.arange(0, ROWS)
                inside = (row < rows)[:, None] & (column < columns)[None, :]
                place = (row * columns)[:, None] + column[None, :]
                values = _tile_of_a(a, row, at, rows, inner, a_row_step, a_column_step)
                before = tl.load(sums + place, mask=inside & (step > 0), other=0.0)
                after = tl.dot(values, weights, before, input_precision="ieee")
                if step == STEPS - 1:
                    after = _with_bias(after, bias, column, columns, BIASED)
                    tl.store(out + place, after.to(out.dtype.element_ty), mask=inside)
                else:
                    tl.store(sums + place, after, mask=inside)
                first += ROWS
            # other threads of this program may read the sums next
            tl.debug_barrier()
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["tiles"])
def write_product(
    out,
    a,
    b,
    rows,
    inner,
    column_units,
    a_row_step,
    a_column_step,
    b_row_step,
    b_column_step,
    out_pitch_units,
    column_tiles,
    tiles,
    UNIT: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out = a @ b; rows of `out` are dense. Widths and pitches of `out` are in units."""
    columns = column_units * UNIT
    within = tl.arange(0, INNER).to(tl.int64)
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        row = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)
        column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(STEPS):
            at = step * INNER + within
            left = _tile_of_a(a, row, at, rows, inner, a_row_step, a_column_step)
            right = _tile_of_a(b, at, column, inner, columns, b_row_step, b_column_step)
            sums = tl.dot(left, right, sums, input_precision="ieee")
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        there = out + (row * out_pitch_units * UNIT)[:, None] + column[None, :]
        tl.store(there, sums.to(out.dtype.element_ty), mask=inside)
        tile += tl.num_programs(0)
