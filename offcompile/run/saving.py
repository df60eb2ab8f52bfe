"""Atomic checkpoints: written to a temporary file, synced, then renamed into place."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.posix import fcntl
from offcompile.runtime.base.watchdog import calling, told

_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_DESCRIPTORS = Path("/proc/self/fd")
#: errors of file systems that do not support O_TMPFILE
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_FRUITLESS_TRIES = 8


@dataclass(frozen=True)
class Calls:
    """The system calls that reach the disk; tests replace them to inject failures."""

    write: Callable[[int, memoryview], int] = os.write
    fsync: Callable[[int], None] = os.fsync
    replace: Callable[[Path, Path], None] = os.replace


def save(obj: object, path: str | os.PathLike[str], *, calls: Calls | None = None) -> None:
    """Save atomically with `torch.save`, to a file that `torch.load` reads.

    When it returns, the file is on the disk. If anything fails before (a full disk, a kill, a power
    cut), the file that was at `path` is unchanged. Tensors are written straight from their memory,
    one after the other; only tensors of another device are copied, one at a time.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OffloadError(
            f"offcompile.save needs a path, not {type(path).__name__}: a file that is open already "
            "cannot be put in place as a whole; for that one use torch.save"
        )
    _check_links(Path(path).absolute())
    # follow a link, so that it stays a link to the file
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
    """A file object for torch.save. Keeps the first error, since torch may raise its own."""

    def __init__(self, calls: Calls) -> None:
        self.descriptor = -1
        self.directory = Path()
        self.nbytes = 0
        self.error: BaseException | None = None
        self._calls = calls

    def write(self, data: bytes | memoryview) -> int:
        # torch keeps writing after an error, to end the archive
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
            # interrupts too: raised once torch has returned
            self.error = error
            return 0
        return len(view)

    def flush(self) -> None:
        """Do nothing: writes are unbuffered."""


def _write(obj: object, writer: _Writer) -> None:
    try:
        torch.save(obj, writer)  # type: ignore[arg-type]
    except BaseException:
        # torch reports the missing bytes, or goes on
        if writer.error is None:
            raise
    if writer.error is not None:
        raise writer.error


@contextmanager
def _beside(target: Path, calls: Calls) -> Iterator[int]:
    """Yield a new file that replaces `target` on success and is removed on failure."""
    mode = _mode_of(target)
    _sweep(target)
    part = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.part")
    descriptor, has_name = _open(target.parent, part)
    try:
        # keeps other processes from sweeping it away; some file systems have no locks
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
    """Return a descriptor, and True if the file has a name. Unnamed files vanish with a kill."""
    if _O_TMPFILE and _DESCRIPTORS.exists():
        try:
            return os.open(directory, _O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), False
        except OSError as error:
            if error.errno not in _NO_TMPFILE or not directory.is_dir():
                raise
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(part, flags, 0o666), True


def _sweep(target: Path) -> None:
    """Remove partial files of killed processes: those that no live process has locked."""
    prefix = f".{target.name[:200]}."
    try:
        names = os.listdir(target.parent)
    except PermissionError:
        return  # a directory can be writable but not listable
    for name in names:
        if name.startswith(prefix) and name.endswith(".part") and len(name) == len(prefix) + 13:
            left = target.with_name(name)
            # another user may have put anything there: a pipe would block us, a link lead elsewhere
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with suppress(OSError), open(os.open(left, flags), "rb") as part:
                if os.fstat(part.fileno()).st_uid == os.geteuid():
                    fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left.unlink()


def _name(descriptor: int, part: Path) -> None:
    directory = os.open(part.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # with directory descriptors, Linux follows the link in /proc to the file behind it
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
    """The permissions of the replaced file if we own it; None: the umask decides."""
    try:
        told = target.stat()
    except FileNotFoundError:
        return None
    return stat.S_IMODE(told.st_mode) if told.st_uid == os.geteuid() else None


def _check_links(path: Path) -> None:
    """Refuse links of other users in world-writable directories, as the kernel's guard does.

    That guard never sees these links, because we resolve them before we open anything.
    """
    for place in (path, *path.parents):
        try:
            link, around = place.lstat(), place.parent.stat()
        except OSError:
            continue  # a missing path leads nowhere; opening it will fail
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
