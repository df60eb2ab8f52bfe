"""Measures what the program itself holds between two graphs of a step, such as its loss.

A loss in eager mode, or a module between compiled blocks, makes tensors of its own while what
graphs have saved waits for backward. They come out of the same budget, and no plan knows them. So
the most that they come to is measured in each gap, from the end of one execution to the start of
the next. Plans leave that much room at this place from then on, and so does the keeper, for which a
gap that takes much is one more execution.

On the CPU torch's allocator counts what this thread allocates (`tensor_memory`), in every gap. On a
card its allocator has a peak that others may want to read, so only the first few gaps are measured.

A small graph may run in such a gap, too: transformers computes some losses in a graph of their own.
So for each forward it is also noted how much graphs and the program held until its backward began,
and what newer forwards would leave if nothing moved.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.interface import Device
from offcompile.runtime.device.streams import Streams
from offcompile.runtime.memory.malloc.heap import Guard, heap
from offcompile.runtime.moves.activation_cache import ActivationCache

#: gaps of one kind whose largest counts
RECENT_GAPS = 4
#: gaps of one kind that are measured on a card
MEASURED_ON_CARD = 3
#: half and sizes of the execution before a gap
Place: TypeAlias = tuple[str, tuple[int, ...]]


class GapPeaks:
    """The most held in the gaps behind the executions of one graph with one set of weights."""

    __slots__ = ("_amid", "_most")

    def __init__(self) -> None:
        self._most: dict[Place, deque[int]] = {}
        #: by sizes: the most held between the two halves
        self._amid: dict[tuple[int, ...], deque[int]] = {}

    def most_bytes(self, place: Place) -> int:
        """The most held in the recent gaps at this place."""
        return max(self._most.get(place, ()), default=0)

    def times(self, place: Place) -> int:
        """How often it was measured lately."""
        return len(self._most.get(place, ()))

    def note(self, place: Place, nbytes: int) -> None:
        self._most.setdefault(place, deque(maxlen=RECENT_GAPS)).append(nbytes)

    def amid_bytes(self, sizes: tuple[int, ...]) -> int | None:
        """The most that the program and other graphs held between the two halves lately, for these
        sizes or, if they are new, for any. None if no backward has come."""
        recent = [self._amid[sizes]] if sizes in self._amid else self._amid.values()
        return max((nbytes for some in recent for nbytes in some), default=None)

    def note_amid(self, sizes: tuple[int, ...], nbytes: int) -> None:
        self._amid.setdefault(sizes, deque(maxlen=RECENT_GAPS)).append(nbytes)


class Waiting(Protocol):
    """A forward that waits for its backward."""

    waiting: bool
    #: what it would have left on the device if nothing had moved
    full_bytes: int
    #: the most held so far while it waits, without what it has left itself
    amid_bytes: int


class _Meter(ABC):
    """Measures the most that is allocated since `begin`, beyond what there was then."""

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def most_bytes(self) -> int: ...


class _HeapMeter(_Meter):
    """Counts what this thread takes from malloc: lanes, which fill the keeper, have their own."""

    def __init__(self, guard: Guard) -> None:
        self._guard, self._thread = guard, 0
        self.begin()

    def begin(self) -> None:
        self._thread = threading.get_ident()
        self._guard.count()

    def most_bytes(self) -> int:
        return self._guard.most_counted() if threading.get_ident() == self._thread else 0


class _CardMeter(_Meter):
    def __init__(self, streams: Streams) -> None:
        self._streams, self._began_bytes = streams, 0
        self.begin()

    def begin(self) -> None:
        self._streams.reset_peak()
        self._began_bytes = self._streams.memory().allocated_bytes

    def most_bytes(self) -> int:
        return self._streams.memory().peak_allocated_bytes - self._began_bytes


def _meter(device: Device, times: int) -> _Meter | None:
    """Begin to measure; None if that cannot be, or if a place was measured often enough."""
    if isinstance(device, CudaDevice):
        return _CardMeter(device.streams) if times < MEASURED_ON_CARD else None
    guard = heap().guard
    return None if guard is None else _HeapMeter(guard)


@dataclass(eq=False)
class _Gap:
    """The gap that lasts. `meter`: None if it is not measured, or no more. `paused`: the keeper for
    which it is an execution."""

    peaks: GapPeaks
    place: Place
    meter: _Meter | None
    paused: weakref.ref[ActivationCache] | None
    #: the most that was measured before the meter was taken away
    took_bytes: int | None = None

    def most_bytes(self) -> int | None:
        """The most that it has taken, as far as it is known."""
        return self.took_bytes if self.meter is None else self.meter.most_bytes()


class OutsideTensors:
    """Measures the gaps between the executions on one device."""

    def __init__(self) -> None:
        self._gap: _Gap | None = None
        #: the most held in a gap of this step so far, None if it has had none, and of the last ones
        self._now_bytes: int | None = None
        self._steps: deque[int] = deque((0,), maxlen=RECENT_GAPS)
        #: forwards that wait, oldest first
        self._waiting: list[weakref.ref[Waiting]] = []

    @property
    def most_bytes(self) -> int:
        """The most held in a gap of this step and the last ones."""
        return max(self._now_bytes or 0, *self._steps)

    def begins(self, peaks: GapPeaks, place: Place, device: Device) -> None:
        """Begin a gap in a step, behind an execution."""
        self._gap = _Gap(peaks, place, _meter(device, peaks.times(place)), None)

    def pauses(
        self, keeper: ActivationCache, name: Hashable, room_bytes: int, backward: bool
    ) -> None:
        """Begin a gap that takes so much that it is an execution for the keeper, which holds no
        more than `room_bytes` meanwhile."""
        keeper.enter(name, room_bytes, backward=backward)
        assert self._gap is not None
        self._gap.paused = weakref.ref(keeper)
        if self._gap.meter is not None:
            self._gap.meter.begin()

    def ends(self, in_step: bool = True) -> None:
        """End the gap: an execution begins, in the same step or in the next."""
        gap, self._gap = self._gap, None
        if gap is not None:
            if in_step and (took_bytes := gap.most_bytes()) is not None:
                gap.peaks.note(gap.place, took_bytes)
            if in_step:
                most_bytes = gap.peaks.most_bytes(gap.place)
                self._now_bytes = max(self._now_bytes or 0, most_bytes)
                self.holds(most_bytes)
            keeper = None if gap.paused is None else gap.paused()
            if keeper is not None:
                keeper.leave()
        if not in_step and self._now_bytes is not None:  # evaluations have no gaps
            self._steps.append(self._now_bytes)
            self._now_bytes = None

    def waits(self, forward: Waiting) -> None:
        """Note that a forward waits for its backward from now on."""
        self._waiting.append(weakref.ref(forward))

    def holds(self, nbytes: int, own: Waiting | None = None) -> None:
        """Note that so much is held now, without what waiting forwards have left. `own`: the one
        whose backward begins; its plan counts what it left."""
        found = [(ref, one) for ref in self._waiting if (one := ref()) is not None and one.waiting]
        self._waiting = [ref for ref, _ in found]
        for _, one in reversed(found):
            if one is not own:
                one.amid_bytes = max(one.amid_bytes, nbytes)
                nbytes += one.full_bytes

    def compiles(self) -> None:
        """Note that a graph is about to be compiled in the gap that lasts, which takes memory once:
        what the program has taken before counts, and no more is measured."""
        gap = self._gap
        if gap is not None:
            gap.took_bytes, gap.meter = gap.most_bytes(), None
