"""Where the update of an arrived gradient is made: at once, or by channels beside backward."""

from __future__ import annotations

from time import perf_counter_ns

import torch

from offcompile.runtime.carrier import Brought
from offcompile.runtime.channels import Channels

from . import apply
from .core import Core, Entry
from .rules import Hyper

#: steps of each way that are compared; what comes before makes states and compiles
TRIALS, WARM_STEPS = 3, 2


class Ways:
    """Inline where the processor computes anyway; channels beside a device that computes alone.

    chosen: None while that is measured.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        asked = core.settings.channels
        self.chosen: bool | None = asked if isinstance(asked, bool) else None
        self._measures = asked == "measure"
        self._channels: Channels | None = None
        self._steps = 0
        self._best_ns: dict[bool, int] = {}
        self._since_ns = 0

    def update(
        self, entry: Entry, gradient: torch.Tensor, hyper: Hyper, borrowed: bool = False
    ) -> None:
        """Apply a gradient now or soon. borrowed: its memory is another's when this returns."""
        self.core.place()
        beside = self._beside(entry)
        carrier = self.core.carrier(entry)
        if carrier is None and (borrowed or entry.parameter.device.type != "cpu"):
            beside = False
        if not beside:
            apply.update(self.core, entry, gradient, hyper)
            return
        self.core.check(entry, gradient)
        self.core.start(entry)
        if carrier is None:
            brought = Brought(gradient.detach(), _nothing, gradient)
        else:
            brought = carrier.bring(entry.parameter, gradient, entry.label, lent=borrowed)
        if self._channels is None:
            self._channels = Channels()
        self._channels.submit(
            brought.arrive,
            lambda: apply.update(self.core, entry, brought.gradient, hyper, brought=brought),
            entry.label,
        )

    def _beside(self, entry: Entry) -> bool:
        if self._measures and self.chosen is None:
            return self._tried()
        if self.chosen is not None:
            return self.chosen
        on_device = (entry.place or "").startswith("device")
        return entry.parameter.device.type != "cpu" and not on_device

    def _tried(self) -> bool:
        return self._steps % 2 == 1

    def settle(self) -> None:
        if self._channels is not None:
            self._channels.settle()
        self.core.finish()

    def step_over(self) -> None:
        """While it is measured: the steps take turns."""
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
    """A gradient on the host is there."""
