"""What the mover needs of a device: memory, slots, copies on lanes, and waiting for them.

Two kinds of device fit. On a synchronous one (`cpu`) compute runs on the caller's thread and a
wait blocks that thread. On an asynchronous one (`simulated`, and CUDA streams) compute is queued
too: `mark` stands for a recorded event, `wait` for a stream that waits, and both return at once.
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
from .listening import MoveListener


class How(Enum):
    """In what state a wait found its copy."""

    READY = "ready"
    LATE = "late"
    PROMOTED = "promoted"


@dataclass(frozen=True)
class Waited:
    how: How
    duration_ns: int


@dataclass(frozen=True)
class Label:
    """What a copy is called in messages and recordings; `direction` is `out` or `load`.

    `heard` is told when a lane worked on it.
    """

    direction: str
    tag: str
    heard: MoveListener | None = field(default=None, compare=False, repr=False)


class Point:
    """Something that copies can be ordered after: a copy, or a mark in compute."""


class Copy(Point, ABC):
    """A copy that was issued. `error` is set, once it has ended, if it failed.

    Where waits do not block, compute may have been let past a load that fails later: then the
    device raises that, naming the load, at its next wait.
    """

    error: BaseException | None = None

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True once the copy is over, well or badly, as far as the host can see."""


@dataclass(frozen=True)
class Filled:
    """Behind `point` memory holds what was sent there; `version`: autograd's count of changes."""

    point: Point
    version: int


class Slot(ABC):
    """Room for one tensor's bytes away from the device."""

    nbytes: int
    tier: str
    #: whether a plan wants what is here to stay here
    planned: bool = False
    #: what was sent here last; see `Device.await_on_host`
    filled: Filled | None = None
    #: what has to return before this is used next; see `Device.hold`
    holds: tuple[Callable[[], None], ...] = ()

    @property
    @abstractmethod
    def where(self) -> str:
        """The place, for messages: a directory, or a kind of memory."""

    @property
    def crossed_bytes(self) -> int:
        """What the last copy took on its way: less than `nbytes` where a codec packed it."""
        return self.nbytes

    @abstractmethod
    def free(self) -> None:
        """Give the room back. Called once, when no copy that uses the slot is unfinished."""

    def forget(self) -> None:
        """The memory has a new holder, who has nothing to do with what was there."""
        self.planned, self.filled, self.holds = False, None, ()


