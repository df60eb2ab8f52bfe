"""From a captured graph to a running one: annotate → decide → order → rewrite, then lowering.

One `Pipeline` is one compilation of one graph for given sizes and for what others hold; `backend`
makes another when its plan no longer fits.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import sympy
import torch
from torch import fx

from offcompile.ir import DEVICE, HOST, Infeasible, OffloadError, Problem, Timeline
from offcompile.ir.units import show_bytes
from offcompile.runtime.clock import Clock, clock_for
from offcompile.runtime.heap import heap
from offcompile.runtime.registry import runtime_for
from offcompile.runtime.weights import live_on_host

from .annotate import Annotated, InPlace, Place, annotate
from .books import Entry
from .costs import CostModel, OpCost, costs_of_graph, open_cost_cache
from .costs_fusion import is_extern
from .decide import Decided, decide
from .dump import Compiled as Compilation
from .dump import dump
from .graphs import BACKWARD, FORWARD, Graphs, Hint, outputs_of, storage_bytes
from .kernels import merge_kernels
from .launch import LAUNCH_HINT, malloc_leaves_holes
from .log import log_compiled, tell_once
from .lower import Compiled, Halves, Phase
from .lower_order import pin_order
from .options import Options
from .progress import Progress
from .replay import worst_case
from .report import PlanReport, remember
from .rewrite import rewrite
from .sizes import hint_of
from .target import Target

#: storages below this share of the largest are not worth a move
SMALL_SHARE = 1 / 2048
LEAST_MOVE_BYTES = 4096
#: weights leave for the host where a step gains more than this
WORTH_LEAVING = 0.02
#: ops that need less than this to run are measured whatever the budget
LEAST_ROOM_BYTES = 16 << 20


@dataclass
class Pipeline:
    """The hooks of one lowering. `sizes`: symbol → value that the plan is made for."""

    options: Options
    target: Target
    name: str
    entry: Entry
    #: which arguments of the captured function are parameters
    parameters: frozenset[int]
    held_bytes: int = 0
    sizes: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    report: PlanReport | None = None
    _graphs: Graphs | None = None
    _costs: dict[Place, OpCost] = field(default_factory=dict)
    _min_move: int = LEAST_MOVE_BYTES
    _in_place: InPlace | None = None
    #: which arguments of the captured function are to live on the host, in the order of their use
    _hosted: tuple[int, ...] = ()
    _decided: Decided | None = None

    # --- hooks of the lowering ----------------------------------------------------------------

    def training(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, inputs: Any
    ) -> Halves | None:
        """New graphs for forward and backward; None: they stay as they are."""
        made = self._plan(Graphs(forward, backward, num_outputs, self.parameters, self._kind))
        if made is None:
            return None
        assert made.backward is not None
        return made.forward, made.backward

    def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule | None:
        outputs = len(outputs_of(graph))
        made = self._plan(Graphs(graph, None, outputs, self.parameters, self._kind))
        return None if made is None else made.forward

    def ready(self, phase: Phase, compiled: Compiled) -> Compiled:
        """Time each run of a compiled graph."""
        report = self.report
        if report is None:
            return compiled
        observe = partial(report.observe, FORWARD if phase == "inference" else phase)
        clock = self._clock
        watched = not report.fits and self._kind == "cpu"
        standing = sum(t.nbytes for t in report.problem.tensors if t.home == DEVICE)

        first = True

        def timed(arguments: list[Any]) -> Any:
            nonlocal first
            if watched and phase != BACKWARD:
                if first:  # what compiling left behind is not the step's
                    gc.collect()
                    heap().settle()
                    first = False
                heap().begin(standing, report.budget_bytes)
            started = clock.start()
            result = compiled(arguments)
            clock.stop(started, observe)
            if phase == BACKWARD:
                self.entry.end()
            if watched and phase != FORWARD:
                heap().end()
            return result

        return timed

    @property
    def _kind(self) -> str:
        return self.target.device.type

    @cached_property
    def _clock(self) -> Clock:
        return clock_for(self.target.device)

    # --- the plan -----------------------------------------------------------------------------

    def _plan(self, graphs: Graphs) -> Graphs | None:
        options, target = self.options, self.target
        budget = options.memory_bytes(target.device_bytes)
        if budget is not None:
            budget -= self.held_bytes
            if budget <= 0:
                raise Infeasible(
                    f"{self.name}: other graphs of this model hold {show_bytes(self.held_bytes)},"
                    " which is the whole budget.",
                    -budget,
                    f"Set memory to more than {show_bytes(self.held_bytes)}.",
                )
        with Progress(self.name) as progress:
            annotated = self._annotate(graphs, budget, progress)
            annotated, decided = self._choose(graphs, annotated, budget, progress)
        reserve = 0 if decided.fits else target.reserve_bytes(budget or decided.order.peak_bytes)
        self.report = PlanReport(
            name=self.name,
            problem=annotated.problem,
            machine=decided.machine,
            result=decided.result,
            budget_bytes=budget if budget is not None else decided.order.peak_bytes + reserve,
            reserve_bytes=reserve,
            holes_bytes=decided.holes_bytes,
            worst_peak_bytes=decided.order.peak_bytes,
            labels=annotated.labels,
            settle=self._clock.settle,
        )
        self._decided = decided
        if any(isinstance(v, torch.SymInt) for v in _values(graphs)):
            self._graphs = graphs  # other sizes will be reckoned on them
        self.entry.kept_bytes = kept_at_turn(annotated.problem, decided.result.timeline)
        self.entry.trains = graphs.backward is not None
        made = None if decided.fits else self._rewrite(graphs, annotated, decided)
        remember(self.report)
        said = Compilation(
            self.report,
            dict(graphs),
            {} if made is None else dict(made),
            "\n".join(map(str, decided.order.steps)),
        )
        log_compiled(said)
        if options.dump is not None:
            dump(options.dump, self.name, said)
        return made

    def _choose(
        self,
        graphs: Graphs,
        annotated: Annotated,
        budget: int | None,
        progress: Callable[[str], None],
    ) -> tuple[Annotated, Decided]:
        """The plan for weights that stay, or for weights on the host: the faster one that fits.

        For the floor, the one that does with less.
        """

        def decided(found: Annotated, weights_stay: bool) -> Decided:
            return decide(
                found.problem,
                self.target.machine,
                budget,
                self.target.reserve_bytes,
                self.options.policy,
                self.options.seconds,
                progress,
                self.held_bytes,
                self.target.holes_bytes,
                weights_stay,
            )

        refused: Infeasible | None = None
        stay: Decided | None = None
        try:
            stay = decided(annotated, True)
        except Infeasible as error:
            refused = error
        compute_us = sum(op.duration_us for op in annotated.problem.ops)
        good = stay is not None and stay.result.makespan_us <= compute_us * (1 + WORTH_LEAVING)
        if stay is not None and budget is not None and (stay.fits or good):
            return annotated, stay
        weights = [t.nbytes for t in annotated.problem.tensors if t.kind == "weight"]
        in_place = self.target.in_place(2 * sum(weights))  # gradients too
        on_host = None if in_place is None else self._on_host(graphs, in_place)
        leave: Decided | None = None
        if on_host is not None:
            try:
                leave = decided(on_host, False)
            except Infeasible as error:
                refused = error
        if leave is None and stay is None:
            assert refused is not None
            raise refused
        if on_host is not None and leave is not None and _better(leave, stay, budget):
            self._in_place = in_place
            return on_host, leave
        assert stay is not None
        return annotated, stay

    def _on_host(self, graphs: Graphs, in_place: InPlace) -> Annotated | None:
        """The same step with its weights on the host; None where none is worth a move."""
        found = self._problem(graphs, hint_of(self.sizes), in_place)
        return found if any(t.home == HOST for t in found.problem.tensors) else None

    def _annotate(
        self, graphs: Graphs, budget: int | None, progress: Callable[[str], None]
    ) -> Annotated:
        hint = hint_of(self.sizes)
        standing = sum(
            storage_bytes(v, hint)
            for v in _values(graphs)
            if isinstance(v, torch.Tensor) and v.device.type == self._kind
        )
        measure = self.options.hardware is None
        model = CostModel(
            self.target.profile,
            measure=measure,
            lowering=self.options.lowering,
            cache=open_cost_cache(self.target.device) if measure else None,
            progress=progress,
            # measuring an op must keep the budget too
            room_bytes=None if budget is None else max(budget - standing, LEAST_ROOM_BYTES),
            device=self.target.device,
        )
        self._costs = {
            (phase, name): cost
            for phase, module in graphs
            for name, cost in costs_of_graph(module.graph, model, hint).items()
        }
        found = annotate(graphs, self._costs, hint, LEAST_MOVE_BYTES)
        largest = max((t.nbytes for t in found.problem.tensors if not t.pinned), default=0)
        self._min_move = max(LEAST_MOVE_BYTES, int(largest * SMALL_SHARE))
        return self._problem(graphs, hint)

    def _problem(self, graphs: Graphs, hint: Hint, in_place: InPlace | None = None) -> Annotated:
        found = annotate(graphs, self._costs, hint, self._min_move, in_place)
        if self.options.lowering == "inductor":
            return merge_kernels(found, graphs, lambda node: not is_extern(node))
        return found

    def _rewrite(self, graphs: Graphs, annotated: Annotated, decided: Decided) -> Graphs:
        _check_one_device(self.name, graphs, self.target.device)
        if self._kind == "cpu":
            heap().prepare()
            if malloc_leaves_holes(os.environ):
                tell_once("malloc of this glibc leaves holes between tensors: " + LAUNCH_HINT)
        settings = self.target.runtime
        runtime_for(settings.key)  # opens the spill files: what is wrong with them shows now
        self._hosted = _hosted_arguments(graphs, annotated)
        made = rewrite(graphs, annotated, decided.result.plan, decided.order, settings.key)
        if self.options.lowering == "inductor":
            for _, module in made.graphs:
                pin_order(module)
        return made.graphs

    def place_weights(self, arguments: Sequence[Any]) -> None:
        """Before a call: give weights that the plan has on the host their memory there."""
        if self._hosted:
            device = runtime_for(self.target.runtime.key).device
            live_on_host(device, [arguments[i] for i in self._hosted])

    # --- later sizes --------------------------------------------------------------------------

    def peak_at(self, sizes: Mapping[sympy.Symbol, int]) -> int:
        """What the same order would hold at other sizes."""
        assert self._decided is not None and self.report is not None
        if self._graphs is None:
            return self.report.needed_peak_bytes
        found = self._problem(self._graphs, hint_of(sizes), self._in_place)
        reserve = self.report.reserve_bytes
        return (
            worst_case(found.problem, self._decided.result.plan, self._decided.order.steps)
            + reserve
        )


def _hosted_arguments(graphs: Graphs, annotated: Annotated) -> tuple[int, ...]:
    hosted = {t.id for t in annotated.problem.tensors if t.home == HOST}
    order = dict.fromkeys(t for op in annotated.problem.ops for t in op.reads if t in hosted)
    index = {
        annotated.storage_of[FORWARD, node.name]: node.meta["desc"].idx
        for node in graphs.forward.graph.find_nodes(op="placeholder")
        if annotated.storage_of.get((FORWARD, node.name)) in hosted
    }
    return tuple(index[t] for t in order)


def _better(leave: Decided, stay: Decided | None, budget: int | None) -> bool:
    if stay is None:
        return True
    if budget is None:
        return leave.order.peak_bytes < stay.order.peak_bytes
    return leave.result.makespan_us < stay.result.makespan_us * (1 - WORTH_LEAVING)


def kept_at_turn(problem: Problem, timeline: Timeline) -> int:
    """Bytes that forward leaves on the device for backward; weights and inputs not counted."""
    phases = {op.id: op.phase for op in problem.ops}
    backward = [s.start_ns for s in timeline.spans if phases.get(s.id) == BACKWARD]
    if not backward:
        return 0
    turn = min(backward)
    made = {t for s in timeline.spans if s.start_ns < turn for t in _written_by(problem, s.id)}
    gone = {f.tensor for f in timeline.freed if f.tier == DEVICE and f.time_ns <= turn}
    homeless = (t for t in problem.tensors if t.home is None)
    return sum(t.nbytes for t in homeless if t.id in made and t.id not in gone)


def _written_by(problem: Problem, span: str) -> tuple[str, ...]:
    op = problem.op.get(span)
    return op.writes if op is not None else ()


def _values(graphs: Graphs) -> Iterator[object]:
    return (n.meta.get("val") for _, m in graphs for n in m.graph.find_nodes(op="placeholder"))


def _check_one_device(name: str, graphs: Graphs, device: torch.device) -> None:
    """OffloadError for a graph on several accelerators, or on one that nothing can move from."""
    for _, module in graphs:
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.device.type in ("cpu", "meta"):
                continue
            if value.device != device:
                raise OffloadError(
                    f"{name} computes on {device} and has {node.name} on {value.device}; tensors"
                    " can only move from one device of a graph. Put each device's part of the"
                    " model into a compiled function of its own, or set memory to None."
                )
