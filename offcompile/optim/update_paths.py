"""Chooses how to apply an arrived gradient: inline, or in channels beside backward."""

from __future__ import annotations

from time import perf_counter_ns

import torch

from offcompile.runtime.device.interface import Device
from offcompile.runtime.moves.weights import device_of
from offcompile.runtime.states.gradient_transport import Brought
from offcompile.runtime.states.update_workers import UpdateJob, UpdateWorkers

from . import apply
from .core import Core, ParameterEntry
from .ranks.shards import local_like
from .rules import Hyper

#: steps of each way to compare, and steps before them, which create states and compile
TRIALS, WARM_STEPS = 3, 2


class UpdatePaths:
    """Updates inline if the CPU computes anyway, in channels beside an asynchronous device.

    chosen: True for channels, False for inline; None: not set, or still being measured.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        asked = core.settings.channels
        self.chosen: bool | None = asked if isinstance(asked, bool) else None
        self._measures = asked == "measure"
        self._channels: UpdateWorkers | None = None
        self._steps = 0
        self._best_ns: dict[bool, int] = {}
        self._since_ns = 0
        #: updates that may run into the next forward pass; fetches of the weight wait for them
        self._held: dict[ParameterEntry, UpdateJob] = {}
        #: the first error of an update in backward, if other ranks have to be told
        self._failed: Exception | None = None
        #: updates of the step under way that may not
        self._due: list[UpdateJob] = []

    def update(
        self, entry: ParameterEntry, gradient: torch.Tensor, hyper: Hyper, borrowed: bool = False
    ) -> None:
        """Apply a gradient now or soon, unless another rank does. borrowed: its memory is reused
        once this returns."""
        if self.core.sharding is not None and not self.core.owns(entry):
            self.core.sharding.updated_elsewhere(entry.key)
            return
        self._await(entry)
        if entry.place is None:
            self.core.place(entry)
        self.core.check(entry, gradient)
        # the first start may take a plan's advice, which decides where the update runs
        self.core.start(entry)
        beside = self._beside(entry)
        carrier = self.core.carrier(entry)
        if carrier is None and (borrowed or entry.parameter.device.type != "cpu"):
            beside = False
        if not beside:
            begun = self.core.begun
            try:
                apply.update(self.core, entry, gradient, hyper)
            except BaseException as error:
                self.core.is_torn |= self.core.begun != begun
                if self.core.sharding is None or not isinstance(error, Exception):
                    raise
                # the other ranks are in the same backward pass, and hear of it in step()
                self._failed = self._failed or error
            return
        gradient = local_like(gradient, entry.parameter)
        if carrier is None:
            brought = Brought(gradient.detach(), _nothing, gradient)
        else:
            brought = carrier.bring(entry.local, gradient, entry.label, lent=borrowed)
        job = self._submit(entry, brought, hyper)
        device = device_of(entry.local) if self.core.settings.tail else None
        if device is None or entry.place == "disk":
            self._due.append(job)
        else:
            self._hold(entry, device, job)

    def later(
        self,
        entry: ParameterEntry,
        gradient: torch.Tensor,
        hyper: Hyper,
        coefficient: torch.Tensor | None,
        grad_scale: torch.Tensor | None,
    ) -> bool:
        """Apply a gradient in a channel, and hold the weight until that is done.

        False: the caller must apply it at once, since fetches of this weight do not wait.
        """
        device = device_of(entry.local)
        if device is None or entry.place == "disk":
            return False
        self._await(entry)
        self.core.check(entry, gradient)
        self.core.start(entry)
        gradient = local_like(gradient, entry.parameter)
        carrier = self.core.carrier(entry)
        if carrier is None:
            brought = Brought(gradient.detach(), _nothing, gradient)
        else:
            brought = carrier.bring(entry.local, gradient, entry.label)
        job = self._submit(entry, brought, hyper, coefficient, grad_scale)
        self._hold(entry, device, job)
        return True

    def _hold(self, entry: ParameterEntry, device: Device, job: UpdateJob) -> None:
        def wait() -> None:
            job.until_over()
            if self._held.get(entry) is job:  # else its error has been raised already
                job.wait()

        self._held[entry] = job
        device.hold(entry.local, wait)

    def _await(self, entry: ParameterEntry) -> None:
        before = self._held.pop(entry, None)
        if before is not None:
            before.wait()

    def _submit(
        self,
        entry: ParameterEntry,
        brought: Brought,
        hyper: Hyper,
        coefficient: torch.Tensor | None = None,
        grad_scale: torch.Tensor | None = None,
    ) -> UpdateJob:
        def work() -> None:
            gradient = brought.gradient
            apply.update(self.core, entry, gradient, hyper, coefficient, grad_scale, brought)

        if self._channels is None:
            self._channels = UpdateWorkers()
        return self._channels.submit(brought.arrive, work, entry.label)

    def _beside(self, entry: ParameterEntry) -> bool:
        if self._measures and self.chosen is None:
            return self._tried()
        if self.chosen is not None:
            return self.chosen
        return entry.parameter.device.type != "cpu" and self.core.is_beside(entry)

    def _tried(self) -> bool:
        return self._steps % 2 == 1

    def settle_due(self) -> None:
        """Wait for the updates that must not outlast the step; raise their errors."""
        if not self.core.settings.tail:
            self.settle()
            return
        while self._due:
            self._due[0].until_over()  # interrupted here, the next call goes on
            self._due.pop(0).wait()
        self.core.finish()

    def raise_failed(self) -> None:
        """Raise the error of an update in backward that was put off until step()."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def settle(self) -> None:
        self._held.clear()
        self._due.clear()
        if self._channels is not None:
            self._channels.settle()
        self.core.finish()
        self.raise_failed()

    def step_over(self) -> None:
        """End a step. While measuring, alternate between the ways and time them."""
        self.core.finish()
        if not self._measures or self.chosen is not None:
            return
        now_ns = perf_counter_ns()
        if self._steps >= WARM_STEPS:
            way, took_ns = self._tried(), now_ns - self._since_ns
            self._best_ns[way] = min(took_ns, self._best_ns.get(way, took_ns))
        self._since_ns = now_ns
        self._steps += 1
        if self._steps >= WARM_STEPS + 2 * TRIALS:
            self.chosen = self._best_ns[True] < self._best_ns[False]

    def close(self) -> None:
        if self._channels is not None:
            self._channels.close()
            self._channels = None


def _nothing() -> None:
    """Wait for nothing: a gradient on the host has arrived."""
