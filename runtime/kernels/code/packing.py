"""Kernels that omit zeros and restore them; `codecs/layout.py` defines the format.

A program processes tiles of whole rows of 128. Packing takes three launches: count the elements
kept in each tile; compute each tile's start; and pack, which reads everything once more. No size
returns to the host in between.

The packed side may be host memory. A program then compacts its kept elements in `staging`, on the
device, and writes them out in full 16-byte accesses; unpacking does the reverse. The staged data
has the same offset from a 16-byte unit as the values, so that both sides are accessed in whole
units.
"""

import triton
import triton.language as tl


@triton.jit
def _places(tile, ROWS: tl.constexpr):
    row = tile * ROWS + tl.arange(0, ROWS)
    return row, row[:, None] * 128 + tl.arange(0, 128)[None, :]


@triton.jit
def _tile_of(x, tile, length, ROWS: tl.constexpr, ROUND: tl.constexpr, POLICY: tl.constexpr):
    """Returns the tile's elements as integers, rounded first if ROUND; zeros beyond the end."""
    row, at = _places(tile, ROWS)
    whole = tl.cast(length, tl.int64) // 128
    inside = (row < whole)[:, None] & (at >= 0)
    values = tl.load(x + at, mask=inside, other=0, eviction_policy=POLICY)
    # only whole rows above: a mask that ended anywhere would narrow every access to one element
    if (tile + 1) * ROWS > whole:
        ragged = (row == whole)[:, None] & (at < length)
        values = tl.where(ragged, tl.load(x + at, mask=ragged, other=0), values)
    if ROUND == 1:
        bits = values.to(tl.float16).to(tl.int16, bitcast=True)
    elif ROUND == 2:
        bits = values.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = values
    return bits


@triton.jit
def _into_tile(out, bits, tile, length, ROWS: tl.constexpr, ROUND: tl.constexpr):
    row, at = _places(tile, ROWS)
    whole = tl.cast(length, tl.int64) // 128
    if ROUND == 1:
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif ROUND == 2:
        values = bits.to(tl.bfloat16, bitcast=True).to(tl.float32)
    else:
        values = bits
    inside = (row < whole)[:, None] & (at >= 0)
    tl.store(out + at, values, mask=inside)
    if (tile + 1) * ROWS > whole:
        ragged = (row == whole)[:, None] & (at < length)
        tl.store(out + at, values, mask=ragged)


