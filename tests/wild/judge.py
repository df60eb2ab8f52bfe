"""Runs a program plainly and under budgets, and says how they compare."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from trust import conformity
from trust.conformity import Outcome, Planned, left_over, run_under, tiny_steps

import offcompile

from . import rounding
from .program import Compiler, Program, Run

EQUAL = "equal"
NEAR = "equal within tolerance"
REFUSED = "refused in words"
PLAIN_FAILS = "plain fails alike"
MISSING = "package missing"
LIMIT = "limit, told by torch"
BROKEN = "BROKEN"
#: budgets tried above the middling one of a single call
MIDDLING_TRIES = 4


@dataclass(frozen=True)
class Verdict:
    program: str
    kind: str
    #: the words of the refusal or the error, the difference, or the package that is missing
    why: str = ""
    changed: bool = False
    moves: int = 0
    bytes_out: int = 0

    @property
    def holds(self) -> bool:
        return self.kind != BROKEN


def plain(module: Any, **more: Any) -> Any:
    return torch.compile(module, backend="aot_eager", **more)


def judge(program: Program) -> Verdict:
    """Bit for bit the plain run at "minimum", and at a middling budget where there is one."""
    if missing := program.missing():
        return Verdict(str(program), MISSING, ", ".join(missing))
    with tiny_steps(), _quiet():
        return _judge(program)


def judge_by_inductor(program: Program) -> Verdict:
    """Near the plain run at "minimum", both with kernels that Inductor makes."""
    if missing := program.missing():
        return Verdict(str(program), MISSING, ", ".join(missing))
    with tiny_steps(), _quiet(), mock.patch.object(conformity, "LOWERING", "inductor"):
        alone = outcome_of(program, torch.compile)
        found = run_under("minimum", lambda compiler: outcome_of(program, compiler))
        kind, why = _compare_nearly(program, alone, found)
    return Verdict(str(program), kind, why, found.changed, found.moves, found.bytes_out)


def _compare_nearly(program: Program, alone: Outcome, found: Planned) -> tuple[str, str]:
    def plainly(compiler: Compiler) -> Outcome:
        return outcome_of(program, compiler)

    def ours(within: Callable[[Compiler], Compiler]) -> Outcome:
        return run_under("minimum", lambda compiler: plainly(within(compiler))).outcome

    mine = found.outcome.error
    if program.limit is not None or program.refused is not None:
        return _compare(program, alone, found)
    if alone.error is not None:  # Inductor refuses what eager kernels run
        alike = mine is None or type(mine) is type(alone.error)
        why = f"plain raised {told(alone)}; ours {told(found.outcome)}"
        return PLAIN_FAILS if alike else BROKEN, why
    if mine is not None:
        return BROKEN, told(found.outcome)
    far = rounding.far_apart(found.outcome, alone)
    if not far or rounding.explains(found.outcome, alone, plainly, ours):
        return NEAR, ""
    return BROKEN, "; ".join(far[:3])


def _judge(program: Program) -> Verdict:
    alone = outcome_of(program, plain)
    if (alone.error is not None) is not program.plain_fails:
        return Verdict(str(program), BROKEN, f"plainly it raised {told(alone)}")

    def run(compiler: Callable[[Any], Any]) -> Outcome:
        return outcome_of(program, compiler)

    least = run_under("minimum", run)
    kind, why = _compare(program, alone, least)
    changed, moves, bytes_out = least.changed, least.moves, least.bytes_out
    budget = least.middling() if least.reports else None
    del least
    middle = None
    for _ in range(MIDDLING_TRIES if kind == EQUAL and budget is not None else 0):
        middle = run_under(budget, run)
        if isinstance(middle.outcome.error, offcompile.Infeasible):
            budget += budget // 2  # calls that wait for their backward together need more
            continue
        kind, why = _compare(program, alone, middle)
        moves, bytes_out = moves + middle.moves, bytes_out + middle.bytes_out
        if kind != EQUAL:
            why = f"at {budget:,} bytes: {why}"
        break
    middle = alone = None  # nothing of them may count as left over
    if kind != BROKEN and (remains := left_over()):
        kind, why = BROKEN, f"left behind: {'; '.join(remains)}"
    if kind == EQUAL and program.moves and not (changed or bytes_out):
        kind, why = BROKEN, "nothing was planned to move, and no graph was changed"
    return Verdict(str(program), kind, why, changed, moves, bytes_out)


def _compare(program: Program, alone: Outcome, found: Planned) -> tuple[str, str]:
    error = found.outcome.error
    if program.limit is not None:
        if error is not None and program.limit in str(error):
            return LIMIT, told(found.outcome)
        return BROKEN, f"its limit {program.limit!r} is gone; it raised {told(found.outcome)}"
    if program.refused is not None:
        if isinstance(error, offcompile.OffloadError) and program.refused in str(error):
            return REFUSED, str(error).partition("\n")[0]
        return (
            BROKEN,
            f"it is to be refused for {program.refused!r}; it raised {told(found.outcome)}",
        )
    if program.plain_fails:
        same = type(error) is type(alone.error)
        return (
            PLAIN_FAILS if same else BROKEN
        ), f"plain raised {told(alone)}; ours {told(found.outcome)}"
    wrong = found.outcome.differences(alone)
    return (BROKEN, "; ".join(wrong[:3])) if wrong else (EQUAL, "")


def outcome_of(program: Program, compiler: Compiler) -> Outcome:
    """The values that a program keeps, from the same seed each time; or its error."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    run = Run(compiler)
    try:
        program.body(run)
    except Exception as error:
        error.__traceback__ = None  # its frames hold the model
        return Outcome(error=error)
    finally:
        gc.collect()
    return Outcome(run.values)


def told(outcome: Outcome) -> str:
    error = outcome.error
    return "nothing" if error is None else f"{type(error).__name__}: {str(error)[:300]}"


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
