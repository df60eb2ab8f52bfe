"""Flushes memory from the processor's caches, because most of a step's tensors are not cached.

An op that is measured alone in a loop would find its operands cached. The caches of servers hold
hundreds of megabytes by now, so reading other memory in between would take longer than the op. The
processor's own flush instruction takes 40 µs per MiB (`cold.cpp`, compiled at first use as Inductor
compiles, and kept in its cache). Without a compiler nothing is flushed.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import cache
from pathlib import Path

from offcompile.runtime.base.small_cpp import library

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cold.cpp")
_lock = threading.Lock()


def cool(begin: int, nbytes: int) -> bool:
    """Flush that memory from all caches; its content stays. False if that is not possible here."""
    with _lock:
        compiled = _compiled()
    if compiled is not None:
        compiled.offcompile_cool(begin, nbytes)
    return compiled is not None


@cache
def _compiled() -> ctypes.CDLL | None:
    try:
        found = library(_SOURCE.read_text())
    except Exception as error:  # a compiler, a linker or a file system may raise anything
        log.info(
            "ops are measured with what the processor's caches hold of their last run: %s: %s",
            type(error).__name__,
            str(error)[:500],
        )
        return None
    found.offcompile_cool.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    found.offcompile_cool.restype = None
    return found
