"""The copies that a CUDA device has accepted and that have not ended, and their late failures."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

from offcompile.ir import OffloadError
from offcompile.runtime.base.threads import TaskQueue
from offcompile.runtime.device.failures import failure

from .copies import CudaCopy


class CopiesInFlight:
    """Accepts copies until it is closed, and tells when all of them have ended. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.unfinished: set[CudaCopy] = set()
        #: loads that failed after compute had passed their waits
        self._late: list[CudaCopy] = []
        #: lane → the queue whose thread waits for its copies to end, in the order of issue
        self._ends: dict[str, TaskQueue] = {}
        self.closed = False
        #: set while somebody waits for ends
        self.hurry = threading.Event()
        self._hurrying = 0

    def add(self, copy: CudaCopy) -> None:
        """Accept a copy, or raise if the device is closed."""
        with self._changed:
            if self.closed:
                raise OffloadError(f"The cuda runtime is closed: {copy.label.tag} cannot move.")
            if copy.lane not in self._ends:
                self._ends[copy.lane] = TaskQueue(f"offcompile-{copy.lane}-ends")
            self._ends[copy.lane].start()
            self.unfinished.add(copy)

    def discard(self, copy: CudaCopy) -> None:
        """Forget a copy that never began."""
        with self._changed:
            self.unfinished.discard(copy)

    def at_end(self, copy: CudaCopy, wait: Callable[[], None]) -> None:
        """Run `wait` on the thread of the lane's ends, after those of earlier copies."""
        self._ends[copy.lane].add(wait, awaited=False)

    def passed(self, copy: CudaCopy) -> None:
        """Note that compute has passed the wait for a copy, unless the copy has failed."""
        with self._changed:
            # the caller checks `copy.error` next, and never again
            copy.awaited = copy.error is None

    def failed(self, copy: CudaCopy, error: BaseException) -> None:
        with self._changed:
            if copy.error is None:
                copy.error = error
                if copy.awaited and copy.label.direction == "load":
                    self._late.append(copy)

    def over(self, copy: CudaCopy) -> None:
        with self._changed:
            copy.over = True
            self.unfinished.discard(copy)
            self._changed.notify_all()

    def raise_late(self) -> None:
        """Raise, once, the error of a load that failed after compute had passed its wait."""
        if self._late:
            with self._changed:
                self._late = [copy for copy in self._late if not copy.told]
                copy = self._late.pop(0) if self._late else None
            if copy is not None and copy.error is not None:
                raise failure(copy.error, "load", copy.label.tag, copy.slot)

    def drain(self) -> None:
        with self._changed:
            self._hurrying += 1
            self.hurry.set()
            try:
                while self.unfinished:
                    self._changed.wait()
            finally:
                self._hurrying -= 1
                if not self._hurrying:
                    self.hurry.clear()

    # -- the end of the device ---------------------------------------------------------------------

    def refuse(self) -> None:
        """Accept no copy from now on."""
        with self._changed:
            self.closed = True

    def queued(self) -> list[CudaCopy]:
        """The copies that still wait for a lane's thread."""
        with self._changed:
            return [copy for copy in self.unfinished if copy.job and not copy.issued.is_set()]

    def join(self) -> None:
        """Return when the ends of all copies have been seen."""
        with self._changed:
            self._hurrying += 1  # for good
            self.hurry.set()
        for ends in self._ends.values():
            ends.close()
            ends.join()

    def warn_late(self) -> None:
        for copy in (copy for copy in self._late if not copy.told):
            error = failure(copy.error or OffloadError(), "load", copy.label.tag, copy.slot)
            warnings.warn(f"The results computed last are wrong: {error}", stacklevel=3)
        self._late.clear()
