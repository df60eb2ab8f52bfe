"""Optimizers of others, with their states elsewhere: `offload(torch.optim.RMSprop, …)`.

The optimizer's own `step()` updates one parameter at a time, with states that are in memory only
meanwhile. This gives its numbers if its update of a parameter depends on nothing but that
parameter, its gradient, its states and the number of the step. A trial on small parameters finds
out, and an optimizer for which this does not hold is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch.optim.optimizer import ParamsT

from offcompile.ir import OffloadError

from .offloaded import OffloadedOptimizer
from .ranks.shards import is_sharded
from .rules import Group, Hyper, OnePass, Parts, number
from .settings import USUAL, Asked

Made = type[torch.optim.Optimizer]
#: shapes and number of steps of the trial
SHAPES, STEPS = ((3, 2), (5,), (2, 2, 2)), 3
#: optimizers with a class of their own here, whose updates need no whole states
OWN = ("Adam", "AdamW", "SGD", "Muon")


def offload(kind: Made, params: ParamsT, **arguments: Any) -> OffloadedOptimizer:
    """Make an optimizer of this class with its states on the host or on disk.

    arguments: those of the class, and those of `offcompile.optim.AdamW` that torch's lacks
    (`states`, `overlap`, `max_norm`, …: docs/optim.md). Raises OffloadError if parameters cannot be
    updated one by one.
    """
    if kind.__module__.startswith("torch.optim") and kind.__name__ in OWN:
        raise OffloadError(
            f"torch.optim.{kind.__name__} has a class here, which updates in blocks: make"
            f" offcompile.optim.{kind.__name__}(…) with the same arguments"
        )
    beside = cast(Asked, {k: v for k, v in arguments.items() if k in USUAL})
    own = {k: v for k, v in arguments.items() if k not in USUAL}
    made: OffloadedOptimizer = _class_of(kind)(params, own, beside)  # type: ignore[arg-type]
    return made


class OthersRule:
    """The update of another optimizer, one whole parameter at a time."""

    counts = True
    whole = True

    def __init__(self, kind: Made, arguments: Mapping[str, Any]) -> None:
        self.kind, self.arguments = kind, arguments
        #: the names of its hyperparameters; schedules keep others in the groups
        self.own: frozenset[str] = frozenset()
        self._names: dict[tuple[tuple[str, str], ...], tuple[str, ...]] = {}

    def names(self, group: Group) -> tuple[str, ...]:
        hyper = self.hyper(group)
        # a schedule changes numbers all the time; states come and go with those that are 0
        key = tuple(
            sorted((n, str(v != 0 if isinstance(v, float) else v)) for n, v in hyper.items())
        )
        if key not in self._names:
            self._names[key] = _tried(self, hyper)
        return self._names[key]

    def hyper(self, group: Group) -> dict[str, Any]:
        return {
            name: number(value) if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name in self.own
        }

    def one_pass(self, group: Group) -> OnePass | None:
        return None

    def update(
        self,
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        parts: Parts,
        steps: Sequence[torch.Tensor],
        hyper: Hyper,
        first: bool,
        grad_scale: torch.Tensor | None,
    ) -> None:
        for i, (weight, gradient, step) in enumerate(zip(weights, gradients, steps, strict=True)):
            if grad_scale is not None:
                inverse = grad_scale.double().reciprocal().float()
                gradient = gradient * inverse.to(gradient.device)
            states = {name: values[i] for name, values in parts.items()}
            made = int(step.item())
            # in the first step the optimizer makes its states itself: not all begin with zeros
            before = {"step": torch.tensor(made - 1.0), **states} if made > 1 else {}
            after = self.stepped([weight.detach()], [gradient], [before], hyper)[0]
            for name, state in states.items():
                if after[name] is not state:
                    state.copy_(after[name])

    def stepped(
        self,
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
        hyper: Hyper,
    ) -> list[dict[str, Any]]:
        """Make one step of these weights in place; returns their states after it."""
        optimizer = self.kind(list(weights), **self.arguments)
        optimizer.param_groups[0].update(hyper)
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            weight.grad = gradient
            if state:
                optimizer.state[weight] = state
        optimizer.step()
        for weight in weights:
            weight.grad = None
        return [optimizer.state[weight] for weight in weights]


def _tried(rule: OthersRule, hyper: Hyper) -> tuple[str, ...]:
    """The names of the optimizer's states besides the step; raises OffloadError if they, or its
    updates, are not of the kind that can be divided by parameters."""
    name = f"{rule.kind.__module__}.{rule.kind.__name__}"
    draw = torch.Generator().manual_seed(0)

    def drawn() -> list[torch.Tensor]:
        return [torch.randn(shape, generator=draw) for shape in SHAPES]

    weights = drawn()
    apart = [w.clone() for w in weights]
    states: list[dict[str, Any]] = [{} for _ in SHAPES]
    apart_states: list[dict[str, Any]] = [{} for _ in SHAPES]
    for _ in range(STEPS):
        gradients = drawn()
        try:
            states = rule.stepped(weights, [g.clone() for g in gradients], states, hyper)
            apart_states = [
                rule.stepped([w], [g.clone()], [s], hyper)[0]
                for w, g, s in zip(apart, gradients, apart_states, strict=True)
            ]
        except Exception as error:
            raise OffloadError(
                f"{name} cannot be offloaded: a step of small parameters on the CPU raises"
                f" {type(error).__name__}: {error}. Use it as it is, or an optimizer of"
                " offcompile.optim."
            ) from error
    found = [_names_of(name, state, w) for state, w in zip(states, weights, strict=True)]
    if len(set(found)) > 1:
        raise OffloadError(
            f"{name} cannot be offloaded: its states differ with the shape of a parameter"
            f" ({', '.join(sorted({n for names in found for n in names}))}). Use it as it is."
        )
    if any(not torch.equal(a, b) for a, b in zip(weights, apart, strict=True)):
        raise OffloadError(
            f"{name} cannot be offloaded: its update of one parameter depends on the others. Use"
            " it as it is."
        )
    return found[0]


def _names_of(name: str, state: Mapping[str, Any], weight: torch.Tensor) -> tuple[str, ...]:
    names = []
    for key, value in state.items():
        if key == "step":
            continue
        if type(value) is not torch.Tensor or value.shape != weight.shape:
            shape = f"a tensor of shape {tuple(value.shape)}" if torch.is_tensor(value) else value
            raise OffloadError(
                f"{name} cannot be offloaded: beside its step, states have to be tensors in the"
                f" shape of their parameter, and {key!r} is {shape!s:.60} for one of shape"
                f" {tuple(weight.shape)}. Use it as it is."
            )
        names.append(key)
    if "step" not in state:
        raise OffloadError(
            f"{name} cannot be offloaded: its states have no 'step', by which the first one would"
            " be known. Use it as it is, or an optimizer of offcompile.optim."
        )
    return tuple(names)


@cache
def _class_of(kind: Any) -> Any:
    """A class that is both; its name is that of `kind`."""

    class Offloaded(OffloadedOptimizer, kind):  # type: ignore[misc]
        def __init__(self, params: ParamsT, own: Mapping[str, Any], beside: Asked) -> None:
            self._begin(beside, own.get("differentiable", False), own.get("capturable", False))
            self.rule = OthersRule(kind, own)
            super().__init__(params, **own)
            self.rule.own = frozenset(self.defaults)
            for group in self.param_groups:
                self.rule.names(group)  # raises if it cannot be
            self._ready()

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            for parameter in self.param_groups[-1]["params"]:
                if is_sharded(parameter):
                    raise OffloadError(
                        f"{kind.__name__} is given whole parameters, and one of shape"
                        f" {tuple(parameter.shape)} is sharded over ranks: use"
                        " offcompile.optim.AdamW, or DistributedDataParallel"
                    )

    Offloaded.__name__ = Offloaded.__qualname__ = kind.__name__
    return Offloaded
