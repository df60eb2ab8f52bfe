"""What the runtime did: counts and amounts for people, single events for tests and timelines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

now_ns = time.perf_counter_ns


@dataclass
class Tally:
    """What one runtime has done since the last reset. Changed under that runtime's lock.

    Every wait for a load is one of: `prefetch_hits` (the data was there), or late. `late` counts
    waits of both directions that had to wait; `demand_misses` are those of them that found the
    copy still queued and moved it to the front. `bytes_out` and `bytes_in` are what crossed,
    packed by a codec or not; `raw_bytes_*` what it is on the device.

    Where graphs share a budget: what a graph asked for of what plans let leave was on the device
    still, or again (`keeper_hits`), on its way there (`keeper_late`), or neither (`keeper_misses`:
    DeepUM's page faults). `keeper_wasted_bytes` were fetched ahead and left again unused.
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


# what stands now, asked of each live runtime; the sum is reported
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
#: of these the largest of all runtimes is reported: those of one device look at the same memory
_LARGEST = {"device_peak_bytes", "heap_waste_bytes", "heap_trims", "heap_trim_us"}

_lock = threading.Lock()
_tallies: list[Tally] = []
_gauges: list[Callable[[], Mapping[str, int]]] = []


def new_tally() -> Tally:
    """A tally that `counters()` includes from now on, also after its runtime has closed."""
    tally = Tally()
    with _lock:
        _tallies.append(tally)
    return tally


def add_gauges(read: Callable[[], Mapping[str, int]]) -> Callable[[], None]:
    """Let `counters()` ask `read` for the present state; returns what takes it out again."""
    with _lock:
        _gauges.append(read)

    def remove() -> None:
        with _lock:
            if read in _gauges:
                _gauges.remove(read)

    return remove


def counters() -> dict[str, int | float]:
    """Everything the runtimes of this process have done since the start or the last reset.

    `spill_bytes_written` is per open runtime and is not reset; `live_tickets`, `spill_bytes`,
    `host_bytes`, `arena_bytes`, `in_flight_bytes`, `keeper_bytes` and `keeper_table_bytes` say
    what stands now. `device_peak_bytes` is the most that has been seen of the device: on CUDA
    by torch's allocator, on the CPU what a compiled step that moves had of its budget, looked
    at as it ran. `heap_waste_bytes` is what of that lay in holes between tensors (on CUDA: the
    most that torch's allocator has kept beyond the most it had handed out); `heap_trims` and
    `heap_trim_us` how often free memory was given back to the system to keep the budget, and
    how long that took, since the process began. `keeper_bytes` is what is kept between graphs
    now, and `keeper_table_bytes` what the tables take that say which graph comes next, and what
    it uses.
    """
    with _lock:
        tallies, gauges = tuple(_tallies), tuple(_gauges)
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
    """Set everything that adds up back to zero; what stands now is not touched."""
    zero = Tally()
    with _lock:
        for tally in _tallies:
            for f in fields(Tally):
                setattr(tally, f.name, getattr(zero, f.name))


def forget_parent() -> None:
    """In a forked child: start with nothing, and with a lock that nobody holds."""
    global _lock
    _lock = threading.Lock()
    _tallies.clear()
    _gauges.clear()
    _recordings.clear()


# -- single events -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    `kind` is a movement op (start_out, wait_out, start_load, wait_load; `time_ns` is when it was
    called, `duration_ns` what it blocked the caller) or the work of a lane (begin_out, end_out,
    begin_load, end_load; `end_*` carries the duration).
    """

    kind: str
    tag: str
    lane: str
    time_ns: int
    duration_ns: int = 0


@dataclass
class Recording:
    events: list[Event] = field(default_factory=list)

    def kinds(self, *kinds: str) -> list[Event]:
        """The events of these kinds, in the order in which they were recorded."""
        return [event for event in self.events if event.kind in kinds]

    def ops(self) -> list[tuple[str, str]]:
        """(kind, tag) of the movement ops, in the order in which the program ran them."""
        called = self.kinds("start_out", "wait_out", "start_load", "wait_load")
        return [(event.kind, event.tag) for event in called]


_recordings: list[Recording] = []


@contextmanager
def record() -> Iterator[Recording]:
    """Collect the events of all runtimes of this process while the block runs."""
    recording = Recording()
    _recordings.append(recording)
    try:
        yield recording
    finally:
        # by identity: two empty recordings are equal
        _recordings[:] = [r for r in _recordings if r is not recording]


def note(kind: str, tag: str, lane: str, time_ns: int, duration_ns: int = 0) -> None:
    """Record an event if anybody listens."""
    if _recordings:
        event = Event(kind, tag, lane, time_ns, duration_ns)
        for recording in tuple(_recordings):
            recording.events.append(event)
