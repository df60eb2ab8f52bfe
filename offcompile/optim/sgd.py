"""SGD, with momentum or without."""

from __future__ import annotations

from typing import Unpack

import torch
from torch.optim.optimizer import ParamsT

from .offloaded import OffloadedOptimizer, as_fused
from .rules import SGDRule
from .settings import Asked

Number = float | torch.Tensor


class SGD(OffloadedOptimizer, torch.optim.SGD):
    """`torch.optim.SGD(fused=True)`, bit for bit, with its states elsewhere.

    `beside`: arguments that torch's class lacks; see `settings.Asked` and docs/optim.md.
    """

    rule = SGDRule()

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: Number = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **beside: Unpack[Asked],
    ) -> None:
        self._begin(beside, differentiable)
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=as_fused(foreach, fused),
        )
        self._ready()
