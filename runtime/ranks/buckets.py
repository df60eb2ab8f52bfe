"""Cuts parameters into buckets, whose gradients ranks reduce together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from offcompile.runtime.device.reductions import SentBucket

#: least bytes of a bucket, and how many buckets a model has at least if it is larger than that
LEAST_BYTES, SHARES = 1 << 20, 16
#: parameters are small below this, or below that share of the largest one
SMALL_BYTES, SMALL_SHARE = 4096, 1 / 256


@dataclass(eq=False)
class Bucket:
    """Gradients that ranks reduce together."""

    parameters: list[torch.Tensor] = field(default_factory=list)
    #: parameter → its first element in the bucket
    starts: dict[int, int] = field(default_factory=dict)
    numel: int = 0
    #: its place in the order of sending
    number: int = 0
    memory: torch.Tensor | None = None
    #: parameters whose gradient was offered, and lies in the bucket
    taken: set[int] = field(default_factory=set)
    #: parameter → its gradient of this rank, which autograd has brought; None: it has brought none
    brought: dict[int, torch.Tensor | None] = field(default_factory=dict)
    #: True if it was sent for this forward
    is_sent: bool = False
    #: the reduction as measured steps show it; None: it is not under way
    seen: SentBucket | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.parameters[0].element_size()

    @property
    def full(self) -> bool:
        return len(self.taken) + len(self.brought) == len(self.parameters)

    def add(self, parameter: torch.Tensor) -> None:
        self.starts[id(parameter)] = self.numel
        self.parameters.append(parameter)
        self.numel += parameter.numel()

    def part(self, parameter: torch.Tensor) -> torch.Tensor:
        """View the memory of one gradient."""
        assert self.memory is not None
        start = self.starts[id(parameter)]
        return self.memory[start : start + parameter.numel()].view(parameter.shape)

    def clear(self) -> None:
        self.memory = self.seen = None
        self.taken.clear()
        self.brought.clear()


def bucket_bytes(parameters: Sequence[torch.Tensor], cap_bytes: int) -> int:
    """Choose the size of buckets, at most `cap_bytes`, by nothing but the parameters: budgets may
    differ between ranks, and results depend on it where more than two ranks are added up."""
    whole = sum(p.nbytes for p in parameters)
    return min(cap_bytes, max(LEAST_BYTES, whole // SHARES))


def cut(parameters: Sequence[torch.Tensor], cap_bytes: int) -> list[Bucket]:
    """Cut the parameters, in reverse, into buckets of `cap_bytes` or one parameter."""
    least = large_from(parameters)
    large = [p for p in reversed(parameters) if p.nbytes >= least]
    small = [p for p in reversed(parameters) if p.nbytes < least]
    found: list[Bucket] = []
    for p in (*large, *small):
        if not (found and _fits(p, found[-1], cap_bytes, least)):
            found.append(Bucket(number=len(found)))
        found[-1].add(p)
    return found


def large_from(parameters: Sequence[torch.Tensor]) -> float:
    """Bytes from which on a parameter is large among these."""
    return max(SMALL_BYTES, max(p.nbytes for p in parameters) * SMALL_SHARE)


def _fits(parameter: torch.Tensor, bucket: Bucket, cap_bytes: int, least: float) -> bool:
    first = bucket.parameters[0]
    alike = first.dtype == parameter.dtype and first.device == parameter.device
    alike &= (first.nbytes < least) == (parameter.nbytes < least)
    return alike and bucket.nbytes + parameter.nbytes <= cap_bytes
