"""Tensors on the CPU take memory that fits the next of their size, within the heap's limit.

torch asks malloc for blocks on a border. Up to 2.38 glibc frees the ends of such a block by
themselves, and a freed tensor's place is then too short for the next tensor of its size: memory
that moves tensors in and out fills with holes, which must go back to the system and be touched
again. And only who hands blocks out knows before they are touched that there would be too much.
So torch is given an allocator that keeps the ends and looks at the heap's limit
(`tensor_memory.cpp`), compiled at first use as Inductor compiles, and kept in its cache. Without a
compiler all works as before, slower, and the limit is kept by a thread that looks now and then.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shlex
import shutil
import threading
from functools import cache
from pathlib import Path

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.small_cpp import library

from .heap import address_space_is_limited, guard_with, heap

log = logging.getLogger(__name__)

#: "torch" leaves memory to torch's own allocator
VARIABLE, USUAL = "OFFCOMPILE_ALLOCATOR", "torch"
#: the first version of glibc whose aligned allocations merge with their ends again (bug 30723)
MENDED_VERSION = (2, 39)
_SOURCE = Path(__file__).with_name("tensor_memory.cpp")
_COMPILERS = ("g++", "clang++", "c++")
_NO_LIMIT = -1  # as in the source
_lock = threading.Lock()


def glibc_version() -> tuple[int, int] | None:
    """None: another C library."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return None
    found = re.match(r"glibc (\d+)\.(\d+)", name or "")
    return (int(found[1]), int(found[2])) if found else None


def malloc_leaves_ends() -> bool:
    """Whether tensors' places do not fit again in blocks that this malloc aligns."""
    version = glibc_version()
    return version is not None and version < MENDED_VERSION


def will_fit() -> bool:
    """Whether `install` has given torch the allocator, or is about to."""
    return _wanted() and (_installed() if _installed.cache_info().currsize else _compiler_found())


def install() -> bool:
    """From now on, new tensors take memory so. False: no, for reasons that the log names."""
    if not _wanted():
        return False
    with _lock:
        return _installed()


def _wanted() -> bool:
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", USUAL):
        raise OffloadError(
            f"{VARIABLE} is {chosen!r}: write {USUAL!r} to leave tensors' memory to torch's own "
            "allocator, or leave it unset"
        )
    # blocks that have mappings of their own leave no holes
    return chosen != USUAL and heap().gives_back and not address_space_is_limited()


def _compiler_found() -> bool:
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    return any(shutil.which(name) for name in named or _COMPILERS)


@cache
def _installed() -> bool:
    try:
        _compile_and_install()
    except Exception as error:  # whatever a compiler, a linker or a file system may say
        log.info(
            "tensors' memory is left to torch's own allocator; another cannot be had: %s: %s",
            type(error).__name__,
            str(error)[:500],
        )
        return False
    return True


def _compile_and_install() -> None:
    libraries = Path(torch.__file__).with_name("lib")
    # the linker would drop a library that is named before what needs it
    flags = (f"-L{libraries}", "-Wl,--no-as-needed", "-lc10")
    # Inductor keeps what it compiled by source and flags: another torch is another source
    source = f"// torch {torch.__version__}\n{_SOURCE.read_text()}"
    compiled = library(source, *flags)
    guard = _Guard(compiled)
    compiled.offcompile_use_plain_blocks()
    guard_with(guard)


class _Guard:
    """The allocator as the heap sees it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.offcompile_limit.argtypes = (ctypes.c_int64, ctypes.c_int)
        library.offcompile_limit.restype = None
        for count in (library.offcompile_trims, library.offcompile_trim_ns):
            count.restype = ctypes.c_int64

    def limit(self, nbytes: int | None, statm: int) -> None:
        self._library.offcompile_limit(_NO_LIMIT if nbytes is None else nbytes, statm)

    def trims(self) -> int:
        return int(self._library.offcompile_trims())

    def trim_ns(self) -> int:
        return int(self._library.offcompile_trim_ns())
