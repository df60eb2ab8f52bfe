"""Reduces gradients over the ranks of a process group while backward goes on, in a few buckets.

From its construction on, DDP has room in its buckets for every gradient. It reduces gradients when
autograd brings them, and a compiled graph brings all of them at its end. Here a gradient goes into
a bucket as soon as the graph offers it, or else when autograd has filled `.grad`. A bucket gets
memory when its first gradient is offered or when it is sent, and loses it when it comes back, so
few have memory at a time. An optimizer that updates during backward then does so from the bucket;
other gradients go to `.grad`.

Ranks have to agree on nothing but the order of collectives, and that follows from the parameters:
buckets are cut from the parameters in reverse order, and sent in that order, no matter which are
full first. So ranks may run different plans. Small parameters, whose gradients no graph offers,
have buckets of their own, which are sent last.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.device.move_events import listener
from offcompile.runtime.device.reductions import SentBucket, sent
from offcompile.runtime.states import updates

#: least bytes of a bucket, and how many buckets a model has at least if it is larger than that
LEAST_BYTES, SHARES = 1 << 20, 16
#: parameters are small below this, or below that share of the largest one
SMALL_BYTES, SMALL_SHARE = 4096, 1 / 256


@dataclass(eq=False)
class Bucket:
    """Gradients that one collective reduces."""

    parameters: list[torch.Tensor] = field(default_factory=list)
    #: parameter → its first element in the bucket
    starts: dict[int, int] = field(default_factory=dict)
    numel: int = 0
    memory: torch.Tensor | None = None
    #: parameters whose gradient was offered, and lies in the bucket
    taken: set[int] = field(default_factory=set)
    #: parameter → its gradient of this rank, which autograd has brought; None: it has brought none
    brought: dict[int, torch.Tensor | None] = field(default_factory=dict)
    #: the collective under way, and if there was one for this forward
    work: Any = None
    is_sent: bool = False
    #: the collective as measured steps show it; None: it is not under way
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
        self.memory = self.work = self.seen = None
        self.taken.clear()
        self.brought.clear()


class GradientReducer:
    """Reduces the gradients of one replicated model, given in the order in which all ranks have its
    parameters. Parameters refer to it weakly."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        group: Any,
        cap_bytes: int,
        failed: Callable[[Exception], Exception] | None = None,
    ) -> None:
        """failed: makes the error to raise of that of a collective."""
        self._failed = failed
        self.group, self.world = group, torch.distributed.get_world_size(group)
        self._least_bytes = large_from(parameters)
        self.buckets = cut(parameters, cap_bytes)
        self._bucket_of = {id(p): b for b in self.buckets for p in b.parameters}
        sizes = [b.nbytes for b in self.buckets]
        self._largest_bytes, cap_bytes = max(sizes), min(cap_bytes, max(sizes))
        #: most bytes of all buckets that have memory
        self.limit_bytes = min(sum(sizes), self._largest_bytes + 2 * cap_bytes)
        #: True from a forward that is to be reduced until its gradients are
        self.expects = False
        #: index of the bucket to send next, and buckets under way, oldest first
        self._next, self._sent = 0, deque[Bucket]()
        #: parameters whose optimizers wait for the end of a graph → True if it may begin then
        self._deferred: dict[int, bool] = {}
        #: True if `_finish` will be called when this backward pass is over
        self._is_asked = False
        updates.reduce_with(parameters, self)
        # accumulators have the hooks, not the parameters: as under DDP, the user's own hooks see
        # the gradients of this rank
        self._accumulators = [_accumulator(p) for p in parameters]
        for parameter, node in zip(parameters, self._accumulators, strict=True):
            handle = node.register_hook(_hook(weakref.ref(self), parameter))
            weakref.finalize(self, handle.remove).atexit = False

    def held_bytes(self) -> int:
        """Bytes of buckets, at most."""
        return self.limit_bytes

    def expect(self) -> None:
        """Reduce the gradients of the forward that has just run. OffloadError if those of the last
        one have not all come."""
        if self.expects and self._has_begun():
            unsent = self.buckets[self._next :]
            lacking = sum(len(b.parameters) - len(b.taken) - len(b.brought) for b in unsent)
            raise OffloadError(
                f"{lacking} parameters got no gradient in the last backward pass, so ranks cannot"
                " reduce it: let every trained parameter take part in the loss, or make"
                " DistributedDataParallel(…, find_unused_parameters=True)"
            )
        self.expects = True

    def _has_begun(self) -> bool:
        return self._next > 0 or any(b.taken or b.brought for b in self.buckets)

    # -- gradients that a compiled graph offers ----------------------------------------------------

    def wants_early(self, parameter: torch.Tensor) -> bool:
        """See `updates.Reducer`. Small ones are sent last."""
        return parameter.nbytes >= self._least_bytes

    def defer(self, parameter: torch.Tensor) -> None:
        """See `updates.Reducer`."""
        self._deferred[id(parameter)] = False

    def uses_up(self) -> bool:
        """See `updates.Updater`: buckets keep gradients until all of them are there."""
        return False

    def takes(self, parameter: torch.Tensor) -> bool:
        """See `updates.Updater`. False if there is no memory: autograd then brings it later."""
        optimizer = updates.optimizer_of(parameter)
        if not self.expects or parameter._backward_hooks:
            return False
        if optimizer is None:
            if parameter._post_accumulate_grad_hooks or not _may_add_to(parameter.grad):
                return False
        elif parameter.grad is not None or not optimizer.takes(parameter):
            return False  # autograd adds it to the one that is there, and both are reduced then
        bucket = self._bucket_of[id(parameter)]
        if bucket.is_sent or id(parameter) in bucket.taken:
            return False
        return bucket.memory is not None or self._has_room_for(bucket)

    def _has_room_for(self, bucket: Bucket) -> bool:
        """True if the bucket may get memory before it is sent: even then there must be room for any
        bucket that is sent before it, or all would wait for each other."""
        filling = sum(b.nbytes for b in self.buckets[self._next :] if b.memory is not None)
        before = 0 if bucket is self.buckets[self._next] else self._largest_bytes
        return filling + bucket.nbytes + before <= self.limit_bytes

    @torch.no_grad()
    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """See `updates.Updater`."""
        self._begin()
        bucket = self._bucket_of[id(parameter)]
        if bucket.memory is None:
            self._give_memory(bucket)
        part, before = bucket.part(parameter), parameter.grad
        if before is None:
            torch.mul(gradient, 1.0 / self.world, out=part)
        else:  # that of passes within no_sync
            torch.add(before, gradient, out=part).mul_(1.0 / self.world)
        bucket.taken.add(id(parameter))
        self._go_on()

    def reduced(self) -> None:
        """See `updates.Updater`."""

    # -- gradients from autograd -------------------------------------------------------------------

    @torch.no_grad()
    def came(self, parameter: torch.Tensor) -> None:
        """Handle the gradient of this rank, which autograd has added to `parameter.grad`. None
        counts as zeros, because other ranks may have one."""
        has_gradient = updates.arrived(parameter)
        if updates.was_taken(parameter):
            self._graph_is_over(parameter)
            return
        self._deferred.pop(id(parameter), None)  # of a pass that was given up
        if not self.expects:
            return
        bucket = self._bucket_of[id(parameter)]
        if bucket.is_sent or id(parameter) in bucket.taken:
            raise OffloadError(
                f"A parameter of shape {tuple(parameter.shape)} got another gradient after ranks"
                " had reduced its first: call backward once for each forward of"
                " DistributedDataParallel, or use no_sync() for all but the last"
            )
        self._begin()
        bucket.brought[id(parameter)] = parameter.grad if has_gradient else None
        self._go_on()

    def _graph_is_over(self, parameter: torch.Tensor) -> None:
        """Let the optimizer of a gradient that was taken begin, if it is reduced."""
        optimizer = updates.optimizer_of(parameter)
        if self._deferred.pop(id(parameter), False) and optimizer is not None:
            optimizer.came(parameter)
            updates.settled(parameter)

    # -- buckets -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _give_memory(self, bucket: Bucket) -> None:
        while self._sent and self._memory_bytes() + bucket.nbytes > self.limit_bytes:
            self._receive()  # the budget goes before time
        like = bucket.parameters[0]
        bucket.memory = torch.empty(bucket.numel, dtype=like.dtype, device=like.device)

    def _memory_bytes(self) -> int:
        return sum(b.nbytes for b in self.buckets if b.memory is not None)

    def _go_on(self) -> None:
        """Send the buckets whose turn it is, and take those that are back."""
        while self._next < len(self.buckets) and self.buckets[self._next].full:
            self._send(self.buckets[self._next])
            self._next += 1
        while self._sent and self._sent[0].work.is_completed():
            self._receive()

    def _send(self, bucket: Bucket) -> None:
        if bucket.memory is None:
            self._give_memory(bucket)
        for parameter in bucket.parameters:
            gradient = bucket.brought.get(id(parameter))
            if gradient is not None:
                torch.mul(gradient, 1.0 / self.world, out=bucket.part(parameter))
            elif id(parameter) not in bucket.taken:
                bucket.part(parameter).zero_()
        distributed: Any = torch.distributed
        with self._explained():
            bucket.work = distributed.all_reduce(bucket.memory, group=self.group, async_op=True)
        self._sent.append(bucket)
        bucket.is_sent, bucket.seen = True, sent(self._next, bucket.nbytes)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self._failed is None:
                raise
            raise self._failed(error) from error

    def _receive(self) -> None:
        """Wait for the oldest bucket under way, and give its gradients to `.grad` or optimizers."""
        bucket = self._sent.popleft()
        heard = listener()
        began = None if heard is None else heard.now()
        with self._explained():
            bucket.work.wait()
        if bucket.seen is not None:
            bucket.seen.is_back()
            if heard is not None:
                heard.waited(bucket.seen.name, began)
        for parameter in bucket.parameters:
            optimizer, reduced = updates.optimizer_of(parameter), bucket.part(parameter)
            gradient = bucket.brought.get(id(parameter))
            deferred = id(parameter) in self._deferred
            if gradient is not None:
                gradient.copy_(reduced)
            elif optimizer is not None and not deferred and optimizer.takes(parameter):
                optimizer.take(parameter, reduced)
            else:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter.detach())
                gradient = parameter.grad.copy_(reduced)
            if deferred:
                self._deferred[id(parameter)] = True
            elif gradient is not None and optimizer is not None:
                optimizer.came(parameter)
            updates.settled(parameter)
        bucket.clear()

    def _finish(self) -> None:
        """End a backward pass. Gradients of further passes may still belong to this forward."""
        self._is_asked = False
        with torch.no_grad():
            while self._sent:
                self._receive()
        if self._next == len(self.buckets):
            self._next, self.expects = 0, False
            optimizers: dict[int, updates.Updater] = {}
            for bucket in self.buckets:
                bucket.is_sent = False
                found = map(updates.optimizer_of, bucket.parameters)
                optimizers |= {id(o): o for o in found if o is not None}
            for optimizer in optimizers.values():
                optimizer.reduced()


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
            found.append(Bucket())
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


def _may_add_to(gradient: torch.Tensor | None) -> bool:
    """True if autograd would add to this gradient in place."""
    return gradient is None or (gradient.layout is torch.strided and not gradient.requires_grad)


def _accumulator(parameter: torch.Tensor) -> torch.autograd.graph.Node:
    with torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(parameter).node


def _hook(mine: weakref.ref[GradientReducer], parameter: torch.Tensor) -> Callable[..., None]:
    # the accumulator owns the parameter, too
    def came(*_: object) -> None:
        reducer = mine()
        if reducer is not None:
            reducer.came(parameter)

    return came
