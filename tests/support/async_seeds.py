"""Many seeds of delays for training on the asynchronous device, each compiled model used again.

Compiling takes a hundred times longer than a step, so a program compiles once, and each seed starts
from the same weights. All that a seed leaves is compared with the plain run's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gpu_checks
import torch
from async_device import Controls
from async_own_checks import DEVICE, settle
from gpu_checks import deterministic
from torch import Tensor, nn
from zoo import BY_NAME, Specimen

import offcompile
from offcompile import optim

STEPS = 2
#: the longest delay of a kernel, drawn with the seed
LONGEST_US = (30.0, 100.0, 300.0, 1000.0)

Optimizer = Callable[[Any], Any]


@dataclass(frozen=True)
class Trained:
    """How a model of the zoo is trained: options of compilation, and the optimizer."""

    model: str
    options: Mapping[str, Any]
    optimizer: Optimizer
    plain_optimizer: Optimizer


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def _beside(parameters: Any) -> optim.AdamW:
    return optim.AdamW(parameters, lr=1e-2, states="host", stream=0.0, overlap=True)


PROGRAMS = {
    "activations and weights": Trained("mlp", {"memory": "minimum"}, _sgd, _sgd),
    "attention": Trained("gpt", {"memory": "minimum"}, _sgd, _sgd),
    "several graphs": Trained("mixture", {"memory": "minimum"}, _sgd, _sgd),
    "updates beside backward": Trained("mlp", {"memory": "minimum"}, _beside, _adamw),
    "files": Trained("mlp", {"memory": "minimum", "host_memory": "64KiB"}, _sgd, _sgd),
}

#: name of a block of seeds → the program, and its seeds: 1,000 in all
_BLOCK = 100
BLOCKS = {
    f"{name}, {_BLOCK} seeds from {first}": (name, range(first, first + _BLOCK))
    for first, name in zip(range(1, 1001, _BLOCK), 2 * tuple(PROGRAMS), strict=True)
}
#: a few for every run of the tests
FEW = {"updates beside backward, few seeds": ("updates beside backward", range(1, 5))}


class _Compiled:
    """A compiled model that starts each time from the same weights."""

    def __init__(
        self, specimen: Specimen, compiler: Callable[[nn.Module], Any], optimizer: Optimizer
    ) -> None:
        self.specimen, self.optimizer = specimen, optimizer
        self.model = specimen.fresh()
        self.forward = compiler(self.model)
        self.first = {name: x.detach().cpu() for name, x in self.model.state_dict().items()}

    def trained(self) -> list[Tensor]:
        """Losses, last gradients, and weights."""
        model, found = self.model, list[Tensor]()
        self._start_again()
        optimizer = self.optimizer(model.parameters())
        for step in range(STEPS):
            torch.manual_seed(100 + step)
            optimizer.zero_grad()
            loss = self.specimen.loss(self.forward(*self.specimen.inputs(step)))
            loss.backward()
            found.append(loss.detach().clone())
            optimizer.step()
        found += [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        return [x.cpu() for x in found]

    def _start_again(self) -> None:
        with torch.no_grad():
            for name, x in self.model.state_dict().items():
                x.copy_(self.first[name])


def many(name: str, seeds: Sequence[int], controls: Controls) -> None:
    """With the delays of each of these seeds, training is plain's to the bit."""
    program = PROGRAMS[name]
    specimen = gpu_checks.on(BY_NAME[program.model], DEVICE)
    torch._dynamo.reset()
    with deterministic():
        expected = _Compiled(specimen, gpu_checks.plain(), program.plain_optimizer).trained()
        torch._dynamo.reset()
        ours = _Compiled(specimen, _compiler(program), program.optimizer)
        moved = offcompile.counters()["bytes_out"]
        try:
            for seed in seeds:
                controls.seed(seed, LONGEST_US[seed % len(LONGEST_US)])
                found = ours.trained()
                wrong = [i for i, x in enumerate(found) if not torch.equal(x, expected[i])]
                assert not wrong, f"seed {seed}: tensors {wrong} of {len(found)}"
        finally:
            controls.seed(0)
            settle()
    assert offcompile.counters()["bytes_out"] > moved


def _compiler(program: Trained) -> Callable[[nn.Module], Any]:
    options = {"lowering": "aot_eager", "seconds": 0.3, **program.options}
    return lambda model: torch.compile(model, backend="offcompile", options=options)
