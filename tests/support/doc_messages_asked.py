"""Messages on what was asked: the budget, options, devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doc_messages import says, told, warned
from torch import nn

import offcompile
from offcompile.ir import Infeasible, InvalidInput
from offcompile.machine import hardware
from offcompile.machine.options import Options

# --- the budget ----------------------------------------------------------------------------------


@says("The budget of … is below the floor of …: at … the device must hold …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    asked = {"memory": "10KiB", "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.1}
    step = torch.compile(nn.Linear(64, 64), backend="offcompile", options=asked)
    try:
        return told(lambda: step(torch.ones(64, 64)), Infeasible)
    finally:
        torch._dynamo.reset()


@says("is not enough for …, which needs …; the floor is …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_decide import FAST, MIB, chain, machine

    from offcompile.planning.fit_budget import PlanSearch, fit_budget

    search = PlanSearch(machine(FAST), lambda _: 0, "weight_rotation", 1.0)
    return told(lambda: fit_budget(chain(), search, 12 * MIB), Infeasible)


@says("others hold …, which is the whole budget")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.machine.hardware import load_profile
    from offcompile.machine.target import CpuTarget
    from offcompile.run.plan.contract import PlanRequest

    request = PlanRequest("graph 1", held_bytes=2 << 20)
    target = CpuTarget(load_profile("cpu"), (), 1 << 30, None)
    return told(lambda: request.budget(Options.read({"memory": "1MiB"}), target), Infeasible)


@says("asked of a device that has …; ask for that much or less")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: Options.read({"memory": "8GiB"}).memory_bytes(4 << 30), InvalidInput)


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.square().mean()


def largest(model: nn.Module) -> None:
    offcompile.max_batch(
        model,
        lambda batch: torch.empty(batch, 64, requires_grad=True),
        64,
        policy=None,
        hardware="cpu",
        options={"lowering": "aot_eager"},
    )


@says("a batch of … holds … at once and has …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: largest(Square()), Infeasible)


@says("The model could not be traced as one graph…: …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: largest(Broken()))


# --- options -------------------------------------------------------------------------------------


def refused(**given: object) -> str:
    return told(lambda: Options.read(given), InvalidInput)


@says("there is no option …; did you mean …?")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(memmory="8GiB")


@says("no such variable; did you mean …?")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: Options.read({}, {"OFFCOMPILE_MEMMORY": "8GiB"}), InvalidInput)


@says("is not a size; allowed: …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(memory=[8])


@says("is no share of the device; a share is more than 0 and at most 1")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(memory=8.0)


@says("mode=… is not for this backend; leave it out")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.run.backend import _compile

    nothing: Any = None
    return told(lambda: _compile(nothing, [], None, "max-autotune", nothing), InvalidInput)


@says("plans by the policy of that name, not by …; leave out one of the two")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(gradient_reserve=0.4, policy="recompute")


@says("unknown policy …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(policy="jiont")


@says("no profile is named …; the nearest is …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: hardware.load_profile("rtx4080"), InvalidInput)


@says("is no torch.nn.Module; give the module that would be compiled")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.ahead.plan import plan

    not_one: Any = len
    return told(lambda: plan(not_one, torch.ones(2)), InvalidInput)


@says("'OFFCOMPILE' is not a valid DynamoBackend")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from accelerate.utils import TorchDynamoPlugin

    return told(lambda: TorchDynamoPlugin(backend="offcompile"), ValueError)


# --- devices -------------------------------------------------------------------------------------


@says("This graph computes on …; offcompile moves tensors of the CPU and of CUDA devices so far")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.machine.target import target_for

    return told(lambda: target_for(Options.read({}), torch.device("mps")))


@says("The rates of … cannot be measured: name a profile of them")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.machine.target import target_for
    from offcompile.runtime.memory import accelerators

    added = accelerators.Accelerator("xpu", accelerators.Registrar)
    patch.setattr(accelerators, "_added", lambda: {"xpu": added})
    return told(lambda: target_for(Options.read({}), torch.device("xpu")))


@says("computes on … and has … on …; tensors can only move from one device of a graph")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_cuda_target import captured

    from offcompile.run.plan.carry_out import _check_one_device

    return told(lambda: _check_one_device("graph 0", captured(), torch.device("cuda:1")))


@says("is asked for, and this process sees no CUDA device")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.device.cuda.facts import cuda_index

    patch.setattr(torch.cuda, "is_available", lambda: False)
    return told(lambda: cuda_index(torch.device("cuda")))


@says("There is no cuda:…: this process sees … CUDA devices")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.device.cuda.facts import cuda_index

    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    return told(lambda: cuda_index(torch.device("cuda:3")))


@says("Host memory cannot be pinned: CUDA refused to register … bytes")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.base import once
    from offcompile.runtime.memory import pinning

    patch.setattr(once, "_done", {})
    return warned(lambda: pinning.warn_pageable(1 << 30, 2))


@says("weights can leave the CPU and CUDA devices so far")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    def build() -> None:
        with offcompile.host_init("mps"):
            nn.Linear(2, 2)

    return told(build)
