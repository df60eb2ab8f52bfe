"""The mover's interface to a device: memory, slots, copies on lanes, and waits for them.

Two kinds of device implement it. On a synchronous one (`cpu`) compute runs on the caller's thread,
and a wait blocks that thread. On an asynchronous one (`simulated`, and CUDA streams) compute is
queued too: `mark` records an event, `wait` makes the compute stream wait, and both return at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import torch

from offcompile.ir import OffloadError

from .lane_rates import LaneRates
from .move_events import MoveListener


class How(Enum):
    """The state in which a wait found its copy."""

    READY = "ready"
    LATE = "late"
    PROMOTED = "promoted"


@dataclass(frozen=True)
class Waited:
    how: How
    duration_ns: int


@dataclass(frozen=True)
class Label:
    """The name of a copy in messages and recordings; `direction` is `out` or `load`.

    `heard` is told when a lane has run the copy.
    """

    direction: str
    tag: str
    heard: MoveListener | None = field(default=None, compare=False, repr=False)


class Point:
    """Something that copies can be ordered after: a copy, or a mark in compute."""


class Copy(Point, ABC):
    """A copy that was issued. `error` is set if it has ended and failed.

    On a device whose waits do not block, compute may already have passed a load that fails later;
    the device then raises that error, naming the load, at its next wait.
    """

    error: BaseException | None = None
    #: True once somebody who waited for it has raised its error
    told = False

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True once the copy is over, successful or not, as far as the host can see."""


@dataclass(frozen=True)
class Filled:
    """Memory holds the data sent to it once `point` is reached; `version`: autograd's version."""

    point: Point
    version: int


class Slot(ABC):
    """Space for one tensor's bytes off the device."""

    nbytes: int
    tier: str
    #: True if a plan wants this tensor to stay in the slot
    planned: bool = False
    #: the last data sent here; see `Device.await_on_host`
    filled: Filled | None = None
    #: functions that must return before the slot is next used; see `Device.hold`
    holds: tuple[Callable[[], None], ...] = ()

    @property
    @abstractmethod
    def where(self) -> str:
        """The place, for messages: a directory, or a kind of memory."""

    @property
    def is_written(self) -> bool:
        """True if the tensor was written to on this rank alone, in memory that ranks have in
        common."""
        return False

    @property
    def crossed_bytes(self) -> int:
        """Bytes that the last copy transferred: less than `nbytes` if a codec packed it."""
        return self.nbytes

    @abstractmethod
    def free(self) -> None:
        """Release the space. Called once, when no copy that uses the slot is unfinished."""

    def forget(self) -> None:
        """Reset the state left by the previous tensor: the memory has a new owner."""
        self.planned, self.filled, self.holds = False, None, ()


