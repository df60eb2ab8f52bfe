"""Ops are measured as a step has them: operands out of the caches, results in touched blocks."""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import warm

from offcompile.ir import OffloadError
from offcompile.runtime.measure import cold
from offcompile.runtime.measure import op as measure_op
from offcompile.runtime.measure.cold import cool
from offcompile.runtime.measure.op import OpCall, Operands, TensorSpec, measure_call
from offcompile.runtime.measure.timing import time_us
from offcompile.runtime.memory.malloc import glibc, tensor_memory
from offcompile.runtime.memory.malloc import heap as heap_module
from offcompile.runtime.memory.malloc.heap import address_space_is_limited
from offcompile.runtime.memory.malloc.tensor_memory import will_fit

aten = torch.ops.aten
MIB = 1 << 20
needs_compiler = pytest.mark.skipif(
    not will_fit() or address_space_is_limited(), reason="tensors' memory is left to torch here"
)


def test_what_is_made_ready_before_a_run_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, done = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call() -> None:
        done.append("call")
        now[0] += 0.01

    def before() -> None:
        done.append("before")
        now[0] += 100.0

    assert time_us(call, seconds=0.02, before=before) == pytest.approx(10_000.0)
    assert done == ["call"] + ["before", "call"] * 3  # the first makes it warm


@needs_compiler
@pytest.mark.parametrize("begin, nbytes", [(0, 0), (0, 1), (3, 64), (64, 4096), (17, 99_983)])
def test_memory_that_left_the_caches_holds_what_it_held(begin: int, nbytes: int) -> None:
    x = torch.randint(0, 256, (100_000,), dtype=torch.uint8)
    x[begin : begin + nbytes] += 1  # written just now, in the caches alone
    as_it_was = x.tolist()
    assert cool(x.data_ptr() + begin, nbytes)
    assert x.tolist() == as_it_was


def test_operands_and_results_are_put_out_of_the_caches_before_each_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, row = (
        TensorSpec(torch.float32, (512, 1024), (1024, 1)),
        TensorSpec(torch.float32, (512, 1024), (0, 1)),
    )
    done: list[tuple[int, int] | None] = []
    read: set[tuple[int, int]] = set()
    written: list[tuple[int, int]] = []
    alive: list[weakref.ref[torch.Tensor]] = []

    def note(begin: int, nbytes: int) -> None:
        if (begin, begin + nbytes) in written:
            assert alive[-1]() is not None  # else somebody may have unmapped it
        done.append((begin, begin + nbytes))

    monkeypatch.setattr(measure_op, "cool", note)

    class Seen:
        _schema = aten.add.Tensor._schema

        def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            done.append(None)
            read.update((t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes()) for t in (x,))
            read.add((y.data_ptr(), y.data_ptr() + 4096))
            made = x + y
            written.append((made.data_ptr(), made.data_ptr() + made.nbytes))
            alive.append(weakref.ref(made))
            return made

    call = OpCall(Seen(), (source, row), {}, (source,))  # type: ignore[arg-type]
    operands = Operands()
    assert measure_call(call, operands) is not None
    timed = done[done.index(None) :]
    while timed and timed[1:2] == [None]:  # runs that nobody times
        timed.pop(0)
    timed.pop(0)
    runs = len(timed) // 3
    assert runs >= 3 and timed[2::3] == [None] * runs
    assert timed[0::3] == written[-runs - 1 : -1]  # what the run before has made
    assert alive[-1]() is None
    (range_,) = set(timed[1::3])
    assert range_ is not None
    pool = operands.storage
    assert pool.data_ptr() <= range_[0] and range_[1] <= pool.data_ptr() + pool.nbytes()
    assert range_[1] - range_[0] >= 512 * 1024 * 4 + 4096
    for begin, end in read:
        assert range_[0] <= begin and min(end, range_[1]) > begin


