"""Moves tensors between a card and spill files without host memory, with GPUDirect Storage.

Never run on a machine that has GPUDirect Storage (docs/gpu.md).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from offcompile.ir import OffloadError
from offcompile.runtime.base.counters import now_ns
from offcompile.runtime.base.mapping import PAGE_BYTES
from offcompile.runtime.device.cpu import CpuSlot
from offcompile.runtime.device.lane_rates import LaneRates
from offcompile.runtime.device.streams import Stream, Streams
from offcompile.runtime.disk.gds import CuFile, GdsStore
from offcompile.runtime.disk.spill import SpillStore

from .copies import CudaCopy

log = logging.getLogger(__name__)

#: smaller tensors go through host memory: they take one staging chunk or less, so one turn
LEAST_BYTES = 4 << 20


class DirectFiles:
    """Moves the bytes that it can; the caller moves the rest through host memory.

    The first failure is logged in one line, and from then on nothing goes this way. Files whose
    bytes are checked on the way (`SpillStore.verified`) never do.
    """

    def __init__(
        self,
        streams: Streams,
        store: SpillStore,
        rates: LaneRates,
        cufile: Callable[[], CuFile | str],
    ) -> None:
        self._streams = streams
        self._store = store
        self._rates = rates
        self._cufile = cufile
        self._lock = threading.Lock()
        self._asked = not store.direct or store.verified
        #: stays registered until `close`, even after `_give_up`: another lane may be using it
        self._files: GdsStore | None = None
        self._works = True

    def move(self, copy: CudaCopy, slot: CpuSlot, stream: Stream, outward: bool) -> int:
        """Move the first bytes of a tensor after the work queued on `stream`; returns how many.

        Blocks until that is over; then `copy.event` is behind it. 0 if nothing moved, or if
        everything must be moved again. Raises only errors of earlier work on the stream.
        """
        nbytes = slot.nbytes - slot.nbytes % PAGE_BYTES
        files = self._opened() if nbytes >= LEAST_BYTES else None
        if files is None:
            return 0
        # the library's calls know nothing of streams
        self._streams.synchronize(self._streams.record(stream))
        began_ns, pointer = now_ns(), copy.part(0, nbytes).data_ptr()
        try:
            (files.write if outward else files.read)(slot.extent, 0, pointer, nbytes)
        except OffloadError as error:
            self._give_up(error)
            return 0
        self._rates.add(copy.lane, nbytes, now_ns() - began_ns)
        copy.event = self._streams.record(stream)
        return nbytes

    def close(self) -> None:
        """Close the files before the store does, when nothing moves any more."""
        with self._lock:
            files, self._files, self._asked = self._files, None, True
        if files is not None:
            files.close()

    def _opened(self) -> GdsStore | None:
        with self._lock:
            if not self._asked:
                self._asked = True
                self._files = self._open()
            return self._files if self._works else None

    def _open(self) -> GdsStore | None:
        found = self._cufile()
        if isinstance(found, str):
            log.debug("%s", found)
            return None
        try:
            with self._streams.on_card():
                return GdsStore(self._store, found, self._streams.on_card)
        except OffloadError as error:
            log.warning("%s", error)
            return None

    def _give_up(self, error: OffloadError) -> None:
        with self._lock:
            first, self._works = self._works, False
        if first:
            log.warning("%s. From now on tensors go through host memory", error)
