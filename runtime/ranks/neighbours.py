"""Adds up buckets over two ranks of one machine, which read each other's memory.

Each rank has an unnamed file in memory, in which its buckets lie, and a pipe on which it hears from
the other: which bucket it has sent and where that lies, or that it has read one. Each opens the
other's file and pipe by their descriptors in /proc. A rank adds what it reads there to its own
part, and writes the sum to where the gradient belongs. So nothing is sent, and no sum is copied.
Only its own rank maps a file: the other reads it a piece at a time, and holds no memory of it.

The sum of two numbers is the same in either order, so the bits are those of an all-reduce. With
more ranks each would have to read all others, and an all-reduce costs less.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.states import updates

from .buckets import Bucket

#: bytes that are read at a time: they should stay in a core's cache until they are added
PIECE_BYTES = 256 << 10
#: so many buckets of the usual size have room beside the largest one
DEPTH = 1
#: places of buckets begin at multiples of this
ALIGNED_BYTES = 64
#: a rank that waits looks so often if the other is still there
LOOK_S = 1.0
#: a bucket's number and its place; no number: the oldest bucket that was not read yet is read
_MESSAGE = struct.Struct("<qq")
_READ = -1


def why_not() -> str | None:
    """Say why this process cannot show another its memory; None: it can."""
    return None if hasattr(os, "memfd_create") else f"{sys.platform} has no unnamed memory files"


@dataclass(frozen=True)
class Address:
    """The place where the other rank finds this one's file and pipe."""

    pid: int
    memory: int
    messages: int
    #: of the file and of the pipe
    inodes: tuple[int, int]


@dataclass(frozen=True)
class BucketRoom:
    """Bytes for buckets, of which the first are kept for the bucket whose turn it is."""

    nbytes: int
    reserved: int

    @classmethod
    def of(cls, buckets: Sequence[Bucket], cap_bytes: int) -> BucketRoom:
        sizes = [_aligned(b.nbytes) for b in buckets]
        largest = max(sizes)
        return cls(min(sum(sizes), largest + DEPTH * min(_aligned(cap_bytes), largest)), largest)


class OwnSide:
    """The file and the pipe of this rank."""

    def __init__(self, nbytes: int) -> None:
        """OSError if there is no room."""
        memory = os.memfd_create("offcompile", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, memory)
        # allocate now: touching a mapping without memory behind it kills the process
        os.posix_fallocate(memory, 0, nbytes)
        self.nbytes, self._memory = nbytes, memory
        self.bytes = torch.frombuffer(mmap.mmap(memory, nbytes), dtype=torch.uint8)
        self.messages, self._sender = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self.messages)
        self._close_sender = weakref.finalize(self, os.close, self._sender)

    @property
    def address(self) -> Address:
        inodes = os.fstat(self._memory).st_ino, os.fstat(self._sender).st_ino
        return Address(os.getpid(), self._memory, self._sender, inodes)

    def is_reached(self) -> None:
        """Close this rank's own end for sending, so that it hears when the other rank ends."""
        self._close_sender()


class OtherSide:
    """The file and the pipe of the other rank, as this one has them open."""

    def __init__(self, at: Address) -> None:
        """OSError or OffloadError if they cannot be reached."""
        self.memory = self._open(at, at.memory, at.inodes[0], os.O_RDONLY)
        self.messages = self._open(at, at.messages, at.inodes[1], os.O_WRONLY)

    def _open(self, at: Address, descriptor: int, inode: int, flags: int) -> int:
        path = f"/proc/{at.pid}/fd/{descriptor}"
        found = os.open(path, flags | os.O_CLOEXEC)
        weakref.finalize(self, os.close, found)
        if os.fstat(found).st_ino != inode:
            raise OffloadError(f"{path} is another file")
        return found

    def read(self, view: memoryview, offset: int) -> None:
        """Fill the view with the other rank's bytes. RuntimeError if it cannot be read."""
        try:
            while len(view):
                count = os.preadv(self.memory, [view], offset)
                if count == 0:
                    raise RuntimeError("the memory of the other rank has ended")
                view, offset = view[count:], offset + count
        except OSError as error:
            raise RuntimeError(f"the memory of the other rank: {error.strerror}") from error

    def tell(self, number: int, offset: int) -> None:
        """RuntimeError if the other rank is gone."""
        try:
            os.write(self.messages, _MESSAGE.pack(number, offset))
        except OSError as error:
            raise RuntimeError(f"connection closed by peer ({error.strerror})") from error


@dataclass(eq=False)
class _Place:
    """Memory of one bucket."""

    offset: int
    nbytes: int
    is_sent: bool = False
    #: readers who still need it: this rank and the other
    readers: int = 2


class BucketPlaces:
    """Deals out bytes. Buckets whose turn has not come lie above those that are reserved, so that
    the one whose turn it is finds room as soon as those that were sent are read."""

    def __init__(self, room: BucketRoom) -> None:
        self._room = room
        self._taken: list[_Place] = []

    def has_room(self, nbytes: int, is_next: bool) -> bool:
        """True if there is a place, or will be when all that was sent is read."""
        filling = [place for place in self._taken if not place.is_sent]
        return is_next or self._free(nbytes, self._room.reserved, filling) is not None

    def take(self, nbytes: int, is_next: bool) -> _Place | None:
        offset = self._free(nbytes, self._room.reserved, self._taken)
        if offset is None and is_next:
            offset = self._free(nbytes, 0, self._taken)
        if offset is None:
            return None
        place = _Place(offset, nbytes)
        self._taken.append(place)
        return place

    def is_read(self, place: _Place) -> None:
        place.readers -= 1
        if place.readers == 0:
            self._taken.remove(place)

    def _free(self, nbytes: int, begin: int, taken: Iterable[_Place]) -> int | None:
        """Find the first gap from `begin` on."""
        for place in sorted(taken, key=lambda one: one.offset):
            if begin + nbytes <= place.offset:
                break
            begin = max(begin, _aligned(place.offset + place.nbytes))
        return begin if begin + nbytes <= self._room.nbytes else None


