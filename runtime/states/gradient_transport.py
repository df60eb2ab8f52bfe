"""Carries gradients to the host and weights back, for an optimizer beside an asynchronous device.

A weight is updated where the host keeps it: in its own memory if that is on the host tier, else in
a pinned copy that is sent to the device after each update. A gradient is copied once. Nothing
blocks the host but the `arrive` that `bring` returns. Compute waits for returning weights at
`finish`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial

import torch

from offcompile.runtime.base.weak import tensor_keys
from offcompile.runtime.device import tickets
from offcompile.runtime.device.failures import failure
from offcompile.runtime.device.interface import Copy, Label, Point, Slot
from offcompile.runtime.memory.accelerators import device_module
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.registry import Runtime, RuntimeSettings, runtime_for, runtimes
from offcompile.runtime.moves.saved import Saved

from .updates import runtime_key_of

OUT, BACK = "d2h", "h2d"
#: duplicates of lent gradients that may be on their way at once
MOST_LENT = 2


@dataclass(frozen=True)
class Brought:
    """A gradient on its way to the host. Keep it until the gradient is used: it owns the memory.

    gradient: a CPU tensor that holds the gradient once `arrive()` returns. After that, the tensor
    that `GradientTransport.place` returns for its weight may be overwritten, too.
    """

    gradient: torch.Tensor
    arrive: Callable[[], None]
    held: torch.Tensor


@dataclass(eq=False)
class _Copied:
    """A weight that stays on the device: its copy on the host, and the users of both."""

    home: torch.Tensor
    #: the weight's autograd version when the two were equal
    version: int
    #: compute may read the weight itself up to this point
    used: Point | None = None
    #: the last copy back to the device, which reads `home`
    back: Copy | None = None


class GradientTransport:
    """The carrier of one device. Call `bring` and `finish` on threads that give work to compute."""

    def __init__(self, mover: Mover) -> None:
        self.mover, self.device = mover, mover.device
        # parameter → _Copied
        self._copies: MutableMapping[torch.Tensor, _Copied] = tensor_keys()
        self._lock = threading.Lock()
        #: copies of the duplicates that compute has not waited for
        self._lent: deque[Copy] = deque()
        #: (copy, label, slot) of each weight on its way back to the device
        self._returning: list[tuple[Copy, str, Slot]] = []

    def place(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter as a CPU tensor for the host to update; see `updated`.

        A host copy is made at the first call, and again when autograd has counted a change of the
        weight.
        """
        copied = self._copied(parameter)
        return self.device.on_host(parameter if copied is None else copied.home)

    def _copied(self, parameter: torch.Tensor) -> _Copied | None:
        """The weight's copy on the host; None if the parameter itself is on the host tier."""
        if self.device.slot_of(parameter) is not None:
            return None
        copied, version = self._copies.get(parameter), parameter._version
        if copied is None or copied.version != version:
            home = self._send(parameter.detach(), f"a weight of shape {tuple(parameter.shape)}")
            self.device.await_on_host([home])()
            copied = self._copies[parameter] = _Copied(home, version)
        return copied

    def bring(
        self, parameter: torch.Tensor, gradient: torch.Tensor, label: str, lent: bool = False
    ) -> Brought:
        """Start copying a gradient of the parameter to the host.

        lent: its memory may be overwritten once this returns; otherwise not before it dies.
        """
        copied, host = self._copied(parameter), gradient.detach()
        if self.device.slot_of(host) is None:
            host = self._send_lent(host, label) if lent else self._send(host, label)
        back = None
        if copied is not None:
            copied.used, back = self.device.mark(), copied.back
        arrive = self.device.await_on_host([host], [parameter] if copied is None else [])
        return Brought(self.device.on_host(host), partial(self._arrive, arrive, back), host)

    def _arrive(self, arrive: Callable[[], None], back: Copy | None) -> None:
        arrive()
        if back is not None:
            self.device.reached(back)

    def _send_lent(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """Send a duplicate. Compute first waits for the oldest one, whose memory this one can have
        then, if there are `MOST_LENT`: the host runs ahead, and would duplicate all gradients."""
        if len(self._lent) >= MOST_LENT:
            self.device.wait(self._lent.popleft())
        flat, copy = self._stored(self._duplicate(tensor), label)
        if copy is not None:
            self._lent.append(copy)
        return flat

    def _send(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        return self._stored(tensor, label)[0]

    def _stored(self, tensor: torch.Tensor, label: str) -> tuple[torch.Tensor, Copy | None]:
        saved = tickets.find(self.mover.start_store(tensor, label, OUT), Saved)
        flat = saved.host
        assert flat is not None
        # the copy holds its source until its end was seen, so nobody has to wait for it
        return flat.view(tensor.dtype).as_strided(tensor.size(), tensor.stride()), saved.copy

    def _duplicate(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def updated(self, parameter: torch.Tensor, label: str) -> None:
        """Note, on any thread, that `place(parameter)` was written; a copy is sent to the device.

        Also increments the weight's autograd version.
        """
        torch.autograd.graph.increment_version(parameter)
        if self.device.slot_of(parameter) is not None:
            return
        copied = self._copies[parameter]
        copied.version = parameter._version
        slot = self.device.slot_of(copied.home)
        assert slot is not None
        after = [] if copied.used is None else [copied.used]
        target = parameter.detach()
        back = self.device.copy_in(BACK, slot, target, after, Label("load", label), _nothing)
        with self._lock:
            copied.back = back
            self._returning.append((back, label, slot))

    def finish(self) -> None:
        """Make work given to compute from now on see the weights passed to `updated`."""
        with self._lock:
            returning, self._returning = self._returning, []
        failed = None
        try:
            while returning:
                back, label, slot = returning[0]
                self.device.wait(back)
                del returning[0]
                if back.error is not None and failed is None:
                    failed = failure(back.error, "load", label, slot)
        finally:  # another load's failure may be raised in between: wait for the rest later
            with self._lock:
                self._returning[:0] = returning
        if failed is not None:
            raise failed


def _nothing(copy: Copy) -> None:
    """Does nothing: waiters check the copy itself."""


def carrier_of(parameter: torch.Tensor) -> GradientTransport | None:
    """The carrier for a parameter; None on the CPU, where compute is synchronous."""
    if parameter.device.type == "cpu":
        return None
    for runtime in runtimes():
        if runtime.device.slot_of(parameter) is not None:
            return runtime.companion(GradientTransport)
    key = runtime_key_of(parameter)  # another graph's may have little room on the host
    runtime = runtime_on(parameter.device) if key is None else runtime_for(key)
    return runtime.companion(GradientTransport)


def runtime_on(device: torch.device) -> Runtime:
    """A runtime of this device for memory that no plan counts: an open one whose host tier has no
    limit, or a new one with default settings."""
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, device_module(device.type).current_device())
    mine = [r for r in runtimes() if r.settings.target == str(device)]
    mine = [r for r in mine if r.settings.host_bytes is None]
    return mine[0] if mine else runtime_for(RuntimeSettings(target=str(device)).key)
