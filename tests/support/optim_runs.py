"""A small model with all that optimizers meet, trained alike by torch's and ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from offcompile import optim

#: class name → arguments that both take
KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "betas": (0.8, 0.95)},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "SGD": {"lr": 5e-2, "momentum": 0.9, "nesterov": True},
}
PLACES = ("device", "host", "disk")
MAX_NORM = 0.05
#: parameters that get gradients: one of the others is never used, two are frozen
TRAINED = 5


class Model(nn.Module):
    """Odd sizes, a tied weight, a frozen one, one whose layout is not contiguous."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read = nn.Embedding(19, 13)
        self.mix = nn.Linear(13, 13)
        self.turned = nn.Parameter(torch.randn(13, 13).t() / 4)
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.write = nn.Linear(13, 19)
        self.write.weight = self.read.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.mix(self.read(tokens))) @ self.turned
        return self.write(self.frozen(hidden)).float()

    def groups(self) -> list[dict[str, Any]]:
        named = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        return [
            {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for n, p in named if p.dim() < 2] + [*self.frozen.parameters()]},
        ]


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads that wait for one another take longer than these small updates."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(19, (7, 5), generator=torch.Generator().manual_seed(number))
    return tokens, tokens.roll(1, 1)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    tokens, wanted = batch(number)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())


@dataclass
class Run:
    """One training: `step()` makes one step of `accumulate` micro-batches, clipped."""

    model: Model
    optimizer: torch.optim.Optimizer
    accumulate: int = 1
    max_norm: float | None = MAX_NORM
    #: True if the optimizer clips by itself
    clips: bool = False
    set_to_none: bool = True
    scheduler: Any = None
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR
        self.scheduler = schedule(self.optimizer, T_max=10)

    def step(self) -> None:
        self.optimizer.zero_grad(self.set_to_none)
        for micro in range(self.accumulate):
            loss = loss_of(self.model, 10 * self.made + micro) / self.accumulate
            loss.backward()
            self.losses.append(loss.item())
        if self.max_norm is not None and not self.clips:
            ordered = [p for g in self.optimizer.param_groups for p in g["params"]]
            norm = nn.utils.clip_grad_norm_(ordered, self.max_norm)
            self.norms.append(norm.item())
        self.optimizer.step()
        if self.clips and self.max_norm is not None:
            self.norms.append(self.optimizer.last_norm.item())
        self.scheduler.step()
        self.made += 1

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.step()
        return self


def torch_run(kind: str, accumulate: int = 1, **more: Any) -> Run:
    model = Model()
    made = getattr(torch.optim, kind)(model.groups(), fused=True, **KINDS[kind])
    return Run(model, made, accumulate, **more)


def our_run(kind: str, accumulate: int = 1, clips: bool = False, **beside: Any) -> Run:
    model = Model()
    if clips:
        beside["max_norm"] = MAX_NORM
    if beside.get("overlap"):
        beside["accumulate"] = accumulate
    made = getattr(optim, kind)(model.groups(), **KINDS[kind], **beside)
    return Run(model, made, accumulate, clips=clips)


def assert_equal(ours: Run, torchs: Run) -> None:
    """Bit for bit: losses, norms, weights and states."""
    assert ours.losses == torchs.losses
    assert ours.norms == torchs.norms
    for (name, a), b in zip(ours.model.named_parameters(), torchs.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert_same_states(ours.optimizer.state_dict(), torchs.optimizer.state_dict())


def assert_same_states(ours: dict[str, Any], torchs: dict[str, Any]) -> None:
    assert ours["param_groups"] == torchs["param_groups"]
    assert ours["state"].keys() == torchs["state"].keys()
    for number, state in torchs["state"].items():
        mine = ours["state"][number]
        assert mine.keys() == state.keys(), number
        for name, value in state.items():
            assert mine[name].shape == value.shape
            assert mine[name].stride() == value.stride()
            assert mine[name].dtype == value.dtype
            assert torch.equal(mine[name], value), (number, name)


def scaled_steps(run: Run, ways: str, scale: float, **scaler_of: Any) -> list[float]:
    scaler, scales = torch.amp.GradScaler("cpu", scale, growth_interval=2), []
    if "set" in scaler_of:
        scaler_of["set"](scaler)
    for number in range(6):
        loss = loss_of(run.model, number)
        loss = loss * float("inf") if number == 2 else loss
        scaler.scale(loss).backward()
        if ways == "unscaled":
            scaler.unscale_(run.optimizer)
            ordered = [p for g in run.optimizer.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(ordered, 0.05)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales
