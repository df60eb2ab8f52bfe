"""Host memory of weights that the ranks of one machine have in common.

One process makes an unlinked file, and the others open it by its descriptor in /proc. Each maps it
twice. Weights lie on a private mapping: a page of it is the file's until this rank writes to it,
which gives the rank a page of its own that no other rank sees. The other mapping is shared. Only an
optimizer writes there, once the ranks have agreed that it may, and all of them see it.

On Linux, a private mapping shows what others write to the file, on pages that it has not written to
itself. POSIX leaves that open, so on other systems ranks have no weights in common.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offcompile.ir import OffloadError
from offcompile.runtime.base.mapping import page_multiple
from offcompile.runtime.disk.page_cache import own_pages
from offcompile.runtime.disk.spill_file import open_unlinked

from .mapped import MappedFile, MappedSlot, check_room

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_READ_WRITE = getattr(mmap, "PROT_READ", 1) | getattr(mmap, "PROT_WRITE", 2)

Bytes = np.ndarray[tuple[int], np.dtype[np.generic]]


def machine() -> str:
    """Name this machine; processes of another pid namespace do not see each other's files."""
    # containers may have one name on two machines
    name = socket.gethostname()
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        name += f" {file.read().strip()}"
    with suppress(OSError):
        name += f" {os.readlink('/proc/self/ns/pid')}"
    return name


def why_not() -> str | None:
    """Say why this process cannot have memory in common with another; None: it can."""
    return None if sys.platform == "linux" else f"{sys.platform} has no files in /proc"


@dataclass(frozen=True)
class FileAddress:
    """The place where other processes find a file."""

    pid: int
    descriptor: int
    inode: tuple[int, int]
    nbytes: int
    directory: str


class CommonFile(MappedFile):
    """One unlinked file that processes have in common. It is gone when the last one closes it."""

    def __init__(self, descriptor: int, nbytes: int, directory: Path) -> None:
        self.directory, self.nbytes = directory, nbytes
        self.given_back: deque[tuple[int, int]] = deque()  # ranges are not used again
        self.shared = mmap.mmap(descriptor, nbytes)
        private = mmap.MAP_PRIVATE | _MAP_NORESERVE
        self.memory = mmap.mmap(descriptor, nbytes, private, _READ_WRITE)
        self._descriptor = descriptor  # closed with this object, from here on

    @classmethod
    def make(cls, directory: Path, nbytes: int) -> CommonFile:
        """Make a file. OffloadError if there is no room for it."""
        check_room(directory, nbytes)
        descriptor = open_unlinked(directory)
        try:
            # allocate now: touching a mapping without disk space behind it kills the process
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(descriptor, nbytes, directory)
        except OSError as error:
            os.close(descriptor)
            raise OffloadError(
                f"a file of {nbytes} bytes in {directory} cannot be mapped: {error.strerror}"
            ) from error

    @classmethod
    def open(cls, at: FileAddress) -> CommonFile:
        """Open a file that another process has made. OffloadError if it cannot be reached."""
        path = f"/proc/{at.pid}/fd/{at.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                told = os.fstat(descriptor)
                if (told.st_dev, told.st_ino) != at.inode or told.st_size != at.nbytes:
                    raise OffloadError(f"{path} is another file")
                return cls(descriptor, at.nbytes, Path(at.directory))
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise OffloadError(f"{path} cannot be opened: {error.strerror}") from error

    @property
    def address(self) -> FileAddress:
        told = os.fstat(self._descriptor)
        inode = told.st_dev, told.st_ino
        return FileAddress(os.getpid(), self._descriptor, inode, self.nbytes, str(self.directory))


class CommonSlot(MappedSlot):
    """The space of one weight in a common file. Copies go through the private mapping, so they see
    and make what this rank has to itself."""

    __slots__ = ("_common",)
    is_own = False

    def __init__(self, file: CommonFile, offset: int, nbytes: int, tier: str) -> None:
        super().__init__(file, offset, nbytes, tier)
        self._common = file

    @property
    def address(self) -> int:
        return int(self.array().ctypes.data)

    def shared_array(self) -> Bytes:
        """The memory that all ranks see."""
        return np.frombuffer(self._common.shared, np.uint8, self.nbytes, self.offset)

    @property
    def is_written(self) -> bool:
        """True if this rank has written to it by itself; False if that is not known."""
        return bool(own_pages(self.address, self.nbytes))

    def publish(self) -> bool:
        """Show other ranks what this one has written by itself; False if it has written nothing."""
        if own_pages(self.address, self.nbytes) == 0:
            return False
        np.copyto(self.shared_array(), self.array())
        return self.drop_own()

    def drop_own(self) -> bool:
        """Give up what this rank has written by itself, for what all ranks see; False if it has
        written nothing."""
        found = own_pages(self.address, self.nbytes)
        if found != 0:
            # the advice takes whole pages, which no other weight has a part in
            size = page_multiple(max(self.nbytes, 1))
            self._common.memory.madvise(mmap.MADV_DONTNEED, self.offset, size)
        return bool(found)

    def forget(self) -> None:
        super().forget()
        self.drop_own()

    def clear_absent(self) -> bool:
        return False

    def read(self, start: int, view: memoryview) -> None:
        stop = start + len(view)
        np.copyto(np.frombuffer(view, np.uint8), self.array()[start:stop])

    def write(self, start: int, view: memoryview) -> None:
        stop = start + len(view)
        np.copyto(self.array()[start:stop], np.frombuffer(view, np.uint8))
