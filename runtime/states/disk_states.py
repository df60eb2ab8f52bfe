"""States on disk, streamed in blocks by direct I/O while the caller works on another block."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base import watchdog
from offcompile.runtime.disk.checksums import VerifiedStore
from offcompile.runtime.disk.drive_life import DriveLife, DriveWatch, capacity_of
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.disk.spill_file import Files

from .state_blocks import BLOCK_BYTES, Frames, StateBlock, cut, padded_bytes
from .state_flow import Flow
from .states import Range, StatesFacts

#: one block of the pool is in use, half may be read ahead, and the others are being written
BUFFERS = 6
#: parameters with smaller states stay in memory: moving them takes longer than it saves
SMALL_BYTES = 64 << 10
_ELSEWHERE = 'name a directory on another disk for optimizer states with directory="/path"'


@dataclass(frozen=True)
class DiskFacts(StatesFacts):
    """Adds the traffic of the last whole step, and the memory that blocks pass through."""

    step_bytes_read: int = 0
    step_bytes_written: int = 0
    #: bytes that stay in memory between visits
    resident_bytes: int = 0
    #: bytes of all frames: now, at the peak, and the limit
    frame_bytes: int = 0
    peak_frame_bytes: int = 0
    limit_bytes: int = 0
    #: the drive's wear at the present write rate; None: not measured for long enough
    drive: DriveLife | None = None


class VisitOrder:
    """The order in which the states of keys are visited, again and again."""

    def __init__(self) -> None:
        self._keys: tuple[int, ...] = ()
        self._place: dict[int, int] = {}
        self._last: tuple[int, int] | None = None  # key, number of the block

    def expect(self, keys: Sequence[int]) -> None:
        self._keys = tuple(keys)
        self._place = {key: at for at, key in enumerate(self._keys)}

    def visited(self, key: int, number: int) -> None:
        self._last = (key, number)

    def upcoming(self, blocks: Mapping[int, Sequence[StateBlock]]) -> Iterator[StateBlock]:
        """Blocks of upcoming visits, from the last visited block on, once around."""
        at = -1
        if self._last is not None:
            key, number = self._last
            yield from islice(blocks.get(key, ()), number + 1, None)
            at = self._place.get(key, -1)
        for key in (*self._keys[at + 1 :], *self._keys[: at + 1]):
            yield from blocks.get(key, ())


class DiskStates:
    """States in unlinked files, striped over directories. Thread-safe.

    host_bytes: bytes of blocks that may stay in memory, besides a pool of `buffers` blocks; blocks
    that this step has visited are evicted first, the latest before the others, since they are
    needed last. The pool is exceeded only for reads while nothing can be written, and by visits
    that are open at the same time.
    capacity_bytes: upper bound for the files (None: all free disk space).
    verify: raise an error if a block differs from the written one when it is read.
    A forked child cannot use it: every call there except `close` raises an error.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        host_bytes: int = 0,
        *,
        block_bytes: int = BLOCK_BYTES,
        buffers: int = BUFFERS,
        small_bytes: int = SMALL_BYTES,
        capacity_bytes: int | None = None,
        files: Files | None = None,
        verify: bool = False,
    ) -> None:
        watchdog.limit_s()  # raise a bad setting now
        if host_bytes < 0 or buffers < 3 or block_bytes <= 0:
            raise OffloadError(
                f"host_bytes={host_bytes}, block_bytes={block_bytes}, buffers={buffers}: give "
                "0 or more bytes of host memory, a positive block size, and 3 buffers or more"
            )
        self._block_bytes, self._small_bytes = block_bytes, small_bytes
        kind = VerifiedStore if verify else SpillStore
        self._store = kind(directories, capacity_bytes, files=files, elsewhere=_ELSEWHERE)
        self.directories = self._store.directories
        self._frames = Frames(block_bytes, block_bytes * buffers + host_bytes)
        self._flow = Flow(self._store, self._frames, host_bytes, buffers // 2, self._upcoming)
        self._lock = self._flow.lock
        self._small: dict[int, tuple[torch.Tensor, ...]] = {}
        self._blocks: dict[int, list[StateBlock]] = {}
        self._visits = VisitOrder()
        self._marks = self._step_bytes = (0, 0)
        self._drive = DriveWatch(capacity_of(self.directories))
        self._owner = os.getpid()
        self._is_open = True

    def add(self, key: int, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        """Add states of `numel` zeros, one part per dtype. Allocates the disk space now."""
        self._check()
        if key in self._blocks or key in self._small:
            raise OffloadError(f"states of key {key} are here already: remove them first")
        kinds = tuple(dtypes)
        if numel * sum(dtype.itemsize for dtype in kinds) <= self._small_bytes:
            with torch.inference_mode(False):
                self._small[key] = tuple(torch.zeros(numel, dtype=dtype) for dtype in kinds)
            return
        blocks: list[StateBlock] = []
        try:
            for start, stop in cut(numel, kinds, self._block_bytes):
                extent = self._store.allocate(padded_bytes(stop - start, kinds))
                blocks.append(StateBlock(start, stop, kinds, extent))
        except BaseException:
            for block in blocks:
                self._store.release(block.extent)
            raise
        with self._lock:
            self._blocks[key] = blocks

    def remove(self, key: int) -> None:
        """Remove the states of a key that nobody is visiting."""
        self._check()
        with self._lock:
            if self._small.pop(key, None) is not None:
                return
            blocks = self._known(key)
            if any(block.pins or block.waiting for block in blocks):
                raise OffloadError(f"states of key {key} are being visited: end that first")
            del self._blocks[key]
            for block in blocks:
                self._flow.forget(block)

    def expect(self, keys: Sequence[int]) -> None:
        """Set the order of visits, which repeats: blocks are read ahead in this order."""
        self._check()
        with self._lock:
            self._visits.expect(keys)
            self._flow.look_ahead()

    def visit(self, key: int, write: bool = True) -> Iterator[Range]:
        """The states of a key, range by range, front to back; a range is valid until the next one.

        With `write`, raises here any write failure since the last visit. No data is lost: the block
        stays in memory and the write is tried again. After an error between ranges, the earlier
        ranges keep the caller's changes.
        """
        self._check()
        small = self._small.get(key)
        if small is not None:
            return iter((Range(0, small[0].numel() if small else 0, small),))
        with self._lock:
            blocks = self._known(key)
            if write:
                self._flow.raise_failure()
        return self._visit(key, blocks, write)

    def _visit(self, key: int, blocks: Sequence[StateBlock], write: bool) -> Iterator[Range]:
        for number, block in enumerate(blocks):
            self._check()
            self._visits.visited(key, number)
            self._flow.pin(block, write)
            try:
                yield Range(block.start, block.stop, block.parts())
            finally:
                if os.getpid() == self._owner:
                    self._flow.unpin(block, write)

    def settle(self) -> None:
        """Return when all evicted blocks are written; raises write failures. May be tried again."""
        self._check()
        self._flow.settle()

    def step_over(self) -> None:
        """End a step: the blocks that it visited are now the ones needed first."""
        self._check()
        with self._lock:
            self._flow.step_over()
            now = (self._store.bytes_read, self._store.bytes_written)
            self._step_bytes = (now[0] - self._marks[0], now[1] - self._marks[1])
            self._marks = now
        self._drive.step_over(now[1], time.monotonic())

    def facts(self) -> DiskFacts:
        self._check()
        disk_bytes = self._store.used_bytes
        with self._lock:
            small_bytes = sum(part.nbytes for parts in self._small.values() for part in parts)
            return DiskFacts(
                host_bytes=small_bytes + self._frames.nbytes,
                disk_bytes=disk_bytes,
                bytes_read=self._store.bytes_read,
                bytes_written=self._store.bytes_written,
                step_bytes_read=self._step_bytes[0],
                step_bytes_written=self._step_bytes[1],
                resident_bytes=small_bytes + self._flow.idle_bytes,
                frame_bytes=self._frames.nbytes,
                peak_frame_bytes=self._frames.peak_bytes,
                limit_bytes=self._frames.limit_bytes,
                drive=self._drive.life,
            )

    def close(self) -> None:
        """Release files and memory and end the threads; open visits fail at their next range."""
        self._is_open = False
        if os.getpid() != self._owner:
            self._flow.drop()
        elif not self._flow.close():
            return  # the files are closed with the last reference
        self._store.close()
        self._small.clear()
        self._blocks.clear()

    def _upcoming(self) -> Iterator[StateBlock]:
        return self._visits.upcoming(self._blocks)

    def _known(self, key: int) -> list[StateBlock]:
        found = self._blocks.get(key)
        if found is None:
            raise OffloadError(f"there are no states of key {key}: add them first")
        return found

    def _check(self) -> None:
        if os.getpid() != self._owner:
            raise OffloadError(
                f"the optimizer states of process {self._owner} were used in {os.getpid()}, forked "
                "from it: make the optimizer in the process that trains"
            )
        if not self._is_open:
            raise OffloadError("the optimizer states are closed: make another optimizer")
