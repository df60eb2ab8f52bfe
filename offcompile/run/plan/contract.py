"""The contract of planning: it takes `GraphFacts` and a `PlanRequest`, and returns a `Planned`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import sympy
import torch

from offcompile.ir import BACKWARD, FORWARD, Infeasible
from offcompile.ir.units import show_bytes
from offcompile.machine.options import Options
from offcompile.machine.target import Target
from offcompile.passes.select.rematerialization import Rematerialization
from offcompile.passes.step.lighter import Lighter
from offcompile.passes.turnover import lighter_ways
from offcompile.planning.feedback.profiling import Profile, Settled
from offcompile.planning.fit_budget import Decided
from offcompile.planning.footprint import NeedsBySize
from offcompile.planning.order import RunStep, WaitStep
from offcompile.planning.planner import NO_RIVAL, Rival
from offcompile.planning.ranks.judge import CollectivesBeside
from offcompile.report.report import PlanReport
from offcompile.run.accounts.apply_placement import WeightPlaces
from offcompile.run.accounts.graph_runs import GraphRuns
from offcompile.run.problem_source import ProblemSource
from offcompile.run.recording import Touched, touched_by
from offcompile.run.step_recorder import StepRecorder
from offcompile.run.verifying import Verifying
from offcompile.runtime.base.clock import StepClock


class PlanKind(NamedTuple):
    """The kinds of plan. The usual one offloads only what it must."""

    #: everything that forward saves for backward must be able to leave
    offload_saved: bool = False
    #: all weights must be on the host, like those of others
    weights_on_host: bool = False
    #: most bytes that forward may leave on the device for backward, not counting weights and
    #: inputs; None: no limit
    keeps_bytes: int | None = None
    #: the price of a byte that is saved, if everything must be able to leave: ops that cost less
    #: run again
    ns_per_byte: float = 0.0
    #: bytes that the program itself holds between forward and backward
    outside_bytes: int = 0

    @property
    def is_usual(self) -> bool:
        return not (self.offload_saved or self.weights_on_host)


#: policies that run ops again
RERUNNING = ("joint", "recompute")

USUAL = PlanKind()
HOSTED = PlanKind(weights_on_host=True)
EMPTIED = PlanKind(offload_saved=True)
BOTH = PlanKind(offload_saved=True, weights_on_host=True)


@dataclass(frozen=True, eq=False)
class GraphFacts:
    """Describes a captured graph to all its plans."""

    options: Options
    target: Target
    #: indices of the arguments of the captured function that are parameters
    parameters: frozenset[int]
    #: argument → its readable name
    names: Mapping[int, str]
    #: the graph's symbols, in the order of its arguments
    symbols: tuple[sympy.Symbol, ...]
    #: observations from runs of the graph
    profile: Profile
    #: wraps runs of the graph, and bounds the keeper meanwhile
    runs: GraphRuns

    def kind_again(self, kind: PlanKind) -> PlanKind:
        """The kind for a plan that replaces one of `kind` in the middle of training."""
        return kind._replace(keeps_bytes=self.runs.may_keep_bytes()) if kind.is_usual else kind


@dataclass(frozen=True, eq=False)
class FreeStates:
    """States of an optimizer that do not exist yet, and may live on the device or beside it.

    nbytes: of all of them. keep: have the device keep the first of them, in this share of their
    bytes; returns what others than the graph hold on the device then.
    """

    nbytes: int
    keep: Callable[[float], int]


@dataclass(frozen=True)
class TakenGradients:
    """Arguments whose gradients are taken while backward runs."""

    #: by an optimizer, which updates them
    updated: frozenset[int] = frozenset()
    #: by what reduces them over ranks, and wants them early
    reduced: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PlanRequest:
    """Asks for a plan of one graph."""

    name: str
    kind: PlanKind = USUAL
    #: bytes of the budget held by others
    held_bytes: int = 0
    #: bytes of the host tier that plans of other calls take
    host_held_bytes: int = 0
    #: True if a refusal should name a budget that has a plan, which takes another search
    explains: bool = True
    #: True if masks are packed as bits without checking if a plan without that would be better
    quick: bool = False
    #: the plan in so many other pieces that this one has to beat
    rival: Rival = NO_RIVAL
    #: a plan to reuse if the problem is the one that it was made for
    settled: Settled | None = None
    taken: TakenGradients = TakenGradients()
    #: parameters that stay on the device because others share their memory
    fixed: frozenset[int] = frozenset()
    #: symbol → the value that the plan is made for
    sizes: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    #: states of the optimizers that may live on the device or beside it; None: their place is known
    states: FreeStates | None = None
    #: share of the weights on the host that the device updates there, of those in `taken.updated`
    updated_there: float = 0.0
    #: bytes of the budget that another of the ranks that plan together does not have, or that runs
    #: took beyond what was planned
    lacking_bytes: int = 0
    #: collectives that run beside the graph; None: there are none to know of
    beside: CollectivesBeside | None = None

    def budget(self, options: Options, target: Target) -> int | None:
        """Bytes that the options leave this graph; None: as few as possible, found by planning."""
        budget = target.budget_bytes(options)
        if budget is None:
            return None
        budget -= self.held_bytes
        if budget > 0:
            return max(1, budget - self.lacking_bytes)
        raise Infeasible(
            f"{self.name}: others hold {show_bytes(self.held_bytes)}, which is the whole budget:"
            " compiled graphs of this process, optimizers with states on the device, and what DDP"
            " and FSDP2 keep of weights and gradients.",
            -budget,
            f"Set memory to more than {show_bytes(self.held_bytes)}, or delete the models that are"
            " no longer used.",
        )


#: given a request and what the plan for it needs: the request to plan for in its place, or None
Instead = Callable[[PlanRequest, NeedsBySize], PlanRequest | None]


@dataclass(frozen=True, eq=False)
class Planned:
    """The plan of one graph, whole. It holds no graphs unless its sizes are dynamic."""

    request: PlanRequest
    source: ProblemSource
    decided: Decided
    #: storage → dtype of its elements
    dtypes: Mapping[str, torch.dtype]
    #: number of pieces of the loss; None: whole
    pieces: int | None
    report: PlanReport
    needs: NeedsBySize
    placement: WeightPlaces
    #: weight → its index among the parameters
    weights: Mapping[str, int]
    #: for each saved output of forward, its storage; None if codecs may not pack it
    saved: tuple[str | None, ...]
    #: storages that codecs may pack
    packable: frozenset[str]
    #: outputs of backward that are gradients offered to an optimizer; None: nothing is offered
    offered: tuple[int, ...] | None
    clock: StepClock
    recorder: StepRecorder
    #: compares the first step with the plain run; None: no verification
    verifying: Verifying | None

    @property
    def moves(self) -> bool:
        """True if any tensor leaves the device or is recomputed."""
        return not self.report.fits

    @property
    def empties_by_turnover(self) -> bool:
        policy = self.decided.result.policy.partition(":")[0]
        return self.request.kind.offload_saved and policy == "turnover"

    @cached_property
    def lighter(self) -> tuple[Lighter, ...]:
        """The ways in which the graph could save less for backward, if it were planned again."""
        dynamic = self.request.sizes  # figures would be those of other sizes
        reruns = self.source.options.policy.partition(":")[0] in RERUNNING
        if dynamic or not reruns or self.request.kind != EMPTIED or not self.empties_by_turnover:
            return ()
        try:
            return lighter_ways(self.report.problem, self.decided.machine)
        finally:  # networks of minimum cuts are large
            Rematerialization.forget()

    @cached_property
    def counts_saved(self) -> frozenset[str]:
        """The halves in which the plan includes, at its peak, all that forward has saved: backward
        if it loads everything at its start, forward if it waits for no copy out before its end."""
        if not self.empties_by_turnover:
            return frozenset()
        steps = self.decided.order.forward()
        last = max((i for i, step in enumerate(steps) if isinstance(step, RunStep)), default=0)
        waits = any(isinstance(step, WaitStep) for step in steps[:last])
        return frozenset((BACKWARD,) if waits else (FORWARD, BACKWARD))

    @cached_property
    def changes_weights(self) -> bool:
        """True if the graph itself changes weights."""
        problem = self.report.problem
        written = {t for op in problem.ops for t in op.writes}
        return any(t.id in written for t in problem.tensors if t.kind == "weight")

    @cached_property
    def touched(self) -> Touched:
        return touched_by(self.report.problem, self.weights)
