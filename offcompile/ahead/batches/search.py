"""Finds the largest batch that fits a budget, and the one with the best throughput, by planning.

Each batch of the answer is traced on fake tensors, costed and planned as in the backend. Nothing
is trained, so nothing can run out of memory. Estimates from traced batches say which to trace next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offcompile.ahead.batch_trace import Traced, trace
from offcompile.graph.graphs import Graphs
from offcompile.graph.split import Splits
from offcompile.graph.weight_placement import TRIAL_SHARE
from offcompile.ir import DEVICE, Infeasible, InvalidInput, Problem, Violation
from offcompile.ir.units import show_us, size
from offcompile.machine.hardware import list_profiles, load_profile, parse_bytes
from offcompile.machine.options import Options
from offcompile.machine.target import CpuTarget, CudaTarget, Target, target_for
from offcompile.passes.select.footprint import footprint
from offcompile.planning.feedback.profiling import Profile
from offcompile.planning.floors import floors_of_ways, plain_plan, with_reserve
from offcompile.run.plan.contract import PlanRequest
from offcompile.run.plan.pieces import best_candidate
from offcompile.run.plan.planner import GraphPlanner
from offcompile.run.problem_source import ProblemSource
from offcompile.runtime.base.progress import Progress
from offcompile.simulate import Simulator

from .estimates import BatchEstimates

#: most batches to try next to the best one so far
REFINEMENTS = 6
#: relative precision of batches
PRECISION = 0.01
#: leaps away from an estimate, each so many times as long as the one before; an estimate above
#: PROGRESS times the last batch begins anew
LONGER, PROGRESS = 4, 1.25
#: planning time per batch; the backend itself plans longer for large graphs
SECONDS = 1.0
US_PER_SECOND = 1e6
CPU = "cpu"
#: GPU profiles; other profiles count as machines without one, unless the model is on a GPU
CARDS = frozenset(list_profiles()) - {CPU}


@dataclass(frozen=True)
class BatchRow:
    """One batch that fits, with its simulated step time and peak device memory."""

    batch: int
    step_us: float
    peak_bytes: int
    #: True if anything moves
    moves: bool

    @property
    def samples_per_second(self) -> float:
        return self.batch / self.step_us * US_PER_SECOND


@dataclass(frozen=True)
class BatchReport:
    """All tried batches that fit, in order, and the smallest one that does not."""

    rows: tuple[BatchRow, ...]
    too_large: int | None
    #: the reason that `too_large` does not fit
    reason: str

    @property
    def largest(self) -> BatchRow:
        return self.rows[-1]

    @property
    def best(self) -> BatchRow:
        """The batch with the most samples per second, by simulated time."""
        return max(self.rows, key=lambda row: row.samples_per_second)

    def to_text(self) -> str:
        lines = [f"{'batch':>10}  {'step':>12}  {'samples/s':>12}  {'peak':>12}"]
        for row in self.rows:
            marks = [m for m, of in (("largest", self.largest), ("best", self.best)) if of is row]
            note = "" if row.moves else "  nothing moves"
            lines.append(
                f"{row.batch:>10}  {show_us(row.step_us):>12}  {row.samples_per_second:>12.4g}"
                f"  {size(row.peak_bytes):>12}{note}{'  ← ' + ', '.join(marks) if marks else ''}"
            )
        if self.too_large is not None:
            lines.append(f"{self.too_large:>10}  does not fit: {self.reason}")
        return "\n".join(lines)

    __str__ = to_text

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "batch": row.batch,
                "step_us": row.step_us,
                "samples_per_second": row.samples_per_second,
                "peak_bytes": row.peak_bytes,
                "moves": row.moves,
            }
            for row in self.rows
        ]
        return {
            "largest": self.largest.batch,
            "best": self.best.batch,
            "rows": rows,
            "too_large": self.too_large,
            "reason": self.reason,
        }


def max_batch(
    model: Callable[..., Any],
    make_inputs: Callable[[int], Any],
    memory: int | float | str | None = None,
    *,
    policy: str | None = "joint",
    hardware: str | Path | None = None,
    held: int | str = 0,
    most: int = 1 << 16,
    measure: bool = False,
    densities: Mapping[str, float] | None = None,
    options: Mapping[str, object] | None = None,
) -> BatchReport:
    """Find the largest batch that fits, and the one with the best throughput.

    model: the module to compile, or a function of the inputs that uses modules.
    make_inputs: maps a batch size to the arguments (a tuple, or one tensor); called under fake
    tensors.
    memory: as in the backend's options, except "minimum".
    policy: as in the backend's options; None: nothing moves, as without offcompile.
    hardware: a profile to plan for; None: this machine, which is measured once.
    held: bytes that others hold on the device, such as optimizer states.
    most: the largest batch to try.
    measure: run ops of unknown cost to measure them, instead of estimating.
    densities: shares of nonzero elements, as in `PlanReport.profile`, to plan with codecs.
    options: other options of the backend.

    Raises `Infeasible` if not even a batch of 1 fits.
    """
    if most < 1:
        raise _refusal("most", f"{most} is no batch; give 1 or more")
    if hardware is not None and measure:
        raise _refusal("measure", "ops cannot be run on a profile; leave out hardware or measure")
    given = dict(options or {}) | {"memory": memory, "hardware": hardware}
    given = {"seconds": SECONDS} | given | ({} if policy is None else {"policy": policy})
    asked = Options.read(given)
    if asked.minimum:
        raise _refusal("memory", "every batch fits its own minimum; give a size")
    held_bytes = parse_bytes(held) if isinstance(held, str) else held
    with Progress("max_batch") as progress:
        search = _BatchSearch(
            model,
            make_inputs,
            asked,
            plain=policy is None,
            measure=measure,
            held_bytes=held_bytes,
            densities=dict(densities or {}),
            tell=progress,
        )
        search.grow(most)
        search.refine()
    return search.report()


def _step(batch: int) -> int:
    """The difference between batches that counts as none."""
    return max(1, int(batch * PRECISION))


def _refusal(where: str, detail: str) -> InvalidInput:
    return InvalidInput([Violation("bad-value", where, detail)])


@dataclass
class _BatchSearch:
    model: Callable[..., Any]
    make_inputs: Callable[[int], Any]
    options: Options
    plain: bool
    measure: bool
    held_bytes: int
    densities: dict[str, float]
    tell: Callable[[str], None]
    rows: dict[int, BatchRow] = field(default_factory=dict)
    refused: dict[int, Infeasible] = field(default_factory=dict)
    target: Target | None = None
    #: of the last traced batch
    planner: GraphPlanner | None = None
    estimates: BatchEstimates = field(init=False)

    def __post_init__(self) -> None:
        self.estimates = BatchEstimates(self._needs)

    # --- the search ---------------------------------------------------------------------------

    def grow(self, most: int) -> None:
        """Find the largest batch that fits, up to the precision."""
        fits, fails, guess = self._up(most)
        # a plan needs more than its floor, so an estimate is a bit too high: short leaps first
        leap = _step(fails) if guess is not None else fails
        while fails - fits > _step(fits):
            batch = max(fails - leap, (fits + fails) // 2)
            if self.try_one(batch):
                fits, leap = batch, fails
            else:
                fails, leap = batch, LONGER * leap

    def _up(self, most: int) -> tuple[int, int, int | None]:
        """Go up until a batch does not fit; return the last that does, that one, and the last
        estimate of the largest."""
        batch, leap = 1, 0
        while True:
            if not self.try_one(batch):
                if batch == 1:
                    raise self.refused[1]
                return max(self.rows), batch, self._guess(most)
            guess = self._guess(most)
            if batch == most:
                return batch, most + 1, guess
            if guess is None:
                wanted = 2 * batch
            elif guess > PROGRESS * batch:
                wanted, leap = guess, 0
            else:
                leap = max(_step(batch), LONGER * leap)
                wanted = max(guess, batch + leap)
            batch = min(wanted, most)

    def _guess(self, most: int) -> int | None:
        """The largest batch whose floor fits, by estimate; None if that is not known."""
        assert self.planner is not None
        budget, target = self.planner.budget(), self.planner.source.target
        if budget is None:
            return None

        def has_room(nbytes: int) -> bool:
            if self.plain:
                return nbytes + target.library_bytes <= budget
            return with_reserve(nbytes, target.reserve_bytes) <= budget

        return self.estimates.largest(has_room, most)

    def refine(self) -> None:
        """Search for a better throughput, where batches line up by estimates; trace the best."""
        rates = {batch: row.samples_per_second for batch, row in self.rows.items()}
        known = max(rates)
        while (known := known // 2) > 1 and self.estimates.at(known):
            rates.setdefault(known, self._rate(known))
        for _ in range(REFINEMENTS):
            batches = sorted(rates)
            at = batches.index(max(batches, key=rates.__getitem__))
            gaps = [
                (batches[i + 1] - batches[i], (batches[i] + batches[i + 1]) // 2)
                for i in (at - 1, at)
                if 0 <= i < len(batches) - 1
            ]
            width, middle = max(gaps, default=(0, 0))
            if width <= _step(batches[at]):
                break
            rates[middle] = self._rate(middle)
        self.try_one(max(rates, key=rates.__getitem__))

    def _rate(self, batch: int) -> float:
        """Samples per second of a batch: estimated if that can be, else traced; 0: does not fit."""
        problems = [] if batch in self.rows else self.estimates.at(batch)
        if problems:
            step_us = min(self._estimated_us(batch, problem) for problem in problems)
            return batch / step_us * US_PER_SECOND
        return self.rows[batch].samples_per_second if self.try_one(batch) else 0.0

    def _estimated_us(self, batch: int, problem: Problem) -> float:
        """The time of a step with that batch; infinite if it does not fit."""
        self.tell(f"estimating a batch of {batch}")
        planner = self.planner
        assert planner is not None
        try:
            if self.plain:
                return self._plain(batch, planner, problem).step_us
            budget = planner.budget()
            made = planner.decide(problem, budget, True, share=TRIAL_SHARE, trial=True)
            return made.cost_us
        except Infeasible:
            return math.inf

    # --- one batch ----------------------------------------------------------------------------

    def try_one(self, batch: int) -> bool:
        if batch in self.rows or batch in self.refused:
            return batch in self.rows
        self.tell(f"trying a batch of {batch}")
        traced = trace(self.model, self.make_inputs, batch, self.options.lowering)
        planner, graphs = self._planner(batch, traced), self._graphs(traced)
        try:
            self.rows[batch] = self._row(batch, planner, graphs, traced.splits)
        except Infeasible as error:
            self.refused[batch] = error
        return batch in self.rows

    def _row(
        self, batch: int, planner: GraphPlanner, graphs: Graphs, splits: Splits | None
    ) -> BatchRow:
        self.planner = planner
        if self.plain:
            problem = planner.source.annotate(graphs, None, planner.tell).problem
            self.estimates.add(batch, (problem,))
            return self._plain(batch, planner, problem)
        whole = self._unmeasured(planner.source).annotate(graphs, None, planner.tell).problem
        self.estimates.add(batch, (whole,))
        candidate = best_candidate(planner, graphs, splits)
        decided = candidate.choice.decided
        if candidate.pieces is not None:
            self.estimates.add(batch, (whole, candidate.choice.annotated.problem))
        target = planner.source.target
        reserve = target.kept_back_bytes(planner.budget() or 0, not decided.fits)
        peak = decided.order.peak_bytes + reserve
        return BatchRow(batch, decided.cost_us, peak, not decided.fits)

    def _plain(self, batch: int, planner: GraphPlanner, problem: Problem) -> BatchRow:
        total = sum(t.nbytes for t in problem.tensors)
        total += max((op.workspace_bytes for op in problem.ops), default=0)
        target = planner.source.target
        machine = target.machine(max(1, total))
        timeline = Simulator(problem, machine).run(plain_plan(problem), record=False)
        peak, limit = timeline.peak_bytes[DEVICE] + target.library_bytes, planner.budget()
        if limit is not None and peak > limit:
            raise Infeasible(
                f"a batch of {batch} holds {size(peak)} at once and has {size(limit)}",
                peak - limit,
                "Let something move: give a policy.",
            )
        return BatchRow(batch, timeline.makespan_us, peak, False)

    def _planner(self, batch: int, traced: Traced) -> GraphPlanner:
        if self.target is None:
            self.target = self._target(traced)
        options = self._with_profile if not self.measure else replace(self.options, hardware=None)
        profile = Profile(densities=self.densities)
        source = ProblemSource(options, self.target, profile, traced.device.type)
        source.learn_codecs()
        explains = batch == 1
        request = PlanRequest(f"a batch of {batch}", held_bytes=self.held_bytes, explains=explains)
        return GraphPlanner(source, request)

    @property
    def _with_profile(self) -> Options:
        """With a named profile, costs of ops are estimated, not measured."""
        return replace(self.options, hardware=self.options.hardware or CPU)

    def _unmeasured(self, source: ProblemSource) -> ProblemSource:
        """The same, but nothing is measured for estimates of other batches."""
        return replace(source, options=self._with_profile) if self.measure else source

    def _needs(self, problem: Problem) -> tuple[list[int], ...]:
        """The device bytes that a step needs at least, in each way to run it."""
        if self.plain:
            return (footprint(problem, ()),)
        assert self.planner is not None
        return floors_of_ways(problem, self.planner.source.target.machine)

    @staticmethod
    def _graphs(traced: Traced) -> Graphs:
        return Graphs(*traced.graphs, traced.parameters, traced.device.type)

    def _target(self, traced: Traced) -> Target:
        options, on_card = self.options, traced.device.type == "cuda"
        if options.hardware is None:
            return target_for(options, traced.device if on_card else None, self.tell)
        profile = load_profile(options.hardware)
        if on_card or options.hardware in CARDS:
            disks = () if options.host_memory is None else options.spill
            bounds = profile.device_memory_bytes, options.host_memory
            return CudaTarget(profile, disks, *bounds)
        return CpuTarget(profile, options.spill, profile.device_memory_bytes, options.host_memory)

    # --- the answer ---------------------------------------------------------------------------

    def report(self) -> BatchReport:
        rows = tuple(self.rows[batch] for batch in sorted(self.rows))
        above = [b for b in sorted(self.refused) if b > rows[-1].batch]
        first = above[0] if above else None
        return BatchReport(rows, first, "" if first is None else self.refused[first].reason)
