"""Samples tensors and lanes during steps, and decides when the results call for a new plan.

The first plan of a graph is made before anything ran, so it uses no codecs. The first steps are
sampled, then one in `WATCH_EVERY`: each tensor that is offloaded, or stays for backward, is
sampled once. On the CPU this takes about a microsecond per sampled row; elsewhere it waits for the
device. Decisions are made between steps, and rarely: planning takes seconds, compiling more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from offcompile.ir import Infeasible, Machine, Plan, Problem
from offcompile.planning.fit_budget import Decided
from offcompile.planning.planner import Beaten
from offcompile.runtime.device.lane_rates import Moved
from offcompile.runtime.moves.probes import watching
from offcompile.simulate import Simulator

from .corrections import Factors
from .earlier_figures import DRIFT, Figures
from .lane_watch import LaneWatch
from .sparsity import Packability, density_of, with_ratios

#: steps sampled before the first decision
FIRST_STEPS = 2
#: afterwards one step in this many is sampled, and half as many after each decision
WATCH_EVERY = 50
#: simulated gain that a new plan must have, as a share of a step's time, if compiling is cheap and
#: if it takes as long as hundreds of steps
WORTH = {"aot_eager": 0.03, "inductor": 0.05}
#: denser tensors hardly shrink with any codec
WORTH_A_CODEC = 0.9
#: a longer search seldom makes a plan cheaper than a short one does by more than this factor
LONGER_GAINS = 1.03
#: limits per graph on decisions that cost planning, and on new plans
MOST_DECISIONS, MOST_REPLANS = 8, 4


@dataclass(frozen=True)
class Settled:
    """A plan made for a problem and a budget, to be reused if both recur."""

    problem: Problem
    budget_bytes: int | None
    decided: Decided
    #: number of pieces of the graph that the plan is for; None if it was not split
    pieces: int | None = None

    def fits(self, problem: Problem, budget_bytes: int | None) -> bool:
        return budget_bytes == self.budget_bytes and problem == self.problem


@dataclass
class Profile:
    """Measurements of one graph over all its plans: densities of its tensors (shares of nonzero
    elements), and the rates of the lanes that its moves use."""

    densities: dict[str, float] = field(default_factory=dict)
    lanes: LaneWatch = field(default_factory=LaneWatch)
    #: measured times of ops over their costs, once they were found to differ
    factors: Factors | None = None
    #: True if holes need all the room that they want: with less, pages went back in every step
    lacks_room: bool = False
    #: outcome of each decision, for people
    said: list[str] = field(default_factory=list)
    replans: int = 0
    _steps: int = 0
    _looking: bool = False
    _every: int = 0
    _decisions: int = 0
    #: densities that the last decision used; None if there was none
    _known: dict[str, float] | None = None
    #: True if `factors` include the time to touch returned memory again
    includes_touching: bool = False
    _found: dict[str, float] = field(default_factory=dict)
    #: reason for the next decision, in words: lanes or ops that differ from the plan
    _lanes_changed: str | None = None
    _costs_changed: str | None = None

    # --- sampling ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begins a step: a forward is about to run, and its backward belongs to the same step."""
        self._every = self._every or WATCH_EVERY
        first = self._steps < FIRST_STEPS
        self._looking = first or (self._open and (self._steps - FIRST_STEPS) % self._every == 0)
        self._steps += 1

    def watching(self, tensor_of: Mapping[str, str]) -> AbstractContextManager[None]:
        """Inside this context, tensors that this thread moves are sampled if the step is due.

        tensor_of: move → the tensor that it moves.
        """
        if not self._looking:
            return nullcontext()

        def look(x: torch.Tensor, move: str) -> None:
            if move in tensor_of:
                self.look(tensor_of[move], x)

        return watching(look)

    def look_at_saved(self, tensors: Sequence[str | None], values: Sequence[object]) -> None:
        """Samples the tensors that forward saves for backward; None: not a storage of the plan."""
        if self._looking:
            for tensor, value in zip(tensors, values, strict=True):
                if tensor is not None and isinstance(value, torch.Tensor):
                    self.look(tensor, value)

    def look(self, tensor: str, x: torch.Tensor) -> None:
        if tensor in self._found or x.numel() * x.element_size() != x.untyped_storage().nbytes():
            return
        density = density_of(x)
        if density is not None:
            self._found[tensor] = density

    def has_zeros(self, tensor: str) -> bool:
        """True if the tensor was seen to have enough zeros for a codec to shrink it."""
        return self.densities.get(tensor, 1.0) <= WORTH_A_CODEC

    @property
    def shows_zeros(self) -> bool:
        return any(density <= WORTH_A_CODEC for density in self.densities.values())

    # --- deciding ---------------------------------------------------------------------------

    @property
    def _open(self) -> bool:
        """True if samples can still lead to a decision."""
        return self._decisions < MOST_DECISIONS and self.replans < MOST_REPLANS

    def due(self) -> bool:
        """True if the steps so far have shown anything not known at the last decision.

        Call it between steps. Moves the samples into `densities`.
        """
        if not self._found:
            return False
        for tensor, density in self._found.items():
            before = self.densities.get(tensor)
            both = before is not None and self._steps <= FIRST_STEPS
            self.densities[tensor] = (density + before) / 2 if both else density  # type: ignore[operator]
        self._found.clear()
        return self._steps >= FIRST_STEPS and self._open and self._changed()

    @property
    def looked(self) -> bool:
        """True if the last step was sampled."""
        return self._looking and self._open

    def lanes_due(self, machine: Machine, totals: Mapping[str, Moved]) -> bool:
        """Like `due`, for lanes: True if their rates differ greatly from those the plan assumes.

        machine: as measured; totals: of the runtime. Call it wherever `due` is called, after it.
        The first steps do not count, nor those of a new plan until the next sample: they touch
        memory and files for the first time.
        """
        if not self.looked:
            return False
        if self._steps <= FIRST_STEPS + 1:
            self.lanes.begin(totals)
        else:
            self._lanes_changed = self.lanes.look(machine, totals)
        return self._lanes_changed is not None

    def costs_due(
        self, factors: Factors, machine: Machine, totals: Mapping[str, Moved], touched: bool
    ) -> bool:
        """Like `due`, for ops, and once: True if ops, or lanes by now, differ much from the plan.

        factors: measured for a plan that was made without any. touched: True if its steps touched
        returned memory again.
        """
        if self.factors is not None or not self._open:
            return False
        self._lanes_changed = self.lanes.look(machine, totals)
        if not factors.same:
            self.factors, self._costs_changed = factors, factors.words()
            self.includes_touching = touched
        return self.seen != "densities"

    @property
    def calls_for_search(self) -> bool:
        """True if a plan for all this may differ: densities matter only if there are zeros."""
        return self.seen != "densities" or self.shows_zeros

    @property
    def figures(self) -> Figures:
        """All figures that the next plan uses."""
        rates, densities = dict(self.lanes.rates), dict(self.densities)
        return Figures(self.factors, self.includes_touching, rates, densities)

    def take(self, figures: Figures) -> None:
        """Have the next plan use these instead."""
        self.factors, self.includes_touching = figures.factors, figures.includes_touching
        self.lanes.rates.clear()
        self.lanes.rates.update(figures.rates)
        self.densities.update(figures.densities)

    @property
    def seen(self) -> str:
        """The reason for the decision to be made now."""
        if self._costs_changed is not None:
            return "costs"
        return "densities" if self._lanes_changed is None else "rates"

    def _changed(self) -> bool:
        known = self._known
        return known is None or any(
            tensor not in known or abs(density - known[tensor]) > DRIFT
            for tensor, density in self.densities.items()
        )

    def decided(self, text: str, again: bool) -> None:
        """Records a decision; `again`: it leads to a new plan."""
        self._known = dict(self.densities)
        self._decisions += 1
        self.replans += again
        self._every *= 2
        reasons = [r for r in (self._costs_changed, self._lanes_changed) if r is not None]
        self._costs_changed = self._lanes_changed = None
        self.note(": ".join(["; ".join(reasons), text] if reasons else [text]))
        if again:
            self.lanes.restart()

    def note(self, text: str) -> None:
        """Records the outcome of a decision."""
        self.said.append(f"after {self._steps} steps: {text}")


