"""Reduces gradients over the ranks of a process group while backward goes on, in a few buckets.

From its construction on, DDP has room in its buckets for every gradient. It reduces gradients when
autograd brings them, and a compiled graph brings all of them at its end. Here a gradient goes into
a bucket as soon as the graph offers it, or else when autograd has filled `.grad`. A bucket gets
memory when its first gradient is offered or when it is sent, and loses it when it comes back, so
few have memory at a time. An optimizer that updates during backward then does so from the bucket;
other gradients go to `.grad`.

Ranks have to agree on nothing but the order of buckets, and that follows from the parameters: they
are cut from the parameters in reverse order, and sent in that order, no matter which are full
first. So ranks may run different plans. Small parameters, whose gradients no graph offers, have
buckets of their own, which are sent last.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.device.move_events import listener
from offcompile.runtime.device.reductions import sent
from offcompile.runtime.states import updates

from .buckets import Bucket, large_from
from .exchange import Exchange


def reducer_in_place_of(ddp: Any) -> Any:
    """Return our object that stands where a DDP module has its reducer; None: DDP has its own."""
    return ddp.reducer if hasattr(ddp.reducer, "held_bytes") else None


class GradientReducer:
    """Reduces the gradients of one replicated model, given in the order in which all ranks have its
    parameters. Parameters refer to it weakly."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
        exchange: Exchange,
        failed: Callable[[Exception], Exception] | None = None,
    ) -> None:
        """failed: makes the error to raise of that of the exchange."""
        self._failed = failed
        self.exchange = exchange
        self._least_bytes = large_from(parameters)
        self.buckets = buckets
        self._bucket_of = {id(p): b for b in buckets for p in b.parameters}
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
        return self.exchange.held_bytes()

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
        has_memory = bucket.memory is not None
        return has_memory or self.exchange.has_room(bucket, self._is_next(bucket))

    def _is_next(self, bucket: Bucket) -> bool:
        return bucket is self.buckets[self._next]

    @torch.no_grad()
    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """See `updates.Updater`."""
        self._begin()
        bucket = self._bucket_of[id(parameter)]
        if bucket.memory is None:
            self._give_memory(bucket)
        part, before = bucket.part(parameter), parameter.grad
        if before is None:
            torch.mul(gradient, 1.0 / self.exchange.world, out=part)
        else:  # that of passes within no_sync
            torch.add(before, gradient, out=part).mul_(1.0 / self.exchange.world)
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
        while not self.exchange.give_memory(bucket, self._is_next(bucket)):
            if self._sent:
                self._receive()  # the budget goes before time
            else:
                with self._explained():
                    self.exchange.wait_for_room()

    def _go_on(self) -> None:
        """Send the buckets whose turn it is, and take those that are back."""
        while self._next < len(self.buckets) and self.buckets[self._next].full:
            self._send(self.buckets[self._next])
            self._next += 1
        while self._sent and self.exchange.is_back(self._sent[0]):
            self._receive()

    def _send(self, bucket: Bucket) -> None:
        if bucket.memory is None:
            self._give_memory(bucket)
        for parameter in bucket.parameters:
            gradient = bucket.brought.get(id(parameter))
            if gradient is not None:
                torch.mul(gradient, 1.0 / self.exchange.world, out=bucket.part(parameter))
            elif id(parameter) not in bucket.taken:
                bucket.part(parameter).zero_()
        with self._explained():
            self.exchange.send(bucket)
        self._sent.append(bucket)
        bucket.is_sent, bucket.seen = True, sent(bucket.number, bucket.nbytes)

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
            self.exchange.wait(bucket)
        if bucket.seen is not None:
            bucket.seen.is_back()
            if heard is not None:
                heard.waited(bucket.seen.name, began)
        for parameter in bucket.parameters:
            self._hand_over(bucket, parameter)
        self.exchange.release(bucket)
        bucket.clear()

    def _hand_over(self, bucket: Bucket, parameter: torch.Tensor) -> None:
        """Bring a reduced gradient to `.grad` or to its optimizer."""
        optimizer = updates.optimizer_of(parameter)
        gradient = bucket.brought.get(id(parameter))
        deferred = id(parameter) in self._deferred
        if gradient is not None:
            self._reduced(bucket, parameter, gradient)
        elif optimizer is not None and not deferred and optimizer.takes(parameter):
            optimizer.take(parameter, self._reduced(bucket, parameter))
        else:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter.detach())
            gradient = self._reduced(bucket, parameter, parameter.grad)
        if deferred:
            self._deferred[id(parameter)] = True
        elif gradient is not None and optimizer is not None:
            optimizer.came(parameter)
        updates.settled(parameter)

    def _reduced(
        self, bucket: Bucket, parameter: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        with self._explained():
            return self.exchange.reduced(bucket, parameter, into)

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
