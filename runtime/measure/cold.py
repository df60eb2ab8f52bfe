"""Memory that no cache of the processor holds, as most of a step's tensors are when an op comes to
them: what runs alone in a loop would find them where it left them.

The caches of servers hold hundreds of megabytes by now, so reading other memory in between would
take longer than the op. The processor's own instruction takes 40 µs per MiB (`cold.cpp`, compiled
at first use as Inductor compiles, and kept in its cache). Without a compiler memory stays as it is.
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
    """Put that memory out of all caches; what is in it stays. False: nobody knows how here."""
    with _lock:
        compiled = _compiled()
    if compiled is not None:
        compiled.offcompile_cool(begin, nbytes)
    return compiled is not None


@cache
def _compiled() -> ctypes.CDLL | None:
    try:
        found = library(_SOURCE.read_text())
    except Exception as error:  # whatever a compiler, a linker or a file system may say
        log.info(
            "ops are measured with what the processor's caches hold of their last run: %s: %s",
            type(error).__name__,
            str(error)[:500],
        )
        return None
    found.offcompile_cool.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    found.offcompile_cool.restype = None
    return found