class Neighbours:
    """Reduces buckets with the other rank of this machine."""

    world = 2

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        sides: tuple[OwnSide, OtherSide],
        room: BucketRoom,
        is_first: bool,
        lives: Callable[[], bool],
        longest_s: float,
    ) -> None:
        """is_first: this rank has the smaller number. lives: True while the other does.
        longest_s: wait no longer for it."""
        self._parameters, self._places = parameters, BucketPlaces(room)
        self._own, self._other = sides
        self._is_first, self._lives, self._longest_s = is_first, lives, longest_s
        self._poll = select.poll()
        self._poll.register(self._own.messages, select.POLLIN)
        self._bytes = memoryview(bytearray(PIECE_BYTES))
        self._piece = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self._at: dict[Bucket, _Place] = {}
        #: buckets that the other rank has sent, and buckets of this one that it has yet to read
        self._theirs: deque[tuple[int, int]] = deque()
        self._unread: deque[_Place] = deque()
        self._own.is_reached()

    def held_bytes(self) -> int:
        # an optimizer gets the sum in memory of its own
        return self._own.nbytes + PIECE_BYTES + max(map(_updated_bytes, self._parameters))

    def has_room(self, bucket: Bucket, is_next: bool) -> bool:
        return self._places.has_room(bucket.nbytes, is_next)

    def give_memory(self, bucket: Bucket, is_next: bool) -> bool:
        self._listen()
        place = self._places.take(bucket.nbytes, is_next)
        if place is None:
            return False
        self._at[bucket] = place
        flat = self._own.bytes[place.offset : place.offset + bucket.nbytes]
        bucket.memory = flat.view(bucket.parameters[0].dtype)
        return True

    def wait_for_room(self) -> None:
        self._hear()

    def send(self, bucket: Bucket) -> None:
        place = self._at[bucket]
        place.is_sent = True
        self._unread.append(place)
        self._other.tell(bucket.number, place.offset)

    def is_back(self, bucket: Bucket) -> bool:
        self._listen()
        return bool(self._theirs)

    def wait(self, bucket: Bucket) -> None:
        while not self._theirs:
            self._hear()
        number = self._theirs[0][0]
        if number != bucket.number:
            raise RuntimeError(f"the other rank sent bucket {number} instead of {bucket.number}")

    def reduced(
        self, bucket: Bucket, parameter: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        own = bucket.part(parameter)
        is_direct = into is not None and into.is_contiguous() and into.dtype == own.dtype
        found = into if into is not None and is_direct else torch.empty_like(own)
        begin = self._theirs[0][1] + bucket.starts[id(parameter)] * own.element_size()
        self._add(own.view(-1), begin, found.view(-1))
        return found if into is None or is_direct else into.copy_(found)

    def _add(self, own: torch.Tensor, begin: int, found: torch.Tensor) -> None:
        """Add the other rank's bytes from `begin` on."""
        size = own.element_size()
        piece = self._piece.view(own.dtype)
        for start in range(0, own.numel(), piece.numel()):
            stop = min(start + piece.numel(), own.numel())
            self._other.read(self._bytes[: (stop - start) * size], begin + start * size)
            mine, theirs = own[start:stop], piece[: stop - start]
            # both ranks add in one order: of two NaNs the sum has the bits of the first
            first, second = (mine, theirs) if self._is_first else (theirs, mine)
            torch.add(first, second, out=found[start:stop])

    def release(self, bucket: Bucket) -> None:
        self._theirs.popleft()
        self._places.is_read(self._at.pop(bucket))
        try:
            self._other.tell(_READ, 0)
        except RuntimeError:
            return  # it has ended with this bucket, or the next wait for it fails

    # -- messages ----------------------------------------------------------------------------------

    def _listen(self) -> bool:
        """Take the messages that are there. False if there are none, nor will be."""
        heard = False
        while True:
            try:
                said = os.read(self._own.messages, 256 * _MESSAGE.size)
            except BlockingIOError:
                return True
            if not said:
                return heard
            heard = True
            for number, offset in _MESSAGE.iter_unpack(said):
                if number == _READ:
                    self._places.is_read(self._unread.popleft())
                else:
                    self._theirs.append((number, offset))

    def _hear(self) -> None:
        """Wait for a message. RuntimeError if none comes."""
        until = time.monotonic() + self._longest_s
        while not self._poll.poll(1000 * LOOK_S):
            # processes that it has forked keep its end open
            if not self._lives():
                raise RuntimeError("connection closed by peer")
            if time.monotonic() > until:
                raise RuntimeError(f"the other rank has sent nothing for {self._longest_s:.0f} s")
        if not self._listen():
            raise RuntimeError("connection closed by peer")


def _updated_bytes(parameter: torch.Tensor) -> int:
    return 0 if updates.optimizer_of(parameter) is None else parameter.nbytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
