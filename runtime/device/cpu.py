"""The CPU as a device: memory is a budget of RAM, slots are in spill files, lanes are threads.

Staging is avoided where possible. Direct I/O requires whole pages, but a tensor begins somewhere
inside one. So a slot keeps the tensor at the same offset within its first page as in memory: the
whole pages in the middle are written straight from the tensor to the file, and only the partial
first and last pages pass through staging. A load reads the file's pages directly into memory, and
its buffer begins inside the first page.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch

from offcompile.ir import OffloadError
from offcompile.runtime import codecs
from offcompile.runtime.base.threads import TaskQueue
from offcompile.runtime.codecs import TensorCodec
from offcompile.runtime.disk.spill import SpillFull, SpillStore
from offcompile.runtime.disk.spill_file import calls_for, part_of
from offcompile.runtime.disk.spill_space import Extent
from offcompile.runtime.memory.arena import Arena
from offcompile.runtime.memory.blocks import MemoryBlock

from . import packing
from .failures import not_arrived
from .interface import Copy, Device, Label, Point, Slot, Waited
from .lane_rates import LaneRates
from .lanes import LaneJob, Lanes
from .mapped import MappedSlot, MappedStore
from .packing import PackedSlot
from .streams import flat_elements
from .tickets import telling

PAGE_BYTES = 4096
#: smaller tensors are staged as a whole: one write instead of three
STAGED_BYTES = 256 << 10
#: the buffer alignment that generated kernels expect
ALIGNMENT_BYTES = 16
_WRITABLE = 0x200

_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class CpuSlot(Slot):
    """An extent of a spill store; the tensor begins `skew_bytes` into its first page."""

    __slots__ = ("extent", "nbytes", "padded_bytes", "skew_bytes", "store", "tier")

    def __init__(self, store: SpillStore, tier: str, nbytes: int, skew_bytes: int) -> None:
        self.store = store
        self.tier = tier
        self.nbytes = nbytes
        self.skew_bytes = skew_bytes
        self.padded_bytes = _pages(max(skew_bytes + nbytes, 1))
        self.extent: Extent = store.allocate(self.padded_bytes)

    @property
    def where(self) -> str:
        return ", ".join(str(directory) for directory in self.store.directories)

    def free(self) -> None:
        self.store.release(self.extent)


class CpuDevice(Device):
    """Implements `Device` on the CPU.

    stores: the store of each tier, fastest first; a full tier overflows to the next.
    mapped: allocates the host memory that ops can use in place.
    chunk_bytes: approximate maximum of one read or write call.
    """

    name = "cpu"

    def __init__(
        self,
        arena: Arena,
        stores: Mapping[str, SpillStore],
        chunk_bytes: int = 8 << 20,
        mapped: MappedStore | None = None,
    ) -> None:
        if chunk_bytes < PAGE_BYTES:
            raise OffloadError(f"chunk_bytes is {chunk_bytes}: it must be at least {PAGE_BYTES}.")
        self.arena = arena
        self.stores = dict(stores)
        self.mapped = mapped
        self.lanes = Lanes("cpu")
        self.rates = LaneRates()
        self._chunk_bytes = chunk_bytes // PAGE_BYTES * PAGE_BYTES
        self._staging: dict[str, MemoryBlock] = {}
        self._packing: dict[str, MemoryBlock] = {}
        self._packing_bounds: MutableMapping[object, int] = WeakKeyDictionary()
        self._disks: dict[str, TaskQueue] = {}

    @property
    def staging_bytes(self) -> int:
        packing_bytes = sum(block.nbytes for block in tuple(self._packing.values()))
        return len(self._staging) * STAGED_BYTES + packing_bytes

    def slot(
        self, source: torch.Tensor, tier: str, codec: str | None = None
    ) -> CpuSlot | PackedSlot:
        nbytes = source.numel() * source.element_size()
        tiers = tuple(self.stores)
        if tier not in self.stores:
            known = ", ".join(tiers) or "none"
            raise OffloadError(f"There is no tier {tier!r} to move to; this runtime has: {known}.")
        skew_bytes = _skew_bytes(source.data_ptr(), nbytes)
        slower = tiers[tiers.index(tier) :]
        for last, name in enumerate(slower, start=1 - len(slower)):
            try:
                if codec is not None:
                    return self._packed_slot(name, source, codecs.codec(codec))
                return CpuSlot(self.stores[name], name, nbytes, skew_bytes)
            except SpillFull:
                if last == 0:
                    raise
        raise AssertionError("the last tier has either taken it or raised")

    def _packed_slot(self, tier: str, source: torch.Tensor, codec: TensorCodec) -> PackedSlot:
        per_piece = packing.elements_per_piece(self._packing_bytes, codec, source.dtype)
        return PackedSlot(self.stores[tier], tier, source, codec, per_piece)

    @property
    def _packing_bytes(self) -> int:
        """Upper bound for each lane's packing staging."""
        return min((packing.STAGING_BYTES, *tuple(self._packing_bounds.values())))

    def bound_packing(self, owner: object, nbytes: int) -> None:
        self._packing_bounds[owner] = max(nbytes, 2 * PAGE_BYTES)

    def addressable(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return super().addressable(sizes) if self.mapped is None else self.mapped.tensors(sizes)

    def slot_of(self, tensor: torch.Tensor) -> MappedSlot | None:
        return None if self.mapped is None else self.mapped.slot_of(tensor)

    def clear(self, host: torch.Tensor) -> None:
        slot = self.slot_of(host)
        if slot is None or not slot.clear_absent():
            super().clear(host)

    def keep_room(self, owner: object, nbytes: int) -> bool:
        if self.mapped is not None:
            self.mapped.keep_room(owner, nbytes)
        return self.mapped is not None

    def expect_scattered(self, host: torch.Tensor, scattered: bool) -> bool:
        slot = self.slot_of(host)
        return slot is not None and slot.expect_scattered(scattered)

    def allocate(self, slot: Slot, freed: Callable[[], None]) -> torch.Tensor:
        if isinstance(slot, MappedSlot | PackedSlot):
            return telling(_room(slot.nbytes).numpy(), freed)
        assert isinstance(slot, CpuSlot)
        # the same for any skew, so that it finds the place of the last step's
        room = _room(_pages(slot.nbytes) + 2 * PAGE_BYTES)
        begin = -room.data_ptr() % PAGE_BYTES + slot.skew_bytes
        # a separate storage that begins where the tensor does: views are rebuilt by offsets from
        # the start of the storage
        return telling(room.numpy()[begin : begin + slot.nbytes], freed)

    def mark(self) -> None:
        """Compute runs on the caller's thread, so its work is already done."""

    def _copy(
        self,
        lane: str,
        tensor: torch.Tensor,
        slot: Slot,
        after: Sequence[Point],
        label: Label,
        on_end: Callable[[Copy], None],
        outward: bool,
    ) -> Copy:
        work: Callable[[], None]
        if isinstance(slot, PackedSlot):
            if outward:
                work = partial(self._pack, lane, flat_elements(tensor), slot)
            else:
                work = partial(self._unpack, lane, flat_elements(tensor, slot.dtype), slot)
        else:
            assert isinstance(slot, CpuSlot | MappedSlot)
            address = tensor.data_ptr()
            if outward:
                work = partial(self._write, lane, address, slot)
            else:
                work = partial(self._read, address, slot)
            work = self.rates.timed(lane, slot.nbytes, work)
        return self.lanes.submit(lane, work, _jobs(after), label, on_end, keep=tensor)

    def wait(self, copy: Copy) -> Waited:
        assert isinstance(copy, LaneJob)
        return self.lanes.wait(copy)

    def reached(self, point: Point) -> None:
        assert isinstance(point, LaneJob)
        self.lanes.wait(point)
        if point.error is not None:
            raise not_arrived(point.label, point.error)

    def cancel(self, copy: Copy) -> bool:
        assert isinstance(copy, LaneJob)
        return self.lanes.cancel(copy)

    def before_copies(self, hook: Callable[[], None]) -> None:
        self.lanes.before = hook

    def drain(self) -> None:
        self.lanes.drain()

    def close(self) -> None:
        ended = self.lanes.close()
        self._staging.clear()
        self._packing.clear()
        for disk in self._disks.values():
            disk.close()
            if ended:
                disk.join()
        self._disks.clear()

    # -- on a lane's thread ----------------------------------------------------------------------

    def _write(self, lane: str, address: int, slot: CpuSlot | MappedSlot) -> None:
        if isinstance(slot, MappedSlot):
            view = _memory(address, slot.nbytes, _WRITABLE)
            for start in range(0, slot.nbytes, self._chunk_bytes):
                slot.write(start, view[start : start + self._chunk_bytes])
            return
        staging = self._staging.get(lane)
        if staging is None:
            staging = self._staging[lane] = self.arena.block(STAGED_BYTES)
        if slot.nbytes > STAGED_BYTES and address % PAGE_BYTES == slot.skew_bytes:
            parts = _whole_pages(slot, staging, address)
            for start, size in calls_for(slot.padded_bytes, self._chunk_bytes):
                slot.store.write_parts(slot.extent, start, part_of(parts, start, size))
            return
        done = 0
        while done < slot.nbytes:
            size = min(STAGED_BYTES, slot.nbytes - done)
            _stage_write(slot, staging, address, done, size)
            done += size

    def _pack(self, lane: str, flat: torch.Tensor, slot: PackedSlot) -> None:
        packing.write(slot, flat, *self._packing_room(lane, slot))

    def _unpack(self, lane: str, flat: torch.Tensor, slot: PackedSlot) -> None:
        packing.read(slot, flat, *self._packing_room(lane, slot))

    def _packing_room(self, lane: str, slot: PackedSlot) -> tuple[MemoryBlock, TaskQueue]:
        """The staging of a lane, and a thread that does its disk I/O concurrently."""
        most = self._packing_bytes
        wanted = packing.staging_bytes_for(slot, most)
        block = self._packing.get(lane)
        if block is None or not wanted <= block.nbytes <= max(wanted, most):
            block = None
            self._packing.pop(lane, None)  # freed before the new one is allocated
            block = self._packing[lane] = self.arena.block(wanted)
        if lane not in self._disks:
            self._disks[lane] = TaskQueue(f"offcompile-{lane}-disk")
        return block, self._disks[lane]

    def _read(self, address: int, slot: CpuSlot | MappedSlot) -> None:
        if isinstance(slot, MappedSlot):
            view = _memory(address, slot.nbytes, _WRITABLE)
            for start in range(0, slot.nbytes, self._chunk_bytes):
                slot.read(start, view[start : start + self._chunk_bytes])
            return
        view = _memory(address - slot.skew_bytes, slot.padded_bytes, _WRITABLE)
        for start, size in calls_for(slot.padded_bytes, self._chunk_bytes):
            slot.store.read(slot.extent, start, view[start : start + size])


def _room(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except (RuntimeError, MemoryError) as error:  # torch has no class of its own for this
        raise OffloadError(
            f"The process is out of memory: a tensor of {nbytes} bytes could not come back. Lower "
            f'options={{"memory": …}}, or leave more memory to this process. It said: {error}'
        ) from error


def _skew_bytes(address: int, nbytes: int) -> int:
    """The offset within its slot's first page of a tensor at `address`."""
    skew_bytes = address % PAGE_BYTES
    return 0 if nbytes <= STAGED_BYTES or skew_bytes % ALIGNMENT_BYTES else skew_bytes


def _whole_pages(slot: CpuSlot, staging: MemoryBlock, address: int) -> list[memoryview]:
    """The pages of the slot: the tensor's own, except its partial first and last page in `staging`.

    The rest of those two pages is not the tensor's and may change during the write, which breaks
    file systems that keep checksums.
    """
    head = -slot.skew_bytes % PAGE_BYTES
    body = (slot.nbytes - head) // PAGE_BYTES * PAGE_BYTES
    tail = slot.nbytes - head - body
    first, last = staging.view[:PAGE_BYTES], staging.view[PAGE_BYTES : 2 * PAGE_BYTES]
    ctypes.memmove(_address(first) + slot.skew_bytes, address, head)
    ctypes.memmove(_address(last), address + head + body, tail)
    inner = _memory(address + head, body, _WRITABLE)
    parts = [(first, head), (inner, body), (last, tail)]
    return [view for view, nbytes in parts if nbytes]


def _stage_write(slot: CpuSlot, staging: MemoryBlock, address: int, start: int, size: int) -> None:
    """Write bytes [start, start + size) of the tensor, which may begin or end within a page."""
    at = slot.skew_bytes + start
    inside = at % PAGE_BYTES
    view = staging.view
    ctypes.memmove(_address(view) + inside, address + start, size)
    slot.store.write(slot.extent, at - inside, view[: _pages(inside + size)])


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _jobs(after: Sequence[Point]) -> list[LaneJob]:
    return [point for point in after if isinstance(point, LaneJob)]
