"""Disks that fail: the right numbers or an error, in bounded time, nothing lost without need."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from lengths import some

from offcompile.ir import OffloadError
from offcompile.runtime.disk.spill import SpillFull
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.states import state_blocks
from offcompile.runtime.states.disk_states import DiskStates
from offcompile.runtime.states.state_blocks import GRAIN

pytestmark = pytest.mark.usefixtures("on_a_disk")

F32 = torch.float32
BLOCK = GRAIN * 8
PAGE = 4096
#: parameters of the training run, in blocks
SIZES = {0: 3, 1: 1, 2: 4}
STEPS = 3

Call = Callable[[int, Sequence[memoryview], int], int]


class Disk:
    """Calls that go wrong where `wrong` says so: what and how many of its kind came before."""

    def __init__(self, wrong: Callable[[str, int], str | None] = lambda what, number: None) -> None:
        self.wrong = wrong
        self.counts = {"read": 0, "write": 0}
        self.files = Files(
            preadv=self._call("read", os.preadv), pwritev=self._call("write", os.pwritev)
        )

    def _call(self, what: str, real: Call) -> Call:
        def call(descriptor: int, views: Sequence[memoryview], at: int) -> int:
            number = self.counts[what]
            self.counts[what] += 1
            fault = self.wrong(what, number)
            if fault in ("EIO", "ENOSPC"):
                code = getattr(errno, fault)
                raise OSError(code, os.strerror(code))
            if fault == "short":
                return real(descriptor, [views[0][: len(views[0]) // 2]], at)
            if fault == "torn":
                real(descriptor, [views[0][: len(views[0]) // 2]], at)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return 0 if fault == "nothing" else real(descriptor, views, at)

        return call


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DiskStates]]:
    made: list[DiskStates] = []

    def one(disk: Disk, kept: int = 0, buffers: int = 3) -> DiskStates:
        states = DiskStates(
            [tmp_path],
            kept * BLOCK,
            block_bytes=BLOCK,
            buffers=buffers,
            small_bytes=0,
            files=disk.files,
        )
        made.append(states)
        return states

    yield one
    for states in made:
        states.close()


def train(states: DiskStates) -> list[torch.Tensor]:
    """Some steps of AdamW; the parameters and their states in the end."""
    numbers = torch.Generator().manual_seed(0)
    weights = {k: torch.randn(n * GRAIN, generator=numbers) for k, n in SIZES.items()}
    for key, weight in weights.items():
        states.add(key, weight.numel(), [F32, F32])
    states.expect(list(reversed(SIZES)))
    for step in range(STEPS):
        for key in reversed(SIZES):
            gradient = torch.randn(weights[key].numel(), generator=numbers)
            for r in states.visit(key):
                here = slice(r.start, r.stop)
                update(weights[key][here], gradient[here], r.parts, step + 1)
        states.step_over()
    states.settle()
    found = list(weights.values())
    for key in SIZES:
        found += [part.clone() for r in states.visit(key, write=False) for part in r.parts]
    return found


def update(
    weight: torch.Tensor, gradient: torch.Tensor, parts: Sequence[torch.Tensor], step: int
) -> None:
    torch._fused_adamw_(
        [weight],
        [gradient],
        [parts[0]],
        [parts[1]],
        [],
        [torch.tensor(float(step))],
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


def in_time(work: Callable[[], object]) -> object:
    """Return what `work` returns or raises; an AssertionError if it hangs."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    return found[0]


@pytest.mark.parametrize("lasting", some([False, True], False))
@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("read", "EIO"),
        ("read", "torn"),
        ("read", "short"),
        ("read", "nothing"),
        ("write", "EIO"),
        ("write", "ENOSPC"),
        ("write", "torn"),
        ("write", "short"),
        ("write", "nothing"),
    ],
)
def test_a_fault_at_any_call_gives_the_right_numbers_or_an_error(
    opened: Callable[..., DiskStates], what: str, fault: str, lasting: bool
) -> None:
    plain = Disk()
    wanted = train(opened(plain))
    right = errors = 0
    for at in range(plain.counts[what] + 1):

        def wrong(kind: str, number: int, at: int = at) -> str | None:
            hit = kind == what and (number >= at if lasting else number == at)
            # a disk that moves less than it was asked for comes to an end all the same
            return None if not hit or (lasting and fault == "short" and number % 3) else fault

        found = in_time(lambda wrong=wrong: train(opened(Disk(wrong))))
        if isinstance(found, list):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            right += 1
        else:
            assert isinstance(found, OffloadError), found
            errors += 1
    if fault == "short" or (fault == "nothing" and not lasting):
        assert not errors
    else:
        assert right and (errors or (what == "read" and not lasting))


