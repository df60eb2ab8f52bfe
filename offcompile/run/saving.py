"""Checkpoints that are whole or not there: written beside, made durable, then put in place."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.watchdog import calling, told

_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_DESCRIPTORS = Path("/proc/self/fd")
#: what file systems say that have no files without a name
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_FRUITLESS_TRIES = 8


@dataclass(frozen=True)
class Calls:
    """What reaches the disk, so that a test can make it fail."""

    write: Callable[[int, memoryview], int] = os.write
    fsync: Callable[[int], None] = os.fsync
    replace: Callable[[Path, Path], None] = os.replace


def save(obj: object, path: str | os.PathLike[str], *, calls: Calls | None = None) -> None:
    """`torch.save` to a file that `torch.load` reads, whole or not at all.

    When it returns, the file is on the disk. Whatever happens before (a full disk, a kill, a power
    cut), the file that was at `path` is still there as it was. Tensors are written straight from
    their memory, one after the other: no copy of them is made, but for those of another device,
    one at a time.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OffloadError(
            f"offcompile.save needs a path, not {type(path).__name__}: a file that is open already "
            "cannot be put in place as a whole; for that one use torch.save"
        )
    _check_links(Path(path).absolute())
    # a link stays a link to the file
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise OffloadError(f"{target} is a directory: give the path of a file in it")
    how = calls or Calls()
    writer = _Writer(how)
    try:
        writer.directory = target.parent
        with told(), _beside(target, how) as writer.descriptor:
            _write(obj, writer)
            with calling("syncing", writer.nbytes, writer.directory):
                how.fsync(writer.descriptor)
    except OSError as error:
        raise _failed(target, writer.nbytes, error) from error
    try:
        _sync_directory(target.parent, how)
    except OSError as error:
        raise OffloadError(
            f"{target} is saved and in place ({writer.nbytes} bytes), but {target.parent} could "
            f"not be synced ({error.strerror or error}): after a power cut the file that was there "
            "before may be back. Check that disk (`dmesg`)"
        ) from error


class _Writer:
    """What torch.save takes for a file. The first error is kept: torch may raise one of its own."""

    def __init__(self, calls: Calls) -> None:
        self.descriptor = -1
        self.directory = Path()
        self.nbytes = 0
        self.error: BaseException | None = None
        self._calls = calls

    def write(self, data: bytes | memoryview) -> int:
        # torch goes on after an error, to end the archive
        if self.error is not None:
            return 0
        view = memoryview(data).cast("B")
        done, fruitless = 0, 0
        try:
            while done < len(view):
                with calling("saving", len(view) - done, self.directory):
                    moved = self._calls.write(self.descriptor, view[done:])
                fruitless = 0 if moved else fruitless + 1
                if fruitless == _FRUITLESS_TRIES:
                    raise OSError(errno.EIO, f"nothing was written in {_FRUITLESS_TRIES} tries")
                done += moved
                self.nbytes += moved
        except BaseException as error:
            # also an interrupt: it is raised once torch has let go
            self.error = error
            return 0
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""


def _write(obj: object, writer: _Writer) -> None:
    try:
        torch.save(obj, writer)  # type: ignore[arg-type]
    except BaseException:
        # torch tells of the bytes that are missing, or goes on
        if writer.error is None:
            raise
    if writer.error is not None:
        raise writer.error


@contextmanager
def _beside(target: Path, calls: Calls) -> Iterator[int]:
    """A new file, which takes the place of `target` if all goes well, and else leaves nothing."""
    mode = _mode_of(target)
    _sweep(target)
    part = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.part")
    descriptor, has_name = _open(target.parent, part)
    try:
        # so that another process does not clear it away; some file systems have no locks
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
        if mode is not None:
            os.fchmod(descriptor, mode)
        if not has_name:
            _name(descriptor, part)
            has_name = True
        calls.replace(part, target)
        has_name = False
    finally:
        os.close(descriptor)
        if has_name:
            with suppress(FileNotFoundError):
                part.unlink()


def _open(directory: Path, part: Path) -> tuple[int, bool]:
    """A descriptor, and whether the file has its name already: a kill leaves no file without one"""
    if _O_TMPFILE and _DESCRIPTORS.exists():
        try:
            return os.open(directory, _O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), False
        except OSError as error:
            if error.errno not in _NO_TMPFILE or not directory.is_dir():
                raise
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(part, flags, 0o666), True


def _sweep(target: Path) -> None:
    """Remove what killed processes left: parts that nobody who lives has locked."""
    prefix = f".{target.name[:200]}."
    try:
        names = os.listdir(target.parent)
    except PermissionError:
        return  # one may write to a directory that one may not list
    for name in names:
        if name.startswith(prefix) and name.endswith(".part") and len(name) == len(prefix) + 13:
            left = target.with_name(name)
            # another user may have put anything there: a pipe would hold us up, a link lead away
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with suppress(OSError), open(os.open(left, flags), "rb") as part:
                if os.fstat(part.fileno()).st_uid == os.geteuid():
                    fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left.unlink()


def _name(descriptor: int, part: Path) -> None:
    directory = os.open(part.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # naming a folder makes the system follow the link in /proc to the file behind it
        os.link(
            str(_DESCRIPTORS / str(descriptor)),
            part.name,
            src_dir_fd=directory,
            dst_dir_fd=directory,
            follow_symlinks=True,
        )
    finally:
        os.close(directory)


def _mode_of(target: Path) -> int | None:
    """The rights of the file that is replaced, if it is ours; else the umask decides."""
    try:
        told = target.stat()
    except FileNotFoundError:
        return None
    return stat.S_IMODE(told.st_mode) if told.st_uid == os.geteuid() else None


def _check_links(path: Path) -> None:
    """Refuse links that another user put where anyone may put one, as the kernel's own guard does.

    We resolve links before we open anything, so that guard never sees them.
    """
    for place in (path, *path.parents):
        try:
            link, around = place.lstat(), place.parent.stat()
        except OSError:
            continue  # what is not there leads nowhere; opening it tells
        open_to_all = stat.S_ISLNK(link.st_mode) and around.st_mode & stat.S_IWOTH
        if open_to_all and link.st_uid not in (os.geteuid(), around.st_uid):
            raise OffloadError(
                f"{place} is a link of another user (uid {link.st_uid}) in {place.parent}, where"
                " anyone may put one: nothing is saved through it. Name the file that is meant"
            )


def _sync_directory(directory: Path, calls: Calls) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        calls.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failed(target: Path, nbytes: int, error: OSError) -> OffloadError:
    name = errno.errorcode.get(error.errno or 0, "unknown")
    fix = {
        errno.ENOSPC: "free space there, or save elsewhere",
        errno.EDQUOT: "free space there, or save elsewhere",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f), or save elsewhere",
        errno.ENOENT: "create the directory first",
        errno.EACCES: "make the directory writable, or save elsewhere",
        errno.EROFS: "save elsewhere",
    }.get(error.errno or 0, "check that disk (`dmesg`), or save elsewhere")
    return OffloadError(
        f"saving {target} failed after {nbytes} bytes ({error.strerror or error}, {name}): {fix}. "
        "If there was a file of that name before, it is still there as it was"
    )
