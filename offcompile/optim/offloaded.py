"""The common base of the optimizers here: torch's classes, with updates made elsewhere."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._compile import _disable_dynamo

from offcompile.ir import OffloadError
from offcompile.run.ranks.absence import announce
from offcompile.runtime.base.interrupts import uninterrupted
from offcompile.runtime.states import updates
from offcompile.runtime.states.states import StatesFacts

from . import apply, checkpoints, clipping
from .arrivals import Arrivals
from .core import Core, ParameterEntry, refuse_flags
from .ranks.sharding import Sharding
from .ranks.shards import local
from .rules import Hyper, Rule
from .settings import Asked, Settings
from .state_placement import Places
from .update_paths import UpdatePaths


@dataclass(frozen=True)
class OptimizerFacts:
    """The last step of an optimizer, and the places of its states, on this rank.

    stores: by place. updated_in_backward, taken_from_graphs, updated_in_step: number of parameters
    in the last step. channels: True if updates run beside backward; None: only for devices other
    than the CPU, or not measured yet.
    """

    stores: dict[str, StatesFacts]
    updated_in_backward: int
    taken_from_graphs: int
    updated_in_step: int
    channels: bool | None


class OffloadedOptimizer(torch.optim.Optimizer):
    """A mixin to inherit before a torch optimizer, whose fused kernel is `rule`."""

    rule: Rule

    #: makes GradScaler call step() even if it found infs; see there
    _step_supports_amp_scaling: bool
    #: total gradient norm of the last step, if max_norm is given
    last_norm: torch.Tensor | None

    def _begin(self, asked: Asked, differentiable: bool, capturable: bool = False) -> None:
        """Do the part of `__init__` that comes before torch's."""
        refuse_flags({"differentiable": differentiable, "capturable": capturable})
        self.settings = Settings.read(asked)

    def _ready(self) -> None:
        """Do the part of `__init__` that comes after torch's."""
        announce()
        self._step_supports_amp_scaling = True
        self.last_norm = None
        places = Places(self.settings)
        group = self.settings.group
        sharding = None if group is None else Sharding(group)
        core = self._core = Core(self.rule, self.settings, places, self.state, sharding)
        ways = UpdatePaths(core)
        self._arrivals = Arrivals(core, ways)
        core.know(self.param_groups)
        self._agree()
        self._watch()
        weakref.finalize(self, _end, ways, places).atexit = False

    def _agree(self) -> None:
        """Raise OffloadError if another rank shares out other parameters."""
        core = self._core
        if core.sharding is not None:
            layouts = {str(core.layout(e)): None for e in core.entries.values()}
            kind = f"{type(self).__name__} with states {', '.join(layouts)}"
            core.sharding.agree(kind, [e.label for e in core.entries.values()])

    def _watch(self) -> None:
        updates.count(self._core.entries, self._arrivals)
        if self.settings.overlap:
            self._arrivals.watch()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        refuse_flags(param_group)
        super().add_param_group(param_group)
        if "_core" in self.__dict__:
            self._core.know(self.param_groups)
            self._agree()
            self._watch()

    # -- a step --------------------------------------------------------------------------------

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the available gradients; see torch's class.

        With overlap, applies the gradients that were not applied during backward, and frees them.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if self._core.sharding is None:
                self._step()
            else:
                self._step_on_ranks(self._core.sharding)
        return loss

    def _step_on_ranks(self, sharding: Sharding) -> None:
        """Make this rank's part of a step, and exchange the updated weights."""
        try:
            with sharding.together():
                try:
                    self._arrivals.ways.raise_failed()
                    self._step()
                except Exception as error:
                    sharding.tell(error)
                    raise
                for parameter in sharding.exchange():
                    self.state[parameter]  # an entry on all ranks, as on the one with the states
        finally:
            self._core.is_torn |= sharding.differs

    @uninterrupted
    def _step(self) -> None:
        self._core.refuse_torn()
        arrivals, overlap = self._arrivals, self.settings.overlap
        grad_scale, found_inf = self._amp()
        self._core.state = self.state
        arrivals.ways.settle_due()
        hypers: dict[int, Hyper] = {id(g): self.rule.hyper(g) for g in self.param_groups}
        if overlap:
            arrivals.check(hypers)
        waiting = self._waiting()
        if not found_inf:
            begun = self._core.begun
            try:
                self._apply(waiting, hypers, grad_scale)
            except BaseException:
                self._core.is_torn = self._core.begun != begun
                raise
        if overlap:
            for entry, _ in waiting:
                entry.parameter.grad = None
            self._arrivals.watch()
        in_step = sum(self._core.owns(entry) for entry, _ in waiting)
        arrivals.over(0 if found_inf else in_step)
        self._core.step_over()

    def _amp(self) -> tuple[torch.Tensor | None, bool]:
        """Return what a GradScaler has set for this step: the scale, if gradients are still scaled,
        and True if one of them is not finite."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return None, False
        if self.settings.overlap and not self.settings.scaled:
            raise OffloadError(
                "A GradScaler cannot unscale gradients that were applied during backward: make"
                f" {type(self).__name__}(…, overlap=True, scaler=scaler), or leave out overlap"
            )
        return getattr(self, "grad_scale", None), bool(float(found_inf) != 0)

    def _waiting(self) -> list[tuple[ParameterEntry, torch.Tensor]]:
        """The gradients that are not applied yet, in the order of the groups."""
        entries = self._core.entries
        order = (p for g in self.param_groups for p in g["params"])
        return [(entries[p], p.grad) for p in order if p.grad is not None]

    def _apply(
        self,
        waiting: list[tuple[ParameterEntry, torch.Tensor]],
        hypers: Mapping[int, Hyper],
        grad_scale: torch.Tensor | None,
    ) -> None:
        coefficient = None
        if self.settings.max_norm is not None:
            if grad_scale is not None:
                _unscale([g for _, g in waiting], grad_scale)
                grad_scale = None
            coefficient = self._clip(waiting)
        waiting = [(entry, gradient) for entry, gradient in waiting if self._core.owns(entry)]
        if self.settings.tail:
            later = self._arrivals.ways.later
            waiting = [
                (entry, gradient)
                for entry, gradient in waiting
                if not later(entry, gradient, hypers[id(entry.group)], coefficient, grad_scale)
            ]
        apply.update_together(self._core, waiting, hypers, coefficient, grad_scale)

    def _clip(self, waiting: list[tuple[ParameterEntry, torch.Tensor]]) -> torch.Tensor | None:
        assert self.settings.max_norm is not None
        for entry, gradient in waiting:
            self._core.check(entry, gradient)
        norms = [self._arrivals.measure(entry, gradient) for entry, gradient in waiting]
        self.last_norm = clipping.total_norm([g for _, g in waiting], norms)
        return clipping.coefficient(self.settings.max_norm, self.last_norm)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like torch's. Raises in the middle of a step that has begun during backward."""
        if "_arrivals" in self.__dict__:
            if self._arrivals.began():
                raise OffloadError(
                    "zero_grad() was called between backward and step(), but with overlap=True"
                    " parameters were updated during backward already: call step() first, or"
                    " discard() if the backward pass was given up (what was updated stays so)"
                )
            self._arrivals.forget()
        super().zero_grad(set_to_none)

    def discard(self) -> None:
        """Give up the step under way: drop its gradients. Parameters that were updated already stay
        updated. With sharded=True, call it on every rank."""
        self._core.is_torn = False
        try:
            self._arrivals.settle()
        finally:
            self._arrivals.forget()
            for parameter in self._core.entries:
                parameter.grad = None
            if self._core.sharding is not None:
                self._discard_on_ranks(self._core.sharding)

    def _discard_on_ranks(self, sharding: Sharding) -> None:
        """Exchange the weights that ranks had updated in the step that is given up."""
        self._core.is_torn = True
        sharding.meet("discard()", lambda: None)
        with sharding.together():
            sharding.exchange()
        self._core.is_torn = False

    # -- saving and loading ---------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until all updates are done and written; raise their errors."""
        self._arrivals.settle()
        for store in self._core.places.stores().values():
            store.settle()

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Like torch's, which can load it. States on disk are copied to an unnamed file that backs
        the tensors, not to memory.

        With sharded=True it has the states of all ranks: a collective, to be called on every rank.
        """
        self.settle()
        return self._saved(checkpoints.whole_state(self._core))

    @_disable_dynamo
    def local_state_dict(self) -> dict[str, Any]:
        """Like `state_dict()`, with the states of this rank alone, and no collective. The same rank
        of as many can load it."""
        self.settle()
        state = checkpoints.own_state(self._core)
        for parameter, entry in self._core.entries.items():
            if not self._core.owns(entry):
                state.pop(parameter, None)
        found = self._saved(state)
        elsewhere = checkpoints.elsewhere(self._core, self.param_groups)
        return found | ({"elsewhere": elsewhere} if elsewhere else {})

    def _saved(self, state: defaultdict[torch.Tensor, Any]) -> dict[str, Any]:
        live, self.state = self.state, state
        try:
            return super().state_dict()
        finally:
            self.state = live

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's; also loads from torch's. Streams states to their places."""
        self._arrivals.settle()
        self._arrivals.forget()
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved = state_dict["state"]
        hooks = (
            self._optimizer_load_state_dict_pre_hooks,
            self._optimizer_load_state_dict_post_hooks,
        )
        none: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = none
        self._optimizer_load_state_dict_post_hooks = none.copy()
        try:
            super().load_state_dict(state_dict | {"state": {}})
        finally:
            self._optimizer_load_state_dict_pre_hooks = hooks[0]
            self._optimizer_load_state_dict_post_hooks = hooks[1]
        numbers = [n for g in state_dict["param_groups"] for n in g["params"]]
        parameters = [p for g in self.param_groups for p in g["params"]]
        numbered = dict(zip(numbers, parameters, strict=True))
        checkpoints.refuse_others(self._core, numbered, state_dict.get("elsewhere", {}))
        checkpoints.load(self._core, self.state, numbered, saved)
        self._core.is_torn = False
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        if "disk" in self._core.places.stores():
            raise OffloadError(
                "An optimizer with states on disk cannot be copied or pickled: save its"
                " state_dict() and load that into a new one"
            )
        if self._core.sharding is not None:
            raise OffloadError(
                "An optimizer whose states are shared out over ranks cannot be copied or pickled:"
                " save its state_dict() on every rank and load that into a new one"
            )
        return super().__getstate__() | {"settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_core" in self.__dict__:
            self._core.state = self.state
            self._core.know(self.param_groups)
            return
        saved, self.state = self.state, defaultdict(dict)
        self._ready()
        checkpoints.load(self._core, self.state, {p: p for p in self._core.entries}, saved)

    def facts(self) -> OptimizerFacts:
        """Report the places of states, their traffic, and how the last step was made."""
        last = self._arrivals.last
        return OptimizerFacts(
            {name: store.facts() for name, store in self._core.places.stores().items()},
            last.in_backward,
            last.from_graphs,
            last.in_step,
            self._arrivals.ways.chosen,
        )


def as_fused(foreach: bool | None, fused: bool | None) -> bool | None:
    """The `fused` flag for groups that makes torch compute alike if it resumes from here."""
    return fused if foreach or fused is not None else True


def _unscale(gradients: list[torch.Tensor], scale: torch.Tensor) -> None:
    """Unscale gradients like `GradScaler.unscale_`."""
    inverse = scale.double().reciprocal().float()
    for gradient in gradients:
        found = torch.zeros((), device=gradient.device)
        torch._amp_foreach_non_finite_check_and_unscale_(
            [local(gradient)], found, inverse.to(gradient.device)
        )


def _end(ways: UpdatePaths, places: Places) -> None:
    """Close files and threads of a dead optimizer. Memory is freed with its last tensor."""
    ways.close()
    disk = places.stores().get("disk")
    if disk is not None:
        disk.close()
