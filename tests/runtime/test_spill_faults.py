"""Compiled training on disks that fail: a named error, and nothing else is lost.

After each fault the same compiled model takes the same step again, with gradients that equal the
plain run's bit for bit, no ticket alive, no byte of the spill files taken, and all threads there.
"""

from __future__ import annotations

import errno
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import MLP

import offcompile
from offcompile.graph.lowering.rewrite import rewrite
from offcompile.ir import OffloadError, Plan
from offcompile.run.plan import carry_out
from offcompile.runtime.base.mapping import PAGE_BYTES
from offcompile.runtime.disk.checksums import VerifiedStore
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.memory.arena import Arena
from offcompile.runtime.moves.registry import Runtime, close_all, runtime_for, runtimes

OPTIONS = {"hardware": "cpu", "memory": "minimum", "lowering": "aot_eager", "seconds": 0.2}
Call = Callable[[int, Sequence[memoryview], int], int]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()  # what other tests have left need not be looked through each time
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
    close_all()


@functools.cache
def plain_gradients() -> tuple[Tensor, ...]:
    model, x = fresh()
    torch.compile(model, backend="aot_eager")(x).square().mean().backward()
    return gradients(model)


def fresh() -> tuple[MLP, Tensor]:
    torch.manual_seed(0)
    return MLP(64, 5), torch.randn(2048, 64)


def gradients(model: MLP) -> tuple[Tensor, ...]:
    found = tuple(p.grad for p in model.parameters() if p.grad is not None)
    assert len(found) == 10
    return found


@dataclass
class Training:
    """A model compiled to spill to `place`."""

    place: Path
    options: dict[str, Any]
    packs: bool

    def __post_init__(self) -> None:
        self.model, self.x = fresh()
        self.run = torch.compile(self.model, backend="offcompile", options=self.options)

    def forward(self) -> Tensor:
        self.model.zero_grad()
        loss: Tensor = self.run(self.x).square().mean()
        return loss

    def step(self) -> None:
        self.forward().backward()

    @property
    def runtime(self) -> Runtime:
        (runtime,) = runtimes()
        return runtime

    @property
    def stores(self) -> list[SpillStore]:
        return list(self.runtime.stores.values())

    def fails(self, step: Callable[[], None], told: str) -> str:
        """The text of the step's error, which must match `told` and name the place."""
        before = set(threading.enumerate())
        with pytest.raises(OffloadError, match=told) as raised:
            step()
        said = str(raised.value)
        assert str(self.place) in said
        del raised
        gone = [thread.name for thread in before - set(threading.enumerate())]
        assert not gone
        return said

    def goes_on(self) -> None:
        self.step()
        for found, want in zip(gradients(self.model), plain_gradients(), strict=True):
            assert torch.equal(found, want)
        moved = self.runtime.mover.tally
        assert moved.bytes_out > 0 and moved.bytes_in > 0
        assert (moved.bytes_out < moved.raw_bytes_out) == self.packs
        self.holds_nothing()

    def holds_nothing(self) -> None:
        gc.collect()
        self.runtime.device.drain()
        found = offcompile.counters()
        assert found["live_tickets"] == 0
        assert found["in_flight_bytes"] == self.runtime.device.staging_bytes
        assert [store.used_bytes for store in self.stores] == [0] * len(self.stores)


@pytest.fixture(scope="module", params=["raw", "bitmask"])
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Training]]:
    """Compiles once for all faults, and anew for other options."""
    codec = None if request.param == "raw" else request.param

    def packed(graphs: Any, annotated: Any, plan: Plan, *rest: Any) -> Any:
        tensor = annotated.problem.tensor
        moves = tuple(
            replace(m, codec=codec) if tensor[m.tensor].kind == "activation" else m
            for m in plan.moves
        )
        return rewrite(graphs, annotated, replace(plan, moves=moves), *rest)

    @functools.cache
    def training(**more: Any) -> Training:
        place = tmp_path_factory.mktemp("spill")
        return Training(place, {**OPTIONS, "spill": place, **more}, codec is not None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carry_out, "rewrite", packed)
        yield training


@pytest.fixture
def training(compiled: Callable[..., Training]) -> Callable[..., Training]:
    def start(**more: Any) -> Training:
        close_all()
        run = compiled(**more)
        run.place.mkdir(exist_ok=True)
        gc.freeze()
        return run

    return start


