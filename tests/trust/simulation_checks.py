"""One seed, one order: whole steps on simulated hardware, and drawn plans on the real runtime."""

from __future__ import annotations

import errno
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from offcompile.runtime.base.threads import TaskQueue
from trust import schedules, simulation
from trust.interleaving import Interleaving, Stuck
from trust.simulated_disk import SimulatedDisk

SEEDS = 20


def test_whole_steps_under_seeds() -> None:
    """Right numbers, or a named error and then right numbers; no race, nothing left.

    And an order that is taken away is found, whichever it is.
    """
    for row in simulation.rows(SEEDS / simulation.SEEDS, seed=0):
        assert row.holds, row


def test_a_seed_is_one_order() -> None:
    for seed in range(12):
        first, again = simulation.simulate(seed), simulation.simulate(seed)
        assert first == again
        assert len(first.log) > 40
    assert simulation.simulate(0).log != simulation.simulate(1).log


@pytest.mark.parametrize("kind", simulation.KINDS)
def test_each_fault_is_met(kind: str) -> None:
    met = [simulation.simulate(seed, kind) for seed in range(6)]
    assert [o.complaints() for o in met] == [[]] * 6
    assert any(o.hit for o in met) == (kind != "none")


def test_a_failure_says_how_it_is_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "PLANTS", {})
    monkeypatch.setattr(simulation.SimulatedDisk, "_move", lambda *_: 0)
    with pytest.raises(AssertionError, match=r"seed 0 \(python -m trust simulation --seed 0 --s"):
        simulation.rows(12 / simulation.SEEDS, seed=0)


def test_drawn_plans_on_the_real_runtime() -> None:
    counts = schedules.all_plays(15, seed=0)
    assert counts.equal == counts.ran >= 12
    assert counts.simulated >= 4
    assert counts.moves > 250 and counts.recomputes > 20


# -- what the long runs stand on -------------------------------------------------------------------


def threads_of(run: Interleaving) -> Any:
    return run._threading()


def count_up(run: Interleaving, locked: bool) -> int:
    """The count after two threads have added one three times each."""
    shim = threads_of(run)
    lock, counts = shim.Lock(), [0]

    def work() -> None:
        for _ in range(3):
            with lock if locked else nullcontext():
                run.touch(64, 8, True, "count")
                seen = counts[0]
                run.point("between")
                counts[0] = seen + 1

    with run.running():
        threads = [shim.Thread(target=work, name=f"t{n}") for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return counts[0]


def test_accesses_that_nothing_orders_are_races_whatever_the_order() -> None:
    lost = 0
    for seed in range(60):
        run = Interleaving(seed)
        assert count_up(run, locked=True) == 6 and run.races == []
        run = Interleaving(seed)
        lost += count_up(run, locked=False) < 6
        assert run.races
    assert 0 < lost < 60


def test_who_waits_for_ever_is_told() -> None:
    run = Interleaving(0)
    shim = threads_of(run)
    event = shim.Event()
    with pytest.raises(Stuck, match="main waits for an event"), run.running():
        event.wait()
    timed = Interleaving(0)
    with timed.running():
        assert not threads_of(timed).Event().wait(3.0)
    assert timed.now_s == 3.0


def test_the_runtime_uses_the_threads_of_a_run_only_inside_of_it() -> None:
    run = Interleaving(0)
    done: list[int] = []
    with run.running():
        queue = TaskQueue("one")
        task = queue.add(lambda: done.append(len(run.tasks)))
        task.wait()
        queue.close()
    assert done == [2] and len(run.tasks) == 1
    assert isinstance(TaskQueue("two")._changed, threading.Condition)


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC", "torn", "short", "nothing", None])
def test_a_simulated_disk_does_what_it_is_told_once(fault: str | None) -> None:
    points: list[str] = []
    disk = SimulatedDisk("disk", points.append, lambda *_: None)
    disk.faults = {("write", 1): fault} if fault else {}
    page, back = np.full(8192, 7, np.uint8), np.zeros(8192, np.uint8)
    files = disk.files
    assert files.pwritev(3, [page.data], 0) == 8192
    if fault in ("short", "nothing", None):
        moved = {"short": 4096, "nothing": 0, None: 8192}[fault]
        assert files.pwritev(3, [(page + 1).data], 0) == moved
    else:
        with pytest.raises(OSError) as raised:
            files.pwritev(3, [(page + 1).data], 0)
        assert raised.value.errno == getattr(errno, "EIO" if fault == "torn" else fault)
        moved = 4096 if fault == "torn" else 0
    assert files.preadv(3, [back.data], 0) == 8192
    assert (back[:moved] == 8).all() and (back[moved:] == 7).all()
    assert disk.hit == ([f"disk write {fault}"] if fault else []) and len(points) >= 6
    assert files.pwritev(3, [page.data], 0) == 8192
