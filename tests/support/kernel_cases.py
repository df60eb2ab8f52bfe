"""Cases for kernels on any device: the interpreter's (CPU) or a real one.

The expected values always come from torch on the CPU. `python kernel_cases.py cuda` runs them all;
one line of JSON for each: [name, null or what went wrong].
"""

from __future__ import annotations

import json
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from offcompile.runtime import kernels
from offcompile.runtime.kernels import Blocks, Config

Case = Callable[[torch.device], None]
CASTS = (torch.float32, torch.float16, torch.bfloat16)
KEPT = (
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
#: a kibibyte in a tile: edges are met with few elements
SMALL = Config(tile_bytes=1024, warps=1)
#: few programs, each of which costs the interpreter milliseconds
WIDE = Config(tile_bytes=1 << 18, warps=4)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All values of a 16-bit type; of float32 those that meet each rounding to 16 bits."""
    halves = torch.arange(1 << 16, dtype=torch.int32)
    if dtype != torch.float32:
        return halves.to(torch.int16).view(dtype)
    # at, below, on and above the middle between neighbours in bfloat16
    near_bfloat16 = [(halves << 16) | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    # the same for float16, whose neighbours are 13 bits apart, with all of its denormals
    exact = halves.to(torch.int16).view(torch.float16).to(torch.float32).view(torch.int32)
    near_float16 = [exact + low for low in (-1, 1, 0xFFF, 0x1000, 0x1001)]
    denormal_middles = (torch.arange(-4097, 4097).to(torch.float32) * 2.0**-25).view(torch.int32)
    return torch.cat([*near_bfloat16, *near_float16, denormal_middles]).view(torch.float32)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: object) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    wide = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, wide, generator=generator, dtype=torch.uint8).view(dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor, exactly: bool) -> None:
    """Equal to the bit; unless `exactly`, any NaN equals any other."""
    found = found.cpu()
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    different = (_bytes(found) != _bytes(expected)).any(-1)
    if not exactly:
        different &= ~(found.isnan() & expected.isnan()).reshape(different.shape)
    where = different.nonzero().flatten()[:5].tolist()
    assert not where, (
        f"{int(different.sum())} of {found.numel()} differ, first at {where}: found "
        f"{found.flatten()[where].tolist()}, expected {expected.flatten()[where].tolist()}"
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return flat.view(tensor.numel(), tensor.itemsize)


def check_copy(
    target: torch.Tensor,
    source: torch.Tensor,
    config: Config | None = None,
    most_programs: int | None = None,
) -> None:
    """Runs the kernel into a view, and checks the view and all else in the view's storage."""
    whole = torch.empty(0, dtype=target.dtype, device=target.device)
    whole.set_(target.untyped_storage())
    before = whole.cpu().clone()
    expected = before.as_strided(target.shape, target.stride(), target.storage_offset())
    kernels.copy_torch(expected, source.cpu())
    kernels.copy_launch(target, source, config).run(most_programs)
    assert_same(whole, before, exactly=target.dtype == source.dtype)


# --- cases -----------------------------------------------------------------------------------


def cast_of_every_pattern(
    target_type: torch.dtype, source_type: torch.dtype, device: torch.device
) -> None:
    source = every_pattern(source_type).to(device)
    target = torch.zeros(source.shape, dtype=target_type, device=device)
    check_copy(target, source, WIDE)


def copy_of_length(
    length: int,
    target_type: torch.dtype,
    source_type: torch.dtype,
    device: torch.device,
    most_programs: int | None = None,
) -> None:
    source = random_bits(source_type, (length,), (length, source_type)).to(device)
    around = torch.zeros(length + 64, dtype=target_type, device=device)
    check_copy(around[32 : 32 + length], source, SMALL, most_programs)


def lengths(itemsize: int) -> tuple[int, ...]:
    block = SMALL.tile_bytes // itemsize
    return (0, 1, 2, 3, block - 1, block, block + 1, 3 * block + 5)


def copy_at_odd_addresses(dtype: torch.dtype, device: torch.device) -> None:
    for at, to in ((1, 0), (0, 1), (3, 5), (8, 4)):
        source = random_bits(dtype, (300,), (at, to)).to(device)[at : at + 270]
        check_copy(torch.zeros(300, dtype=dtype, device=device)[to : to + 270], source, SMALL)


def copy_in_another_order(device: torch.device) -> None:
    """Dense in the same order, if not the usual one: memory is copied as it lies."""
    source = random_bits(torch.float32, (5, 6, 7), "order").to(device).permute(2, 0, 1)
    for dtype in (torch.float32, torch.bfloat16):
        base = torch.zeros(5, 6, 7, dtype=dtype, device=device)
        check_copy(base.permute(2, 0, 1), source, SMALL)


def copy_of_rows(
    rows: int,
    columns: int,
    target_type: torch.dtype,
    source_type: torch.dtype,
    device: torch.device,
) -> None:
    for source_gap, target_gap in ((0, 3), (3, 0), (16, 32)):
        seed = (rows, columns, source_gap, target_type, source_type)
        source = random_bits(source_type, (rows, columns + source_gap), seed).to(device)
        target = torch.zeros(rows, columns + target_gap, dtype=target_type, device=device)
        check_copy(target[:, :columns], source[:, :columns], SMALL, 3)


def copy_of_one_row_to_many(device: torch.device) -> None:
    source = random_bits(torch.float32, (1, 70), "expanded").to(device).expand(9, 70)
    check_copy(torch.zeros(9, 70, dtype=torch.float16, device=device), source, SMALL)


def gather(
    table_rows: int,
    columns: int,
    target_type: torch.dtype,
    source_type: torch.dtype,
    index_type: torch.dtype,
    device: torch.device,
) -> None:
    seed = (table_rows, columns, target_type, source_type)
    for count, gap in ((0, 0), (1, 3), (33, 0), (70, 16)):
        whole = random_bits(source_type, (table_rows, columns + gap), seed)
        generator = torch.Generator().manual_seed(count)
        indices = torch.randint(0, table_rows, (count,), generator=generator, dtype=index_type)
        if count > 1:
            indices[0], indices[-1] = table_rows - 1, 0  # the ends are asked for
        expected = kernels.gather_torch(whole[:, :columns], indices, target_type)
        target = torch.zeros(count, columns, dtype=target_type, device=device)
        table = whole.to(device)[:, :columns]
        launch = kernels.gather_launch(target, table, indices.to(device), SMALL)
        launch.run(3)
        assert_same(target, expected, exactly=target_type == source_type)


#: few rows in a tile: both kernels are met with little, and so are all edges
TILES = Blocks(rows=32, inner=32, columns=16, warps=1)


def assert_product(
    found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Within one rounding of the result, and float32 sums in any order."""
    wide_a, wide_b = a.cpu().double(), b.cpu().double()
    expected, size = wide_a @ wide_b, wide_a.abs() @ wide_b.abs()
    if bias is not None:
        expected, size = expected + bias.cpu().double(), size + bias.cpu().double().abs()
    allowed = torch.finfo(found.dtype).eps * expected.abs() + 2.0**-21 * size
    wrong = (found.cpu().double() - expected).abs() - allowed
    assert found.numel() == 0 or float(wrong.max()) <= 0, f"{float(wrong.max())} too far"


def drawn(dtype: torch.dtype, rows: int, columns: int, gap: int = 0) -> torch.Tensor:
    """A matrix with rows `gap` elements apart, which are no numbers."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    whole = torch.full((rows, columns + gap), float("nan"))
    whole[:, :columns] = torch.randn(rows, columns, generator=generator)
    return whole.to(dtype)


def stream(
    rows: int, inner: int, columns: int, turned: bool, dtype: torch.dtype, device: torch.device
) -> None:
    for gap, biased, most in ((0, True, None), (5, False, 2)):
        a = drawn(dtype, rows, inner, gap).to(device)[:, :inner]
        if turned:
            b = drawn(dtype, columns, inner, gap).to(device)[:, :inner].t()
        else:
            b = drawn(dtype, inner, columns, gap).to(device)[:, :columns]
        bias = drawn(dtype, 1, columns)[0].to(device) if biased else None
        out = torch.full((rows, columns), float("nan"), dtype=dtype, device=device)
        launch = kernels.stream_launch(out, a, b, bias, TILES)
        assert launch.kernel.endswith("few" if rows <= TILES.rows else "many")
        launch.run(most)
        assert_product(out, a, b, bias)


def write(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """`write_launch` takes the layout of weight gradients: dy transposed, times x."""
    for gap, most in ((0, None), (8, 2)):
        a = drawn(dtype, inner, rows, gap).to(device)[:, :rows].t()
        b = drawn(dtype, inner, columns).to(device)
        whole = torch.full((rows, columns + gap), 7.0, dtype=dtype, device=device)
        kernels.write_launch(whole[:, :columns], a, b, TILES).run(most)
        assert_product(whole[:, :columns], a, b, None)
        assert bool((whole[:, columns:] == 7).all()), "something was written between the rows"


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for s in CASTS:
        for t in CASTS:
            pair = f"{named(s)}-{named(t)}"
            cases[f"patterns-{pair}"] = partial(cast_of_every_pattern, t, s)
            width = max(s.itemsize, t.itemsize)
            for length in lengths(width):
                cases[f"length-{pair}-{length}"] = partial(copy_of_length, length, t, s)
    f32, bf16 = torch.float32, torch.bfloat16
    cases["looped-float32-bfloat16"] = partial(copy_of_length, 5000, bf16, f32, most_programs=2)
    for dtype in KEPT:
        for length in (1, 7, 1021, 1024):
            cases[f"kept-{named(dtype)}-{length}"] = partial(copy_of_length, length, dtype, dtype)
    for dtype in (torch.uint8, torch.bfloat16, f32):
        cases[f"odd-addresses-{named(dtype)}"] = partial(copy_at_odd_addresses, dtype)
    cases["another-order"] = copy_in_another_order
    for rows, columns in ((0, 5), (3, 0), (1, 1), (5, 1), (1, 300), (7, 64), (9, 100), (3, 1025)):
        for t, s in ((f32, f32), (bf16, f32), (f32, torch.float16), (torch.bool, torch.bool)):
            name = f"rows-{rows}x{columns}-{named(s)}-{named(t)}"
            cases[name] = partial(copy_of_rows, rows, columns, t, s)
    cases["one-row-to-many"] = copy_of_one_row_to_many
    for rows, columns in ((1, 1), (50, 3), (50, 64), (7, 100), (3, 300)):
        for t, s in ((f32, f32), (f32, bf16), (torch.float16, bf16), (torch.uint8, torch.uint8)):
            for index in (torch.int32, torch.int64):
                name = f"gather-{rows}x{columns}-{named(s)}-{named(t)}-{named(index)}"
                cases[name] = partial(gather, rows, columns, t, s, index)
    # the last two are tall: many rows, and a matrix that is narrow one way or the other
    for m, k, n in ((1, 1, 1), (1, 96, 40), (32, 70, 33), (33, 64, 16), (150, 40, 8), (150, 8, 40)):
        for dtype in CASTS:
            for turned in (True, False):
                name = f"stream-{m}x{k}x{n}-{'turned' if turned else 'straight'}-{named(dtype)}"
                cases[name] = partial(stream, m, k, n, turned, dtype)
            cases[f"write-{n}x{m}x{k}-{named(dtype)}"] = partial(write, n, m, k, dtype)
    return cases


CASES = _cases()


def run_all(cases: Mapping[str, Case], device: torch.device, names: Sequence[str] = ()) -> int:
    """Run the cases named, or all; tell of each, and return how many went wrong."""
    failed = 0
    for name in names or cases:
        wrong = None
        try:
            cases[name](device)
        except Exception:
            wrong = traceback.format_exc(limit=-4)
            failed += 1
        print(json.dumps([name, wrong]), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(1 if run_all(CASES, torch.device(sys.argv[1])) else 0)