def reconsider(
    problem: Problem,
    current: Plan,
    machine: Machine,
    facts: Packability,
    worth: float,
    plan: Callable[[Problem, float, bool], Decided],
    seen: str = "densities",
) -> tuple[str, tuple[Problem, Decided] | None]:
    """Judges a plan by the densities; returns another plan for them if it is worth the change.

    `problem` is as it was planned; `machine` is that of the current plan, with the current
    knowledge of codecs and lanes. plan: searches, for a short time if told so, and raises `Beaten`
    if no plan can take less than so many µs. seen: the other new knowledge, `rates` of lanes or
    `costs` of ops. The text gives the reason, for people.
    """
    shown = with_ratios(problem, machine, facts, only_paying=False)
    asked = with_ratios(problem, machine, facts)
    now = Simulator(shown, machine).run(current, record=False)
    now_us = now.cost_us if now.valid else float("inf")
    compute_us = sum(op.duration_us for op in problem.ops)
    packs = any(move.codec for move in current.moves)
    if seen == "densities" and not packs and not any(t.ratios for t in asked.tensors):
        return "no tensor has zeros enough to be worth packing", None
    if now_us * (1 - worth) <= compute_us:
        return "moving costs next to nothing as it is; the plan stays", None
    try:
        worth_us = now_us * (1 - worth)
        if plan(asked, worth_us, True).result.cost_us > worth_us * LONGER_GAINS:
            raise Beaten
        found = plan(asked, worth_us, False)
    except Beaten:
        return f"no plan for these {seen} gains {100 * worth:.0f}% of a step: the plan stays", None
    except Infeasible:
        return f"no plan was found for these {seen}: the plan stays", None
    gain = 1 - found.result.cost_us / now_us
    told = f"{100 * gain:.1f}% of a step" if now.valid else "a plan that runs"
    if gain <= worth:
        return f"a plan for these {seen} gains {told}: the plan stays", None
    return f"a plan for these {seen} gains {told}: it is taken", (asked, found)
