"""Kernels on masks of one bit per element, in rows of 128 like `codecs.kinds.Sign`."""

import triton
import triton.language as tl

from .packing import _into_tile, _places, _tile_of


@triton.jit
def _bits_of_tile(words, tile, rows, ROWS: tl.constexpr):
    """Returns the tile's bits, 0 and 1; zeros beyond the last row."""
    row, _ = _places(tile, ROWS)
    quarter = row[:, None] * 4 + tl.arange(0, 4)[None, :]
    mask = tl.load(words + quarter, mask=(row < rows)[:, None], other=0)
    bits = (mask[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    return tl.reshape(bits, (ROWS, 128))


@triton.jit(do_not_specialize=["length", "rows", "tiles"])
def pack_truths(x, words, length, rows, tiles, ROWS: tl.constexpr):
    """Bit i of a row's 16 bytes = (the byte x[i] != 0); zeros beyond the end."""
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        values = _tile_of(x, tile, length, ROWS, 0, "evict_first")
        truths = (values != 0).to(tl.int32)
        truths = tl.reshape(truths, (ROWS, 4, 32)) << tl.arange(0, 32)[None, None, :]
        row, _ = _places(tile, ROWS)
        quarter = row[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(words + quarter, tl.xor_sum(truths, 2), mask=(row < rows)[:, None])
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["length", "rows", "tiles"])
def unpack_truths(out, words, length, rows, tiles, ROWS: tl.constexpr, NEGATED: tl.constexpr):
    """out[i] = the bit, inverted if NEGATED, as a byte."""
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        truths = _bits_of_tile(words, tile, rows, ROWS) ^ NEGATED
        _into_tile(out, truths.to(tl.uint8), tile, length, ROWS, 0)
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["length", "rows", "tiles"])
def keep(x, words, out, length, rows, tiles, ROWS: tl.constexpr):
    """out[i] = x[i] where the bit is 1, and 0 elsewhere; both as integers."""
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        values = _tile_of(x, tile, length, ROWS, 0, "evict_first")
        bits = _bits_of_tile(words, tile, rows, ROWS)
        _into_tile(out, tl.where(bits != 0, values, 0), tile, length, ROWS, 0)
        tile += tl.num_programs(0)
