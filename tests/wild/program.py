"""A program, what it is given to run with, and the list that all of them are in."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

#: compiles a module or a function; further arguments are those of `torch.compile`
Compiler = Callable[..., Any]
Step = Callable[[int], Tensor]


@dataclass
class Run:
    """Hands a program its compiler and keeps the values by which two runs are compared."""

    compiler: Compiler
    values: dict[str, Tensor] = field(default_factory=dict)

    def compile(self, module: Any, **more: Any) -> Any:
        return self.compiler(module, **more)

    def compile_in_place(self, module: nn.Module, **more: Any) -> None:
        """Compile as `module.compile()` does: the module stays itself and calls compiled code."""
        module._compiled_call_impl = self.compiler(module._call_impl, **more)

    def keep(self, name: str, value: Tensor) -> None:
        assert name not in self.values, f"{name} is kept twice"
        self.values[name] = value.detach().clone()

    def keep_state(self, model: nn.Module, name: str = "") -> None:
        """Parameters, their gradients, and buffers, also those that state_dict leaves out."""
        for at, p in model.named_parameters():
            self.keep(f"{name}{at}", p)
            if p.grad is not None and not p.grad.is_sparse:
                self.keep(f"{name}gradient of {at}", p.grad)
        for at, b in model.named_buffers():
            self.keep(f"{name}{at}", b)

    def train(
        self,
        model: nn.Module,
        step: Step,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        steps: int = 3,
        keep: bool = True,
    ) -> None:
        """A plain loop: `step` gives the loss of the step of that number."""
        if optimizer is None:
            optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
        for n in range(steps):
            torch.manual_seed(100 + n)
            optimizer.zero_grad()
            loss = step(n)
            loss.backward()
            optimizer.step()
            if keep:
                self.keep(f"loss {len(self.values)}", loss)
        if keep:
            self.keep_state(model)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@dataclass(frozen=True)
class Program:
    """`refused`: words of the refusal that is right for it. `plain_fails`: torch cannot do it.
    `limit`: torch can do it plainly, and raises an error with these words where weights move.
    """

    family: str
    name: str
    body: Callable[[Run], None]
    needs: tuple[str, ...] = ()
    refused: str | None = None
    plain_fails: bool = False
    limit: str | None = None
    #: False: there is nothing in it to move
    moves: bool = True

    def __str__(self) -> str:
        return f"{self.family}/{self.name}"

    def missing(self) -> tuple[str, ...]:
        """Packages that it needs and that are not installed."""
        return tuple(n for n in self.needs if not _installed(n))


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


#: all programs of the modules imported so far, by "family/name"
PROGRAMS: dict[str, Program] = {}


def add(program: Program) -> None:
    assert str(program) not in PROGRAMS, f"there are two programs {program}"
    PROGRAMS[str(program)] = program


def family(
    name: str, needs: Iterable[str] = ()
) -> Callable[..., Callable[[Callable[[Run], None]], Callable[[Run], None]]]:
    """A decorator for the programs of a family."""
    of_all = tuple(needs)

    def decorator(
        *, needs: Iterable[str] = (), **more: Any
    ) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
        def taken(body: Callable[[Run], None]) -> Callable[[Run], None]:
            add(Program(name, body.__name__, body, (*of_all, *needs), **more))
            return body

        return taken

    return decorator
