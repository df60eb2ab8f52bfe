"""Holding runs against each other, bit for bit, where steps are far too small to need a plan."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import offcompile
from offcompile.ir import DEVICE
from offcompile.machine import target
from offcompile.planning.floors import peak_alone
from offcompile.report import report as report_module
from offcompile.run import problem_source as survey
from offcompile.run import trial
from offcompile.runtime.moves.registry import runtimes

from .rows import Row

#: the least that moves in these runs: everything but single numbers
LEAST_BYTES = 8
#: share of the way from the floor to the step's own peak
MIDDLING = 0.5

#: the one in which equal bits are promised
LOWERING = "aot_eager"

Compiler = Callable[..., Any]
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def tiny_steps() -> Iterator[None]:
    """Lets tensors of a few bytes move, and plans keep nothing for the runtime: so that budgets
    mean something to a step of a few hundred bytes. On one thread, and no plan is tried out.

    Layers that Dynamo would rather not trace (`nn.LSTM`) are traced.
    """
    threads, freezes = torch.get_num_threads(), not gc.get_freeze_count()
    torch.set_num_threads(1)
    if freezes:  # collecting need not look through all that was imported
        gc.collect()
        gc.freeze()
    try:
        with (
            torch._dynamo.config.patch(run_gc_after_compile=False, allow_rnn=True),
            mock.patch.object(survey, "LEAST_MOVE_BYTES", LEAST_BYTES),
            mock.patch.object(target, "LEAST_RESERVE", 0),
            mock.patch.object(trial, "STEPS_BEFORE", sys.maxsize),
        ):
            yield
    finally:
        if freezes:
            gc.unfreeze()
        torch.set_num_threads(threads)


def plain(module: Any) -> Any:
    return torch.compile(module, backend="aot_eager")


def ours(memory: int | str) -> Compiler:
    options = {"memory": memory, "lowering": LOWERING, "hardware": "cpu"}
    options |= {"policy": "joint:evaluations=10", "seconds": 0.01}
    return lambda module, **more: torch.compile(
        module, backend="offcompile", options=options, **more
    )


@dataclass(frozen=True)
class Outcome:
    """The tensors that a run left, by name, or the error that it raised."""

    values: Mapping[str, Tensor] = field(default_factory=dict)
    error: BaseException | None = None

    def differences(self, other: Outcome) -> list[str]:
        """List the differences from `other` in any bit (one NaN is as good as another)."""
        if self.error is not None or other.error is not None:
            mine, theirs = (type(o.error).__name__ for o in (self, other))
            return [] if mine == theirs else [f"raised {_told(self)}, not {_told(other)}"]
        found = [f"{name} is in one only" for name in self.values.keys() ^ other.values.keys()]
        common = [name for name in self.values if name in other.values]
        return found + [n for n in common if not same(self.values[n], other.values[n])]


def _told(outcome: Outcome) -> str:
    error = outcome.error
    return "nothing" if error is None else f"{type(error).__name__}: {str(error)[:200]}"


def same(mine: Tensor, theirs: Tensor) -> bool:
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    if mine.is_complex():
        return same(torch.view_as_real(mine), torch.view_as_real(theirs))
    if not mine.is_floating_point():
        return torch.equal(mine, theirs)
    nan = mine.isnan(), theirs.isnan()
    bits = (
        x.masked_fill(n, 0).view(_BITS[x.itemsize])
        for x, n in zip((mine, theirs), nan, strict=True)
    )
    return torch.equal(*nan) and torch.equal(*bits)


@dataclass(frozen=True)
class Planned:
    """A run under a budget, and what was planned for it."""

    outcome: Outcome
    #: the last plan of each graph
    reports: tuple[offcompile.PlanReport, ...]
    bytes_out: int

    @property
    def moves(self) -> int:
        return sum(len(r.plan.moves) for r in self.reports)

    @property
    def changed(self) -> bool:
        """True if any graph differs from that of the plain run."""
        return any(not r.fits for r in self.reports)

    def middling(self) -> int | None:
        """A budget between the floor and the step's own peak; None if nothing lies between."""
        floor = sum(r.floor_bytes for r in self.reports)
        ample = sum(map(_peak_as_it_is, self.reports))
        between = floor + int(MIDDLING * (ample - floor))
        return between if floor < between < ample else None


def _peak_as_it_is(report: offcompile.PlanReport) -> int:
    """The peak of the step with nothing moved and no weight on the host."""
    tensors = tuple(replace(t, home=t.home and DEVICE) for t in report.problem.tensors)
    machine = report.machine
    return peak_alone(
        replace(report.problem, tensors=tensors), lambda n: machine.with_capacity(DEVICE, n)
    )


def run_under(memory: int | str, run: Callable[[Compiler], Outcome]) -> Planned:
    """Run `run` with our backend at a budget."""
    known, before = len(report_module._remembered), offcompile.counters()["bytes_out"]
    outcome = run(ours(memory))
    last = {r.name.partition(",")[0]: r for r in offcompile.reports()[known:]}
    del report_module._remembered[known:]
    return Planned(outcome, tuple(last.values()), offcompile.counters()["bytes_out"] - before)


def left_over() -> list[str]:
    """Name the gauges that runs have left above zero though nothing of them is held."""
    torch._dynamo.reset()
    gc.collect()
    for runtime in runtimes():
        runtime.device.drain()  # a loss that is dropped does not wait for what is under way
    counters = offcompile.counters()
    gauges = ("live_tickets", "spill_bytes", "host_bytes", "keeper_bytes")
    return [f"{name} is {counters[name]:,}, not 0" for name in gauges if counters[name]]


@dataclass
class Tally:
    """Counts the cases of a sweep at one budget."""

    seed: int
    of: int = 0
    done: int = 0
    compiled: int = 0
    changed: int = 0
    moves: int = 0
    bytes_out: int = 0
    exceptions: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def count(
        self, case: str, found: Planned, eager: Outcome, run: Callable[[Compiler], Outcome]
    ) -> None:
        """`run` is asked for the plain backend where `found` is not what the eager run was."""
        self.of += 1
        self.compiled += bool(found.reports)
        self.changed += found.changed
        self.moves += found.moves
        self.bytes_out += found.bytes_out
        wrong = found.outcome.differences(eager)
        if eager.error is not None:
            self.fails(case, f"eager already raised {_told(eager)}")
            return
        if not wrong:
            self.done += 1
            return
        alone = run(plain)
        theirs = alone.differences(eager)
        if theirs and not found.outcome.differences(alone):
            self.exceptions.append(
                f"{case}: under aot_eager alone it is not eager's bits either ({theirs[0]}),"
                " and here it is aot_eager's"
            )
        else:
            self.fails(case, "; ".join(wrong[:3]))

    def fails(self, case: str, why: str) -> None:
        self.failures.append(f"{case} (--seed {self.seed}): {why}")

    def row(self, what: str) -> Row:
        figures = (
            ("compiled", f"{self.compiled:,}"),
            ("with another graph than the plain one", f"{self.changed:,}"),
            ("moves planned", f"{self.moves:,}"),
            ("bytes sent out", f"{self.bytes_out:,}"),
        )
        return Row(what, self.done, self.of, tuple(self.exceptions), figures)


def rows_of(counted: Mapping[str, Tally]) -> list[Row]:
    """A row of counts for each name; raises AssertionError with all that failed."""
    failures = [line for tally in counted.values() for line in tally.failures]
    if failures:
        raise AssertionError("\n".join([f"{len(failures)} failures:", *failures]))
    return [tally.row(what) for what, tally in counted.items()]
