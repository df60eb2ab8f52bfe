"""Adam and AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from .beside import Beside
from .rules import AdamRule
from .settings import Directory, Settings, StatesAt

Number = float | torch.Tensor


class Adam(Beside, torch.optim.Adam):
    """`torch.optim.Adam(fused=True)`, bit for bit, with its states elsewhere.

    What comes after `fused` is told in docs/optim.md.
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
        states: StatesAt = "auto",
        overlap: bool = False,
        accumulate: int = 1,
        max_norm: float | None = None,
        scaler: Any = None,
        host_memory: int | str | None = None,
        directory: Directory | None = None,
        state_dtype: str | None = None,
        master: bool | None = None,
        channels: bool | str | None = None,
    ) -> None:
        self._begin(
            Settings.read(
                states=states,
                overlap=overlap,
                accumulate=accumulate,
                max_norm=max_norm,
                scaler=scaler,
                host_memory=host_memory,
                directory=directory,
                state_dtype=state_dtype,
                master=master,
                channels=channels,
            )
        )
        torch.optim.Adam.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            # what continues from a checkpoint in torch is to compute as this does
            fused=None if foreach else (True if fused is None else fused),
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._ready()
