"""Tells rounding from a fault, where two runs in float32 differ by more than their order of adding.

A run of plain Inductor in float64 stands for the exact result. Most programs come close to it in
float32 too; but a ReLU whose input is zero up to rounding passes its gradient in one run and stops
it in another, and a batch norm over two nearly equal values makes ones of their rounding errors.
Such a program is judged in float64, where a fault would show and rounding hardly does. In float32
about as many of its values may be off as in a plain run, with the same weights or with weights that
are off by one rounding each. How far they are off says nothing then: what was divided by a rounding
error may be of any size. All of these are runs of Inductor, since eager kernels draw other random
numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from trust.conformity import Outcome

from .program import Compiler

#: relative and absolute difference of values after a few steps
NEARNESS = (1e-3, 1e-4)
#: factor by which more values may be off, or be further off, than in a plain run
AS_FAR = 3.0
#: plain runs with weights off by a rounding
NUDGED_RUNS = 3


def far_apart(mine: Outcome, theirs: Outcome) -> list[str]:
    """Names of values that differ by more than another order of adding explains."""
    if mine.values.keys() != theirs.values.keys():
        return ["the runs kept different values"]
    return [
        f"{name} is {(a.double() - b.double()).abs().max():.2g} off"
        for name, a in mine.values.items()
        if not torch.allclose(a.double(), (b := theirs.values[name]).double(), *NEARNESS, True)
    ]


def explains(
    mine: Outcome,
    theirs: Outcome,
    plainly: Callable[[Compiler], Outcome],
    ours: Callable[[Callable[[Compiler], Compiler]], Outcome],
    compiler: Compiler = torch.compile,
) -> bool:
    """True if our values, which are far from those of plain Inductor (`theirs`), are right but for
    rounding.

    `plainly` runs the program with a compiler, `ours` with ours inside what it is given. A program
    that cannot run in float64 is held against eager kernels in its own types.
    """
    exact = plainly(in_float64(compiler))
    if exact.error is not None or exact.values.keys() != mine.values.keys():
        exact = plainly(uncompiled)
        return exact.error is None and _as_near(mine, theirs, exact)
    if not far_apart(mine, exact):
        return True  # only the plain run in float32 is off
    wide = ours(in_float64)
    if wide.error is not None or far_apart(wide, exact):
        return False
    off = len(far_apart(mine, exact))
    others = (plainly(nudged(seed, compiler)) for seed in range(NUDGED_RUNS))
    return any(
        off <= AS_FAR * len(far_apart(other, exact))
        for other in itertools.chain([theirs], others)
        if other.error is None
    )


def _as_near(mine: Outcome, theirs: Outcome, exact: Outcome) -> bool:
    """True if ours is about as near, all values together: a single one may have been rounded well
    by chance."""
    if not mine.values.keys() == theirs.values.keys() == exact.values.keys():
        return False
    return _distance(mine, exact) <= AS_FAR * _distance(theirs, exact)


def _distance(found: Outcome, exact: Outcome) -> float:
    """The sum of the largest error of each value."""
    return sum(
        float((a.double() - exact.values[name].double()).abs().max())
        for name, a in found.values.items()
    )


def uncompiled(module: Any, **_: Any) -> Any:
    return module


def in_float64(compiler: Compiler) -> Compiler:
    """Compiles the module with its weights in float64, and casts what it is called with."""

    def wide(module: nn.Module, **more: Any) -> Any:
        run = compiler(module.double(), **more)

        def called(*args: Any, **named: Any) -> Any:
            return run(*pytree.tree_map(_cast, args), **pytree.tree_map(_cast, named))

        return called

    return wide


def _cast(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floating else value


def nudged(seed: int, compiler: Compiler) -> Compiler:
    """Moves each number in the module's weights to the next above or below, and compiles it."""

    def moved(module: nn.Module, **more: Any) -> Any:
        drawn = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in module.parameters():
                up = torch.rand(p.shape, generator=drawn) < 0.5
                p.copy_(torch.nextafter(p, torch.where(up, torch.inf, -torch.inf).to(p.dtype)))
        return compiler(module, **more)

    return moved
