"""Adam and AdamW in one pass over weight, gradient and states, wherever each of them lies.

Used for updates that run on the device. All arithmetic is float32 whatever the types; multiply-adds
may be contracted, so results differ from torch's in the last bits. Many small tensors are better
left to torch's fused kernel, which updates them all in one launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from offcompile.ir import OffloadError

from .launch import Launch, why_not
from .shapes import ACCESS_BYTES, CASTS, dense_alike, flat
from .tuning import Config, config_for


@dataclass(frozen=True)
class AdamStep:
    """The hyperparameters of one step. `step` counts from 1; the gradient is multiplied by `scale`
    (−1 to maximise); `decoupled` selects AdamW's weight decay."""

    step: int
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise OffloadError(f"step {self.step} of Adam is not possible: steps count from 1")

    @property
    def numbers(self) -> dict[str, float]:
        """The kernel's scalar arguments, computed in double precision."""
        return {
            "scale": float(self.scale),
            "step_size": self.lr / (1 - self.beta1**self.step),
            "decay": float(self.weight_decay * (self.lr if self.decoupled else 1)),
            "beta1": float(self.beta1),
            "beta2": float(self.beta2),
            "rest1": 1.0 - self.beta1,
            "rest2": 1.0 - self.beta2,
            "root_correction2": math.sqrt(1 - self.beta2**self.step),
            "eps": float(self.eps),
        }


@dataclass(frozen=True)
class AdamTensors:
    """The tensors of one update: all of one shape, dense in the same order.

    low: receives the new weights in its own, narrower type; `weight` is then the master copy.
    coefficient: a one-element tensor on the same device that scales the gradient (clipping).
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    low: torch.Tensor | None = None
    coefficient: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for tensor in self.elementwise:
            if tensor.shape != self.weight.shape or not dense_alike(tensor, self.weight):
                raise OffloadError(
                    f"no update of a weight of shape {tuple(self.weight.shape)} and strides "
                    f"{self.weight.stride()} with a tensor of shape {tuple(tensor.shape)} and "
                    f"strides {tensor.stride()}: all must be dense in the same order"
                )
        if self.coefficient is not None and self.coefficient.numel() != 1:
            raise OffloadError(
                f"the coefficient of an update is one number, not {self.coefficient.numel()}"
            )

    @property
    def elementwise(self) -> tuple[torch.Tensor, ...]:
        low = () if self.low is None else (self.low,)
        return (self.weight, self.gradient, self.exp_avg, self.exp_avg_sq, *low)


def adam_update(tensors: AdamTensors, step: AdamStep, most_programs: int | None = None) -> None:
    """Update weight and states in place, with the kernel if it can run, with torch otherwise.

    Increments the weights' autograd version counters.
    """
    if _fits(tensors):
        adam_launch(tensors, step).run(most_programs)
        changed = [tensors.weight, *([] if tensors.low is None else [tensors.low])]
        torch.autograd.graph.increment_version(changed)
    else:
        adam_torch(tensors, step)


def adam_torch(tensors: AdamTensors, step: AdamStep) -> None:
    """The reference update, op by op."""
    n = step.numbers
    with torch.no_grad():
        w, g, m, v = (t.float() for t in tensors.elementwise[:4])
        g = g * n["scale"]
        if tensors.coefficient is not None:
            g = g * tensors.coefficient.float().to(g.device)
        if step.decoupled:
            w = w - n["decay"] * w
        else:
            g = g + n["decay"] * w
        m = n["beta1"] * m + n["rest1"] * g
        v = n["beta2"] * v + n["rest2"] * g * g
        w = w - n["step_size"] * m / (v.sqrt() / n["root_correction2"] + n["eps"])
        tensors.exp_avg.copy_(m)
        tensors.exp_avg_sq.copy_(v)
        tensors.weight.copy_(w)
        if tensors.low is not None:
            tensors.low.copy_(w)


def adam_launch(tensors: AdamTensors, step: AdamStep, config: Config | None = None) -> Launch:
    """Returns the launch for an update; raises OffloadError if no kernel supports these types."""
    for tensor in tensors.elementwise:
        if tensor.dtype not in CASTS:
            known = ", ".join(sorted(str(dtype) for dtype in CASTS))
            raise OffloadError(
                f"no kernel updates with {tensor.dtype}: it takes {known}; use adam_torch"
            )
    weight = flat(tensors.weight)
    width = max(t.itemsize for t in tensors.elementwise)
    config = config or config_for(weight.numel() * width)
    block = config.tile_bytes // width
    flags = {
        "LOW": int(tensors.low is not None),
        "SCALED": int(tensors.coefficient is not None),
        "DECOUPLED": int(step.decoupled),
    }
    return Launch(
        "updates:adam_blocks",
        {
            "weight": weight,
            # placeholders for tensors that the flags disable; the kernel never reads them
            "low": weight if tensors.low is None else flat(tensors.low),
            "gradient": flat(tensors.gradient),
            "exp_avg": flat(tensors.exp_avg),
            "exp_avg_sq": flat(tensors.exp_avg_sq),
            "coefficient": weight if tensors.coefficient is None else flat(tensors.coefficient),
        },
        {**step.numbers, "length": weight.numel()},
        -(-weight.numel() // block),
        config.warps,
        {"UNIT": min(block, ACCESS_BYTES // width), "BLOCK": block, **flags},
    )


def _fits(tensors: AdamTensors) -> bool:
    device = tensors.weight.device
    among = (*tensors.elementwise, *([] if tensors.coefficient is None else [tensors.coefficient]))
    if any(t.device != device for t in among) or any(
        t.dtype not in CASTS for t in tensors.elementwise
    ):
        return False
    return why_not(device, *(t.dtype for t in among)) is None