class Device(ABC):
    name: str
    #: bytes moved by each lane and the time taken, from which lane speeds are derived
    rates: LaneRates

    @property
    def captures(self) -> bool:
        """True while the calling thread captures a graph, whose copies run at each replay."""
        return False

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Device memory that the lanes hold for themselves at the moment."""

    @abstractmethod
    def slot(self, source: torch.Tensor, tier: str, codec: str | None = None) -> Slot:
        """A slot for all bytes of `source` on `tier` or, if that is full, on a slower tier.

        With a codec, the slot has space for the codec's worst case, and copies to and from it pack
        and unpack. SpillFull if there is no space.
        """

    @abstractmethod
    def allocate(self, slot: Slot, freed: Callable[[], None]) -> torch.Tensor:
        """A flat uint8 tensor of `slot.nbytes` for a load from `slot`, at offset 0 of its storage.

        When the storage dies, `freed` is called and then the memory is released. `freed` runs
        inside a finalizer, on any thread: it must neither block nor take a lock.
        """

    def addressable(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Flat uint8 tensors on the host tier that ops of the device can use in place.

        They are uninitialized. New ones lie one after another, in the order given.
        """
        raise OffloadError(f"The {self.name} device has no host memory that ops can use in place.")

    def slot_of(self, tensor: torch.Tensor) -> Slot | None:
        """The slot that holds an `addressable` tensor's storage; None for any other tensor."""
        return None

    def clear(self, host: torch.Tensor) -> None:
        """Zero an `addressable` tensor, in compute's order."""
        host.zero_()

    def expect_scattered(self, host: torch.Tensor, scattered: bool) -> bool:
        """Advise whether ops will read only scattered rows of an `addressable` tensor in place.

        Returns True if that changed anything.
        """
        return False

    def keep_room(self, owner: object, nbytes: int) -> bool:
        """Cache up to `nbytes` of freed `addressable` memory for reuse, as long as `owner` lives.

        A second call replaces the first. Returns True if the device does so.
        """
        return False

    def bound_packing(self, owner: object, nbytes: int) -> None:  # noqa: B027
        """Limit each lane's device memory for packing, where possible, as long as `owner` lives.

        A second call replaces the first.
        """

    # -- reads and writes of `addressable` tensors by the host itself ------------------------------

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """An `addressable` tensor as a CPU tensor: the same memory, shape and strides.

        It does not keep the memory alive: keep `tensor` as long.
        """
        if tensor.device.type != "cpu":
            raise OffloadError(f"The {self.name} device has no host memory that lies on it.")
        return tensor.detach()

    def sent(self, host: torch.Tensor, point: Point | None) -> None:
        """Note that an `addressable` tensor holds its data once `point` is reached.

        Nobody can wait for a point of a graph: readers wait for all work that compute was given.
        """
        slot = None if self.captures else self.slot_of(host)
        if slot is not None:
            slot.filled = None if point is None else Filled(point, _version(host))

    def await_on_host(
        self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor] = ()
    ) -> Callable[[], None]:
        """Returns a function that blocks its caller, on any thread, until the host may touch these.

        read: wait until the data sent to these has arrived. If nothing else changed the tensor,
        compute may go on meanwhile; otherwise wait for all work given to compute before this call.
        written: wait until no work given to compute or lanes before this call uses these.
        All are `addressable`. The function raises any error on the way.
        """
        points: list[Point | None] = []
        for tensor in read:
            filled = self._slot(tensor).filled
            points.append(None if filled is None else filled.point)
            if filled is None or filled.version != _version(tensor):
                points.append(self.mark())
        for tensor in written:
            points.extend(self._users(self._slot(tensor)))
        return partial(self._reach, tuple(point for point in points if point is not None))

    def _reach(self, points: Sequence[Point]) -> None:
        for point in points:
            self.reached(point)

    def _users(self, slot: Slot) -> Sequence[Point | None]:
        """Points behind everything that uses the memory of an `addressable` tensor so far."""
        return [self.mark()]

    def reached(self, point: Point) -> None:
        """Block the calling thread until `point` is reached; OffloadError if its copy failed."""
        raise OffloadError(f"The {self.name} device has no points that the host could wait for.")

    #: True once `hold` has been called
    ever_held = False

    def hold(self, host: torch.Tensor, until: Callable[[], None]) -> None:
        """Make the next user of an `addressable` tensor call `until` first, through `claim`.

        Fetches claim the tensors they fetch; all other users (kernels in place, the host) must call
        `claim`.
        """
        slot = self._slot(host)
        self.ever_held = True
        slot.holds = (*slot.holds, until)

    def claim(self, host: torch.Tensor) -> None:
        """Return when nothing holds the tensor any more. If `until` raises, it stays held."""
        slot = self.slot_of(host)
        while slot is not None and slot.holds:
            until = slot.holds[0]
            until()
            slot.holds = tuple(hold for hold in slot.holds if hold is not until)

    def _slot(self, host: torch.Tensor) -> Slot:
        slot = self.slot_of(host)
        if slot is None:
            raise OffloadError(
                f"A tensor of shape {tuple(host.shape)} on {host.device} does not lie on the host"
                f" tier of the {self.name} device. Send it there first (`start_store`)."
            )
        return slot

    @abstractmethod
    def mark(self) -> Point | None:
        """The point behind the work given to compute so far; None where compute is synchronous."""

    def copy_out(
        self,
        lane: str,
        source: torch.Tensor,
        slot: Slot,
        after: Sequence[Point],
        label: Label,
        on_end: Callable[[Copy], None],
    ) -> Copy:
        """Start copying all bytes of `source` (dense) into `slot`, once `after` is reached.

        The source is kept alive until the copy has ended or compute has waited for it. `on_end` is
        called once, from any thread, before any wait returns; it is not called if the copy is
        cancelled. Where waits do not block, it is called later, when the host has seen the copy
        end.
        """
        return self._copy(lane, source, slot, after, label, on_end, outward=True)

    def copy_in(
        self,
        lane: str,
        slot: Slot,
        target: torch.Tensor,
        after: Sequence[Point],
        label: Label,
        on_end: Callable[[Copy], None],
    ) -> Copy:
        """Start filling `target` (from `allocate(slot)`) from `slot`; see `copy_out`."""
        return self._copy(lane, target, slot, after, label, on_end, outward=False)

    @abstractmethod
    def _copy(
        self,
        lane: str,
        tensor: torch.Tensor,
        slot: Slot,
        after: Sequence[Point],
        label: Label,
        on_end: Callable[[Copy], None],
        outward: bool,
    ) -> Copy:
        """Start a copy from `tensor` to `slot` (`outward`), or back."""

    @abstractmethod
    def wait(self, copy: Copy) -> Waited:
        """Let compute go on only when `copy` has ended. A queued copy moves to the front."""

    @abstractmethod
    def cancel(self, copy: Copy) -> bool:
        """Remove a copy that has not begun from its queue; False if it is too late."""

    @abstractmethod
    def before_copies(self, hook: Callable[[], None]) -> None:
        """Call `hook`, with no lock held, before each queued copy begins."""

    @abstractmethod
    def drain(self) -> None:
        """Block the caller until no copy is queued or running."""

    @abstractmethod
    def close(self) -> None:
        """Cancel queued copies, finish running ones, end the threads."""


def _version(tensor: torch.Tensor) -> int:
    """The number of changes to the tensor's memory that autograd has counted; views share it."""
    return -1 if tensor.is_inference() else tensor._version
