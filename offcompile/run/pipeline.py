"""Turns a captured graph into a running one: annotate → decide → order → rewrite → lower.

One `Pipeline` is one compilation of one graph, for given sizes and given memory held by others.
`compiled` makes another one when the plan no longer fits.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import sympy
import torch
from torch import fx

from offcompile.graph.annotate import Annotated
from offcompile.graph.graphs import Graphs, outputs_of
from offcompile.graph.in_backward_updates import Offers
from offcompile.graph.lowering.lower import Compiled, Halves, Phase
from offcompile.graph.lowering.order import pin_order
from offcompile.graph.lowering.rewrite import rewrite
from offcompile.graph.sizes import hint_of
from offcompile.graph.split import Splits
from offcompile.graph.split.decision import Ways
from offcompile.graph.update_advice import advice
from offcompile.graph.weight_placement import Choice
from offcompile.ir import BACKWARD, FORWARD, Machine, OffloadError, Plan, Problem
from offcompile.machine.malloc_advice import HINT, malloc_leaves_holes
from offcompile.machine.options import Options
from offcompile.machine.target import CudaTarget, Target
from offcompile.planning.empty_turn import kept_at_turn
from offcompile.planning.endurance import spilled_bytes, watch_for
from offcompile.planning.feedback.profiling import Profile, Settled
from offcompile.planning.fit_budget import Decided
from offcompile.planning.footprint import Footprint, NeedsBySize, bytes_of, standing_in
from offcompile.report.dump import Dumped as Compilation
from offcompile.report.dump import dump
from offcompile.report.log import log_compiled, log_decision, tell_once, warn
from offcompile.report.report import PlanReport, remember
from offcompile.report.stalls import move_names
from offcompile.report.verified import Verified
from offcompile.runtime.base.clock import StepClock, clock_for
from offcompile.runtime.base.garbage import garbage
from offcompile.runtime.base.progress import Progress
from offcompile.runtime.memory import tensor_memory
from offcompile.runtime.memory.heap import heap
from offcompile.runtime.moves.registry import runtime_for
from offcompile.runtime.states.update_ops import taken_or_kept

from .accounts.apply_placement import WeightPlaces, weight_places
from .accounts.graph_runs import GraphRuns, Room, kept_between
from .accounts.usage import GraphUsage
from .accounts.wall import Watch
from .plan_graph import Planning, Tell
from .problem_source import ProblemSource, values
from .recording import Touched, recorded, touched_by, weights_of
from .step_recorder import StepRecorder
from .verifying import Verifying

#: each lane may pack in this fraction of the runtime's reserve; at most four lanes pack
PACKING_SHARE = 4


@dataclass(eq=False)
class Pipeline:
    """The hooks of one lowering. `sizes`: symbol → value that the plan is made for."""

    options: Options
    target: Target
    name: str
    entry: GraphUsage
    #: indices of the arguments of the captured function that are parameters
    parameters: frozenset[int]
    held_bytes: int = 0
    sizes: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    #: argument → its readable name
    names: Mapping[int, str] = field(default_factory=dict)
    #: arguments that an optimizer updates during backward
    updated: frozenset[int] = frozenset()
    report: PlanReport | None = None
    #: observations from runs of the graph
    profile: Profile = field(default_factory=Profile)
    #: a plan to reuse if the problem is the one that it was made for
    settled: Settled | None = None
    #: the type of device that the graph was traced on, if other than the target's
    traced_on: str | None = None
    #: True if a refusal should name a budget that has a plan, which takes another search
    explains: bool = True
    #: True if everything that the graph saves for backward must be able to leave
    turns: bool = False
    #: True if all weights must be on the host
    hosts: bool = False
    #: parameters that stay on the device because others share their memory
    fixed: frozenset[int] = frozenset()
    #: wraps runs of the graph, and bounds the keeper meanwhile
    executions: GraphRuns | None = None
    #: the graph's symbols, in the order of its arguments
    symbols: tuple[sympy.Symbol, ...] = ()
    _graphs: Graphs | None = None
    _needs: NeedsBySize | None = None
    #: weight → its index among the parameters
    _weights: Mapping[str, int] = field(default_factory=dict)
    #: True if the graph itself changes weights
    _changes_weights: bool = False
    _decided: Decided | None = None
    _recorder: StepRecorder | None = None
    #: compares the first step with the plain run; None: no verification
    _verifying: Verifying | None = None
    _dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    #: storages that codecs may pack
    _packable: frozenset[str] = frozenset()
    #: for each saved output of forward, its storage; None if codecs may not pack it
    _saved: tuple[str | None, ...] = ()
    #: offers to split the loss, until that is decided; then the number of pieces
    _splits: Splits | None = None
    _pieces: int | None = None

    def __post_init__(self) -> None:
        kind = self.traced_on or self.target.device.type
        survey = ProblemSource(self.options, self.target, self.profile, kind, self.sizes)
        survey.learn_codecs()
        self.target = survey.target
        self._planning = Planning(
            self.name,
            survey,
            self.held_bytes,
            self.settled,
            self.explains,
            self.turns,
            self.hosts,
        )
        self.places = WeightPlaces(self.parameters, self.target.runtime.key, self._kind == "cpu")

    @property
    def offers(self) -> Offers | None:
        """Gradients that the graphs offer to an optimizer; set once there is a plan."""
        return self._planning.offers

    # --- hooks of the lowering ----------------------------------------------------------------

    def training(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, inputs: Any
    ) -> Halves | None:
        """Return new graphs for forward and backward; None if they stay unchanged."""
        made = self._plan(self._pair(forward, backward, num_outputs))
        if made is None:
            return None
        assert made.backward is not None
        return made.forward, made.backward

    def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule | None:
        outputs = len(outputs_of(graph))
        made = self._plan(self._pair(graph, None, outputs))
        return None if made is None else made.forward

    def ready(self, phase: Phase, compiled: Compiled) -> Compiled:
        """Wrap a compiled graph to time, verify and account for each run."""
        report, recorder = self.report, self._recorder
        if report is None or recorder is None:
            return compiled
        garbage.compiled()
        observe = partial(report.observe, FORWARD if phase == "inference" else phase)
        clock = self._clock
        # a step that fits stays within its budget only if freed memory goes back to the system
        budgeted = self.options.memory is not None and heap().keeps
        watched = self._kind == "cpu" and (not report.fits or budgeted)

        offered = self.offers.outputs if self.offers is not None and phase == BACKWARD else ()
        direct_reads = self._direct_reads(phase)
        mover = runtime_for(self.target.runtime.key).mover if direct_reads else None
        profile, kept_from = self.profile, len(self._saved)
        tensor_of = {m.id: m.tensor for m in report.plan.moves if m.tensor in self._packable}
        spills = spilled_bytes(report.problem, report.plan, self._kind) > 0
        drives = watch_for(self.target.runtime) if spills else None
        first = True
        verifying = self._verifying

        def timed(arguments: list[Any]) -> Any:
            nonlocal first
            check = None if verifying is None else verifying.begin(phase, arguments)
            with self._recorded(phase, arguments), self._among_others(phase, arguments) as room:
                if watched and (phase != BACKWARD or room is not None):
                    if first:
                        if not report.fits:
                            garbage.collect_of_compiling()
                        heap().settle()
                        first = False
                    assert self.executions is not None
                    sizes = self.executions.sizes if room is None else room.sizes
                    standing = self.needs_at(sizes).standing_bytes
                    most = report.budget_bytes
                    if room is not None:
                        standing += room.held_bytes
                        most = room.peak_bytes + room.kept_limit_bytes
                    heap().begin(standing, most, self._at_rest, lays_out=not report.fits)
                started = clock.start()
                with recorder.running(phase), profile.watching(tensor_of):
                    result = compiled(arguments)
                clock.stop(started, observe)
            if phase != FORWARD:
                garbage.ran()
            if kept_from and phase == FORWARD:
                profile.look_at_saved(self._saved, result[-kept_from:])
            if mover is not None:
                mover.read_in_place(direct_reads)
            if offered:
                result = list(result)
                for i in offered:
                    result[i] = taken_or_kept(result[i])
            if phase == BACKWARD:
                self.entry.end()
                self.places.made_gradients()
            if phase != FORWARD:
                if watched:
                    heap().end()
                if drives is not None:
                    drives.step_over()
            if check is not None:
                check(result)
            return result

        return timed

    def _among_others(
        self, phase: Phase, arguments: Sequence[Any]
    ) -> AbstractContextManager[Room | None]:
        assert self.report is not None and self.executions is not None
        lends = self.lends or self.options.lowering != "inductor"
        return self.executions.running(
            phase, arguments, self._peak_at, lends, self.turns, self.moves, self._holds_saved
        )

    def needs_at(self, sizes: tuple[int, ...]) -> Footprint:
        """Return the memory needs of the plan for these values of the graph's symbols."""
        return Footprint() if self._needs is None else self._needs.at(sizes)

    def knows_needs_at(self, sizes: tuple[int, ...]) -> bool:
        """True if `needs_at` is already computed for these sizes."""
        return self._needs is None or not sizes or sizes in self._needs.known

    def _peak_at(self, sizes: tuple[int, ...]) -> int:
        return self.needs_at(sizes).peak_bytes

    def _recorded(self, phase: Phase, arguments: Sequence[Any]) -> AbstractContextManager[None]:
        recording = recorded()
        if recording is None:
            return nullcontext()
        assert self.executions is not None
        binding = self.executions.binding
        if phase == BACKWARD:
            binding, _ = self.executions.forward_of(arguments)
        return recording.running(
            self.executions.name, phase, binding, self._touched, self.target.device
        )

    @cached_property
    def _touched(self) -> Touched:
        assert self.report is not None
        return touched_by(self.report.problem, self._weights)

    @property
    def steps_recorded(self) -> int:
        return 0 if self._recorder is None else self._recorder.recorded

    @property
    def lends(self) -> bool:
        """True if buffers of evicted tensors must not be reused: the runtime may keep them."""
        return self.turns

    @property
    def _holds_saved(self) -> bool:
        """True if, from the start of backward, the plan includes everything that forward saved."""
        assert self._decided is not None
        return self.turns and self._decided.result.policy == "turnover"

    @property
    def moves(self) -> bool:
        """True if any tensor leaves the device or is recomputed."""
        return self.report is None or not self.report.fits

    def _direct_reads(self, phase: Phase) -> int:
        """Count the operands that ops of this half use in place on the host."""
        assert self.report is not None
        ops, half = self.report.problem.op, FORWARD if phase == "inference" else phase
        reads = (d for d in self.report.plan.directs if d.tensor in ops[d.op].reads)
        return sum((ops[d.op].phase == BACKWARD) == (half == BACKWARD) for d in reads)

    def _pair(
        self, forward: fx.GraphModule, backward: fx.GraphModule | None, outputs: int
    ) -> Graphs:
        return Graphs(
            forward, backward, outputs, self.parameters, self._kind, self.names, self.fixed
        )

    @property
    def _kind(self) -> str:
        return self._planning.survey.kind

    @cached_property
    def _clock(self) -> StepClock:
        return clock_for(self.target.device)

    # --- the plan -----------------------------------------------------------------------------

    def may_split(self, splits: Splits) -> None:
        self._splits = splits

    def _settle(self, given: Graphs, tell: Tell) -> tuple[Graphs, Choice]:
        """Return the graphs to plan, whole or with the loss in pieces, and the plan."""
        base, splits = self._planning, self._splits
        if splits is None or given.backward is None:
            return base.settle(given, self.updated, tell)

        def whole() -> tuple[Planning, Graphs, Choice]:
            return base, *base.settle(given, self.updated, tell)

        def in_pieces(pieces: int) -> tuple[Planning, Graphs, Choice]:
            tell(f"planning with the loss in {pieces} pieces")
            planning = replace(base, survey=replace(base.survey), explains=False)
            halves = self._pair(*splits.into(pieces), given.num_outputs)
            return planning, *planning.settle(halves, self.updated, tell)

        ways = Ways(
            self.options,
            base.budget(),
            whole,
            in_pieces,
            lambda: splits.most_pieces,
            lambda: splits.largest_bytes,
            lambda made: made[2],
        )
        if self.settled is not None:
            self._pieces = self.settled.pieces
            found = whole() if self._pieces is None else in_pieces(self._pieces)
        else:
            found, self._pieces = ways.best()
        self._planning, graphs, choice = found
        if self._pieces is not None:
            choice = replace(choice, split=splits.describe(self._pieces))
        self._splits = None  # holds the whole joint graph
        return graphs, choice

    def _plan(self, given: Graphs) -> Graphs | None:
        options, target = self.options, self.target
        with Progress(self.name) as progress:
            graphs, choice = self._settle(given, progress)
            annotated, decided = choice.annotated, choice.decided
        if options.verify:
            self._verifying = self._verifying_of(given, annotated, decided)
        moves = not decided.fits or self.budget() is None
        if self._verifying is not None and self.fixed and moves:
            count = f"{len(self.fixed)} weight{'s' if len(self.fixed) > 1 else ''}"
            self._verifying.verified.notes["weights"] = (
                f"{count} stayed on the device, where others hold the same memory"
            )
        self._recorder = StepRecorder(
            self.name,
            self._clock,
            partial(_waiting, weakref.ref(self.entry)),
            decided.order.steps,
            move_names(decided.result.plan, annotated.labels, annotated.names),
        )
        self.report = replace(
            self._planning.report(choice),
            profile=self.profile,
            settle=self._clock.settle,
            steps=self._recorder,
            verified=None if self._verifying is None else self._verifying.verified,
            kept=partial(kept_between, target.runtime),
        )
        written = {t for op in annotated.problem.ops for t in op.writes}
        weights = (t.id for t in annotated.problem.tensors if t.kind == "weight")
        self._changes_weights = not written.isdisjoint(weights)
        self._weights = weights_of(graphs, annotated, sorted(self.parameters))
        self._dtypes = annotated.dtypes
        self._decided = decided
        if any(isinstance(v, torch.SymInt) for v in values(graphs)):
            self._graphs = graphs  # needed to evaluate the plan at other sizes
        kept = decided.kept
        if kept is None:
            kept = kept_at_turn(annotated.problem, decided.result.timeline)
        problem = annotated.problem
        self._needs = NeedsBySize(
            Footprint(standing_in(problem), self.report.needed_peak_bytes, bytes_of(problem, kept)),
            None if self._graphs is None else self._problem_at,
            decided.result.plan,
            decided.order.steps,
            self.report.reserve_bytes,
            kept,
        )
        self.entry.trains = graphs.backward is not None
        made: Graphs | None
        if not decided.fits:
            made = self._rewrite(graphs, annotated, decided)
        else:
            made = None if graphs is given else graphs
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

    def _verifying_of(self, given: Graphs, annotated: Annotated, decided: Decided) -> Verifying:
        rounds = _rounds(decided.result.plan, decided.machine)
        exact = self.options.lowering == "aot_eager" and not rounds and self._pieces is None

        def label(phase: str, node: fx.Node) -> str:
            return annotated.labels.get(annotated.storage_of.get((phase, node.name), ""), "")

        return Verifying(self.name, given, self.target.device, Verified(exact), label)

    def plan_only(
        self, forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int
    ) -> Decided:
        """Return the decision for these graphs without rewriting them. Nothing runs unless ops are
        measured. Raises `Infeasible`."""
        graphs = self._pair(forward, backward, num_outputs)
        _, choice = self._settle(graphs, lambda text: None)
        return choice.decided

    def step_that_moves_nothing(
        self, forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int
    ) -> Problem:
        graphs = self._pair(forward, backward, num_outputs)
        return self._planning.survey.annotate(graphs, None, lambda text: None).problem

    def budget(self) -> int | None:
        """Bytes that the options leave this graph; None: as few as possible, found by planning."""
        return self._planning.budget()

    def _rewrite(self, graphs: Graphs, annotated: Annotated, decided: Decided) -> Graphs:
        _check_one_device(self.name, graphs, self.target.device)
        if self._kind == "cpu":
            heap().prepare()
            tensor_memory.install()
            if malloc_leaves_holes(os.environ):
                tell_once("malloc of this glibc leaves holes between tensors: " + HINT)
        settings = self.target.runtime
        # opens the spill files, so that errors show now
        device = runtime_for(settings.key).device
        assert self.report is not None
        device.bound_packing(self, self.report.reserve_bytes // PACKING_SHARE)
        device.keep_room(self, _gradient_bytes_on_host(annotated.problem, decided.result.plan))
        plan, exact = decided.result.plan, self.options.lowering != "inductor"
        by_device: Mapping[str, bool] = {}
        if isinstance(self.target, CudaTarget) and graphs.backward is not None:
            timeline = decided.result.timeline
            by_device = advice(annotated, timeline, self.target.profile)
        self.places = weight_places(self.places, graphs, annotated, plan, by_device)
        if self.places.has_any and graphs.backward is not None:
            verified = None if self._verifying is None else self._verifying.verified
            self.places.watch = Watch(self.names, partial(_tell_of_weights, self.name, verified))
        made = rewrite(graphs, annotated, plan, decided.order, settings.key, exact)
        tensors = annotated.problem.tensors
        packable = {t.id for t in tensors if t.kind == "activation" and not t.pinned}
        self._packable = frozenset(packable)
        self._saved = tuple(s if s in packable else None for s in made.saved)
        if not exact:
            for _, module in made.graphs:
                pin_order(module)
        return made.graphs

    def _at_rest(self) -> None:
        runtime_for(self.target.runtime.key).device.drain()

    def place_weights(self, arguments: Sequence[Any]) -> bool:
        """Place weights before a call. False if a hosted weight cannot leave."""
        if not self.places.place(arguments):
            return False
        if self.executions is not None:
            hosted = None if self._changes_weights else self.places.of(arguments)
            self.executions.weights = hosted
        return True

    # --- observations ---------------------------------------------------------------------------

    def reconsider(self, held_bytes: int) -> Settled | None:
        """Plan again if what runs have shown makes it worth recompiling; see `profiling`."""
        if self.report is None or self._decided is None or self._decided.fits:
            return None
        again = replace(self._planning, held_bytes=held_bytes)
        with Progress(self.name) as progress:
            text, found = again.reconsider(
                self._decided, self.report.problem, self._dtypes, progress
            )
        self.profile.decided(text, found is not None)
        log_decision(self.name, text)
        return None if found is None else replace(found, pieces=self._pieces)

    # --- later sizes --------------------------------------------------------------------------

    def _problem_at(self, sizes: tuple[int, ...]) -> Problem:
        """Build the planned step at other sizes."""
        assert self._graphs is not None
        planning, values = self._planning, dict(zip(self.symbols, sizes, strict=True))
        return planning.survey.problem(
            self._graphs, planning.in_place, planning.stays, hint_of(values)
        ).problem


def _rounds(plan: Plan, machine: Machine) -> bool:
    """True if a move uses a lossy codec."""
    lossless = {codec.name for codec in machine.codecs if codec.lossless}
    return any(move.codec is not None and move.codec not in lossless for move in plan.moves)


def _gradient_bytes_on_host(problem: Problem, plan: Plan) -> int:
    """Bytes that the gradients of each step take on the host."""
    leaving = {d.tensor for d in plan.directs} | {m.tensor for m in plan.moves}
    gradients = (t for t in problem.tensors if t.kind == "gradient")
    return sum(t.nbytes for t in gradients if t.id in leaving)


def _check_one_device(name: str, graphs: Graphs, device: torch.device) -> None:
    """Raise OffloadError if the graph uses an accelerator other than `device`."""
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


def _tell_of_weights(name: str, verified: Verified | None, finding: str) -> None:
    warn(f"{name}: {finding}")
    if verified is not None:
        verified.notes["weights"] = finding


def _waiting(entry: weakref.ref[GraphUsage]) -> int:
    """Count forwards that wait for their backward. Weak, since reports outlive their graph."""
    found = entry()
    return 0 if found is None else len(found.waiting())
