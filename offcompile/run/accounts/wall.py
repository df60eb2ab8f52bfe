"""Checks in a plan's first optimizer steps that the optimizer trains the memory its graph reads.

A weight that moved to the host has new memory. `runtime/device/owners.py` counts the tensors that
would go on using the old memory; code that kept a bare address is not counted, and would train
memory that no graph reads. Such a step leaves a trace: an optimizer visibly changes other tensors
while a weight that had a gradient stays the same. Three such steps are reported.

A step is judged at the next call, since updates may run beside the step, or be copied back from a
master copy after it. A weight that was seen to change is no longer watched.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from offcompile.runtime.base.weak import WeakTensor
from offcompile.runtime.device.owners import address_of, plain_parts

#: steps without effect before they are reported
STRIKES = 3
#: the watch ends after this many optimizer steps or calls
MOST_STEPS, MOST_CALLS = 16, 1000
#: runs of elements in a sample, and elements per run: few pages of memory that may be cold
RUNS, RUN_LENGTH = 16, 64
#: parameters of an optimizer that are sampled to see if it trains
MOST_OTHERS = 16
#: share of a sample that must differ for a visible change
VISIBLE = 0.25
#: weights named in a message
NAMED = 3

#: relation of an optimizer to a weight: its own, or one of a graph unknown to it
MINE, NOBODYS = "mine", "nobody's"
_FIX = (
    "Weights on the host have other memory than before the first compiled call: let go of addresses"
    " from before it and take new ones after it, or keep [p.detach() for p in model.parameters()]"
    " from before it, and they stay on the device."
)


@dataclass(eq=False)
class _Weight:
    """A weight on the host that has not been seen to change."""

    name: str
    parameter: WeakTensor
    version: int
    address: int | None
    sample: torch.Tensor | None = None
    #: relation to it of the optimizers that stepped since the last call → optimizer name
    met: dict[str, str] = field(default_factory=dict)
    strikes: Counter[str] = field(default_factory=Counter)

    def changed(self) -> bool:
        """True if somebody was seen to write to it, or if it is gone."""
        parameter = self.parameter()
        if parameter is None or parameter._version != self.version:
            return True
        if address_of(parameter) != self.address:
            return True
        # writes through `.data` do not increment the version
        return self.sample is not None and not torch.equal(sampled(parameter), self.sample)

    def has_gradient(self) -> bool:
        parameter = self.parameter()
        gradient = None if parameter is None else parameter.grad
        return gradient is not None and bool(sampled(gradient).any())


#: a tensor, with a sample of it
_Sampled = tuple[WeakTensor, torch.Tensor]


@dataclass(eq=False)
class Watch:
    """The watch over one plan. `names`: readable names of arguments; `tell`: gets findings."""

    names: Mapping[int, str]
    tell: Callable[[str], None]
    #: True if the plan's backward has run since the last call
    made_gradients: bool = False
    _weights: dict[int, _Weight] = field(default_factory=dict)
    #: ids of all parameters of the graph
    _known: set[int] = field(default_factory=set)
    #: id of an optimizer in its step → some of its other parameters, with samples from before; one
    #: list per active `step`, since a subclass's `step` may call its parent's
    _others: dict[int, list[list[_Sampled]]] = field(default_factory=dict)
    _steps: int = 0
    _calls: int = 0

    def __post_init__(self) -> None:
        hooks.add(self)

    def look(
        self, arguments: Sequence[torch.Tensor], parameters: Iterable[int], hosted: Iterable[int]
    ) -> bool:
        """Judge the steps since the last call. Call it once weights are on the host. True if the
        watch is over."""
        self._calls += 1
        self._others.clear()  # left by steps that raised
        self._judge()
        for i in hosted:
            p = arguments[i]
            if p.requires_grad and id(p) not in self._known:
                name = self.names.get(i, f"argument {i}")
                self._weights[id(p)] = _Weight(name, WeakTensor(p), p._version, address_of(p))
        self._known.update(id(arguments[i]) for i in parameters)
        if self._weights and self._steps < MOST_STEPS and self._calls < MOST_CALLS:
            return False
        hooks.watches.discard(self)
        hooks.take_away()
        return True

    def before(self, optimizer: Optimizer) -> None:
        """Take samples before an optimizer step."""
        self._let_go_of_changed()
        if not self._weights:
            return
        for weight in self._weights.values():
            parameter = weight.parameter()
            if weight.sample is None and parameter is not None:
                weight.sample = sampled(parameter)
        others = [p for p in _groups_of(optimizer) if id(p) not in self._weights]
        trained = [p for p in others if p.grad is not None and address_of(plain_parts(p)[0])]
        chosen = trained[:MOST_OTHERS]
        samples = [(WeakTensor(p), sampled(p)) for p in chosen]
        self._others.setdefault(id(optimizer), []).append(samples)

    def after(self, optimizer: Optimizer) -> None:
        """Note the weights that an optimizer step should have changed."""
        steps = self._others.get(id(optimizer))
        others = steps.pop() if steps else []
        self._steps += not steps
        self._let_go_of_changed()
        if not self._weights:
            return
        pairs = [(was, sampled(p)) for ref, was in others if (p := ref()) is not None]
        groups = {id(p): group for p, group in _groups_of(optimizer).items()}
        knows_graph = not self._known.isdisjoint(groups)
        for key, weight in self._weights.items():
            parameter = weight.parameter()
            if parameter is None or not _visible(pairs, parameter.dtype):
                continue
            if _may_train(groups.get(key)) and weight.has_gradient():
                weight.met[MINE] = type(optimizer).__name__
            elif not knows_graph and self.made_gradients:
                weight.met[NOBODYS] = type(optimizer).__name__

    def _let_go_of_changed(self) -> None:
        for key in [key for key, weight in self._weights.items() if weight.changed()]:
            del self._weights[key]

    def _judge(self) -> None:
        if any(weight.met for weight in self._weights.values()):
            self._let_go_of_changed()
        found: dict[tuple[str, str], dict[int, _Weight]] = {}
        for key, weight in self._weights.items():
            for how, optimizer in weight.met.items():
                if how == MINE or not weight.has_gradient():  # a remaining gradient is unused
                    weight.strikes[how] += 1
                    if weight.strikes[how] >= STRIKES:
                        found.setdefault((how, optimizer), {})[key] = weight
            weight.met.clear()
        self.made_gradients = False
        for (how, optimizer), weights in found.items():
            if how == NOBODYS and _wait_for_their_optimizer(weights):
                for weight in weights.values():
                    weight.strikes.clear()
                continue
            for key in weights:
                self._weights.pop(key, None)
            self.tell(_words(how, optimizer, [weight.name for weight in weights.values()]))


def _words(how: str, optimizer: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    named = ", ".join(names[:NAMED]) + more
    if how == MINE:
        return (
            f"{STRIKES} steps of {optimizer} with gradients for {named} have changed other weights"
            f" and not these, where the graph reads them: it writes elsewhere. {_FIX}"
        )
    return (
        f"nothing has changed {named} in {STRIKES} steps of {optimizer}, which trains other"
        " tensors, though each backward makes gradients for these, and they are used up. If nobody"
        " is to train them, requires_grad_(False) spares their gradients. If somebody does, it"
        f" writes elsewhere. {_FIX}"
    )


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Copy some elements of a tensor's storage, from all over it."""
    part = plain_parts(tensor)[0].detach()
    if part.layout is not torch.strided:
        part = part.coalesce().values() if part.layout is torch.sparse_coo else part.values()
    whole = torch.empty(0, dtype=part.dtype, device=part.device).set_(part.untyped_storage())
    count = whole.numel()
    if count <= RUNS * RUN_LENGTH:
        return whole.clone()
    return whole.as_strided((RUNS, RUN_LENGTH), ((count - RUN_LENGTH) // (RUNS - 1), 1)).clone()


def _visible(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> bool:
    """True if a step has changed one of these enough to show in a weight of this dtype, so that the
    learning rate is neither zero nor so small that bfloat16 rounds updates away."""
    return any(
        was.shape != now.shape or (was.to(dtype) != now.to(dtype)).float().mean() >= VISIBLE
        for was, now in pairs
        if was.numel()
    )


def _groups_of(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    return {p: group for group in optimizer.param_groups for p in group["params"]}


def _may_train(group: dict[str, Any] | None) -> bool:
    """True if the optimizer has a group for the weight, with a nonzero learning rate."""
    return group is not None and group.get("lr") != 0


def _wait_for_their_optimizer(weights: Mapping[int, _Weight]) -> bool:
    """True if some optimizer has one of these weights, such as one of two that step in turn."""
    return any(
        not weights.keys().isdisjoint(id(p) for p in _groups_of(found))
        for found in gc.get_objects()
        if issubclass(type(found), Optimizer) and hasattr(found, "param_groups")
    )


# --- torch's hooks for all optimizers, in place while there is a watch ----------------------------


class _Hooks:
    """Calls all watches before and after each step of any optimizer."""

    def __init__(self) -> None:
        self.watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._handles: list[Any] = []

    def add(self, watch: Watch) -> None:
        self.watches.add(watch)
        if not self._handles:
            self._handles.append(register_optimizer_step_pre_hook(self._before))
            self._handles.append(register_optimizer_step_post_hook(self._after))

    def take_away(self) -> None:
        """Remove the hooks if no watch is left. Must not be called from a hook or a plan's
        finalizer, since torch iterates over hooks while it calls them."""
        if not self.watches:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # keep this out of compiled or captured optimizer steps
        if not torch.compiler.is_compiling() and not _is_capturing():
            for watch in tuple(self.watches):
                watch.before(optimizer)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and not _is_capturing():
            for watch in tuple(self.watches):
                watch.after(optimizer)


# per process: torch knows hooks for all optimizers only, not for one
hooks = _Hooks()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