class Device(ABC):
    name: str
    #: what its lanes have moved, as far as the time that it took says how fast they are
    rates: LaneRates

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Device memory that the lanes hold for themselves at the moment."""

    @abstractmethod
    def slot(self, source: torch.Tensor, tier: str, codec: str | None = None) -> Slot:
        """Room for all bytes of `source` on `tier` or, where that is full, on a slower one.

        With a codec, room for what that makes of the worst input; copies to and from the slot
        pack and unpack. SpillFull if there is none.
        """

    @abstractmethod
    def allocate(self, slot: Slot, freed: Callable[[], None]) -> torch.Tensor:
        """A flat uint8 tensor of `slot.nbytes` for a load from `slot`, at offset 0 of its storage.

        When the storage dies its memory goes back, after `freed` was called. `freed` runs inside
        a finalizer, on any thread: it must neither block nor take a lock.
        """

    def addressable(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Flat uint8 tensors on the host tier that ops of the device can use in place.

        Their content is undefined. New ones lie one behind the other, in the order given.
        """
        raise OffloadError(f"The {self.name} device has no host memory that ops can use in place.")

    def slot_of(self, tensor: torch.Tensor) -> Slot | None:
        """The slot that is the memory of an `addressable` tensor's storage; None: another's."""
        return None

    def clear(self, host: torch.Tensor) -> None:
        """Make all of an `addressable` tensor zero, in compute's order."""
        host.zero_()

    def expect_scattered(self, host: torch.Tensor, scattered: bool) -> bool:
        """Say whether only rows here and there of an `addressable` tensor will be read in place.

        Returns whether that made a difference.
        """
        return False

    def keep_room(self, owner: object, nbytes: int) -> bool:
        """As long as `owner` lives, keep so much of the memory of `addressable` tensors that died
        for those that come; a second call replaces the first. Returns whether the device does."""
        return False

    def bound_packing(self, owner: object, nbytes: int) -> None:  # noqa: B027
        """As long as `owner` lives, let no lane hold more of the device's memory than this for
        packing, as far as that can be; a second call replaces the first."""

    # -- the host itself reads and writes what is `addressable` ------------------------------------

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """An `addressable` tensor as one of the processor: the same memory, shape and strides.

        It does not keep that memory: keep `tensor` as long.
        """
        if tensor.device.type != "cpu":
            raise OffloadError(f"The {self.name} device has no host memory that lies on it.")
        return tensor.detach()

    def sent(self, host: torch.Tensor, point: Point | None) -> None:
        """Note that behind `point` an `addressable` tensor holds what it is to hold."""
        slot = self.slot_of(host)
        if slot is not None:
            slot.filled = None if point is None else Filled(point, _version(host))

    def await_on_host(
        self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor] = ()
    ) -> Callable[[], None]:
        """A function that blocks its caller, on any thread, until the host may touch these.

        read: what was sent to it has arrived. If that is all that changed its tensor, compute may
        go on meanwhile; otherwise all has ended that compute was given before this call.
        written: nothing uses it any more of what was given before this call to compute or lanes.
        All are `addressable`. The function raises what went wrong on the way.
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
        """Points behind all that uses the memory of an `addressable` tensor so far."""
        return [self.mark()]

    def reached(self, point: Point) -> None:
        """Block the calling thread until `point` is; OffloadError if a copy failed there."""
        raise OffloadError(f"The {self.name} device has no points that the host could wait for.")

    #: whether `hold` was ever called
    ever_held = False

    def hold(self, host: torch.Tensor, until: Callable[[], None]) -> None:
        """The next who uses an `addressable` tensor has to `claim` it, and that calls `until`.

        Fetches claim what they fetch; others, kernels in place and the host, have to ask for it.
        """
        slot = self._slot(host)
        self.ever_held = True
        slot.holds = (*slot.holds, until)

    def claim(self, host: torch.Tensor) -> None:
        """Return when nothing holds the tensor any more. What `until` raises leaves it held."""
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
        """The point that compute has been given work up to; None where compute is synchronous."""

    @abstractmethod
    def copy_out(
        self,
        lane: str,
        source: torch.Tensor,
        slot: Slot,
        after: Sequence[Point],
        label: Label,
        on_end: Callable[[Copy], None],
    ) -> Copy:
        """Begin copying all bytes of `source` (dense) into `slot`, once `after` is reached.

        The source is kept alive until the copy has ended or compute has waited for it. `on_end`
        is called once, before any wait returns, from any thread; not if the copy is cancelled.
        Where waits do not block, it comes after them: when the host has seen the copy end.
        """

    @abstractmethod
    def copy_in(
        self,
        lane: str,
        slot: Slot,
        target: torch.Tensor,
        after: Sequence[Point],
        label: Label,
        on_end: Callable[[Copy], None],
    ) -> Copy:
        """Begin filling `target` (from `allocate(slot)`) with what `slot` holds; see `copy_out`."""

    @abstractmethod
    def wait(self, copy: Copy) -> Waited:
        """Let compute go on only when `copy` has ended. A queued copy goes to the front."""

    @abstractmethod
    def cancel(self, copy: Copy) -> bool:
        """Take a copy that has not begun out of its queue; False if it is too late for that."""

    @abstractmethod
    def before_copies(self, hook: Callable[[], None]) -> None:
        """Have `hook` called, with no lock held, before each queued copy begins."""

    @abstractmethod
    def drain(self) -> None:
        """Block the caller until no copy is queued or running."""

    @abstractmethod
    def close(self) -> None:
        """Cancel what is queued, finish what runs, end the threads."""


def _version(tensor: torch.Tensor) -> int:
    """How often autograd saw the tensor's memory change; views share the count."""
    return -1 if tensor.is_inference() else tensor._version
