"""One unlinked file for offloaded data, written and read bypassing the page cache."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from offcompile.ir import OffloadError
from offcompile.runtime.base import watchdog
from offcompile.runtime.base.mapping import PAGE_BYTES, Mapping, page_multiple
from offcompile.runtime.base.posix import fcntl

from .directories import ELSEWHERE, check_directory
from .extents import FreeRanges

_FRUITLESS_TRIES = 8
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)


def _allocate(descriptor: int, offset: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, nbytes)
    else:
        os.ftruncate(descriptor, offset + nbytes)


def _free_bytes(descriptor: int) -> int:
    told = os.fstatvfs(descriptor)
    return told.f_bavail * told.f_frsize


@dataclass(frozen=True)
class Files:
    """The system calls that reach the disk, replaceable so that a test can make one fail."""

    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    allocate: Callable[[int, int, int], None] = _allocate
    free_bytes: Callable[[int], int] = _free_bytes


class SpillFile:
    """An unlinked file, mode 0600, which disappears when closed, and its free ranges.

    direct: True if it bypasses the page cache. size_bytes: space taken from the file system so far.
    The ranges have no lock of their own: the store that owns the file holds its lock.
    """

    def __init__(
        self, directory: Path, files: Files, reserve_bytes: int, elsewhere: str = ELSEWHERE
    ) -> None:
        check_directory(directory, elsewhere)
        self.directory = directory
        self.size_bytes = 0
        self.free = FreeRanges()
        self._head = 0
        self._files = files
        self._reserve_bytes = reserve_bytes
        self._elsewhere = elsewhere
        self._descriptor = open_unlinked(directory, elsewhere)
        self.device = os.fstat(self._descriptor).st_dev
        self._closed = weakref.finalize(self, os.close, self._descriptor)
        self._closed.atexit = False
        self.direct = _make_direct(self._descriptor)

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def take(self, nbytes: int) -> int | None:
        """Take one range of `nbytes`, at the head of the log if possible; returns its offset, or
        None if none fits."""
        start = self.free.take_next(self._head, nbytes)
        if start is not None:
            self._head = start + nbytes
        return start

    def room_bytes(self) -> int:
        """Returns the space that the file system can still give, less the reserve."""
        room = self._files.free_bytes(self._descriptor) - self._reserve_bytes
        return max(0, room // PAGE_BYTES * PAGE_BYTES)

    def grow(self, at_least_bytes: int, wished_bytes: int) -> bool:
        """Grow by `wished_bytes` or less; returns False if even `at_least_bytes` do not fit."""
        step = min(wished_bytes, self.room_bytes())
        while step >= at_least_bytes:
            if self._extend(step):
                self.free.add(self.size_bytes, step)
                self.size_bytes += step
                return True
            if step == at_least_bytes:
                return False
            step = max(at_least_bytes, step // 2 // PAGE_BYTES * PAGE_BYTES)
        return False

    def _extend(self, step: int) -> bool:
        try:
            with watchdog.told(), watchdog.calling("growing by", step, self.directory):
                self._files.allocate(self._descriptor, self.size_bytes, step)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                os.ftruncate(self._descriptor, self.size_bytes)  # some may have been allocated
                return False
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise self._failed("growing", step, self.size_bytes, error) from error
            # no such call on this file system: space is allocated on write
            os.ftruncate(self._descriptor, self.size_bytes + step)
        return True

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write all views, one after the other."""
        self._transfer("writing", self._files.pwritev, offset, views)

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        self._transfer("reading", self._files.preadv, offset, views)

    def _transfer(
        self,
        doing: str,
        call: Callable[[int, Sequence[memoryview], int], int],
        offset: int,
        views: Sequence[memoryview],
    ) -> None:
        """Move all of `views`, in whole pages; a partly moved page is moved again."""
        total = sum(map(len, views))
        done, fruitless = 0, 0
        while done < total:
            left = total - done
            number, moved = watchdog.begun(doing, left, self.directory), 0
            try:
                moved = call(self._descriptor, part_of(views, done, left), offset + done)
            except OSError as error:
                raise self._failed(doing, left, offset + done, error) from error
            finally:
                watchdog.over(number, moved)
            # direct I/O can resume only at whole pages
            moved = moved if moved == left else moved // PAGE_BYTES * PAGE_BYTES
            fruitless = 0 if moved else fruitless + 1
            if fruitless == _FRUITLESS_TRIES:
                raise self._failed(doing, left, offset + done, None)
            done += moved

    def _failed(self, doing: str, nbytes: int, at: int, error: OSError | None) -> OffloadError:
        if error is None:
            found, fix = f"nothing was moved in {_FRUITLESS_TRIES} tries", "check that disk"
        else:
            name = errno.errorcode.get(error.errno or 0, "unknown")
            found, fix = f"{os.strerror(error.errno or 0)}, {name}", "check that disk (`dmesg`)"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                fix = "free space there"
        return OffloadError(
            f"{doing} {nbytes} bytes at {at} of the spill file in {self.directory} failed "
            f"({found}): {fix}, or {self._elsewhere}"
        )

    def flush(self) -> None:
        """Sync the file to disk and drop it from the page cache."""
        os.fsync(self._descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._closed()


def part_of(views: Sequence[memoryview], start: int, size: int) -> list[memoryview]:
    """Returns the parts of `views` at [start, start + size) of their concatenation."""
    parts = []
    at = 0
    for view in views:
        low, high = max(start, at), min(start + size, at + len(view))
        if low < high:
            parts.append(view[low - at : high - at])
        at += len(view)
    return parts


def calls_for(nbytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (start, size) of calls that move `nbytes`: equal sizes, about `chunk_bytes` at most.

    Sizes are equal because a call for a single last page takes as long as one for a hundred.
    """
    count = max(-(-(nbytes - chunk_bytes // 8) // chunk_bytes), 1)
    size = page_multiple(-(-nbytes // count), PAGE_BYTES)
    for start in range(0, nbytes, size):
        yield start, min(size, nbytes - start)


def open_unlinked(directory: Path, elsewhere: str = ELSEWHERE) -> int:
    """Open a file that has no name any more, or never had one; returns its descriptor."""
    try:
        if _O_TMPFILE:
            try:
                return os.open(directory, _O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                    raise
        descriptor, name = tempfile.mkstemp(prefix=".offcompile-", dir=directory)
        try:
            os.unlink(name)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise OffloadError(
            f"no spill file can be made in {directory} ({error.strerror}): make it writable, or "
            f"{elsewhere}"
        ) from error
    return descriptor


def _make_direct(descriptor: int) -> bool:
    """Enable O_DIRECT if page-sized writes work; some file systems accept the flag, then refuse."""
    if not _O_DIRECT:
        return False
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    scratch = Mapping(PAGE_BYTES)
    scratch.open(0, PAGE_BYTES)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, before | _O_DIRECT)
        os.pwritev(descriptor, [scratch.view(0, PAGE_BYTES)], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, before)
            return False
        # a full disk is not the flag's fault: the next allocation will report it
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    os.ftruncate(descriptor, 0)
    return True
