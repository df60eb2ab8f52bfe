"""The segments by which a host arena grows: mapped, touched by several threads, registered."""

from __future__ import annotations

import threading
import weakref

from offcompile.runtime.base.mapping import Mapping, page_multiple

from . import pinning
from .blocks import Segment
from .pinning import Registrar

_LEAST_TOUCHED_BYTES = 16 << 20


def make(nbytes: int, registrar: Registrar | None, threads: int) -> tuple[Segment, int]:
    """Create a touched segment; returns it with CUDA's code: 0 if registered, or not requested.

    Raises OffloadError if the system has no memory for it.
    """
    mapping = Mapping(nbytes)
    mapping.open(0, mapping.nbytes)
    _touch(mapping, threads)
    number, code = pinning.register(mapping, registrar) if registrar else (None, 0)
    segment = Segment.of(mapping, nbytes, number)
    if number is not None:
        weakref.finalize(segment, pinning.let_go, number).atexit = False
    return segment, code


def _touch(mapping: Mapping, threads: int) -> None:
    part = page_multiple(max(-(-mapping.nbytes // threads), _LEAST_TOUCHED_BYTES))
    parts = [(at, min(part, mapping.nbytes - at)) for at in range(0, mapping.nbytes, part)]
    mine, helpers = parts[:1], []
    for start, nbytes in parts[1:]:
        helper = threading.Thread(target=mapping.touch, args=(start, nbytes))
        try:
            helper.start()
        except RuntimeError:  # a limit left no room for its stack
            mine.append((start, nbytes))
        else:
            helpers.append(helper)
    for start, nbytes in mine:
        mapping.touch(start, nbytes)
    for helper in helpers:
        helper.join()
