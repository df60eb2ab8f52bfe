"""Runs kernels in Triton's interpreter: `TRITON_INTERPRET=1 python interpreter_child.py`.

One line of JSON for each case, [name, null or what went wrong], in the order in which they ran.
"""

from __future__ import annotations

import mmap
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import interpreter_rounding
import numpy as np
import torch
from kernel_cases import (
    CASES,
    TILES,
    Case,
    assert_product,
    assert_same,
    drawn,
    random_bits,
    run_all,
)
from triton.runtime.interpreter import interpreter_builder

from offcompile.runtime import kernels
from offcompile.runtime.kernels import copying, gathering, streaming
from offcompile.runtime.kernels import launch as launching

assert interpreter_rounding.KNOWN

#: in elements of one byte: the third row and the fourth lie beyond 31 bits
FAR_PITCH = 2**30 + 1
#: Python 3.11 has no name for it
MAP_NORESERVE = 0x4000


def beyond_31_bits_copied(device: torch.device) -> None:
    _far("copy", device)


def beyond_31_bits_gathered(device: torch.device) -> None:
    _far("gather", device)


def _far(what: str, device: torch.device) -> None:
    """Rows so far apart that the last lie beyond 31 bits; only their own pages take memory."""
    rows, columns = 4, 61
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    addresses = mmap.mmap(-1, rows * FAR_PITCH, flags=flags)
    expected = random_bits(torch.uint8, (rows, columns), "far")
    for row in range(rows):
        start = row * FAR_PITCH
        addresses[start : start + columns] = bytes(expected[row].tolist())
    # the interpreter copies whole storages to and fro: it is shown the first row's only
    first = torch.frombuffer(addresses, dtype=torch.uint8, count=columns + 1)[:columns]
    near = torch.zeros(rows, columns, dtype=torch.uint8)
    spread = first.expand(rows, columns)
    if what == "copy":
        launch = kernels.copy_launch(near, spread)
        pitch = "source_pitch_units"
    else:
        launch = kernels.gather_launch(near, spread, torch.arange(rows, dtype=torch.int32))
        pitch = "table_pitch_units"
    assert launch.constants["UNIT"] == 1
    assert launch.numbers[pitch] == 0
    replace(launch, numbers={**launch.numbers, pitch: FAR_PITCH}).run()
    assert torch.equal(near, expected)


def bad_indices_stop(device: torch.device) -> None:
    # the interpreter leaves assertions out, and has no option to keep them
    kept = replace(interpreter_builder.options, debug=True)
    for bad in (-1, 4, 2**40):
        launch = kernels.gather_launch(
            torch.zeros(3, 8), torch.ones(4, 8), torch.tensor([0, bad, 1])
        )
        with mock.patch.object(interpreter_builder, "options", kept):
            try:
                launch.run()
            except Exception as error:
                told = f"{error} {error.__cause__} {error.__context__}"
                assert "an index lies outside of the table" in told, told
            else:
                raise AssertionError(f"index {bad} of a table of 4 rows went unnoticed")


def bad_indices_read_nothing(device: torch.device) -> None:
    target = torch.zeros(4, 8)
    # addresses that would end the process if they were read
    indices = torch.tensor([0, -(2**40), 2**40, 3])
    kernels.gather_launch(target, torch.ones(4, 8), indices).run()
    assert target.sum(1).tolist() == [8, 0, 0, 8]


def plain_names_run_kernels(device: torch.device) -> None:
    """`copy_into` and `gather_rows` take the kernel where the device is one that runs it."""
    source = random_bits(torch.bfloat16, (40, 30), "plain")
    copied, pitched = torch.zeros(40, 30), torch.zeros(40, 64)[:, :30]
    transposed = torch.zeros(30, 40).t()
    indices = torch.tensor([[3, 39], [0, 3]])
    ran: list[str] = []

    def run(launch: kernels.Launch, most_programs: int | None = None) -> None:
        ran.append(launch.kernel)
        really(launch, most_programs)

    really = kernels.Launch.run
    with ExitStack() as stack:
        for module in (launching, copying, gathering):
            stack.enter_context(mock.patch.object(module, "why_not", lambda *asked: None))
        stack.enter_context(mock.patch.object(kernels.Launch, "run", run))
        for target in (copied, pitched, transposed):
            kernels.copy_into(target, source)
            assert_same(target, source.float(), exactly=False)
        found = kernels.gather_rows(source, indices, torch.float32, most_programs=1)
    assert_same(found, source[indices].float(), exactly=False)
    assert ran == ["movement:copy_blocks", "movement:copy_pitched", "movement:gather_pitched"]


