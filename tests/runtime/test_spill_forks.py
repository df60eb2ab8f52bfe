"""A store of spill files and fork: the child is told, and the parent goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from spill_files import descriptors, filled

from offcompile.ir import OffloadError
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.disk.spill_space import Extent
from offcompile.runtime.memory.arena import Arena

pytestmark = pytest.mark.usefixtures("on_a_disk")
MIB = 1 << 20
PAGE = 4096
linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(40 * MIB)


@linux
def test_a_forked_child_is_told_and_its_parent_goes_on(tmp_path: Path, arena: Arena) -> None:
    with SpillStore([tmp_path]) as store:
        extent, view, back = store.allocate(8 * MIB), filled(arena, 8 * MIB), arena.block(8 * MIB)
        begun, stop = threading.Event(), threading.Event()
        rounds = [0]
        wrong: list[int] = []

        def work() -> None:
            while not stop.is_set():
                store.write(extent, 0, view)
                store.read(extent, 0, back.view)
                rounds[0] += 1
                begun.set()
                if back.view != view:
                    wrong.append(rounds[0])

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        try:
            for _ in range(10):
                child = os.fork()
                if not child:
                    os._exit(child_of(store, extent, view))
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finally:
            stop.set()
            thread.join()
        assert not wrong


def test_a_fork_waits_for_what_runs_and_holds_back_what_comes(tmp_path: Path, arena: Arena) -> None:
    entered, finish = threading.Event(), threading.Event()
    calls: list[str] = []

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        entered.set()
        finish.wait()
        calls.append("written")
        return os.pwritev(descriptor, buffers, offset)

    with SpillStore([tmp_path], files=Files(pwritev=pwritev)) as store:
        extent, view = store.allocate(PAGE), filled(arena, PAGE)

        def fork() -> None:
            store.before_fork()
            calls.append("forked")
            store.after_fork(in_child=False)

        first = threading.Thread(target=store.write, args=(extent, 0, view))
        forking = threading.Thread(target=fork)
        first.start()
        entered.wait()
        forking.start()
        forking.join(0.05)
        assert forking.is_alive()
        finish.set()
        first.join()
        forking.join()
        assert calls == ["written", "forked"]
        store.before_fork()
        second = threading.Thread(target=store.write, args=(extent, 0, view))
        second.start()
        second.join(0.05)
        assert calls == ["written", "forked"]
        store.after_fork(in_child=False)
        second.join()
        assert calls == ["written", "forked", "written"]


def child_of(store: SpillStore, extent: Extent, view: memoryview) -> int:
    """0 when a child is refused, can let go of what it inherited, and holds no file open."""
    for use in (lambda: store.allocate(1), lambda: store.read(extent, 0, view)):
        try:
            use()
        except OffloadError as error:
            if f"used in {os.getpid()}, forked from" not in str(error):
                return 2
        else:
            return 3
    if descriptors(store.directories[0]):
        return 4
    store.release(extent)
    store.close()
    return 0
