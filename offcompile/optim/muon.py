"""Muon, whose update of a matrix needs all of it at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch.optim import _muon as torchs
from torch.optim.optimizer import ParamsT

from offcompile.ir import OffloadError

from .offloaded import OffloadedOptimizer
from .ranks.shards import is_sharded
from .rules import Group, Hyper, OnePass, Parts, number
from .settings import Asked


class MuonRule:
    counts = False
    whole = True

    def names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def hyper(self, group: Group) -> dict[str, Any]:
        numbers = ("lr", "momentum", "weight_decay", "eps")
        return {name: number(group[name]) for name in numbers} | {
            "nesterov": bool(group["nesterov"]),
            "ns_coefficients": tuple(map(float, group["ns_coefficients"])),
            "ns_steps": int(group["ns_steps"]),
            "adjust_lr_fn": group["adjust_lr_fn"],
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
        if grad_scale is not None:
            inverse = grad_scale.double().reciprocal().float()
            gradients = [gradient * inverse.to(gradient.device) for gradient in gradients]
        torchs.muon(
            list(weights),
            list(gradients),
            list(parts["momentum_buffer"]),
            has_complex=False,
            **hyper,
        )


class Muon(OffloadedOptimizer, torch.optim.Muon):
    """`torch.optim.Muon`, bit for bit, with its states elsewhere.

    `beside`: arguments that torch's class lacks; see `settings.Asked` and docs/optim.md. Beside a
    GPU all states stream to it unless `stream` says otherwise: the products of an update take the
    host far longer.
    """

    rule = MuonRule()

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (
            torchs.DEFAULT_A,
            torchs.DEFAULT_B,
            torchs.DEFAULT_C,
        ),
        *,
        eps: float = torchs.EPS,
        ns_steps: int = torchs.DEFAULT_NS_STEPS,
        adjust_lr_fn: str | None = None,
        **beside: Unpack[Asked],
    ) -> None:
        if beside.get("stream") is None:
            beside["stream"] = True
        self._begin(beside, differentiable=False)
        super().__init__(
            params,
            lr,
            weight_decay,
            momentum,
            nesterov,
            ns_coefficients,
            eps,
            ns_steps,
            adjust_lr_fn,
        )
        self._ready()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        for parameter in given:
            _check_whole(parameter)
        super().add_param_group({**param_group, "params": given})


def _check_whole(given: Any) -> None:
    """Raise OffloadError for a vector, and for a matrix of which this rank has only a part."""
    parameter = given[1] if isinstance(given, tuple) else given  # with its name, or without
    if parameter.ndim != 2:
        raise OffloadError(
            f"Muon updates matrices, and a parameter has shape {tuple(parameter.shape)}: give it"
            " to AdamW, as is usual for biases, norms and embeddings"
        )
    if is_sharded(parameter):
        raise OffloadError(
            f"Muon needs whole matrices, and a parameter of shape {tuple(parameter.shape)} is"
            " sharded over ranks: give it to torch.optim.Muon, or use DistributedDataParallel"
        )