@triton.jit(do_not_specialize=["length", "tiles"])
def count_tiles(x, starts, length, tiles, ROWS: tl.constexpr, ROUND: tl.constexpr):
    """starts[tile] = the number of non-zero elements in the tile."""
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        # will be read again soon: let it stay in the caches
        bits = _tile_of(x, tile, length, ROWS, ROUND, "")
        tl.store(starts + tile, tl.sum(tl.sum((bits != 0).to(tl.int32), 1), 0))
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["count", "rows", "tiles"])
def scan_tiles(starts, words, count, rows, tiles, BLOCK: tl.constexpr):
    """starts[i] = the sum of all before i; the total becomes the last offset. One program."""
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros((), dtype=tl.int32)
    first = tl.program_id(0).to(tl.int64)
    while first < count:
        inside = first + lanes < count
        counts = tl.load(starts + first + lanes, mask=inside, other=0)
        tl.store(starts + first + lanes, before + tl.cumsum(counts, 0) - counts, mask=inside)
        before += tl.sum(counts, 0)
        first += BLOCK
    # pad with zeros to 16 bytes
    ends = tl.cast(rows, tl.int64) + tl.arange(0, 4)
    said = tl.where(ends == rows, before, 0)
    tl.store(words + ends, said, mask=ends < (rows + 4) // 4 * 4)


@triton.jit
def _units(shift, count, UNIT: tl.constexpr):
    """Returns the first whole unit, and the end, of `count` elements from `shift` into a unit."""
    return (shift + UNIT - 1) // UNIT, (shift + count) // UNIT


@triton.jit(do_not_specialize=["length", "rows", "masks_units", "values_units", "tiles"])
def pack_tiles(
    x,
    starts,
    words,
    values,
    staging_words,
    staging_values,
    length,
    rows,
    masks_units,
    values_units,
    tiles,
    ROWS: tl.constexpr,
    ROUND: tl.constexpr,
    UNIT: tl.constexpr,
    STAGED: tl.constexpr,
    STAGING_UNITS: tl.constexpr,
):
    """Write offsets, masks and values. `words` and `values` view one memory as 4-byte words and as
    elements."""
    masks = words + tl.cast(masks_units, tl.int64) * 4
    value_words = words + tl.cast(values_units, tl.int64) * 4
    packed = values + tl.cast(values_units, tl.int64) * UNIT
    stage = tl.program_id(0).to(tl.int64) * STAGING_UNITS
    stage_words = staging_words + stage * 4
    stage_values = staging_values + stage * UNIT
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        bits = _tile_of(x, tile, length, ROWS, ROUND, "evict_first")
        kept = (bits != 0).to(tl.int32)
        counts = tl.sum(kept, 1)
        row_starts = tl.cumsum(counts, 0) - counts
        start = tl.load(starts + tile)
        row, _ = _places(tile, ROWS)
        tl.store(words + row, start + row_starts, mask=row < rows)
        quarters = tl.reshape(kept, (ROWS, 4, 32)) << tl.arange(0, 32)[None, None, :]
        quarter = row[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(masks + quarter, tl.xor_sum(quarters, 2), mask=(row < rows)[:, None])
        place = row_starts[:, None] + tl.cumsum(kept, 1) - 1
        if STAGED:
            count = tl.sum(counts, 0)
            unit = start // UNIT
            shift = start - unit * UNIT
            tl.store(stage_values + shift + place, bits, mask=kept != 0)
            # other threads of this program write out what this one has staged
            tl.debug_barrier()
            first, end = _units(shift, count, UNIT)
            word = tl.arange(0, (STAGING_UNITS - 1) * 4)
            inside = word < (end - first) * 4
            taken = tl.load(stage_words + first * 4 + word, mask=inside)
            tl.store(value_words + (unit + first).to(tl.int64) * 4 + word, taken, mask=inside)
            # units shared with the tile before, and with the one after
            lane = tl.arange(0, UNIT)
            low, high = lane, end * UNIT + lane
            to = packed + unit.to(tl.int64) * UNIT
            early = (low >= shift) & (low < first * UNIT) & (low < shift + count)
            tl.store(to + low, tl.load(stage_values + low, mask=early), mask=early)
            late = (high >= first * UNIT) & (high < shift + count)
            tl.store(to + high, tl.load(stage_values + high, mask=late), mask=late)
            tl.debug_barrier()
        else:
            tl.store(packed + start.to(tl.int64) + place, bits, mask=kept != 0)
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["length", "rows", "masks_units", "values_units", "tiles"])
def unpack_tiles(
    out,
    words,
    values,
    staging_words,
    staging_values,
    length,
    rows,
    masks_units,
    values_units,
    tiles,
    ROWS: tl.constexpr,
    ROUND: tl.constexpr,
    UNIT: tl.constexpr,
    STAGED: tl.constexpr,
    STAGING_UNITS: tl.constexpr,
):
    """Reverse `pack_tiles`. Only units shared by two tiles are read twice."""
    masks = words + tl.cast(masks_units, tl.int64) * 4
    value_words = words + tl.cast(values_units, tl.int64) * 4
    packed = values + tl.cast(values_units, tl.int64) * UNIT
    stage = tl.program_id(0).to(tl.int64) * STAGING_UNITS
    stage_words = staging_words + stage * 4
    stage_values = staging_values + stage * UNIT
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        row, _ = _places(tile, ROWS)
        start = tl.load(words + tile * ROWS)
        starts = tl.load(words + row, mask=row < rows, other=0)
        quarter = row[:, None] * 4 + tl.arange(0, 4)[None, :]
        mask = tl.load(masks + quarter, mask=(row < rows)[:, None], other=0)
        kept = (mask[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        kept = tl.reshape(kept, (ROWS, 128))
        place = (starts - start)[:, None] + tl.cumsum(kept, 1) - kept
        if STAGED:
            count = tl.load(words + tl.minimum((tile + 1) * ROWS, rows)) - start
            unit = start // UNIT
            shift = start - unit * UNIT
            # read the first unit whole, with another tile's elements, but nothing past the last one
            _, end = _units(shift, count, UNIT)
            word = tl.arange(0, (STAGING_UNITS - 1) * 4)
            inside = word < end * 4
            taken = tl.load(value_words + unit.to(tl.int64) * 4 + word, mask=inside)
            tl.store(stage_words + word, taken, mask=inside)
            rest = end * UNIT + tl.arange(0, UNIT)
            behind = packed + unit.to(tl.int64) * UNIT
            lastly = rest < shift + count
            tl.store(stage_values + rest, tl.load(behind + rest, mask=lastly), mask=lastly)
            tl.debug_barrier()
            bits = tl.load(stage_values + shift + place, mask=kept != 0, other=0)
            tl.debug_barrier()
        else:
            bits = tl.load(packed + start.to(tl.int64) + place, mask=kept != 0, other=0)
        _into_tile(out, bits, tile, length, ROWS, ROUND)
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["length", "rows", "tiles"])
def pack_signs(x, words, length, rows, tiles, ROWS: tl.constexpr):
    """Bit i of a row's 16 bytes = not (x[i] <= 0); zeros beyond the end."""
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        values = _tile_of(x, tile, length, ROWS, 0, "evict_first")
        above = tl.where(values <= 0, 0, 1)
        above = tl.reshape(above, (ROWS, 4, 32)) << tl.arange(0, 32)[None, None, :]
        row, _ = _places(tile, ROWS)
        quarter = row[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(words + quarter, tl.xor_sum(above, 2), mask=(row < rows)[:, None])
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["length", "rows", "tiles"])
def unpack_signs(out, words, length, rows, tiles, ROWS: tl.constexpr):
    """out[i] = 1 or 0."""
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        row, _ = _places(tile, ROWS)
        quarter = row[:, None] * 4 + tl.arange(0, 4)[None, :]
        mask = tl.load(words + quarter, mask=(row < rows)[:, None], other=0)
        above = (mask[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        # through float32: the interpreter has no other cast from integers to bfloat16
        values = tl.reshape(above, (ROWS, 128)).to(tl.float32).to(out.dtype.element_ty)
        _into_tile(out, values, tile, length, ROWS, 0)
        tile += tl.num_programs(0)
