"""Spill files that verify every page when it is read back, for disks that are not trusted.

A 64-bit checksum of each page is computed before the page is written, kept in memory as long as
its extent, and compared with the checksum of the page read. Off by default: stores are then plain
ones, and none of this runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from offcompile.ir import OffloadError
from offcompile.runtime.base.mapping import PAGE_BYTES
from offcompile.runtime.codecs import engine

from .spill import SpillStore
from .spill_space import Extent

_Array = np.ndarray[Any, np.dtype[Any]]


class VerifiedStore(SpillStore):
    """A store whose `read` raises if a page differs from the one last written there.

    Uses 8 bytes of memory per page in use. Pages that were never written are not checked.
    """

    verified = True

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # checksums by extent number; 0: not written
        self._sums: dict[int, _Array] = {}
        engine()  # may compile: do that now, so that no lane waits for it

    @property
    def sums_bytes(self) -> int:
        """Memory used by the checksums now."""
        return sum(sums.nbytes for sums in tuple(self._sums.values()))

    def allocate(self, nbytes: int) -> Extent:
        extent = super().allocate(nbytes)
        self._sums[extent.number] = np.zeros(extent.padded_nbytes // PAGE_BYTES, np.uint64)
        return extent

    def release(self, extent: Extent) -> None:
        super().release(extent)
        del self._sums[extent.number]

    def _move(
        self, extent: Extent, offset: int, buffers: Sequence[memoryview], writing: bool
    ) -> None:
        given = list(_sums(buffers)) if writing else []
        super()._move(extent, offset, buffers, writing)
        if not writing:
            given = list(_sums(buffers))
        found = np.concatenate(given)
        first = offset // PAGE_BYTES
        kept = self._sums[extent.number][first : first + len(found)]
        if writing:
            kept[:] = found
        else:
            changed = np.flatnonzero((kept != found) & (kept != 0))
            if len(changed):
                raise self._changed(extent, offset, len(found), changed)

    def _changed(self, extent: Extent, offset: int, pages: int, changed: _Array) -> OffloadError:
        within = offset + int(changed[0]) * PAGE_BYTES
        ((file, at, _),) = self.ranges(extent, within, PAGE_BYTES)
        return OffloadError(
            f"{len(changed)} of {pages} pages read are not what was written there (their checksums "
            f"differ): the first lies at {at} of the spill file in {self.directories[file]}, "
            f"{within} bytes into what was stored. The drive, its controller or memory changed it, "
            "or another program wrote there; the tensor is lost. Check that disk (`dmesg`, "
            "`smartctl -a`) and do this step again: its results are not to be used"
        )


def _sums(buffers: Sequence[memoryview]) -> Iterator[_Array]:
    for buffer in buffers:
        pages = np.frombuffer(buffer, np.uint8)
        # the store itself refuses partial pages
        yield engine().sum_pages(pages[: len(pages) // PAGE_BYTES * PAGE_BYTES])
