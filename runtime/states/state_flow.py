"""Moves blocks between disk and memory: reads ahead, caches, and writes behind.

One thread reads and one writes. A block is never read before its own write has ended, and a block
that could not be written stays in memory until it can be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np

from offcompile.ir import OffloadError
from offcompile.runtime.base import watchdog
from offcompile.runtime.base.threads import Worker
from offcompile.runtime.disk.spill import SpillStore

from .block_queues import BlockQueues
from .state_blocks import Frame, Frames, Phase, StateBlock

#: number of upcoming blocks considered for read-ahead
_LOOK_AHEAD = 16
#: nobody else holds the lock for this long, so after a timeout this thread must hold it itself
_INSIDE_S = 1.0


class Flow:
    """Gives blocks frames while they are visited, and keeps them there while there is room.

    host_bytes: bytes of frames that may be idle; the rest of `frames` is for blocks in transit.
    upcoming: returns the blocks that will be visited next; called with the lock held.
    """

    def __init__(
        self,
        store: SpillStore,
        frames: Frames,
        host_bytes: int,
        most_ahead: int,
        upcoming: Callable[[], Iterable[StateBlock]],
    ) -> None:
        self.lock = threading.Lock()
        self.host_bytes = host_bytes
        self._store, self._frames = store, frames
        self._most_ahead, self._upcoming = most_ahead, upcoming
        self._changed = threading.Condition(self.lock)
        self._queues = BlockQueues()
        self._writing: StateBlock | None = None
        #: the error that stopped writing, until it has been raised
        self._failure: BaseException | None = None
        states = "offcompile-states"
        self._reader = Worker(
            f"{states}-in", self._changed, self._next_read, self._read, self._reader_died
        )
        self._writer = Worker(
            f"{states}-out", self._changed, self._next_write, self._write, self._writer_died
        )
        self._step = 0
        self._is_open = True

    @property
    def idle_bytes(self) -> int:
        return self._queues.idle_bytes

    # -- for visits; `raise_failure`, `look_ahead`, `step_over` and `forget` need the lock ---------

    def pin(self, block: StateBlock, write: bool) -> None:
        """Return when the block is in its frame, where it stays until `unpin`."""
        with self.lock:
            block.error = None
            block.waiting += 1
            try:
                watchdog.until(
                    self._changed, lambda: self._came(block, write), lambda: _described(block)
                )
            finally:
                block.waiting -= 1
            self._queues.remove(block)
            block.pins += 1
            self.look_ahead()

    def _came(self, block: StateBlock, write: bool) -> bool:
        """Try once to get the block into its frame; True if it is there."""
        if block.phase is Phase.READY:
            return True
        if not self._is_open or block.is_removed:
            raise OffloadError("the states were closed or removed while they were visited")
        if block.error is not None:
            error, block.error = block.error, None
            raise error
        if block.phase is Phase.LEAVING:
            self._queues.leaving.remove(block)
            block.phase = Phase.READY
            return True
        if block.phase is Phase.ABSENT:
            if write and not self._frames.has_room(block.nbytes):
                self.raise_failure()
            if block not in self._queues.demands:
                self._queues.demands.append(block)
            self.look_ahead()
        return False

    def unpin(self, block: StateBlock, write: bool) -> None:
        with self.lock:
            block.pins -= 1
            block.is_dirty |= write
            if block.pins or not self._is_open:
                return
            block.step = self._step
            self._queues.rest(block)
            while self.idle_bytes > self.host_bytes:
                self._leave(self._needed_last())
            self._changed.notify_all()

    def look_ahead(self) -> None:
        self._reader.wake()

    def step_over(self) -> None:
        self._step += 1

    def raise_failure(self) -> None:
        """Raise the last write failure, if any, and retry the write from now on."""
        if self._failure is not None:
            error, self._failure = self._failure, None
            self._writer.wake()
            raise error

    def forget(self, block: StateBlock) -> None:
        """Release the block's frame and extent, at once or when its transfer ends."""
        block.is_removed = True
        if block.phase not in (Phase.READING, Phase.WRITING):
            self._release(block)
            if not self._queues.leaving and self._writing is None:
                self._failure = None
        self._changed.notify_all()

    def settle(self) -> None:
        """Wait for all pending writes; raises write failures. May be tried again."""
        with self.lock:
            self._failure = None
            if self._queues.leaving:
                self._writer.wake()
            watchdog.until(self._changed, self._settled, self._what_leaves)
            self.raise_failure()

    def _settled(self) -> bool:
        over = self._failure is not None or not self._is_open
        return over or not (self._queues.leaving or self._writing)

    def _what_leaves(self) -> str:
        blocks = [*self._queues.leaving, *filter(None, [self._writing])]
        nbytes = sum(block.nbytes for block in blocks)
        return f"The writing of {nbytes} bytes of optimizer states in {len(blocks)} blocks"

    def close(self) -> bool:
        """End the threads and drop all frames.

        Returns False if the threads end later and their frames with them. This happens when a disk
        hangs, and when garbage collection closes the store from within one of the store's own
        lines.
        """
        self._is_open = False
        self._reader.end()
        self._writer.end()
        if self._reader.is_this_thread() or self._writer.is_this_thread():
            return False
        if not self.lock.acquire(timeout=_INSIDE_S):
            return False
        self.lock.release()
        # join both, even if the first one is left behind
        if not all([self._reader.join(), self._writer.join()]):
            return False
        self.drop()
        return True

    def drop(self) -> None:
        """Drop everything, without a lock: for a forked child, which has no threads."""
        self._is_open = False
        self._queues.clear()
        self._frames.clear()

    # -- eviction --------------------------------------------------------------------------------

    def _needed_last(self) -> StateBlock:
        return self._queues.needed_last(self._step)

    def _leave(self, block: StateBlock) -> None:
        """Free the frame, now or once its content has been written."""
        self._queues.remove(block)
        if block.is_dirty:
            block.phase = Phase.LEAVING
            self._queues.leaving.append(block)
            self._writer.wake()
        else:
            self._empty(block)

    def _empty(self, block: StateBlock) -> None:
        frame, block.frame = block.frame, None
        block.phase = Phase.ABSENT
        if frame is not None:
            self._frames.give_back(frame)

    def _release(self, block: StateBlock) -> None:
        self._queues.remove(block)
        self._empty(block)
        self._store.release(block.extent)

    def _stay(self, block: StateBlock) -> None:
        """Keep the block for the visit that waits for it; if none comes, it is evicted first."""
        block.phase = Phase.READY
        self._queues.ahead.append(block)

    # -- the two threads -------------------------------------------------------------------------

    def _next_read(self) -> StateBlock | None:
        while self._queues.demands:
            block = self._queues.demands[0]
            frame = self._demanded_frame(block) if block.phase is Phase.ABSENT else None
            if frame is None and block.phase is Phase.ABSENT and block.error is None:
                return None  # a frame becomes free when a block has been written
            self._queues.demands.popleft()
            if frame is not None:
                return _begun(block, frame)
        return self._next_ahead()

    def _demanded_frame(self, block: StateBlock) -> Frame | None:
        try:
            frame = self._frames.take(block.nbytes)
            for other in reversed(self._queues.ahead):
                if frame is None and not other.waiting:
                    self._leave(other)
                    frame = self._frames.take(block.nbytes)
            # there may be less memory than the limit: then evict idle blocks too
            while frame is None and not self._is_writing() and self._idle_that_can_go():
                self._leave(self._needed_last())
                frame = self._frames.take(block.nbytes)
            if frame is None and not self._is_writing():
                frame = self._frames.take(block.nbytes, beyond_limit=True)
            return frame
        except OffloadError as error:
            block.error = error
            self._changed.notify_all()
            return None

    def _is_writing(self) -> bool:
        return self._failure is None and bool(self._queues.leaving or self._writing)

    def _idle_that_can_go(self) -> bool:
        return bool(self._queues.idle) and (
            self._failure is None or not self._needed_last().is_dirty
        )

    def _next_ahead(self) -> StateBlock | None:
        coming = list(islice(self._upcoming(), _LOOK_AHEAD))
        for block in coming:
            if block.phase is Phase.ABSENT and block.error is None:
                if len(self._queues.ahead) >= self._most_ahead:
                    useless = [b for b in self._queues.ahead if b not in coming and not b.waiting]
                    if not useless:
                        return None
                    self._leave(useless[0])
                try:
                    frame = self._frames.take(block.nbytes)
                except OffloadError as error:
                    block.error, frame = error, None
                return None if frame is None else _begun(block, frame)
        return None

    def _read(self, block: StateBlock) -> None:
        assert block.frame is not None
        error: BaseException | None = None
        try:
            pages = block.frame.view[: block.nbytes]
            if block.is_written:
                self._store.read(block.extent, 0, pages)
            else:
                np.frombuffer(pages, np.uint8).fill(0)
        except BaseException as failed:
            error = failed
        with self.lock:
            if block.is_removed:
                self._release(block)
            elif error is not None:
                block.error = error
                self._empty(block)
            else:
                self._stay(block)
            self._changed.notify_all()

    def _reader_died(self, block: StateBlock | None, error: OffloadError) -> None:
        """Report the error to waiters of the block, or of every block if the thread had none."""
        for one in [block] if block is not None else list(self._queues.demands):
            if one.phase is Phase.READING:
                self._empty(one)
            one.error = error

    def _writer_died(self, block: StateBlock | None, error: OffloadError) -> None:
        self._failure = error
        lost, self._writing = self._writing, None
        if lost is not None and lost.phase is Phase.WRITING:
            lost.phase = Phase.LEAVING
            self._queues.leaving.appendleft(lost)

    def _next_write(self) -> StateBlock | None:
        if self._failure is not None or not self._queues.leaving:
            return None
        self._writing = self._queues.leaving.popleft()
        self._writing.phase = Phase.WRITING
        return self._writing

    def _write(self, block: StateBlock) -> None:
        assert block.frame is not None
        error: BaseException | None = None
        try:
            self._store.write(block.extent, 0, block.frame.view[: block.nbytes])
        except BaseException as failed:
            error = failed
        with self.lock:
            self._writing = None
            if block.is_removed:
                self._release(block)
            elif error is not None:
                self._failure = error
                block.phase = Phase.LEAVING
                self._queues.leaving.appendleft(block)
            else:
                block.is_written, block.is_dirty = True, False
                if block.waiting:
                    self._stay(block)
                else:
                    self._empty(block)
            self._changed.notify_all()


def _described(block: StateBlock) -> str:
    return f"A block of {block.nbytes} bytes of optimizer states ({block.phase.value})"


def _begun(block: StateBlock, frame: Frame) -> StateBlock:
    block.frame, block.phase = frame, Phase.READING
    return block
