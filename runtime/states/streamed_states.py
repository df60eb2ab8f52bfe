"""Optimizer states on the host tier that are copied to the device for each update, and back.

They pass through a few device buffers: compute works on one while the next ones are filled and the
last ones are copied back. Nothing here blocks the host. A copy into a buffer runs after the copy
out of it, and compute waits for the buffer that it is about to use.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.device.failures import failure, not_arrived
from offcompile.runtime.device.interface import Copy, Device, Label, Point, Slot

from .gradient_transport import BACK, OUT
from .state_blocks import cut
from .states import ALIGN_BYTES, Range, StatesFacts

#: large enough for the full rate of a link, small enough that the first block arrives soon
BLOCK_BYTES = 32 << 20
#: one is in use, one is copied out, the others are filled
BUFFERS = 4


@dataclass(eq=False)
class _Block:
    """Elements [start, stop) of one parameter: its states, one after another."""

    key: int
    start: int
    stop: int
    dtypes: tuple[torch.dtype, ...]
    #: on the host, as the device addresses it
    home: torch.Tensor
    slot: Slot
    #: once this point is reached, the host holds the data to load
    written: Point | None
    out: Copy | None = None

    @property
    def label(self) -> str:
        return f"optimizer states {self.key} [{self.start}:{self.stop}]"

    def parts(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found, at = [], 0
        for dtype in self.dtypes:
            nbytes = (self.stop - self.start) * dtype.itemsize
            found.append(flat[at : at + nbytes].view(dtype))
            at += _aligned(nbytes)
        return tuple(found)


@dataclass(eq=False)
class _Buffer:
    """A device buffer. `block`: the block that is in it or being loaded."""

    flat: torch.Tensor
    block: _Block | None = None
    load: Copy | None = None
    is_open: bool = False
    #: points that must be reached before the next load may write here
    after: list[Point] = field(default_factory=list)


class StreamedStates:
    """States of one device's parameters. Visits give work to the caller's compute stream.

    The buffers are allocated by the first visits, and stay.
    """

    def __init__(
        self, device: Device, block_bytes: int = BLOCK_BYTES, buffers: int = BUFFERS
    ) -> None:
        if buffers < 1 or block_bytes <= 0:
            raise OffloadError(
                f"block_bytes={block_bytes}, buffers={buffers}: give a positive size and 1 or more"
            )
        self.device = device
        self._block_bytes, self._most = block_bytes, buffers
        self._blocks: dict[int, list[_Block]] = {}
        self._buffers: list[_Buffer] = []
        self._largest: Slot | None = None
        self._order: tuple[int, ...] = ()
        self._place: dict[int, int] = {}
        self._in_bytes = self._out_bytes = 0
        self._lock = threading.RLock()

    def add(self, key: int, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        """Add states of `numel` zeros, one part per dtype, in host memory."""
        if key in self._blocks:
            raise OffloadError(f"Optimizer states number {key} are there already: remove them.")
        kinds = tuple(dtypes)
        ranges = cut(numel, kinds, self._block_bytes) if kinds and numel else []
        sizes = [
            sum(_aligned((stop - start) * d.itemsize) for d in kinds) for start, stop in ranges
        ]
        homes = self.device.addressable(sizes) if sizes else []
        for home in homes:
            self.device.clear(home)
        cleared = self.device.mark()
        blocks = []
        for (start, stop), home in zip(ranges, homes, strict=True):
            slot = self.device.slot_of(home)
            assert slot is not None, "the device does not know its own memory"
            blocks.append(_Block(key, start, stop, kinds, home, slot, cleared))
            if self._largest is None or slot.nbytes > self._largest.nbytes:
                self._largest = slot
        with self._lock:
            self._blocks[key] = blocks

    def remove(self, key: int) -> None:
        """Remove the states of a key that nobody is visiting; loads of them may still run."""
        with self._lock:
            blocks = self._blocks.pop(key)
            for buffer in self._buffers:
                if buffer.block in blocks:
                    self._empty(buffer)

    def expect(self, keys: Sequence[int]) -> None:
        """Set the order of visits, which repeats: blocks are loaded ahead in this order."""
        with self._lock:
            self._order = tuple(k for k in keys if k in self._blocks)
            self._place = {key: at for at, key in enumerate(self._order)}

    def visit(self, key: int, write: bool = True) -> Iterator[Range]:
        """See `States`. Parts are on the device: only work on the compute stream may touch them."""
        blocks = tuple(self._blocks[key])
        for number, block in enumerate(blocks):
            with self._lock:
                self._look_ahead(blocks[number:])
                buffer = self._opened(block)
            try:
                yield Range(block.start, block.stop, block.parts(buffer.flat))
            finally:
                with self._lock:
                    self._close(buffer, block, write)

    def settle(self) -> None:
        """Return when everything is written; raises write failures."""
        for block in [b for blocks in self._blocks.values() for b in blocks]:
            if block.out is not None:
                self.device.reached(block.out)

    def facts(self) -> StatesFacts:
        nbytes = sum(b.slot.nbytes for blocks in self._blocks.values() for b in blocks)
        return StatesFacts(nbytes, 0, self._in_bytes, self._out_bytes)

    def held_bytes(self, largest_bytes: int) -> int:
        """Device bytes of its buffers, if no parameter has more than `largest_bytes` of states."""
        return self._most * min(self._block_bytes, largest_bytes)

    def close(self) -> None:
        """Release everything; copies in flight keep the memory they use."""
        with self._lock:
            self._blocks.clear()
            self._buffers.clear()
            self._order, self._place, self._largest = (), {}, None

    # -- under the lock ----------------------------------------------------------------------------

    def _look_ahead(self, here: Sequence[_Block]) -> None:
        """Start loading these blocks and then the expected ones, as far as there are buffers."""
        wanted = list(here[: self._most])
        at = self._place.get(here[0].key)
        if at is not None:
            for step in range(1, len(self._order)):
                if len(wanted) >= self._most:
                    break
                key = self._order[(at + step) % len(self._order)]
                wanted.extend(self._blocks.get(key, ()))
        wanted = wanted[: self._most]
        for block in wanted:
            if self._buffer_of(block) is None:
                free = self._free(wanted)
                if free is None:
                    break
                self._load(free, block)

    def _opened(self, block: _Block) -> _Buffer:
        """The buffer that holds the block, for compute to use from now on."""
        buffer = self._buffer_of(block)
        if buffer is None:  # visits that are open at the same time use all buffers
            buffer = self._made(block)
            self._load(buffer, block)
        load = buffer.load
        assert load is not None
        self.device.wait(load)
        if load.error is not None:
            self._empty(buffer)
            if block.out is not None and block.out.error is not None:
                raise not_arrived(Label("out", block.label), block.out.error)
            raise failure(load.error, "load", block.label, block.slot)
        buffer.is_open = True
        return buffer

    def _close(self, buffer: _Buffer, block: _Block, write: bool) -> None:
        mark = self.device.mark()
        buffer.is_open = False
        buffer.block = buffer.load = None
        buffer.after = [] if mark is None else [mark]
        if write and self._blocks.get(block.key) is not None:
            source = buffer.flat[: block.slot.nbytes]
            label = Label("out", block.label)
            block.out = self.device.copy_out(OUT, source, block.slot, buffer.after, label, _nothing)
            block.written = block.out
            buffer.after = [block.out]
            self._out_bytes += block.slot.nbytes
        if len(self._buffers) > self._most:
            self._buffers.remove(buffer)

    def _load(self, buffer: _Buffer, block: _Block) -> None:
        after = [*buffer.after, *([] if block.written is None else [block.written])]
        target = buffer.flat[: block.slot.nbytes]
        label = Label("load", block.label)
        buffer.load = self.device.copy_in(BACK, block.slot, target, after, label, _nothing)
        buffer.block = block
        buffer.after = [buffer.load]
        self._in_bytes += block.slot.nbytes

    def _buffer_of(self, block: _Block) -> _Buffer | None:
        return next((b for b in self._buffers if b.block is block), None)

    def _free(self, wanted: Sequence[_Block]) -> _Buffer | None:
        """The least recently used free buffer, or a new one; None if all are in use."""
        assert self._largest is not None
        for buffer in self._buffers:
            unused = not buffer.is_open and (buffer.block is None or buffer.block not in wanted)
            if unused and buffer.flat.numel() < self._largest.nbytes:
                self._buffers.remove(buffer)  # allocated before larger states were added
                return self._made(wanted[0])
            if unused:
                self._empty(buffer)
                self._buffers.remove(buffer)
                self._buffers.append(buffer)
                return buffer
        return self._made(wanted[0]) if len(self._buffers) < self._most else None

    def _made(self, block: _Block) -> _Buffer:
        assert self._largest is not None
        flat = self.device.allocate(self._largest, _gone)
        mark = self.device.mark()  # kernels of its last holder may still run
        buffer = _Buffer(flat, after=[] if mark is None else [mark])
        self._buffers.append(buffer)
        return buffer

    def _empty(self, buffer: _Buffer) -> None:
        buffer.block = buffer.load = None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _nothing(copy: Copy) -> None:
    """Does nothing: waiters check the copy itself."""


def _gone() -> None:
    """Does nothing: the buffers are not counted one by one."""
