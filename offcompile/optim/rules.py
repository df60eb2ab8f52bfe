"""The arithmetic: torch's fused kernels on flat tensors.

They compute whole vectors one way and what is left at the very end of a call another way (in
double precision, say), and share work between threads in whole cache lines. So an update cut into
ranges is bit for bit that of the whole, if each range but the last is a multiple of
`runtime.states.ALIGN_ELEMENTS` elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

Group = Mapping[str, Any]
Parts = Mapping[str, Sequence[torch.Tensor]]
Hyper = Mapping[str, Any]


class Rule(Protocol):
    """One kind of optimizer."""

    #: whether steps are counted
    counts: bool

    def names(self, group: Group) -> tuple[str, ...]:
        """The states that parameters of the group have."""

    def hyper(self, group: Group) -> dict[str, Any]:
        """What the group says now, as plain numbers: equal if nothing was changed."""

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
        """Update weights and states in place. first: the states mean nothing yet."""


def _number(value: Any) -> float:
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


class AdamRule:
    counts = True

    def names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())

    def hyper(self, group: Group) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "lr": _number(group["lr"]),
            "beta1": _number(beta1),
            "beta2": _number(beta2),
            "weight_decay": _number(group["weight_decay"]),
            "eps": _number(group["eps"]),
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


class SGDRule:
    counts = False

    def names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def hyper(self, group: Group) -> dict[str, Any]:
        numbers = ("lr", "momentum", "dampening", "weight_decay")
        return {name: _number(group[name]) for name in numbers} | {
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
