"""States on disk that are closed, dropped, collected or forked leave nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_states_made import BLOCK, F32, Make, count, files_open, making, threads, values

from offcompile.ir import OffloadError
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.states.disk_states import DiskStates
from offcompile.runtime.states.state_blocks import GRAIN

pytestmark = pytest.mark.usefixtures("on_a_disk")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from making(tmp_path)


# -- an end ----------------------------------------------------------------------------------------


def test_close_leaves_no_thread_file_or_memory(make: Make) -> None:
    before = files_open()
    states = make(4 * BLOCK)
    states.add(0, 20 * GRAIN, [F32, F32])
    states.expect([0])
    count(states, 0)
    frame = next(states.visit(0, write=False)).parts[0]
    kept = weakref.ref(frame.untyped_storage())
    states.close()
    states.close()
    assert not threads() and files_open() == before
    del frame
    gc.collect()
    assert kept() is None
    with pytest.raises(OffloadError, match="closed"):
        states.visit(0)


def test_a_store_that_is_dropped_goes_by_itself(tmp_path: Path) -> None:
    before = files_open()
    states = DiskStates([tmp_path], block_bytes=BLOCK, small_bytes=0)
    states.add(0, 20 * GRAIN, [F32, F32])
    count(states, 0)
    dead, running = weakref.ref(states), threads()
    del states
    for thread in running:  # they end by themselves
        thread.join(30)
    gc.collect()
    assert dead() is None and files_open() == before


@pytest.mark.parametrize("where", ["reader", "writer", "inside"])
def test_garbage_collection_may_close_it_from_anywhere(make: Make, where: str) -> None:
    before = files_open()
    closed = threading.Event()

    def call(what: str, real: Callable[..., int]) -> Callable[..., int]:
        def moved(*given: object) -> int:
            if what == where and not closed.is_set():
                states.close()
                closed.set()
            return real(*given)

        return moved

    files = Files(preadv=call("reader", os.preadv), pwritev=call("writer", os.pwritev))
    states = make(files=files)
    states.add(0, 4 * GRAIN, [F32, F32])
    if where == "inside":
        count(states, 0)
        with states._lock:
            states.close()
    else:
        with pytest.raises(OffloadError, match="closed"):
            for _ in range(3):
                count(states, 0)
                states.settle()
        assert closed.wait(30)
    for thread in threads():
        thread.join(30)
    assert not threads()
    states.close()
    assert files_open() == before


def test_open_visits_of_a_closed_store_fail_and_touch_nothing(make: Make) -> None:
    states = make()
    states.add(0, 8 * GRAIN, [F32, F32])
    visit = states.visit(0)
    part = next(visit).parts[0]
    states.close()
    part.fill_(1)  # still memory
    with pytest.raises(OffloadError, match="closed"):
        next(visit)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_part_in_it(make: Make) -> None:
    states = make(2 * BLOCK)
    states.add(0, 20 * GRAIN, [F32, F32])
    states.expect([0])
    visit = states.visit(0)
    next(visit).parts[0].fill_(1)
    child = os.fork()
    if not child:
        code = 1
        try:
            visit.close()  # type: ignore[attr-defined]
            try:
                states.visit(0)
            except OffloadError as error:
                code = 0 if "forked" in str(error) else 2
            states.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    for r in visit:
        r.parts[0].fill_(1)
    assert values(states, 0)[0].unique().tolist() == [1.0]
