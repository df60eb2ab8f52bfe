"""Records the runtime's work: counters for people, single events for tests and timelines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

now_ns = time.perf_counter_ns


@dataclass
class Tally:
    """Counts the work of one runtime since the last reset. Changed under that runtime's lock.

    A wait for a load counts either as one of `prefetch_hits` (the data was there) or as late.
    `late` counts the waits of both directions that blocked; `demand_misses` counts those of them
    that found the copy still queued and moved it to the front. `bytes_out` and `bytes_in` count
    the bytes transferred, packed by a codec or not; `raw_bytes_*` count their size on the device.

    The `keeper_*` counters apply where graphs share a budget. When a graph asks for an evicted
    tensor, the tensor is on the device still or again (`keeper_hits`), on its way there
    (`keeper_late`), or neither (`keeper_misses`: DeepUM's page faults). `keeper_wasted_bytes`
    counts the bytes that were prefetched and evicted again unused.
    """

    moves: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    raw_bytes_out: int = 0
    raw_bytes_in: int = 0
    direct_reads: int = 0
    demand_misses: int = 0
    prefetch_hits: int = 0
    late: int = 0
    wait_us: float = 0.0
    in_flight_peak_bytes: int = 0
    keeper_hits: int = 0
    keeper_misses: int = 0
    keeper_late: int = 0
    keeper_wasted_bytes: int = 0


# present amounts, read from each live runtime and reported as a sum
GAUGES = (
    "live_tickets",
    "spill_bytes",
    "spill_bytes_written",
    "host_bytes",
    "arena_bytes",
    "in_flight_bytes",
    "keeper_bytes",
    "keeper_table_bytes",
    "device_peak_bytes",
    "heap_waste_bytes",
    "heap_trims",
    "heap_trim_us",
)
#: reported as the maximum over all runtimes: runtimes of one device see the same memory
_LARGEST = {"device_peak_bytes", "heap_waste_bytes", "heap_trims", "heap_trim_us"}


class _Records:
    """The tallies and gauges of every runtime, and the recordings that are open."""

    def __init__(self) -> None:
        self.start_afresh()

    def start_afresh(self) -> None:
        self.lock = threading.Lock()
        self.tallies: list[Tally] = []
        self.gauges: list[Callable[[], Mapping[str, int]]] = []
        self.recordings: list[CounterRecording] = []


# per process, since `counters()` reports on all runtimes, those closed included
_records = _Records()


def new_tally() -> Tally:
    """Create a tally that `counters()` includes from now on, even after its runtime has closed."""
    tally = Tally()
    with _records.lock:
        _records.tallies.append(tally)
    return tally


def add_gauges(read: Callable[[], Mapping[str, int]]) -> Callable[[], None]:
    """Let `counters()` read the present state from `read`; returns a function that removes it."""
    records = _records
    with records.lock:
        records.gauges.append(read)

    def remove() -> None:
        with records.lock:
            if read in records.gauges:
                records.gauges.remove(read)

    return remove


def counters() -> dict[str, int | float]:
    """Returns the work of all runtimes of this process since the start or the last reset.

    `spill_bytes_written` is per open runtime and is not reset; `live_tickets`, `spill_bytes`,
    `host_bytes`, `arena_bytes`, `in_flight_bytes`, `keeper_bytes` and `keeper_table_bytes` are
    present amounts. `device_peak_bytes` is the peak device memory seen: on CUDA by torch's
    allocator, on the CPU the part of its budget that a compiled step with offloading used,
    sampled as it ran. `heap_waste_bytes` is the part of the peak that lay in holes between
    tensors (on CUDA: the peak reserved by torch's allocator minus the peak it had handed out).
    `heap_trims` and `heap_trim_us` say how often free memory was returned to the system to keep
    the budget, and how long that took, since the process began. `keeper_bytes` are the bytes kept
    between graphs now; `keeper_table_bytes` is the size of the tables that predict the next graph
    and the tensors that it uses.
    """
    with _records.lock:
        tallies, gauges = tuple(_records.tallies), tuple(_records.gauges)
    report: dict[str, int | float] = {f.name: 0 for f in fields(Tally)}
    for tally in tallies:
        for f in fields(Tally):
            report[f.name] += getattr(tally, f.name)
    for name in GAUGES:
        report[name] = 0
    for read in gauges:
        for name, value in read().items():
            report[name] = max(report[name], value) if name in _LARGEST else report[name] + value
    return report


def reset_counters() -> None:
    """Set all cumulative counters back to zero; present amounts are not touched."""
    zero = Tally()
    with _records.lock:
        for tally in _records.tallies:
            for f in fields(Tally):
                setattr(tally, f.name, getattr(zero, f.name))


def forget_parent() -> None:
    """Clear everything in a forked child, and replace the lock by one that nobody holds."""
    _records.start_afresh()


# -- single events -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """One event.

    `kind` is a movement op (start_out, wait_out, start_load, wait_load; `time_ns` is when it was
    called, `duration_ns` how long it blocked the caller) or the work of a lane (begin_out,
    end_out, begin_load, end_load; `end_*` carries the duration).
    """

    kind: str
    tag: str
    lane: str
    time_ns: int
    duration_ns: int = 0


@dataclass
class CounterRecording:
    events: list[Event] = field(default_factory=list)

    def kinds(self, *kinds: str) -> list[Event]:
        """Returns the events of these kinds in the order in which they were recorded."""
        return [event for event in self.events if event.kind in kinds]

    def ops(self) -> list[tuple[str, str]]:
        """Returns (kind, tag) of each movement op in the order in which the program ran them."""
        called = self.kinds("start_out", "wait_out", "start_load", "wait_load")
        return [(event.kind, event.tag) for event in called]


@contextmanager
def record() -> Iterator[CounterRecording]:
    """Collect the events of all runtimes of this process while the block runs."""
    recording = CounterRecording()
    _records.recordings.append(recording)
    try:
        yield recording
    finally:
        # by identity: two empty recordings are equal
        open_ones = _records.recordings
        open_ones[:] = [one for one in open_ones if one is not recording]


def note(kind: str, tag: str, lane: str, time_ns: int, duration_ns: int = 0) -> None:
    """Record an event if any recording is open."""
    if _records.recordings:
        event = Event(kind, tag, lane, time_ns, duration_ns)
        for recording in tuple(_records.recordings):
            recording.events.append(event)
