"""Overlaps updates with backward: applies gradients as they arrive."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.report.log import tell_once
from offcompile.runtime.base.interrupts import uninterrupted
from offcompile.runtime.moves.weights import is_on_host
from offcompile.runtime.states import updates

from .clipping import norm
from .core import Core, ParameterEntry
from .layout import flat_like, room_like, shaped_like
from .ranks.replicas import reduced_after_backward
from .ranks.shards import is_sharded, version_of
from .rules import Hyper
from .state_placement import SMALL_BYTES, is_kept_there, kept_on
from .update_paths import UpdatePaths

LOGGER = logging.getLogger("offcompile")


@dataclass
class Arrival:
    """The state of one parameter's gradient in the step under way."""

    passes: int = 0
    #: hyperparameters of the group when the parameter was updated; None: not updated yet
    hyper: Hyper | None = None
    #: the norm of `.grad`, the gradient that it was measured on, and its version
    norm: tuple[torch.Tensor, torch.Tensor, int] | None = None


@dataclass
class ArrivalTally:
    """Number of parameters updated in one step, by way."""

    in_backward: int = 0
    from_graphs: int = 0
    in_step: int = 0


@dataclass(eq=False)
class Arrivals:
    """The `updates.Updater` of one optimizer. Hooks and compiled graphs refer to it weakly."""

    core: Core
    ways: UpdatePaths
    arrived: dict[ParameterEntry, Arrival] = field(default_factory=dict)
    tally: ArrivalTally = field(default_factory=ArrivalTally)
    last: ArrivalTally = field(default_factory=ArrivalTally)
    #: steps that are over
    stepped: int = 0
    #: True if a plan has chosen the places that the user leaves open
    is_placed: bool = False
    _hooks: dict[ParameterEntry, Any] = field(default_factory=dict)
    #: True if gradients are final only after backward; None: to be found out
    _reduced_late: bool | None = None
    #: True once it was looked if weights that each rank updates are on the host
    _looked: bool = False
    _lock: Any = field(default_factory=threading.RLock)

    def watch(self) -> None:
        """Hook every parameter that can get a gradient."""
        mine = weakref.ref(self)
        for parameter, entry in self.core.entries.items():
            if entry not in self._hooks and parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                handle = register(_hook(mine))
                self._hooks[entry] = handle
                self._reduced_late = None
                updates.register([parameter], self)
                weakref.finalize(self, handle.remove).atexit = False

    # -- gradients from autograd -----------------------------------------------------------------

    @uninterrupted
    def came(self, parameter: torch.Tensor) -> None:
        """See `updates.Updater`."""
        entry = self.core.entries[parameter]
        with self._lock:
            arrival = self._arrival(entry)
            gradient = parameter.grad
            if gradient is None or arrival.passes < self.core.settings.accumulate:
                return
            if self._is_of_one_rank(parameter):
                raise OffloadError(
                    f"Nothing reduces the gradient of {entry.label} over ranks before it is used:"
                    " with overlap=True and sharded=True, wrap the model in"
                    " DistributedDataParallel, or reduce gradients yourself before step() and make"
                    " the optimizer with overlap=False"
                )
            if self.core.settings.deferred or self._waits_for_ddp():
                self._hold(entry, gradient)
            elif self._is_last_hook(entry) and not self.core.waits_for_step(entry):
                self._apply(entry, arrival, gradient)

    def _arrival(self, entry: ParameterEntry) -> Arrival:
        arrival = self.arrived.setdefault(entry, Arrival())
        if arrival.hyper is not None:
            accumulate = self.core.settings.accumulate
            raise OffloadError(
                f"{entry.label} got another gradient after it had been updated in this step:"
                f" accumulate={accumulate} says that every {accumulate}. backward pass is followed"
                " by step(). Give the number of backward passes per step, or overlap=False; after"
                " a backward pass that was given up, call discard() on the optimizer first"
            )
        arrival.passes += 1
        return arrival

    def _is_of_one_rank(self, parameter: torch.Tensor) -> bool:
        """True if ranks would update from the gradients of one rank: neither DDP nor a hook of the
        user's has reduced this one."""
        if self.core.sharding is None or updates.reducer_of(parameter) is not None:
            return False
        hooks = parameter._post_accumulate_grad_hooks or ()
        return len(hooks) <= 1 and not parameter._backward_hooks and not self._waits_for_ddp()

    def _is_last_hook(self, entry: ParameterEntry) -> bool:
        """True if no hook of the user's has yet to see the gradient."""
        hooks = entry.parameter._post_accumulate_grad_hooks
        return not hooks or next(reversed(hooks)) == self._hooks[entry].id

    def _apply(self, entry: ParameterEntry, arrival: Arrival, gradient: torch.Tensor) -> None:
        hyper = self.core.rule.hyper(entry.group)
        self.ways.update(entry, gradient, hyper)
        entry.parameter.grad = None
        arrival.hyper = hyper
        self.tally.in_backward += self.core.owns(entry)

    def _hold(self, entry: ParameterEntry, gradient: torch.Tensor) -> None:
        """Keep a complete gradient for step()."""
        self.core.check(entry, gradient)
        if not self.core.settings.scaled and not self._waits_for_ddp():
            self.measure(entry, gradient)

    def _waits_for_ddp(self) -> bool:
        """True if DDP reduces these gradients: they wait for step(), where they are final."""
        if self._reduced_late is None:
            self._reduced_late = reduced_after_backward(self.core.entries)
            if self._reduced_late:
                LOGGER.warning(
                    "offcompile: overlap=True does nothing where DistributedDataParallel itself"
                    " reduces gradients, after their hooks have run: all updates wait for step()."
                    " Compile the model with this backend before its first step"
                    " (TORCH_LOGS=offcompile says why that is not enough), use fully_shard (FSDP2),"
                    " which calls hooks after it has reduced, or overlap=False"
                )
        return self._reduced_late

    def measure(self, entry: ParameterEntry, gradient: torch.Tensor) -> torch.Tensor:
        """Return the norm of `.grad`, recomputed if `.grad` has changed since the last call."""
        arrival = self.arrived.setdefault(entry, Arrival())
        known = arrival.norm
        # a scaler changes gradients without a version bump
        version = version_of(gradient)
        stale = known is None or known[1] is not gradient or known[2] != version
        if known is None or stale or self.core.settings.scaled:
            known = arrival.norm = (norm(gradient), gradient, version)
        return known[0]

    def reduced(self) -> None:
        """See `updates.Updater`. All ranks see the weights that their owners have updated."""
        if self.core.sharding is not None:
            self.core.sharding.wait_for_owners()
        elif not self._looked:
            self._looked = True
            if any(map(is_on_host, self.core.entries)):
                tell_once(
                    "each rank keeps its own weights on the host: only with sharded=True does one"
                    " rank update a weight for all"
                )

    # -- gradients straight from a compiled graph ------------------------------------------------

    def uses_up(self) -> bool:
        """See `updates.Updater`."""
        alone = self.core.sharding is None
        return self.core.settings.uses_up and alone and not self._waits_for_ddp()

    def takes(self, parameter: torch.Tensor) -> bool:
        """See `updates.Updater`."""
        entry = self.core.entries.get(parameter)
        if entry is None or entry not in self._hooks or not parameter.requires_grad:
            return False
        if is_sharded(parameter) or self._waits_for_ddp() or self._is_of_one_rank(parameter):
            return False
        others = parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) != 1
        before = self.arrived.get(entry)
        held = parameter.grad
        plain = held is None or (held.layout == torch.strided and not held.requires_grad)
        return plain and not others and (before is None or before.hyper is None)

    @torch.no_grad()
    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """See `updates.Updater`."""
        entry = self.core.entries[parameter]
        with self._lock:
            arrival = self._arrival(entry)
            is_due = arrival.passes >= self.core.settings.accumulate
            self.tally.from_graphs += 1
            if is_due and parameter.grad is None and not self.core.settings.deferred:
                hyper = self.core.rule.hyper(entry.group)
                self.ways.update(entry, gradient, hyper, borrowed=True)
                arrival.hyper = hyper
                self.tally.in_backward += self.core.owns(entry)
                return
            if parameter.grad is None:
                room = room_like(parameter)
                room.copy_(shaped_like(flat_like(gradient, parameter), parameter))
                parameter.grad = room
            else:
                parameter.grad += gradient
            held = parameter.grad
            assert held is not None
            if is_due and self.core.settings.deferred:
                self._hold(entry, held)
            elif is_due:
                self._apply(entry, arrival, held)

    def held_bytes(self) -> int:
        """See `updates.Updater`."""
        return self.core.held_bytes()

    # -- places that the user leaves open --------------------------------------------------------

    def free_states(self, parameters: Collection[int]) -> int:
        """See `updates.StatesOwner`."""
        core = self.core
        if not core.settings.is_open or core.sharding is not None:
            return 0
        trained = [e for e in core.entries.values() if e.parameter.requires_grad]
        for entry in trained:
            begun = entry.store is not None or entry.step is not None
            known = id(entry.parameter) in parameters
            if begun or not known or entry.parameter.device.type == "cpu":
                return 0
        return sum(map(core.nbytes, trained))

    def keep(self, share: float) -> None:
        """See `updates.StatesOwner`."""
        core, self.is_placed = self.core, True
        trained = (e for e in core.entries.values() if e.parameter.requires_grad)
        core.place_again(round(share * sum(map(core.nbytes, trained))))

    def steps(self) -> int:
        """See `updates.StatesOwner`."""
        return self.stepped

    def beside_bytes(self, device: torch.device) -> int:
        """See `updates.StatesOwner`."""
        return sum(map(self.core.nbytes, self._beside(device)))

    def _beside(self, device: torch.device) -> list[ParameterEntry]:
        """Parameters whose states this device could as well keep, in order."""
        core = self.core
        if self.is_placed or not core.settings.is_open or core.sharding is not None:
            return []
        made = (e for e in core.entries.values() if e.store is not None)
        there = [e for e in made if not is_kept_there(e.place) and e.parameter.device == device]
        return [e for e in there if not (is_sharded(e.parameter) or is_on_host(e.parameter))]

    def fill(self, device: torch.device, room_bytes: int) -> int:
        """See `updates.StatesOwner`."""
        core, beside = self.core, self._beside(device)
        if self.arrived:
            return 0
        there = dict.fromkeys(beside, kept_on(device))
        before = core.held_bytes()
        # without any beside the device, buffers for those that cross are gone, too
        if core.held_with(there) - before > room_bytes:
            taken = itertools.accumulate(map(core.nbytes, beside))
            there = {
                e: there[e] for e, nbytes in zip(beside, taken, strict=True) if nbytes <= room_bytes
            }
        if there:
            self.settle()
        with torch.inference_mode(False), torch.no_grad():
            for entry, place in there.items():
                core.move(entry, place)
        return core.held_bytes() - before

    def give_way(self) -> int:
        """See `updates.StatesOwner`. Small states stay."""
        core = self.core
        kept = [e for e in core.entries.values() if is_kept_there(e.place)]
        kept = [e for e in kept if core.nbytes(e) > SMALL_BYTES]
        if self.arrived or not core.settings.is_open or not kept:
            return 0
        before = core.held_bytes()
        core.places.choose_again(0)
        chosen = core.places.choose((e.parameter, core.nbytes(e)) for e in kept)
        with torch.inference_mode(False), torch.no_grad():
            for position, entry in enumerate(kept):
                core.move(entry, chosen[position])
        return before - core.held_bytes()

    # -- the end of a step -----------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for all updates under way; raise their errors."""
        self.ways.settle()

    def check(self, hypers: Mapping[int, Hyper]) -> None:
        """Raise OffloadError if updates made during backward are not those that step() wants."""
        if not self.arrived and self.stepped and self._has_no_gradient():
            raise OffloadError(
                "step() was called without a gradient since the last one: with overlap=True"
                " a step uses its gradients up, so that it cannot be made twice. Call it once"
                " after backward, or make the optimizer with overlap=False"
            )
        for entry, arrival in self.arrived.items():
            if arrival.hyper is None:
                continue
            now = hypers[id(entry.group)]
            changed = [k for k, v in arrival.hyper.items() if now[k] != v]
            if changed:
                told = ", ".join(f"{k} from {arrival.hyper[k]} to {now[k]}" for k in changed)
                raise OffloadError(
                    f"{entry.label} was updated during backward, and then its group changed {told}"
                    " before step(): change it before backward or after step(), or make the"
                    " optimizer with overlap=False"
                )
            if entry.parameter.grad is not None:
                raise OffloadError(
                    f"{entry.label} was updated during backward, and has a new gradient before"
                    " step(): leave .grad alone between the two, or make the optimizer with"
                    " overlap=False. If DistributedDataParallel has written it, wrap the model"
                    " before the first step"
                )

    def _has_no_gradient(self) -> bool:
        return all(p.grad is None for p in self.core.entries)

    def began(self) -> bool:
        """True if a parameter was updated in the step under way."""
        return any(a.hyper is not None for a in self.arrived.values())

    def over(self, in_step: int) -> None:
        """End the step; `in_step` parameters were updated in `step()` itself."""
        self.tally.in_step = in_step
        self.last, self.tally = self.tally, ArrivalTally()
        self.arrived.clear()
        self.stepped += 1
        self.ways.step_over()

    def forget(self) -> None:
        """Forget the gradients that have arrived."""
        self.arrived.clear()
        self.tally = ArrivalTally()


def _hook(mine: weakref.ref[Arrivals]) -> Callable[[torch.Tensor], None]:
    def arrived(parameter: torch.Tensor) -> None:
        if updates.reducer_of(parameter) is not None:
            return  # still the gradient of one rank: `came` is called when it is reduced
        brought = updates.arrived(parameter)
        arrivals = mine()
        if arrivals is not None and brought:
            arrivals.came(parameter)

    return arrived
