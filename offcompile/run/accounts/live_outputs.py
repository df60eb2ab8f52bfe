"""Counts outputs of graphs without a backward that were passed to other graphs and are alive.

A reentrant checkpoint runs blocks without gradients and keeps the inputs of each. These take
memory, but no backward waits for them (`usage`), and only the plan of the running block includes
them. Outputs that were passed to no graph, such as collected predictions, belong to the user's
program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class LiveOutputs:
    """The live results on one device."""

    def __init__(self) -> None:
        #: by address of the storage, which is not reused while a weak reference exists
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._passed_on: set[int] = set()
        self._given: set[int] = set()

    def made(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the outputs of a run without a backward."""
        for key, (ref, _) in tuple(self._made.items()):
            if _expired(ref):
                del self._made[key]
                self._passed_on.discard(key)
        for storage in _storages(tensors):
            if storage._cdata not in self._given:  # an argument passed through
                self._made[storage._cdata] = _weak(storage), storage.nbytes()

    def given(self, arguments: Sequence[object]) -> None:
        """Note the arguments of a run that begins; its own plan includes them."""
        tensors = (x for x in arguments if isinstance(x, torch.Tensor))
        self._given = {storage._cdata for storage in _storages(tensors)}
        self._passed_on |= self._given & self._made.keys()

    def standing_bytes(self) -> int:
        """Bytes of live results that were passed on, except the arguments of the newest run."""
        found = (self._made[key] for key in self._passed_on - self._given)
        return sum(nbytes for ref, nbytes in found if not _expired(ref))


def _storages(tensors: Iterable[torch.Tensor]) -> Iterable[torch.UntypedStorage]:
    for x in tensors:
        try:
            yield x.untyped_storage()
        except RuntimeError:  # raised for sparse tensors, and for subclasses without memory
            continue


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _expired(ref: StorageWeakRef) -> bool:
    return bool(ref.expired())  # type: ignore[no-untyped-call]
