"""Installs a CPU allocator in torch whose freed blocks fit the next tensor of their size.

torch requests aligned blocks from malloc. Up to 2.38, glibc frees the unaligned ends of such a
block separately, so a freed tensor's block is too short for the next tensor of its size: a program
that offloads fragments its heap, and the holes must be returned to the system and faulted in again.
Also, only the allocator knows, before the pages are touched, that a block would exceed the limit.
So torch gets an allocator that keeps the ends and checks the heap's limit (`tensor_memory.cpp`),
compiled at first use with Inductor's compiler, and cached with it. Without a compiler everything
works, but slower, and a thread that checks now and then enforces the limit.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import threading
from functools import cache
from pathlib import Path

import numpy as np
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.small_cpp import library

from .glibc import glibc_version
from .heap import address_space_is_limited, guard_with, heap
from .placement import Integers
from .places import BlockPlaces

log = logging.getLogger(__name__)

#: "torch" keeps torch's own allocator
VARIABLE, USUAL = "OFFCOMPILE_ALLOCATOR", "torch"
#: first glibc version whose freed aligned blocks merge with their ends again (bug 30723)
MENDED_VERSION = (2, 39)
_SOURCE = Path(__file__).with_name("tensor_memory.cpp")
_COMPILERS = ("g++", "clang++", "c++")
_NO_LIMIT = -1  # the same value as in the C++ source
_lock = threading.Lock()


def malloc_leaves_ends() -> bool:
    """True if blocks that this malloc aligns are too short, once freed, for the same size."""
    version = glibc_version()
    return version is not None and version < MENDED_VERSION


def will_fit() -> bool:
    """True if `install` has given torch the allocator, or is expected to succeed."""
    return _wanted() and (_installed() if _installed.cache_info().currsize else _compiler_found())


def install() -> bool:
    """Install the allocator for new tensors; returns False if it cannot, and logs the reason."""
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
    # under a limit on address space, large blocks have mappings of their own and leave no holes
    return chosen != USUAL and heap().gives_back and not address_space_is_limited()


def _compiler_found() -> bool:
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    return any(shutil.which(name) for name in named or _COMPILERS)


@cache
def _installed() -> bool:
    try:
        _compile_and_install()
    except Exception as error:  # any error of the compiler, linker or file system
        log.info(
            "tensors' memory is left to torch's own allocator; another cannot be had: %s: %s",
            type(error).__name__,
            str(error)[:500],
        )
        return False
    return True


def _compile_and_install() -> None:
    libraries = Path(torch.__file__).with_name("lib")
    # the linker would drop a library named before the code that needs it
    flags = (f"-L{libraries}", "-Wl,--no-as-needed", "-lc10")
    # Inductor caches by source and flags: the comment makes the source differ per torch version
    source = f"// torch {torch.__version__}\n{_SOURCE.read_text()}"
    compiled = library(source, *flags)
    guard = _Guard(compiled)
    compiled.offcompile_use_plain_blocks()
    guard_with(guard)


class _Guard:
    """The allocator's interface to the heap."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.places = BlockPlaces(_Placing(library))
        library.offcompile_limit.argtypes = (ctypes.c_int64, ctypes.c_int)
        library.offcompile_keep_within.argtypes = (ctypes.c_int64,)
        library.offcompile_limit.restype = library.offcompile_keep_within.restype = None
        for count in (library.offcompile_trims, library.offcompile_trim_ns):
            count.restype = ctypes.c_int64
        library.offcompile_placed_bytes.restype = ctypes.c_int64
        library.offcompile_give_back_places.restype = library.offcompile_count.restype = None
        library.offcompile_most_counted.restype = ctypes.c_int64
        library.offcompile_watch.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_double)
        library.offcompile_watch.restype = ctypes.c_int64

    def limit(self, nbytes: int | None, statm: int) -> None:
        self._library.offcompile_limit(_NO_LIMIT if nbytes is None else nbytes, statm)

    def keep_within(self, most_bytes: int) -> None:
        self._library.offcompile_keep_within(most_bytes)

    def trims(self) -> int:
        return int(self._library.offcompile_trims())

    def trim_ns(self) -> int:
        return int(self._library.offcompile_trim_ns())

    def placed_bytes(self) -> int:
        return int(self._library.offcompile_placed_bytes())

    def count(self) -> None:
        self._library.offcompile_count()

    def most_counted(self) -> int:
        return int(self._library.offcompile_most_counted())

    def give_back_places(self) -> None:
        self._library.offcompile_give_back_places()

    def watch(self, limit_bytes: int, beyond_bytes: int, seconds: float) -> int:
        return int(self._library.offcompile_watch(limit_bytes, beyond_bytes, seconds))


class _Placing:
    """The allocator's interface to `BlockPlaces`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.offcompile_begin_step.restype = library.offcompile_record.restype = None
        library.offcompile_events.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        library.offcompile_events.restype = ctypes.c_int64
        library.offcompile_missed_bytes.restype = ctypes.c_int64
        library.offcompile_lay_out.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
        )

    def begin_step(self) -> None:
        self._library.offcompile_begin_step()

    def record(self, on: bool) -> None:
        self._library.offcompile_record(int(on))

    def events(self) -> Integers:
        count = self._library.offcompile_events(None, 0)
        found = np.zeros((count, 3), np.int64)
        taken = self._library.offcompile_events(found.ctypes.data, count)
        return found[: min(count, taken)]

    def lay_out(self, sizes: Integers, offsets: Integers, extent_bytes: int) -> bool:
        return bool(
            self._library.offcompile_lay_out(
                sizes.ctypes.data, offsets.ctypes.data, len(sizes), extent_bytes
            )
        )

    def missed_bytes(self) -> int:
        return int(self._library.offcompile_missed_bytes())

    def trim(self) -> None:
        heap().trim()
