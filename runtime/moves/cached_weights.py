"""Decides which host weights may be prefetched, and how long a copy of one stays valid.

Optimizers, a loaded state dict or code that assigns `.data` may change a weight between steps.
Autograd counts most of these changes, but not all. So a copy is valid for one sweep at most. A
sweep is the forwards of some blocks, each with weights that no other block of the sweep has used,
and the one backward pass that may follow. The next sweep drops all copies, and no copy is made for
it before it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from offcompile.runtime.base.weak import WeakTensor
from offcompile.runtime.device.interface import Device, Slot


@dataclass(eq=False)
class Weight:
    """A parameter and the address of its memory."""

    block: tuple[Hashable, str, int]
    parameter: WeakTensor
    id: int
    address: int
    #: tag and lane of the last load
    tag: str = ""
    lane: str = ""
    #: backward executions that have fetched it
    backwards: set[Hashable] = field(default_factory=set)

    def now(self) -> torch.Tensor | None:
        """The parameter, if its memory is still at `address`."""
        found = self.parameter()
        if found is None or found.untyped_storage().data_ptr() != self.address:
            return None
        return found


class CachedWeights:
    """The weights that graphs have been called with. Not thread-safe.

    A finalizer calls `died` with each weight that is gone; `died` must take no lock.
    """

    def __init__(self, device: Device, died: Callable[[Weight], None]) -> None:
        self.device, self._died = device, died
        self.of_block: dict[Hashable, Weight] = {}
        self._by_id: dict[int, Weight] = {}
        self._by_address: dict[int, Weight] = {}
        self._made = 0
        #: in this sweep: the weights its forwards have used, and the backward pass that has begun
        self._used: set[Weight] = set()
        self._backward_pass: int | None = None
        #: True while the running graph changes weights
        self._changing = False

    def begin(self, parameters: Iterable[torch.Tensor] | None, backward: bool) -> bool:
        """Start a graph that fetches these parameters; None if it changes weights.

        Returns False if a new sweep begins. A backward need not name its parameters again.
        """
        self._changing = parameters is None
        mine = [self._know(p) for p in parameters or () if not p.is_inference()]
        task = torch._C._current_graph_task_id()
        # a forward inside a backward pass recomputes activations for it
        if backward or task != -1:
            goes_on = self._backward_pass in (None, task)
            self._backward_pass = task
        else:
            goes_on = self._backward_pass is None and self._used.isdisjoint(mine)
            if not goes_on:
                self._used.clear()
            self._backward_pass = None
            self._used.update(mine)
        return goes_on and not self._changing

    def end(self) -> None:
        """Note that the graph has ended."""
        self._changing = False

    def at(self, host: torch.Tensor) -> Weight | None:
        """The weight at this memory, if copies of it may be kept."""
        weight = self._by_address.get(host.untyped_storage().data_ptr())
        return None if weight is None or self._changing or weight.now() is None else weight

    def ahead(self, weight: Weight, execution: Hashable) -> tuple[torch.Tensor, Slot] | None:
        """The weight's memory, if it may be prefetched now for an expected execution."""
        host = weight.now()
        slot = None if host is None else self.device.slot_of(host)
        if host is None or slot is None or slot.holds or not self.in_sweep(weight, execution):
            return None
        return host, slot

    def in_sweep(self, weight: Weight, execution: Hashable) -> bool:
        """True if the execution that is expected to want the weight belongs to this sweep."""
        if self._changing or not weight.lane:
            return False
        if execution in weight.backwards:
            return True
        return self._backward_pass is None and weight not in self._used

    def forget(self, weight: Weight) -> None:
        del self.of_block[weight.block]
        if self._by_id.get(weight.id) is weight:
            del self._by_id[weight.id]
        if self._by_address.get(weight.address) is weight:
            del self._by_address[weight.address]
        self._used.discard(weight)

    def _know(self, parameter: torch.Tensor) -> Weight:
        address = parameter.untyped_storage().data_ptr()
        weight = self._by_id.get(id(parameter))
        if weight is None or weight.parameter() is not parameter:
            self._made += 1
            weight = Weight(
                ("weights", "", self._made), WeakTensor(parameter), id(parameter), address
            )
            weight.parameter = WeakTensor(parameter, partial(self._died, weight))
            self._by_id[weight.id] = self.of_block[weight.block] = weight
        elif weight.address != address and self._by_address.get(weight.address) is weight:
            del self._by_address[weight.address]
        weight.address = address
        self._by_address[address] = weight
        return weight
