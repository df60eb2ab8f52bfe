"""Every module of PyTorch's own database, forward and backward, under budgets and plainly."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .conformity import Compiler, Outcome, Tally, left_over, rows_of, run_under, tiny_steps
from .rows import Row

#: cases after which is looked whether anything is left over
LOOK_EVERY = 100
#: sets of arguments that each module has at scale 1, in each mode, if there are so many
MOST_EACH = 6


def module_db() -> list[Any]:
    """The database; importing it forbids setting backend flags to the whole process, but for
    the context it is done in."""
    with torch.backends.__allow_nonbracketed_mutation():
        return importlib.import_module("torch.testing._internal.common_modules").module_db


@dataclass(frozen=True)
class Case:
    """One set of arguments for one module in one mode."""

    module: str
    number: int
    make: Callable[..., torch.nn.Module]
    constructor: tuple[Any, ...]
    arguments: tuple[Any, ...]
    dtype: torch.dtype
    training: bool
    seed: int

    @property
    def name(self) -> str:
        return f"{self.module} {self.number} ({'training' if self.training else 'evaluation'})"

    def run(self, compiler: Compiler) -> Outcome:
        """Forward and backward of a fresh module; with the same compiler always the same."""
        torch._dynamo.reset()
        torch.manual_seed(self.seed)
        args, keywords = _copied(self.constructor)
        module = self.make(*args, **keywords).to(self.dtype).train(self.training)
        args, keywords = _copied(self.arguments)
        try:
            outputs = compiler(module)(*args, **keywords)
            results = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
            begin = [x for x in results if x.requires_grad]
            if begin:
                torch.autograd.backward(begin, [torch.randn_like(x) for x in begin])
        except Exception as error:
            return Outcome(error=error)
        given = [x for x in pytree.tree_leaves((args, keywords)) if isinstance(x, Tensor)]
        values = {f"output {n}": x.detach() for n, x in enumerate(results)}
        values |= {f"argument {n}": x.detach() for n, x in enumerate(given)}
        values |= {f"gradient of argument {n}": x.grad for n, x in enumerate(given) if _has(x)}
        values |= {f"gradient of {n}": p.grad for n, p in module.named_parameters() if _has(p)}
        values |= {f"state {n}": x.detach() for n, x in module.state_dict().items()}
        return Outcome(values)


def _has(x: Tensor) -> bool:
    return x.is_leaf and x.grad is not None


def _copied(tree: Any) -> Any:
    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().clone().requires_grad_(x.requires_grad)

    return pytree.tree_map(copied, tree)


def cases(seed: int) -> Iterator[Case]:
    """All of them, in the order of the database; training and evaluation."""
    for info in module_db():
        # no module of the database is without one of these
        dtype = next(d for d in (torch.float32, torch.float64) if d in info.dtypes)
        for training in (True, False):
            torch.manual_seed(seed)
            drawn = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=True, training=training
            )
            for number, one in enumerate(drawn):
                made, given = one.constructor_input, one.forward_input
                if given is not None:
                    yield Case(
                        info.name,
                        number,
                        info.module_cls,
                        (made.args, made.kwargs),
                        (given.args, given.kwargs),
                        dtype,
                        training,
                        seed,
                    )


def spread(scale: float, seed: int) -> list[Case]:
    """At scale 1 all cases of most modules, and so many of those with hundreds."""
    groups: dict[tuple[str, bool], list[Case]] = {}
    for case in cases(seed):
        groups.setdefault((case.module, case.training), []).append(case)
    most = max(1, round(MOST_EACH * max(1.0, scale)))
    chosen = [c for group in groups.values() for c in _some(group, most, seed)]
    return _some(chosen, round(scale * len(chosen)), seed)


def _some(every: list[Case], wanted: int, seed: int) -> list[Case]:
    """At most so many, evenly spread; which they are is up to the seed."""
    step = len(every) / max(1, wanted)
    if step <= 1:
        return every
    return [every[int((n + seed * 0.618 % 1) * step)] for n in range(max(1, wanted))]


def sweep(chosen: list[Case], seed: int) -> tuple[Tally, Tally]:
    """Each case at the minimum, and at a middling budget if there is one between."""
    least, middle = Tally(seed), Tally(seed)
    with tiny_steps(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, case in enumerate(chosen):
            eager = case.run(lambda module: module)
            found = run_under("minimum", case.run)
            least.count(case.name, found, eager, case.run)
            budget = found.middling()
            if budget is not None:
                middle.count(case.name, run_under(budget, case.run), eager, case.run)
            del found, eager
            if number % LOOK_EVERY == LOOK_EVERY - 1 or case is chosen[-1]:
                for what in left_over():
                    least.fails(f"up to {case.name}", what)
    return least, middle


def rows(scale: float, seed: int) -> list[Row]:
    least, middle = sweep(spread(scale, seed), seed)
    return rows_of(
        {
            "modules of PyTorch, at the minimum": least,
            "modules of PyTorch, at a middling budget": middle,
        }
    )
