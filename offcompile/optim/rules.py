"""The arithmetic: torch's fused kernels on flat tensors.

They compute whole vectors one way and the remainder at the end of a call another way (for example
in double precision), and split work between threads by whole cache lines. So an update in ranges is
bit for bit the same as the whole update if each range but the last is a multiple of
`runtime.states.ALIGN_ELEMENTS` elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from offcompile.runtime.kernels.adamw import AdamStep, AdamTensors, adam_update

Group = Mapping[str, Any]
Parts = Mapping[str, Sequence[torch.Tensor]]
Hyper = Mapping[str, Any]


class OnePass(Protocol):
    """Updates one range of a parameter, equal to `Rule.update` within rounding."""

    def __call__(
        self,
        weight: torch.Tensor,
        master: torch.Tensor | None,
        gradient: torch.Tensor,
        parts: Mapping[str, torch.Tensor],
        step: int,
        hyper: Hyper,
        grad_scale: torch.Tensor | None,
    ) -> None:
        """Update the range. step: the number of this step, from 1. If there is a `master`, it is
        updated and the weight is cast from it."""


class Rule(Protocol):
    """One kind of optimizer."""

    #: True if steps are counted
    counts: bool
    #: True if an update needs the whole parameter at once, in its shape
    whole: bool

    def names(self, group: Group) -> tuple[str, ...]:
        """The states that parameters of the group have."""

    def hyper(self, group: Group) -> dict[str, Any]:
        """The group's current hyperparameters as plain numbers, to be compared for changes."""

    def one_pass(self, group: Group) -> OnePass | None:
        """A one-pass update on a device for mixed dtypes; None if there is none."""

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
        """Update weights and states in place. first: the states are not initialised yet."""


def number(value: Any) -> float:
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


class AdamRule:
    counts = True
    whole = False

    def names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())

    def hyper(self, group: Group) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "lr": number(group["lr"]),
            "beta1": number(beta1),
            "beta2": number(beta2),
            "weight_decay": number(group["weight_decay"]),
            "eps": number(group["eps"]),
            "amsgrad": bool(group["amsgrad"]),
            "maximize": bool(group["maximize"]),
            "decoupled": bool(group["decoupled_weight_decay"]),
        }

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
        values = dict(hyper)
        kernel = torch._fused_adamw_ if values.pop("decoupled") else torch._fused_adam_
        kernel(
            list(weights),
            list(gradients),
            list(parts["exp_avg"]),
            list(parts["exp_avg_sq"]),
            list(parts["max_exp_avg_sq"]) if values["amsgrad"] else [],
            list(steps),
            grad_scale=grad_scale,
            found_inf=None,
            **values,
        )

    def one_pass(self, group: Group) -> OnePass | None:
        return None if group["amsgrad"] else _adam_in_one_pass


def _adam_in_one_pass(
    weight: torch.Tensor,
    master: torch.Tensor | None,
    gradient: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    step: int,
    hyper: Hyper,
    grad_scale: torch.Tensor | None,
) -> None:
    tensors = AdamTensors(
        weight=weight if master is None else master,
        gradient=gradient,
        exp_avg=parts["exp_avg"],
        exp_avg_sq=parts["exp_avg_sq"],
        low=None if master is None else weight,
        coefficient=None if grad_scale is None else grad_scale.reciprocal(),
    )
    numbers = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled")
    sign = -1.0 if hyper["maximize"] else 1.0
    adam_update(tensors, AdamStep(step, scale=sign, **{name: hyper[name] for name in numbers}))


class SGDRule:
    counts = False
    whole = False

    def one_pass(self, group: Group) -> OnePass | None:
        return None

    def names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def hyper(self, group: Group) -> dict[str, Any]:
        numbers = ("lr", "momentum", "dampening", "weight_decay")
        return {name: number(group[name]) for name in numbers} | {
            "nesterov": bool(group["nesterov"]),
            "maximize": bool(group["maximize"]),
        }

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
        torch._fused_sgd_(
            list(weights),
            list(gradients),
            list(parts["momentum_buffer"]) if hyper["momentum"] != 0 else [],
            is_first_step=first and hyper["momentum"] != 0,
            grad_scale=grad_scale,
            found_inf=None,
            **hyper,
        )