class Disk:
    """From the n-th of some call on, `fault` stands in for it; see `Files`."""

    def __init__(self, stores: Sequence[SpillStore], after: int = 0, **faults: Any) -> None:
        self._files = [(file, file._files) for store in stores for file in store._files]
        self._left = after
        for file, real in self._files:
            calls = {name: self._late(fault, getattr(real, name)) for name, fault in faults.items()}
            file._files = replace(real, **calls)

    def _late(self, fault: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            self._left -= 1
            return (fault if self._left < 0 else real)(*given)

        return call

    def mend(self) -> None:
        for file, files in self._files:
            file._files = files


def refusing(code: int) -> Callable[..., int]:
    def call(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    return call


def stuck(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    return 0


def short(whole: Call) -> Call:
    """One page at a time, and of every fourth only a part the first time."""
    tried: set[int] = set()

    def call(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        whole(descriptor, [views[0][:PAGE_BYTES]], offset)
        if offset % (4 * PAGE_BYTES) or offset in tried:
            return PAGE_BYTES
        tried.add(offset)
        return PAGE_BYTES - 512

    return call


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("call", "fault", "told"),
    [
        ("pwritev", refusing(errno.ENOSPC), "No space left on device"),
        ("pwritev", refusing(errno.EIO), "Input/output error"),
        ("pwritev", stuck, "nothing was moved"),
        ("preadv", refusing(errno.EIO), "Input/output error"),
        ("preadv", stuck, "nothing was moved"),
    ],
    ids=["write-ENOSPC", "write-EIO", "write-stuck", "read-EIO", "read-stuck"],
)
def test_what_the_disk_refuses(
    training: Callable[..., Training], call: str, fault: Any, told: str, after: int
) -> None:
    run = training()
    run.step()
    disk = Disk(run.stores, after, **{call: fault})
    said = run.fails(run.step, told)
    assert "copied out to" in said or "loaded from" in said
    disk.mend()
    run.goes_on()


def test_short_writes_and_reads_are_carried_on(training: Callable[..., Training]) -> None:
    run = training(verify_spill=True)
    run.step()
    real = Files()
    disk = Disk(run.stores, pwritev=short(real.pwritev), preadv=short(real.preadv))
    run.goes_on()
    disk.mend()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
def test_files_that_cannot_grow(training: Callable[..., Training], code: int) -> None:
    run = training()
    run.step()
    key = run.runtime.settings.key
    close_all()
    disk = Disk(runtime_for(key).stores.values(), allocate=refusing(code))  # type: ignore[arg-type]
    assert "growing" in run.fails(run.step, os.strerror(code))
    disk.mend()
    run.goes_on()


def test_a_full_disk(training: Callable[..., Training]) -> None:
    run = training()
    run.step()
    key = run.runtime.settings.key
    close_all()
    disk = Disk(runtime_for(key).stores.values(), free_bytes=lambda _: 0)  # type: ignore[arg-type]
    run.fails(run.step, "no room for .* bytes")
    disk.mend()
    run.goes_on()


def test_a_directory_that_goes_away_under_open_files(training: Callable[..., Training]) -> None:
    run = training()
    run.step()
    run.place.rmdir()
    run.goes_on()


@pytest.mark.parametrize("count", [1, 2])
def test_directories_that_go_away_before_their_files_have_a_byte(
    tmp_path: Path, count: int
) -> None:
    places = [tmp_path / str(i) for i in range(count)]
    for place in places:
        place.mkdir()
    with SpillStore(places, reserve_bytes=0) as store:
        for place in places:
            place.rmdir()
        block, back = (Arena(0).block(1 << 20) for _ in range(2))
        block.view[:] = os.urandom(1 << 20)
        extent = store.allocate(1 << 20)
        store.write(extent, 0, block.view)
        store.read(extent, 0, back.view)
        assert back.view == block.view


def test_a_directory_that_is_gone_before_the_files_are_opened(
    training: Callable[..., Training],
) -> None:
    run = training()
    run.goes_on()
    close_all()
    run.place.rmdir()
    run.fails(run.step, "does not exist: create it")
    run.place.mkdir()
    run.goes_on()


def test_a_directory_made_read_only(training: Callable[..., Training]) -> None:
    run = training()
    run.step()
    run.place.chmod(0o500)
    run.goes_on()  # what is open stays so
    if os.geteuid():
        close_all()
        run.fails(run.step, "not writable")
    run.place.chmod(0o700)
    run.goes_on()


# -- bytes that change on the disk -----------------------------------------------------------------


def flip(store: SpillStore, bit: int) -> None:
    """One bit of the first page of what was stored first, behind everybody's back."""
    extent = store._extents.live[min(store._extents.live)]
    file, at, _ = store.ranges(extent, 0, PAGE_BYTES)[0]
    # a second descriptor: the store's own is direct
    descriptor = os.open(f"/proc/self/fd/{store.descriptors[file]}", os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, at + bit // 8)
        os.pwrite(descriptor, bytes([byte ^ 1 << bit % 8]), at + bit // 8)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="files of Linux")


@linux
@pytest.mark.parametrize("bit", [0, 8 * 3001 + 6])
def test_a_bit_that_flips_on_the_disk_is_told(training: Callable[..., Training], bit: int) -> None:
    run = training(verify_spill=True)
    run.goes_on()
    assert {type(store) for store in run.stores} == {VerifiedStore}
    for again in (False, True):
        loss = run.forward()
        run.runtime.device.drain()
        (used,) = (store for store in run.stores if store.used_bytes)
        flip(used, bit)
        told = "1 of .* pages read are not what was written there"
        said = run.fails(functools.partial(loss.backward, retain_graph=again), told)
        assert "could not be loaded from" in said and "Check that disk" in said
        if again:  # as often as it is asked for
            run.fails(loss.backward, told)
        del loss
        run.goes_on()


def test_nothing_is_checked_unless_asked_for(training: Callable[..., Training]) -> None:
    run = training()
    run.goes_on()
    assert {type(store) for store in run.stores} == {SpillStore}
    assert not run.runtime.settings.verify_spill
