"""Adds up buckets over the ranks of a process group, by its collectives.

An exchange gives buckets their memory, within a limit, and reduces those that are sent. All ranks
send the same buckets in the same order. A bucket may get memory before it is its turn; there is
always room left for the one whose turn it is, or all would wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from .buckets import Bucket


class Exchange(Protocol):
    """How ranks reduce buckets. Methods that wait raise RuntimeError if another rank fails."""

    #: the number of ranks
    world: int

    def held_bytes(self) -> int:
        """Bytes of memory that it takes, at most."""

    def has_room(self, bucket: Bucket, is_next: bool) -> bool:
        """True if `give_memory` will succeed once all buckets that were sent are back. is_next: the
        bucket is the next to be sent."""

    def give_memory(self, bucket: Bucket, is_next: bool) -> bool:
        """Give the bucket memory; False if there is none now."""

    def wait_for_room(self) -> None:
        """Wait for memory of buckets that are back on this rank, if other ranks still read it."""

    def send(self, bucket: Bucket) -> None:
        """Begin to reduce the bucket."""

    def is_back(self, bucket: Bucket) -> bool:
        """True if `wait` has nothing to wait for."""

    def wait(self, bucket: Bucket) -> None:
        """Wait until the bucket can be read."""

    def reduced(
        self, bucket: Bucket, parameter: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the reduced gradient of a bucket that is back; if `into` is given, there."""

    def release(self, bucket: Bucket) -> None:
        """Take back the bucket's memory: this rank has read it."""


class AllReduce:
    """Reduces buckets by an all-reduce each. A bucket has memory of its own from its first gradient
    on until it is back."""

    def __init__(self, group: Any, buckets: Sequence[Bucket], cap_bytes: int) -> None:
        self.group, self.world = group, torch.distributed.get_world_size(group)
        sizes = [b.nbytes for b in buckets]
        self._largest_bytes, cap_bytes = max(sizes), min(cap_bytes, max(sizes))
        self._limit_bytes = min(sum(sizes), self._largest_bytes + 2 * cap_bytes)
        self._filling: set[Bucket] = set()
        self._sent: dict[Bucket, Any] = {}

    def held_bytes(self) -> int:
        return self._limit_bytes

    def has_room(self, bucket: Bucket, is_next: bool) -> bool:
        before = 0 if is_next else self._largest_bytes
        return _bytes(self._filling) + bucket.nbytes + before <= self._limit_bytes

    def give_memory(self, bucket: Bucket, is_next: bool) -> bool:
        held = _bytes(self._filling) + _bytes(self._sent)
        if self._sent and held + bucket.nbytes > self._limit_bytes:
            return False
        like = bucket.parameters[0]
        bucket.memory = torch.empty(bucket.numel, dtype=like.dtype, device=like.device)
        self._filling.add(bucket)
        return True

    def wait_for_room(self) -> None:
        """Do nothing: no other rank reads this one's memory."""

    def send(self, bucket: Bucket) -> None:
        self._filling.discard(bucket)
        distributed: Any = torch.distributed
        work = distributed.all_reduce(bucket.memory, group=self.group, async_op=True)
        self._sent[bucket] = work

    def is_back(self, bucket: Bucket) -> bool:
        return bool(self._sent[bucket].is_completed())

    def wait(self, bucket: Bucket) -> None:
        self._sent[bucket].wait()

    def reduced(
        self, bucket: Bucket, parameter: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        part = bucket.part(parameter)
        return part if into is None else into.copy_(part)

    def release(self, bucket: Bucket) -> None:
        del self._sent[bucket]


def _bytes(buckets: Iterable[Bucket]) -> int:
    return sum(bucket.nbytes for bucket in buckets)
