"""What graphs without a backward have made, and others have been given, as long as it lives.

A checkpoint that is reentrant runs blocks without gradients and keeps what went into each. No pass
waits for it (`books`), no plan but that of the block that runs counts it, and still it stands. What
went to nobody, like predictions that a program collects, is the program's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class LiveOutputs:
    """On one device."""

    def __init__(self) -> None:
        #: by address: neither is used again while a weak reference stands
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._passed_on: set[int] = set()
        self._given: set[int] = set()

    def made(self, tensors: Iterable[torch.Tensor]) -> None:
        """A run has returned these; no backward follows."""
        for key, (ref, _) in tuple(self._made.items()):
            if _expired(ref):
                del self._made[key]
                self._passed_on.discard(key)
        for storage in _storages(tensors):
            if storage._cdata not in self._given:  # that is whose it was
                self._made[storage._cdata] = _weak(storage), storage.nbytes()

    def given(self, arguments: Sequence[object]) -> None:
        """A run begins with these; in its plan they are counted."""
        tensors = (x for x in arguments if isinstance(x, torch.Tensor))
        self._given = {storage._cdata for storage in _storages(tensors)}
        self._passed_on |= self._given & self._made.keys()

    def standing_bytes(self) -> int:
        """What was passed on and lives, but for what the run that began last was given."""
        found = (self._made[key] for key in self._passed_on - self._given)
        return sum(nbytes for ref, nbytes in found if not _expired(ref))


def _storages(tensors: Iterable[torch.Tensor]) -> Iterable[torch.UntypedStorage]:
    for x in tensors:
        try:
            yield x.untyped_storage()
        except RuntimeError:  # what torch says of sparse ones, and of subclasses without memory
            continue


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _expired(ref: StorageWeakRef) -> bool:
    return bool(ref.expired())  # type: ignore[no-untyped-call]
