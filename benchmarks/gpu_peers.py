"""Other libraries, where installed, that take weights and gradients off the card."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: of SGD, and of AdamW, whose steps are as long as its rate whatever the gradients
RATE, ADAMW_RATE = 0.01, 1e-4
PEERS = ("torchao", "torchao, AdamW", "deepspeed")


@dataclass(frozen=True)
class Peer:
    """How to run one model: forward to a loss, then backward and update."""

    forward: Callable[..., Tensor]
    learn: Callable[[Tensor], None]


def peer(kind: str, model: nn.Module) -> Peer:
    """The peer of this kind; ImportError, which the row then shows, if it is not installed."""
    if kind == "deepspeed":
        return _deepspeed(model)
    return _torchao(model, adamw=kind != "torchao")


def _torchao(model: nn.Module, adamw: bool) -> Peer:
    """Gradients and the optimizer leave; weights stay."""
    from torchao.optim import CPUOffloadOptimizer

    weights = [p for p in model.parameters() if p.requires_grad]
    made: tuple[Any, dict[str, Any]] = (torch.optim.SGD, {"lr": RATE})
    if adamw:
        made = (torch.optim.AdamW, {"fused": True, "lr": ADAMW_RATE})
    optimizer = CPUOffloadOptimizer(weights, made[0], offload_gradients=True, **made[1])

    def learn(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Peer(torch.compile(model, backend="inductor", dynamic=False), learn)


def _deepspeed(model: nn.Module) -> Peer:
    """ZeRO-3 of one rank with parameters and optimizer on the CPU."""
    import deepspeed

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}.items():
        os.environ.setdefault(name, value)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    away = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": away, "offload_optimizer": away},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def learn(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return Peer(engine, learn)