def test_without_a_compiler_ops_are_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(source: str, *flags: str) -> None:
        raise RuntimeError("no compiler")

    cold._compiled.cache_clear()
    monkeypatch.setattr(cold, "library", refuse)
    spec = TensorSpec(torch.float32, (64, 64), (64, 1))
    try:
        with caplog.at_level(logging.INFO, "offcompile.runtime.measure.cold"):
            assert not cool(0, 1 << 40)
            found = measure_call(OpCall(aten.neg.default, (spec,), {}, (spec,)), Operands())
        assert found is not None and found.duration_us > 0
        assert caplog.text.count("no compiler") == 1
    finally:
        cold._compiled.cache_clear()


def in_a_process(code: str) -> list[int]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    done = warm.run(command, env=environment, imported=warm.LITTLE)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


SETUP = """
import gc, resource, torch
from offcompile.runtime.memory.malloc import tensor_memory
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.measure.op import OpCall, Operands, TensorSpec, measure_call
h = heap()
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def made(): return torch.ones(40 << 18)
"""


@pytest.mark.long
@needs_compiler
def test_large_blocks_keep_their_pages_inside_and_go_back_afterwards() -> None:
    outside, inside, before, held, after = in_a_process(
        SETUP
        + """
tensor_memory.install(); h.prepare(); made()
first = faults()
for _ in range(4): made()
outside = faults() - first
before = h.resident_bytes()
with h.laid_out():
    made()
    first = faults()
    for _ in range(4): made()
    inside = faults() - first
    held = h.resident_bytes()
print(outside, inside, before, held, h.resident_bytes())
"""
    )
    assert outside >= 4 * 20  # huge pages at the best
    assert inside <= 8
    assert held - before >= 38 * MIB
    assert after - before <= 8 * MIB


@pytest.mark.soak  # the test above sees the pages of one such block go back
@needs_compiler
def test_measuring_large_blocks_takes_no_more_memory_with_each_run() -> None:
    before, peak, after = in_a_process(
        SETUP
        + """
from offcompile.runtime.base import process_memory as memory
aten = torch.ops.aten
spec = TensorSpec(torch.float32, (40 << 18,), (1,))
measure_call(OpCall(aten.neg.default, (TensorSpec(torch.float32, (4,), (1,)),), {}, ()), Operands())
memory.reset_peak()
gc.disable()
before = h.resident_bytes()
operands = Operands()
for op in (aten.neg.default, aten.relu.default, aten.exp.default):
    assert measure_call(OpCall(op, (spec,), {}, (spec,)), operands) is not None
peak = memory.peak_bytes() - memory.resident()[1]
del operands
print(before, peak, h.resident_bytes())
"""
    )
    assert peak - before <= 100 * MIB  # an operand, a result, and what comes with them
    assert after - before <= 4 * MIB  # at once, not when it is collected


class Process:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def mallopt(self, option: int, value: int) -> None:
        self.asked.append((option, value))


@pytest.mark.parametrize("fits_again", [True, False])
def test_where_places_do_not_fit_again_large_blocks_stay_as_they_are(
    fits_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    h, process = heap_module.Heap(), Process()
    monkeypatch.setattr(h, "_malloc", glibc.Malloc(process))  # type: ignore[arg-type]
    monkeypatch.setattr(h, "guard", object() if fits_again else None)
    monkeypatch.setattr(h, "resident_bytes", lambda: 0)
    monkeypatch.setattr(heap_module, "address_space_is_limited", lambda: False)
    with h.laid_out():
        inside = list(process.asked)
    most_mappings = glibc.M_MMAP_MAX
    assert inside == ([(most_mappings, 0)] if fits_again else [])
    assert process.asked[1:] == ([(most_mappings, 65536)] if fits_again else [])


def test_a_choice_of_memory_that_does_not_exist_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(tensor_memory.VARIABLE, "jemalloc")
    spec = TensorSpec(torch.float32, (4,), (1,))
    with pytest.raises(OffloadError, match="jemalloc"):
        measure_call(OpCall(aten.neg.default, (spec,), {}, (spec,)), Operands())
