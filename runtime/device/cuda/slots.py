"""Finds room for tensors that leave a GPU: in host memory, and on the disk where that is full."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.device.cpu import CpuSlot
from offcompile.runtime.device.packing import PackedSlot, elements_in
from offcompile.runtime.disk.spill import SpillFull, SpillStore
from offcompile.runtime.memory.host_arena import HostFull

from .copies import CopyBlock, CopyBlocks, HostSlot
from .host_aliases import HostAliases
from .packing import PackedHostSlot, Packers, PackingRooms


class SlotMaker:
    """Makes slots on the tiers `host` and `disk`.

    stores: the store of the tier `disk`, or none. chunk_bytes: the most that a piece packed for the
    disk takes. shadows: gives back host memory that nobody uses, before the host tier counts as
    full.
    """

    def __init__(
        self,
        arena: CopyBlocks,
        stores: Mapping[str, SpillStore],
        packers: Packers,
        shadows: HostAliases,
        chunk_bytes: int,
    ) -> None:
        self._arena, self._stores = arena, stores
        self._packers, self._shadows = packers, shadows
        self._chunk_bytes = chunk_bytes

    def make(
        self, source: torch.Tensor, tier: str, codec: str | None
    ) -> HostSlot | CpuSlot | PackedSlot:
        """A slot for `source`; SpillFull if there is no room."""
        nbytes = source.numel() * source.element_size()
        kind = None if codec is None else self._packers.codec(codec)
        if tier == "host":
            try:
                if kind is None:
                    return HostSlot(self._block(nbytes), nbytes, self._arena.pinned)
                rooms = PackingRooms(source, kind, self._packers.in_place)
                block = self._block(rooms.nbytes)
                return PackedHostSlot(block, nbytes, self._arena.pinned, rooms)
            except HostFull as full:
                if not self._stores:
                    raise SpillFull(str(full)) from full
        elif tier not in self._stores:
            known = ", ".join(("host", *self._stores))
            raise OffloadError(f"There is no tier {tier!r} to move to; this runtime has: {known}.")
        if kind is not None:
            per_piece = elements_in(self._chunk_bytes, kind, source.dtype)
            return PackedSlot(self._stores["disk"], "disk", source, kind, per_piece)
        return CpuSlot(self._stores["disk"], "disk", nbytes, skew_bytes=0)

    def _block(self, nbytes: int) -> CopyBlock:
        try:
            return self._arena.block(nbytes)
        except HostFull:
            if not self._shadows.spare_bytes:
                raise
            self._shadows.release()
            return self._arena.block(nbytes)
