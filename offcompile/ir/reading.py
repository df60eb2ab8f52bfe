"""Reading of files that somebody else may have written: bounded in size, checked for ownership."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

#: for problems, plans, machines and traces: larger than anything that `record` writes
MOST_BYTES = 256 << 20
#: for hardware profiles and machines as TOML, which are a page of figures
MOST_TOML_BYTES = 256 << 10

_CHUNK_BYTES = 1 << 20


def read_bounded(path: str | os.PathLike[str], most_bytes: int, ours: bool = False) -> str:
    """Returns the text of a UTF-8 file of at most `most_bytes`.

    ours: accept only a regular file, not a link, that belongs to this user or root and that
    nobody else may write to.
    Raises OSError, whose `strerror` says what is wrong, or UnicodeDecodeError.
    """
    # opening a pipe that has no writer would block; users who name a pipe themselves wait for it
    flags = os.O_RDONLY | os.O_CLOEXEC | ((os.O_NOFOLLOW | os.O_NONBLOCK) if ours else 0)
    descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if ours:
            _check_ours(Path(path), os.fstat(descriptor))
        chunks: list[bytes] = []
        left = most_bytes + 1
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            chunks.append(chunk)
            left -= len(chunk)
    if left <= 0:
        detail = f"it has more than {most_bytes} bytes, the most that is read"
        raise OSError(errno.EFBIG, detail, str(path))
    return b"".join(chunks).decode("utf-8")


def _check_ours(path: Path, told: os.stat_result) -> None:
    wrong = ""
    if not stat.S_ISREG(told.st_mode):
        wrong = "it is no regular file"
    elif told.st_uid not in (os.geteuid(), 0):
        wrong = f"it belongs to another user (uid {told.st_uid})"
    elif told.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = f"others may write to it (mode {stat.S_IMODE(told.st_mode):04o})"
    if wrong:
        raise OSError(errno.EPERM, wrong, str(path))
