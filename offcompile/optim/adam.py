"""Adam and AdamW."""

from __future__ import annotations

from typing import Unpack

import torch
from torch.optim.optimizer import ParamsT

from .offloaded import OffloadedOptimizer, as_fused
from .rules import AdamRule
from .settings import Asked

Number = float | torch.Tensor


class Adam(OffloadedOptimizer, torch.optim.Adam):
    """`torch.optim.Adam(fused=True)`, bit for bit, with its states elsewhere.

    `beside`: arguments that torch's class lacks; see `settings.Asked` and docs/optim.md.
    """

    rule = AdamRule()

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **beside: Unpack[Asked],
    ) -> None:
        self._begin(beside, differentiable, capturable)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            fused=as_fused(foreach, fused),
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._ready()


class AdamW(OffloadedOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)`, bit for bit, with its states elsewhere.

    `beside`: arguments that torch's class lacks; see `settings.Asked` and docs/optim.md.
    """

    rule = AdamRule()

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **beside: Unpack[Asked],
    ) -> None:
        self._begin(beside, differentiable, capturable)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            fused=as_fused(foreach, fused),
        )
        self._ready()