def each_weight_is_read_once(device: torch.device) -> None:
    """By the addresses of all loads: whatever the rows, the way it lies, and the programs."""
    for rows in (1, 32, 100):
        for turned in (True, False):
            for most in (None, 3):
                _count_reads(rows, turned, most)


def _count_reads(rows: int, turned: bool, most: int | None) -> None:
    a = drawn(torch.float32, rows, 70)
    b = drawn(torch.float32, 41, 70).t() if turned else drawn(torch.float32, 70, 41)
    out = torch.zeros(rows, 41)
    tiles = replace(TILES, inner=64)
    launch = kernels.stream_launch(out, a, b, None, tiles)
    tile = (tiles.inner, tiles.columns)
    seen: list[np.ndarray] = []
    load = interpreter_builder.create_masked_load

    def counted(pointers: Any, mask: Any, *rest: Any) -> Any:
        # tiles of no other operand are of this shape
        if pointers.data.shape == tile:
            seen.append(pointers.data[mask.data])
        return load(pointers, mask, *rest)

    with mock.patch.object(interpreter_builder, "create_masked_load", counted):
        launch.run(most)
    assert_product(out, a, b, None)
    addresses, times = np.unique(np.concatenate(seen), return_counts=True)
    assert (len(addresses), times.max()) == (b.numel(), 1), (rows, turned, most)
    assert addresses[-1] - addresses[0] == 4 * (b.numel() - 1)


def each_gradient_is_written_once(device: torch.device) -> None:
    a, b = drawn(torch.float32, 40, 70).t(), drawn(torch.float32, 40, 41)
    out = torch.zeros(70, 41)
    seen: list[np.ndarray] = []
    store = interpreter_builder.create_masked_store

    def counted(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen.append(pointers.data[mask.data])
        return store(pointers, value, mask, *rest)

    with mock.patch.object(interpreter_builder, "create_masked_store", counted):
        kernels.write_launch(out, a, b, TILES).run(3)
    addresses, times = np.unique(np.concatenate(seen), return_counts=True)
    assert (len(addresses), times.max()) == (out.numel(), 1)


def products_run_kernels(device: torch.device) -> None:
    """`stream_matmul` and `write_matmul` take the kernel where the device is one that runs it."""
    x, weight = drawn(torch.bfloat16, 5, 40), drawn(torch.bfloat16, 24, 40)
    bias, dy = drawn(torch.bfloat16, 1, 24)[0], drawn(torch.bfloat16, 5, 24)
    gradient = torch.zeros_like(weight)
    ran: list[str] = []

    def run(launch: kernels.Launch, most_programs: int | None = None) -> None:
        ran.append(launch.kernel)
        really(launch, most_programs)

    really = kernels.Launch.run
    with ExitStack() as stack:
        for module in (launching, streaming):
            stack.enter_context(mock.patch.object(module, "why_not", lambda *asked: None))
        stack.enter_context(mock.patch.object(kernels.Launch, "run", run))
        assert_product(kernels.stream_matmul(x, weight.t(), bias), x, weight.t(), bias)
        assert_product(kernels.stream_matmul(dy, weight), dy, weight, None)
        kernels.write_matmul(gradient, dy.t(), x)
        # no kernel where scratch is too large, or rows overlap
        with mock.patch.object(streaming, "MOST_SCRATCH_BYTES", 200 * 24 * 4 - 1):
            kernels.stream_matmul(drawn(torch.bfloat16, 200, 40), weight.t())
        kernels.stream_matmul(x, weight[0].expand(24, 40).t())
    assert_product(gradient, dy.t(), x, None)
    assert ran == ["streaming:stream_few"] * 2 + ["streaming:write_product"]


ALL: dict[str, Case] = {
    **CASES,
    "beyond-31-bits-copied": beyond_31_bits_copied,
    "beyond-31-bits-gathered": beyond_31_bits_gathered,
    "bad-indices-stop": bad_indices_stop,
    "bad-indices-read-nothing": bad_indices_read_nothing,
    "plain-names-run-kernels": plain_names_run_kernels,
    "each-weight-is-read-once": each_weight_is_read_once,
    "each-gradient-is-written-once": each_gradient_is_written_once,
    "products-run-kernels": products_run_kernels,
}


if __name__ == "__main__":
    run_all(ALL, torch.device("cpu"))
