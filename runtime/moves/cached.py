"""The keeper's records of the tensors it holds."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from offcompile.runtime.device.interface import Copy

from .cached_weights import Weight
from .saved import Saved

#: (execution, tag, index among live tensors with that tag); weights use blocks of their own
Block = tuple[Hashable, str, int]


@dataclass(eq=False)
class Cached:
    """A tensor that the keeper holds on the device, outside every plan."""

    block: Block
    saved: Saved
    tensor: torch.Tensor
    #: the copy in progress, in or out
    copy: Copy | None = None
    leaving: bool = False
    #: compute may be queued behind the copy: it can no longer be cancelled
    awaited: bool = False
    #: the weight that `tensor` is a copy of, and its autograd version when the copy was made
    weight: Weight | None = None
    version: int = 0

    @property
    def clean(self) -> bool:
        """True if it can be dropped without a copy out."""
        return self.weight is not None or self.saved.written

    @property
    def under_way(self) -> bool:
        """True if it is still being loaded and nobody has asked for it yet."""
        copy = self.copy
        return copy is not None and not (self.leaving or self.awaited or copy.ended)

    def is_of(self, host: torch.Tensor) -> bool:
        """True if it is a copy of the current content of the weight at `host`."""
        mine = self.saved.host
        # this record keeps the memory alive, so its address cannot have been reused
        return mine is not None and version_of(host) == self.version and _same(mine, host)


@dataclass(eq=False)
class CacheNote:
    """A tensor whose ticket is alive, wherever the tensor is."""

    block: Block
    saved: Saved
    #: the lane that reloads it, once known
    lane: str | None = None
    #: tensors whose copies out make room for it
    room: list[Cached] = field(default_factory=list)


def version_of(tensor: torch.Tensor) -> int:
    """The number of changes to the tensor's memory that autograd has counted."""
    return tensor._version


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def nothing() -> None:
    """Does nothing: buffers of the keeper are not counted against the in-flight limit."""