def test_what_could_not_be_written_stays_and_is_written_later(
    opened: Callable[..., DiskStates], tmp_path: Path
) -> None:
    disk = Disk()
    states = opened(disk)
    for key in range(6):
        states.add(key, GRAIN, [F32, F32])
        fill(states, key, key + 1)
    states.settle()
    disk.wrong = lambda what, number: "ENOSPC" if what == "write" else None
    fill(states, 0, 10)
    with pytest.raises(OffloadError, match=r"writing 32768 bytes .*No space left.*free space") as e:
        states.settle()
    assert str(tmp_path) in str(e.value) and 'directory="/path"' in str(e.value)
    # all can be read, within the pool and one block more
    assert [value(states, key) for key in range(6)] == [10, 2, 3, 4, 5, 6]
    with pytest.raises(OffloadError, match="No space left"):
        states.settle()
    assert states.facts().peak_frame_bytes <= 4 * BLOCK
    disk.wrong = lambda what, number: None
    states.settle()
    assert [value(states, key) for key in range(6)] == [10, 2, 3, 4, 5, 6]
    states.settle()
    assert states.facts().frame_bytes <= 3 * BLOCK


def test_a_disk_that_takes_nothing_any_more_does_not_fill_the_memory(
    opened: Callable[..., DiskStates],
) -> None:
    disk = Disk()
    states = opened(disk)
    states.add(0, 40 * GRAIN, [F32, F32])
    states.add(1, GRAIN, [F32, F32])
    fill(states, 0, 1)
    states.settle()
    disk.wrong = lambda what, number: "EIO" if what == "write" else None
    with pytest.raises(OffloadError, match="Input/output error"):
        fill(states, 0, 2)
    assert states.facts().frame_bytes <= 3 * BLOCK
    changed = value_counts(states, 0)
    assert changed[2.0] and changed[1.0] and sum(changed.values()) == 40 * GRAIN
    disk.wrong = lambda what, number: None
    fill_again = in_time(lambda: [tries(lambda: fill(states, 0, 3)) for _ in range(2)])
    assert fill_again == [False, True] or fill_again == [True, True]
    states.settle()
    assert value(states, 0) == 3


def test_a_failed_write_is_told_at_the_next_visit_before_anything_is_changed(
    opened: Callable[..., DiskStates],
) -> None:
    disk = Disk(lambda what, number: "EIO" if what == "write" and number == 0 else None)
    states = opened(disk)
    states.add(0, GRAIN, [F32, F32])
    states.add(1, GRAIN, [F32, F32])
    fill(states, 0, 1)
    for thread in threading.enumerate():  # until the writer has nothing to do
        if thread.name == "offcompile-states-out":
            thread.join(30)
    with pytest.raises(OffloadError, match="EIO"):
        states.visit(1)
    fill(states, 1, 2)  # told once, and the write is tried again
    states.settle()
    assert (value(states, 0), value(states, 1)) == (1, 2)


def test_read_ahead_that_failed_is_tried_again_when_it_is_needed(
    opened: Callable[..., DiskStates],
) -> None:
    disk = Disk()
    states = opened(disk)
    states.add(0, 6 * GRAIN, [F32, F32])
    fill(states, 0, 1)
    states.settle()
    ahead = ("read", disk.counts["read"] + 1)
    disk.wrong = lambda what, number: "EIO" if (what, number) == ahead else None
    states.expect([0])
    visit = states.visit(0, write=False)
    next(visit)
    flow, (_, block, *_) = states._flow, states._blocks[0]
    with flow.lock:  # a visit that comes before the failure is noted would be told of it
        assert flow._changed.wait_for(lambda: block.error is not None, 30)
    assert [r.parts[0].unique().tolist() for r in visit] == [[1.0]] * 5


