"""Finds the largest batch that fits a budget, and the one with the best throughput, by planning.

Each candidate is traced on fake tensors, costed and planned as in the backend. Nothing is
trained, so nothing can run out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offcompile.graph.graphs import Graphs
from offcompile.ir import DEVICE, Infeasible, InvalidInput, Violation
from offcompile.ir.units import show_us, size
from offcompile.machine.hardware import list_profiles, load_profile, parse_bytes
from offcompile.machine.options import Options
from offcompile.machine.target import CpuTarget, CudaTarget, Target, target_for
from offcompile.planning.feedback.profiling import Profile
from offcompile.planning.fit_budget import plain_plan
from offcompile.run.plan.contract import PlanRequest
from offcompile.run.plan.pieces import best_candidate
from offcompile.run.plan.planner import GraphPlanner
from offcompile.run.problem_source import ProblemSource
from offcompile.runtime.base.progress import Progress
from offcompile.simulate import Simulator

from .batch_trace import Traced, trace

#: most batches to try next to the best one so far
REFINEMENTS = 6
#: relative precision of batches
PRECISION = 0.01
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

    # --- the search ---------------------------------------------------------------------------

    def grow(self, most: int) -> None:
        """Double the batch until it does not fit, then bisect up to the precision."""
        fits, fails = 0, most + 1
        batch = 1
        while batch < fails:
            if not self.try_one(batch):
                if batch == 1:
                    raise self.refused[1]
                fails = batch
                break
            fits, batch = batch, min(2 * batch, most) if batch < most else fails
        while fails - fits > max(1, int(fits * PRECISION)):
            middle = (fits + fails) // 2
            if self.try_one(middle):
                fits = middle
            else:
                fails = middle

    def refine(self) -> None:
        """Search for a better throughput next to the best batch so far."""
        for _ in range(REFINEMENTS):
            known = sorted(self.rows)
            at = known.index(max(known, key=lambda b: self.rows[b].samples_per_second))
            gaps = [
                (known[i + 1] - known[i], (known[i] + known[i + 1]) // 2)
                for i in (at - 1, at)
                if 0 <= i < len(known) - 1
            ]
            width, middle = max(gaps, default=(0, 0))
            if width <= max(1, int(known[at] * PRECISION)):
                return
            self.try_one(middle)

    # --- one batch ----------------------------------------------------------------------------

    def try_one(self, batch: int) -> bool:
        if batch in self.rows or batch in self.refused:
            return batch in self.rows
        self.tell(f"trying a batch of {batch}")
        traced = trace(self.model, self.make_inputs, batch, self.options.lowering)
        try:
            self.rows[batch] = self._row(batch, traced)
        except Infeasible as error:
            self.refused[batch] = error
        return batch in self.rows

    def _row(self, batch: int, traced: Traced) -> BatchRow:
        planner, graphs = self._planner(batch, traced), self._graphs(traced)
        if self.plain:
            return self._plain(batch, planner, graphs)
        decided = best_candidate(planner, graphs, traced.splits).choice.decided
        target = planner.source.target
        reserve = 0 if decided.fits else target.reserve_bytes(planner.budget() or 0)
        peak = decided.order.peak_bytes + reserve
        return BatchRow(batch, decided.cost_us, peak, not decided.fits)

    def _plain(self, batch: int, planner: GraphPlanner, graphs: Graphs) -> BatchRow:
        problem = planner.source.annotate(graphs, None, planner.tell).problem
        total = sum(t.nbytes for t in problem.tensors)
        total += max((op.workspace_bytes for op in problem.ops), default=0)
        machine = planner.source.target.machine(max(1, total))
        timeline = Simulator(problem, machine).run(plain_plan(problem), record=False)
        peak, limit = timeline.peak_bytes[DEVICE], planner.budget()
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
        # with a named profile, op costs are estimated, not measured
        hardware = None if self.measure else self.options.hardware or CPU
        options = replace(self.options, hardware=hardware)
        profile = Profile(densities=self.densities)
        source = ProblemSource(options, self.target, profile, traced.device.type)
        source.learn_codecs()
        explains = batch == 1
        request = PlanRequest(f"a batch of {batch}", held_bytes=self.held_bytes, explains=explains)
        return GraphPlanner(source, request)

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
