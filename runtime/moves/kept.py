"""What a `Keeper` notes of the tensors that it holds, and whom it asks about the future."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from offcompile.runtime.device.interface import Copy

from .kept_weights import Weight
from .saved import Saved

#: execution, tag, and which of the tensors of that name that are alive; weights have their own
Block = tuple[Hashable, str, int]


class Foresight(Protocol):
    """What the keeper asks and tells; `offcompile.passes.correlation.Predictor` is one."""

    @property
    def counters(self) -> Any: ...
    @property
    def table_bytes(self) -> int: ...
    def enter(self, execution: Hashable) -> None: ...
    def leave(self) -> None: ...
    def following(self) -> Hashable | None: ...
    def touch(self, block: Any, nbytes: int, reads: bool = True) -> str: ...
    def wrote(self, block: Any) -> None: ...
    def dead(self, block: Any) -> int: ...
    def predictions(self, free_bytes: int, limit: int | None = None) -> Sequence[Any]: ...
    def shortfall(self, free_bytes: int) -> tuple[Any, int] | None: ...
    def victims(self, needed_bytes: int, wanted: Any = None) -> Sequence[Any]: ...
    def fetching(self, block: Any, nbytes: int, prefetch: bool = False) -> None: ...
    def arrived(self, block: Any) -> None: ...
    def leaving(self, block: Any) -> None: ...
    def stays(self, block: Any) -> None: ...
    def cleaned(self, block: Any) -> None: ...
    def left(self, block: Any) -> None: ...


@dataclass(eq=False)
class Cached:
    """A tensor on the device that no plan counts."""

    block: Block
    saved: Saved
    tensor: torch.Tensor
    #: on its way in, or out
    copy: Copy | None = None
    leaving: bool = False
    #: compute may be queued behind the copy: it can no longer be cancelled
    awaited: bool = False
    #: a copy of this one, which counted so many changes when it was made
    weight: Weight | None = None
    version: int = 0

    @property
    def clean(self) -> bool:
        """Whether it may go without a copy."""
        return self.weight is not None or self.saved.written

    @property
    def under_way(self) -> bool:
        """Still coming, and nobody has asked for it yet."""
        copy = self.copy
        return copy is not None and not (self.leaving or self.awaited or copy.ended)

    def is_of(self, host: torch.Tensor) -> bool:
        """Whether it holds what the weight does that lies on this memory."""
        mine = self.saved.host
        # the copy's own hold on the memory keeps it from going round
        return mine is not None and version_of(host) == self.version and _same(mine, host)


@dataclass(eq=False)
class Known:
    """A tensor whose ticket lives, wherever it is."""

    block: Block
    saved: Saved
    #: by which it comes back, once that is known
    lane: str | None = None
    #: copies that make room for it
    room: list[Cached] = field(default_factory=list)


def version_of(tensor: torch.Tensor) -> int:
    """How often autograd saw the tensor's memory change."""
    return tensor._version


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def nothing() -> None:
    """Nobody counts the keeper's memory but the keeper."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, as they lie in its storage."""
    storage = tensor.untyped_storage()
    nbytes = tensor.numel() * tensor.element_size()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(storage, 0, (nbytes,), (1,))