def test_a_block_that_cannot_be_read_costs_only_itself(opened: Callable[..., DiskStates]) -> None:
    disk = Disk()
    states = opened(disk)
    for key in range(3):
        states.add(key, GRAIN, [F32, F32])
        fill(states, key, key + 1)
    states.settle()
    disk.wrong = lambda what, number: "EIO" if what == "read" else None
    with pytest.raises(OffloadError, match=r"reading 32768 bytes .*EIO.*check that disk"):
        value(states, 0)
    disk.wrong = lambda what, number: None
    assert [value(states, key) for key in range(3)] == [1, 2, 3]


def test_without_room_on_disk_nothing_is_added(tmp_path: Path) -> None:
    states = DiskStates(
        [tmp_path], block_bytes=BLOCK, small_bytes=0, capacity_bytes=10 * BLOCK, buffers=3
    )
    states.add(0, 4 * GRAIN, [F32, F32])
    with pytest.raises(SpillFull, match=r"no room for 32768 bytes .*directory=\"/path\""):
        states.add(1, 8 * GRAIN, [F32, F32])
    assert states.facts().disk_bytes == 4 * BLOCK
    states.add(1, 6 * GRAIN, [F32, F32])
    fill(states, 1, 5)
    assert value(states, 1) == 5
    states.close()


def test_what_is_removed_is_no_longer_a_failure(opened: Callable[..., DiskStates]) -> None:
    disk = Disk()
    states = opened(disk)
    states.add(0, GRAIN, [F32, F32])
    states.add(1, GRAIN, [F32, F32])
    disk.wrong = lambda what, number: "ENOSPC" if what == "write" else None
    fill(states, 0, 1)
    with pytest.raises(OffloadError, match="ENOSPC"):
        states.settle()
    states.remove(0)
    states.settle()
    assert value(states, 1) == 0


def fill(states: DiskStates, key: int, to: float) -> None:
    for r in states.visit(key):
        for part in r.parts:
            part.fill_(to)


def value(states: DiskStates, key: int) -> float:
    """The one number that all elements are."""
    (found,) = value_counts(states, key)
    return found


def value_counts(states: DiskStates, key: int) -> dict[float, int]:
    found = [r.parts[0].clone() for r in states.visit(key, write=False)]
    numbers, counts = torch.cat(found).unique(return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def tries(work: Callable[[], object]) -> bool:
    try:
        work()
    except OffloadError:
        return False
    return True


def test_with_less_memory_than_agreed_it_makes_do(
    opened: Callable[..., DiskStates], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, given = state_blocks.Frame, 0

    def few(nbytes: int) -> state_blocks.Frame:
        nonlocal given
        given += 1
        if given > 2:
            raise OffloadError("the operating system refused")
        return real(nbytes)

    monkeypatch.setattr(state_blocks, "Frame", few)
    states = opened(Disk(), kept=4, buffers=6)
    assert in_time(lambda: isinstance(train(states), list)) is True
    assert states.facts().limit_bytes <= 2 * BLOCK
    monkeypatch.setattr(state_blocks, "Frame", real)
    wanted = train(opened(Disk()))
    found = [p.clone() for k in SIZES for r in states.visit(k, write=False) for p in r.parts]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted[len(SIZES) :], strict=True))


def test_without_any_memory_it_is_an_error(
    opened: Callable[..., DiskStates], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(nbytes: int) -> state_blocks.Frame:
        raise OffloadError("the operating system refused")

    states = opened(Disk())
    states.add(0, GRAIN, [F32, F32])
    with monkeypatch.context() as patch:
        patch.setattr(state_blocks, "Frame", none)
        found = in_time(lambda: fill(states, 0, 1))
        assert isinstance(found, OffloadError) and "refused" in str(found)
    fill(states, 0, 1)
    assert value(states, 0) == 1


def test_without_threads_it_is_an_error(
    opened: Callable[..., DiskStates], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    states = opened(Disk())
    states.add(0, GRAIN, [F32, F32])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OffloadError, match=r"cannot be started .*ulimit"):
            fill(states, 0, 1)
    fill(states, 0, 1)
    assert value(states, 0) == 1
