"""Weights that channels update beside a device on simulated streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from cuda_bench import Bench, fill

from offcompile.runtime.device import tickets
from offcompile.runtime.moves.saved import Saved
from offcompile.runtime.states.gradient_transport import Brought, GradientTransport
from offcompile.runtime.states.update_workers import UpdateJob, UpdateWorkers


class SimulatedCarrier(GradientTransport):
    """Duplicates by a simulated kernel."""

    bench: Bench

    def _duplicate(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self.bench.streams.empty(tensor.numel())
        self.bench.streams.launch(copy, (tensor,), (made,), "duplicate")
        return made


def copy(source: np.ndarray, target: np.ndarray) -> None:
    target[:] = source


@dataclass
class Updates:
    """Channels whose threads know what the handing over of a job tells them, and no more."""

    bench: Bench
    carrier: SimulatedCarrier
    channels: UpdateWorkers = field(default_factory=UpdateWorkers)
    #: the clock once the last update is over
    clock: int = 0

    def start(
        self,
        weight: torch.Tensor,
        brought: Brought,
        label: str,
        first: Callable[[torch.Tensor], None] | None = None,
    ) -> Callable[[], None]:
        """Queue `weight += gradient` on the host, after `first(gradient)`; returns what waits."""
        bench, carrier = self.bench, self.carrier
        watch, place = bench.streams._watch, carrier.place(weight)
        before = watch.known
        over: list[int] = []

        def arrive() -> None:
            watch.known |= before
            brought.arrive()

        def work() -> None:
            nonlocal brought
            watch.known |= self.clock
            try:
                bench.streams.touch(brought.gradient, False, f"read {label}")
                if first is not None:
                    first(brought.gradient)
                bench.streams.touch(place, True, f"update {label}")
                place.add_(brought.gradient)
                carrier.updated(weight, label)
            finally:
                bench.streams.let_go(brought.gradient)
                del brought
                self.clock = watch.known
                over.append(self.clock)

        job = self.channels.submit(arrive, work, label)
        return partial(self._wait, job, over)

    def _wait(self, job: UpdateJob, over: list[int]) -> None:
        job.wait()
        self.bench.streams._watch.known |= over[0]


def updates_of(bench: Bench, carrier: type[SimulatedCarrier] = SimulatedCarrier) -> Updates:
    made = carrier(bench.mover)
    made.bench = bench
    return Updates(bench, made)


def weight_of(bench: Bench, nbytes: int, value: int, on_host: bool) -> torch.Tensor:
    if not on_host:
        return bench.full(nbytes, value)
    (weight,) = bench.device.addressable([nbytes])
    bench.streams.launch(fill(value), (), (weight,), f"place {value}")
    return weight


def use(bench: Bench, weight: torch.Tensor, value: int, in_place: bool, tag: str) -> None:
    """Read a weight as a compiled forward does, and expect `value` in it."""
    if in_place or bench.device.slot_of(weight) is None:
        bench.device.claim(weight)
        bench.expect(weight, value, tag)
        return
    buffer, load = bench.mover.start_fetch(weight, tag, "h2d")
    bench.wait_load(load)
    bench.expect(buffer, value, tag)


KINDS = ("lent", "kept", "sent", "written", "added")


def produce(bench: Bench, nbytes: int, value: int, kind: str) -> torch.Tensor:
    """A gradient as a compiled backward makes it, on the device or already on its way."""
    if kind in ("lent", "kept"):
        return bench.full(nbytes, value)
    if kind == "sent":
        ticket = bench.mover.start_store(bench.full(nbytes, value), "g", "d2h")
        bench.wait_out(ticket)
    else:
        host, ticket = bench.mover.store_in_place(nbytes, "g")
        bench.streams.launch(fill((value - (kind == "added")) % 256), (), (host,), "store")
        bench.mover.stored(host)
    found = tickets.find(ticket, Saved).host
    assert found is not None
    if kind == "added":
        # autograd adds to `.grad` this way: by a kernel, and it counts the version
        bench.streams.launch(lambda g: g.__iadd__(1), (), (found,), "add")
        torch._C._autograd._unsafe_set_version_counter((found,), (found._version + 1,))
    return found
