"""Keeps weights on the host once for all ranks of a machine, where one rank updates for all.

Weights come here at the end of a step, when their owners would send them: the owner writes a weight
into a file that all ranks have mapped (`runtime/device/common.py`), and each rank moves the
parameter there, if it has it on the host. So ranks have the same bytes by construction, and from
then on there is nothing to send. A weight that nobody has updated, such as a frozen one, comes here
if all ranks have the same bytes in it, which they compare once. An owner writes to the file

- in `step()`, once every rank has called it;
- or in backward, if the gradient was reduced there: no rank has an op left that reads the weight.

A program's own writes to a weight stay on their rank, as they do without this, until the owner's
next update replaces them everywhere. A weight that a program writes to time and again has memory
of its own on each rank.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from offcompile.ir import OffloadError
from offcompile.optim.layout import flat, is_dense
from offcompile.report.log import tell_once
from offcompile.runtime.base.mapping import page_multiple
from offcompile.runtime.device.common import (
    CommonFile,
    CommonSlot,
    FileAddress,
    machine,
    why_not,
)
from offcompile.runtime.device.cpu import CpuDevice
from offcompile.runtime.device.mapped import MappedSlot, MappedStore
from offcompile.runtime.device.owners import why_it_stays
from offcompile.runtime.moves.weights import device_of

from .wire import Wire

#: steps in a row in which a program may write to a weight by itself before it is kept apart
MOST_WRITTEN = 3


class Whereabouts(IntEnum):
    """The memory of a weight on one rank; on all of them it is the worst of these."""

    COMMON = 0
    #: on the host, and may go to common memory
    APART = 1
    #: must be sent
    ELSEWHERE = 2


@dataclass(frozen=True)
class _Told:
    """Tells the other ranks, before a file is made, where a rank is and if it can share."""

    machine: str
    why: str | None
    file: FileAddress | None = None


class CommonWeights:
    """The weights of one optimizer with sharded states, by their keys. Methods that take `places`
    are called on all ranks of the group, with the same arguments."""

    def __init__(self, wire: Wire, parameters: Sequence[torch.Tensor]) -> None:
        """parameters: by key; may grow."""
        self.wire, self._parameters = wire, parameters
        self._slots: dict[int, CommonSlot] = {}
        #: key → steps in a row in which the program has written to it, and keys of this step
        self._written: Counter[int] = Counter()
        self._writes: set[int] = set()
        #: keys that lay in common memory on this rank when the last step ended
        self._left_there: set[int] = set()
        #: keys of weights whose bytes ranks have compared
        self._compared: set[int] = set()
        self._refused: str | None = why_not()

    @property
    def is_used(self) -> bool:
        """True on all ranks once there is common memory: owners then write to it in `step()` only
        when all ranks are there."""
        return bool(self._slots)

    def memory(self, key: int) -> torch.Tensor | None:
        """Return the memory of a weight that all ranks see; None if this rank does not use it. All
        ranks then see what this rank has written to the weight by itself."""
        slot = self._slots.get(key)
        if slot is None or not self._is_there(key):
            return None
        if slot.publish():
            self._writes.add(key)
        return _shared(slot, self._parameters[key])

    def is_there(self, key: int) -> bool:
        """True if the weight lies in common memory on this rank."""
        return key in self._slots and self._is_there(key)

    def _is_there(self, key: int) -> bool:
        device = device_of(self._parameters[key])
        return device is not None and device.slot_of(self._parameters[key]) is self._slots[key]

    # -- at the end of a step --------------------------------------------------------------------

    def publish(self, keys: Sequence[int]) -> None:
        """Show all ranks what this rank, their owner, has written to these weights by itself."""
        for key in keys:
            self.memory(key)

    def place(self, key: int) -> Whereabouts:
        """Say where a weight is on this rank."""
        if self._refused is not None or self._written[key] >= MOST_WRITTEN:
            return Whereabouts.ELSEWHERE
        parameter = self._parameters[key]
        device = device_of(parameter)
        slot = None if device is None else device.slot_of(parameter)
        mine = self._slots.get(key)
        if slot is not None and slot is mine:
            return Whereabouts.COMMON
        if key in self._left_there:  # a graph has moved it: the program had written to it
            self._writes.add(key)
        store = _store_of(parameter)
        if not isinstance(slot, MappedSlot) or store is None or not _is_plain(parameter, slot):
            return Whereabouts.ELSEWHERE
        if why_it_stays(parameter) is not None or (mine is not None and not store.is_free(mine)):
            return Whereabouts.ELSEWHERE
        return Whereabouts.APART

    @torch.no_grad()
    def share(
        self, places: Mapping[int, Whereabouts], quiet: Sequence[int], owned: Collection[int]
    ) -> list[int]:
        """Bring updated weights to all ranks through common memory, and return the keys of those
        that have to be sent. places: by key, the worst of all ranks. quiet: keys of weights on the
        host that nobody has updated. owned: keys of this rank."""
        joining = [key for key, place in places.items() if place == Whereabouts.APART]
        joining += self._alike(quiet)
        new = [key for key in joining if key not in self._slots]
        if new and not self._make_room(new):
            joining = [key for key in joining if key in self._slots]
        for key in joining:
            if key in owned and not self._is_there(key):
                _shared(self._slots[key], self._parameters[key]).copy_(self._parameters[key])
        if joining:
            self.wire.meet()
        joined = set(joining)
        sent = []
        for key in dict.fromkeys((*places, *joining)):
            if key in joined or places[key] == Whereabouts.COMMON:
                self._settle(key, key in owned)
            else:
                sent.append(key)
                self._leave(key)
        self._left_there = {key for key in self._slots if self._is_there(key)}
        self._count_writes(places)
        self._report(sent)
        return sent

    def _alike(self, keys: Sequence[int]) -> list[int]:
        """Find the weights that have the same bytes on all ranks, of those not compared before."""
        new = [key for key in keys if key not in self._compared]
        if not new:
            return []
        self._compared.update(new)
        ranks = self.wire.gathered([_digest(self._parameters[key]) for key in new])
        return [key for i, key in enumerate(new) if len({digests[i] for digests in ranks}) == 1]

    def _count_writes(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self._writes:
                self._written[key] += 1
            elif self._written[key] < MOST_WRITTEN:
                del self._written[key]
        self._writes.clear()

    def _settle(self, key: int, is_mine: bool) -> None:
        """Have this rank use what the owner has made of a weight."""
        if not self._is_there(key):
            self._move(key)
        elif not is_mine and self._slots[key].drop_own():
            self._writes.add(key)

    def _move(self, key: int) -> None:
        """Move the parameter to common memory."""
        parameter, slot = self._parameters[key], self._slots[key]
        device, store = device_of(parameter), _store_of(parameter)
        assert device is not None and store is not None
        before = device.slot_of(parameter)
        assert isinstance(before, MappedSlot)
        with torch.inference_mode(False), torch.no_grad():
            memory = store.tensor_on(slot).view(parameter.dtype)
            parameter.data = memory.as_strided(parameter.size(), parameter.stride())
        slot.planned, before.is_reused = before.planned, False

    def _leave(self, key: int) -> None:
        """Give a weight memory of its own, unless something else on this rank looks at it."""
        if not self.is_there(key) or why_it_stays(self._parameters[key]) is not None:
            return
        parameter = self._parameters[key]
        store = _store_of(parameter)
        assert store is not None
        with torch.inference_mode(False), torch.no_grad():
            (memory,) = store.tensors([parameter.untyped_storage().nbytes()])
            own = memory.view(parameter.dtype).as_strided(parameter.size(), parameter.stride())
            parameter.data = own.copy_(parameter.detach())
        device = device_of(parameter)
        slot = None if device is None else device.slot_of(parameter)
        assert slot is not None
        slot.planned = self._slots[key].planned

    # -- the file --------------------------------------------------------------------------------

    def _make_room(self, keys: Sequence[int]) -> bool:
        """Make room for weights in a new file; False, on all ranks, if that is not possible."""
        starts, end = [], 0
        for key in keys:
            starts.append(end)
            end += page_multiple(max(self._parameters[key].untyped_storage().nbytes(), 1))
        store = _store_of(self._parameters[keys[0]])
        assert store is not None
        file: CommonFile | None = None
        told = _Told(machine(), None)
        if self.wire.rank == 0:
            try:
                file = CommonFile.make(store.directory, end)
                told = _Told(machine(), None, file.address)
            except OffloadError as error:
                told = _Told(machine(), str(error))
        ranks: list[_Told] = self.wire.gathered(told)
        machines = len({rank.machine for rank in ranks})
        why = next((rank.why for rank in ranks if rank.why is not None), None)
        if machines > 1:
            why = f"the ranks are on {machines} machines"
        if why is None:
            at, failed = ranks[0].file, None
            assert at is not None
            try:
                file = file or CommonFile.open(at)
            except OffloadError as error:
                failed = f"rank {self.wire.members[self.wire.rank]}: {error}"
            why = next((said for said in self.wire.gathered(failed) if said is not None), None)
        if why is not None or file is None:
            self._refused = why
            tell_once(f"each rank keeps its own weights on the host: {why}")
            return False
        for key, start in zip(keys, starts, strict=True):
            nbytes = self._parameters[key].untyped_storage().nbytes()
            self._slots[key] = CommonSlot(file, start, nbytes, store.tier)
        return True

    def _report(self, sent: Sequence[int]) -> None:
        if not self._slots:
            return
        nbytes = sum(self._slots[key].nbytes for key in self._left_there)
        apart = sum(self._parameters[key].nbytes for key in sent)
        tell_once(
            f"{len(self._left_there)} weights on the host, {nbytes / 2**20:.1f} MiB, are there once"
            f" for the {self.wire.world} ranks of this machine; {len(sent)} that are updated,"
            f" {apart / 2**20:.1f} MiB, are sent: they are on a rank's device, or the program"
            " writes to them or looks at them"
        )


def _store_of(parameter: torch.Tensor) -> MappedStore | None:
    device = device_of(parameter)
    return device.mapped if isinstance(device, CpuDevice) else None


def _is_plain(parameter: torch.Tensor, slot: MappedSlot) -> bool:
    """True if the parameter is all of its slot, without gaps."""
    whole = parameter.untyped_storage().nbytes() == slot.nbytes == parameter.nbytes
    return whole and parameter.storage_offset() == 0 and is_dense(parameter)


def _digest(parameter: torch.Tensor) -> bytes:
    elements = flat(parameter.detach()).view(torch.uint8)
    return hashlib.sha256(elements.numpy().data).digest()


def _shared(slot: CommonSlot, like: torch.Tensor) -> torch.Tensor:
    """View the memory that all ranks see as a weight."""
    memory = torch.from_numpy(slot.shared_array()).view(like.dtype)
    return memory.as_strided(like.size(), like.stride())
