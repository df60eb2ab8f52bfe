"""The mover on the CPU device: data, lifetimes, bounds, failures, forks."""

from __future__ import annotations

import errno
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.counters import counters, record, reset_counters
from offcompile.runtime.device import tickets
from offcompile.runtime.device.cpu import STAGED_BYTES, CpuDevice
from offcompile.runtime.disk.directories import default_directory
from offcompile.runtime.disk.spill import SpillFull, SpillStore
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.memory.arena import Arena
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.registry import RuntimeSettings, close_all, runtime_for, runtimes
from offcompile.runtime.moves.saved import Load, Saved

ROOT = Path(__file__).parents[2]
KIB = 1024


class Disk:
    """The real calls, behind a gate for writes and with errors on demand."""

    def __init__(self) -> None:
        self.writing, self.open = threading.Event(), threading.Event()
        self.open.set()
        self.fail: OSError | None = None

    def pwritev(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        self.writing.set()
        self.open.wait()
        if self.fail is not None:
            raise self.fail
        return Files().pwritev(descriptor, views, offset)


class Bench:
    """A mover on stores of its own, and short names for what graphs do."""

    def __init__(self, in_flight_bytes: int | None = None, **capacities: int | None) -> None:
        self.disk = Disk()
        self.stores = {
            tier: SpillStore(
                [default_directory()], capacity, files=Files(pwritev=self.disk.pwritev)
            )
            for tier, capacity in (capacities or {"host": None}).items()
        }
        self.device = CpuDevice(Arena(0), self.stores, chunk_bytes=64 * KIB)
        self.mover = Mover(self.device, in_flight_bytes)

    def out(self, x: torch.Tensor, tag: str = "x", tier: str = "host") -> torch.Tensor:
        return self.mover.start_out(x, tag, tier, "out")

    def wait_out(self, ticket: torch.Tensor) -> None:
        self.mover.wait_out(tickets.find(ticket, Saved))

    def load(self, ticket: torch.Tensor, tag: str = "x") -> tuple[torch.Tensor, torch.Tensor]:
        return self.mover.start_load(tickets.find(ticket, Saved), tag, "in")

    def wait_load(self, load: torch.Tensor) -> None:
        self.mover.wait_load(tickets.find(load, Load))

    def shut(self) -> None:
        """From now on, writes wait, the first of them begun."""
        self.disk.writing.clear()
        self.disk.open.clear()

    def used_bytes(self) -> int:
        self.mover.sweep()
        self.device.drain()
        self.mover.sweep()
        return sum(store.used_bytes for store in self.stores.values())

    def close(self) -> None:
        self.disk.open.set()
        self.mover.close()
        for store in self.stores.values():
            store.close()


@pytest.fixture
def benches() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(in_flight_bytes: int | None = None, **capacities: int | None) -> Bench:
        made.append(Bench(in_flight_bytes, **capacities))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture
def bench(benches: Callable[..., Bench]) -> Bench:
    return benches()


def kib(n: int, value: int = 1) -> torch.Tensor:
    return torch.full((n * KIB,), value, dtype=torch.uint8)


@pytest.mark.parametrize("skip", [0, 1, 16, 64, 4096 - 64], ids=lambda n: f"skip{n}")
@pytest.mark.parametrize(
    "nbytes", [1, 4095, 4096, 4097, STAGED_BYTES, STAGED_BYTES + 1, 700_001, 1 << 20]
)
def test_bytes_come_back_wherever_they_lay(bench: Bench, nbytes: int, skip: int) -> None:
    room = torch.randint(0, 256, (nbytes + 8192,), dtype=torch.uint8)
    # an own storage that starts `skip` bytes into a page
    start = -room.data_ptr() % 4096 + skip
    x = torch.from_numpy(room.numpy()[start : start + nbytes])
    ticket = bench.out(x)
    bench.wait_out(ticket)
    want = x.clone()
    room.zero_()
    buffer, load = bench.load(ticket)
    bench.wait_load(load)
    assert torch.equal(buffer, want)
    assert buffer.storage_offset() == 0
    assert buffer.untyped_storage().nbytes() == nbytes
    assert nbytes <= STAGED_BYTES or buffer.data_ptr() % 16 == 0


def test_a_tensor_that_does_not_fill_its_memory_is_refused(bench: Bench) -> None:
    with pytest.raises(OffloadError, match=r"wide cannot move.*stride \(8, 2\)"):
        bench.out(torch.zeros(4, 8)[:, ::2], "wide")
    bench.wait_out(bench.out(torch.zeros(4, 8).t()))


def test_a_slot_lives_as_long_as_its_ticket(bench: Bench) -> None:
    ticket = bench.out(kib(64, 7))
    bench.wait_out(ticket)
    for _ in range(3):
        buffer, load = bench.load(ticket)
        bench.wait_load(load)
        assert int(buffer[-1]) == 7
    alias = ticket.detach()
    del ticket
    assert bench.used_bytes() == 64 * KIB
    del alias
    assert bench.used_bytes() == 0
    del buffer, load
    assert bench.mover._gauges() == {"live_tickets": 0, "in_flight_bytes": STAGED_BYTES}


def test_two_loads_of_one_ticket_have_a_buffer_each(bench: Bench) -> None:
    ticket = bench.out(kib(4, 5))
    (one, first), (two, second) = bench.load(ticket), bench.load(ticket)
    bench.wait_load(first)
    one.zero_()
    bench.wait_load(second)
    assert int(two[0]) == 5


def test_a_load_outlives_the_ticket_it_came_from(bench: Bench) -> None:
    bench.shut()
    ticket = bench.out(kib(64, 7))
    buffer, load = bench.load(ticket)
    del ticket
    bench.disk.open.set()
    bench.wait_load(load)
    assert int(buffer[-1]) == 7
    assert bench.used_bytes() == 0


def test_what_nobody_wants_any_more_is_not_written(bench: Bench) -> None:
    bench.shut()
    running = bench.out(kib(4))
    bench.disk.writing.wait()
    queued = bench.out(kib(8))
    buffer, load = bench.load(queued)
    del running, queued, buffer, load
    bench.mover.sweep()
    bench.disk.open.set()
    assert bench.used_bytes() == 0
    assert bench.mover.tally.bytes_out == 4 * KIB
    assert bench.mover.tally.bytes_in == 0
    assert bench.mover._gauges() == {"live_tickets": 0, "in_flight_bytes": STAGED_BYTES}


def test_a_source_is_let_go_when_its_copy_is_complete(bench: Bench) -> None:
    died = threading.Event()
    x = tickets.telling(kib(64).numpy(), died.set)
    ticket = bench.out(x)
    del x
    bench.wait_out(ticket)
    assert died.is_set()


def test_a_demanded_load_overtakes_the_queue(bench: Bench) -> None:
    bench.shut()
    saved = [bench.out(kib(4, i), f"x{i}") for i in range(5)]
    bench.disk.writing.wait()
    loads = [bench.load(ticket, f"x{i}") for i, ticket in enumerate(saved)]
    with record() as recording:
        threading.Timer(0.01, bench.disk.open.set).start()
        bench.wait_load(loads[3][1])
        bench.device.drain()
    assert int(loads[3][0][0]) == 3
    done = [event.tag for event in recording.kinds("end_out")]
    assert done == ["x0", "x3", "x1", "x2", "x4"]
    assert next(event.tag for event in recording.kinds("end_load")) == "x3"
    tally = bench.mover.tally
    assert (tally.demand_misses, tally.late, tally.prefetch_hits) == (1, 1, 0)
    bench.wait_load(loads[0][1])
    assert (tally.demand_misses, tally.late, tally.prefetch_hits) == (1, 1, 1)
    assert tally.wait_us > 0


def test_a_full_tier_yields_to_the_next_and_the_last_one_says_so(
    benches: Callable[..., Bench],
) -> None:
    bench = benches(host=64 * KIB, disk=64 * KIB)
    kept = [bench.out(kib(64, 1), "a"), bench.out(kib(64, 2), "b")]
    assert [bench.stores[tier].used_bytes for tier in ("host", "disk")] == [64 * KIB] * 2
    with pytest.raises(SpillFull):
        bench.out(kib(64), "c")
    with pytest.raises(OffloadError, match=r"no tier 'moon'.*host, disk"):
        bench.out(kib(1), "d", "moon")
    for i, ticket in enumerate(kept, start=1):
        buffer, load = bench.load(ticket)
        bench.wait_load(load)
        assert int(buffer[0]) == i
    kept.clear()
    del buffer, load, ticket
    assert bench.used_bytes() == 0
    assert bench.mover._gauges()["live_tickets"] == 0
    bench.wait_out(bench.out(kib(64), "c"))


def test_a_failed_write_is_told_where_the_data_is_needed(bench: Bench) -> None:
    bench.disk.fail = OSError(errno.ENOSPC, "No space left on device")
    ticket = bench.out(kib(4), "block3.relu")
    buffer, load = bench.load(ticket, "block3.relu")
    place = str(default_directory())
    with pytest.raises(OffloadError, match="No space left") as told:
        bench.wait_out(ticket)
    for part in ("block3.relu (4096 bytes)", "copied out", place, "free space there"):
        assert part in str(told.value)
    with pytest.raises(OffloadError, match=r"loaded from .*\(it had not been written there\)"):
        bench.wait_load(load)
    bench.disk.fail = None
    good = bench.out(kib(4, 9))
    again, second = bench.load(good)
    bench.wait_load(second)
    assert int(again[0]) == 9
    del ticket, buffer, load, good, again, second, told
    gc.collect()
    assert bench.used_bytes() == 0


def test_outs_beyond_the_limit_wait_until_others_have_drained(
    benches: Callable[..., Bench],
) -> None:
    bench = benches(STAGED_BYTES + 100 * KIB)
    bench.shut()
    first = bench.out(kib(64))
    bench.disk.writing.wait()
    second: list[torch.Tensor] = []
    caller = threading.Thread(target=lambda: second.append(bench.out(kib(64))))
    caller.start()
    caller.join(0.05)
    assert not second
    bench.disk.open.set()
    caller.join()
    bench.wait_out(second[0])
    bench.wait_out(first)
    assert bench.mover.tally.in_flight_peak_bytes <= STAGED_BYTES + 100 * KIB


def test_no_caller_waits_for_what_only_it_can_free(benches: Callable[..., Bench]) -> None:
    bench = benches(STAGED_BYTES + 100 * KIB)
    # larger than the limit by itself
    ticket = bench.out(kib(512))
    bench.wait_out(ticket)
    held = []
    for _ in range(3):
        held.append(bench.load(ticket))
        bench.wait_load(held[-1][1])
    assert bench.mover._gauges()["in_flight_bytes"] == STAGED_BYTES + 3 * 512 * KIB
    bench.wait_out(bench.out(kib(64)))
    held.clear()
    assert bench.mover._gauges()["in_flight_bytes"] == STAGED_BYTES


@pytest.fixture
def interrupts() -> Iterator[None]:
    """An interrupt is one, also where a shell started the tests with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_wait_leaves_things_clean(bench: Bench) -> None:
    bench.shut()
    ticket = bench.out(kib(4))
    main = threading.main_thread().ident
    assert main is not None
    alarm = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        alarm.start()
        bench.wait_out(ticket)
    bench.disk.open.set()
    bench.wait_out(ticket)
    del ticket
    assert bench.used_bytes() == 0


def test_a_closed_mover_says_so(bench: Bench) -> None:
    ticket = bench.out(kib(4))
    bench.wait_out(ticket)
    bench.mover.close()
    with pytest.raises(OffloadError, match="closed"):
        bench.load(ticket)
    with pytest.raises(OffloadError, match="closed"):
        bench.out(kib(4))


def test_tickets_of_another_kind_or_origin_are_refused(bench: Bench) -> None:
    ticket = bench.out(kib(4))
    _, load = bench.load(ticket)
    with pytest.raises(OffloadError, match="a Saved, not for a Load"):
        bench.wait_load(ticket)
    with pytest.raises(OffloadError, match="stands for nothing"):
        bench.wait_out(torch.tensor([-1]))
    bench.wait_load(load)


# -- the registry --------------------------------------------------------------------------------


def test_equal_settings_share_a_runtime_until_it_is_closed() -> None:
    one = RuntimeSettings(chunk_bytes=1 << 20)
    assert RuntimeSettings.from_key(one.key) == one
    assert RuntimeSettings.from_key(one.key).key == one.key
    runtime = runtime_for(one.key)
    assert runtime_for(RuntimeSettings(chunk_bytes=1 << 20).key) is runtime
    assert runtime_for(RuntimeSettings().key) is not runtime
    close_all()
    assert runtimes() == ()
    assert runtime_for(one.key) is not runtime
    close_all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RuntimeSettings(target="moon"), "target 'moon'.*cpu"),
        (lambda: RuntimeSettings(host_bytes=0, disk_bytes=0), "nothing could move"),
        (lambda: RuntimeSettings(arena_bytes=-1), "arena_bytes is -1"),
        (lambda: RuntimeSettings.from_key("x"), "not the key"),
        (lambda: RuntimeSettings.from_key('{"speed":1}'), "unknown settings: speed"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OffloadError, match=message):
        make()


def test_counters_add_up_over_runtimes_and_start_again() -> None:
    close_all()
    runtime = runtime_for(RuntimeSettings().key)
    reset_counters()
    ticket = runtime.mover.start_out(kib(8), "x", "host", "out")
    runtime.mover.wait_out(tickets.find(ticket, Saved))
    found = counters()
    assert (found["moves"], found["bytes_out"], found["live_tickets"]) == (1, 8 * KIB, 1)
    assert found["spill_bytes"] == found["host_bytes"] == found["spill_bytes_written"] == 8 * KIB
    assert found["direct_reads"] == 0
    del ticket
    reset_counters()
    after = counters()
    assert (after["moves"], after["live_tickets"], after["spill_bytes"]) == (0, 0, 0)
    close_all()


FORK = """
import os, sys, torch
from offcompile.ir import OffloadError
from offcompile.runtime.device import tickets
from offcompile.runtime.moves.saved import Saved
from offcompile.runtime.moves.registry import RuntimeSettings, runtime_for

key = RuntimeSettings().key
def trip():
    mover = runtime_for(key).mover
    ticket = mover.start_out(torch.full((5000,), 3.0), "x", "host", "out")
    saved = tickets.find(ticket, Saved)
    mover.wait_out(saved)
    buffer, load = mover.start_load(saved, "x", "in")
    from offcompile.runtime.moves.saved import Load
    mover.wait_load(tickets.find(load, Load))
    assert buffer.view(torch.float32).sum() == 15000
    return ticket

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return torch.full((3,), i)

old = trip()
assert sum(int(b.sum()) for b in torch.utils.data.DataLoader(Numbers(), num_workers=1)) == 18
child = os.fork()
if child == 0:
    try:
        saved = tickets.find(old, Saved)
        try:
            saved.mover.start_load(saved, "x", "in")
        except OffloadError as error:
            assert "before fork" in str(error)
        else:
            os._exit(2)
        trip()
        del old, saved
        trip()
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
trip()
saved = tickets.find(old, Saved)
buffer, load = saved.mover.start_load(saved, "x", "in")
print("fine")
"""


def test_forked_children_start_afresh_and_the_parent_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "fine\n", done.stderr
    assert done.returncode == 0


def test_what_dies_after_the_close_is_forgotten_at_once(bench: Bench) -> None:
    ticket = bench.out(kib(4, 1), "late")
    bench.device.drain()
    (saved,) = (
        e for e in tickets._issued.entries.values() if isinstance(e, Saved) and e.tag == "late"
    )
    bench.mover.close()
    assert saved.ticket_alive
    del ticket
    assert not saved.ticket_alive and saved not in tickets._issued.entries.values()
