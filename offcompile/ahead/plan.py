"""`offcompile.plan`: plans a model as the backend would, for hardware that need not be present."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from offcompile.graph.graphs import Graphs
from offcompile.graph.split.decision import Ways
from offcompile.graph.updates import Updates
from offcompile.graph.weight_placement import Choice
from offcompile.ir import InvalidInput, Problem, Violation
from offcompile.machine.hardware import load_profile
from offcompile.machine.options import Options
from offcompile.machine.target import CpuTarget, CudaTarget, Target, target_for
from offcompile.planning.feedback.profiling import Profile
from offcompile.planning.fit_budget import planning_seconds
from offcompile.planning.floors import floor_of, with_reserve
from offcompile.planning.planner import NO_RIVAL, Rival, bounded_longer
from offcompile.planning.splitting import SplitPart, StepEstimate
from offcompile.report.report import PlanReport
from offcompile.report.simple_way import SimpleWay
from offcompile.run.plan.candidates import Candidate, plan_in_order, searched_on
from offcompile.run.plan.contract import PlanRequest
from offcompile.run.plan.plan_graph import report_of
from offcompile.run.plan.planner import GraphPlanner
from offcompile.runtime.base.interpreter import rarely_collected
from offcompile.runtime.base.progress import Progress

from .batch_trace import Traced
from .fake_trace import trace_ahead
from .layers import Layers, find_layers, shortened
from .lora.adapters import with_adapters
from .lora.request import LoraRequest
from .simple_ways import SimpleWays
from .surveyed import AheadProblemSource, NotAlike, Twin

CPU = "cpu"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class ForecastRequest:
    """A request to plan a model."""

    model: nn.Module
    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]
    options: Options
    loss: Callable[[Any], Any] | None = None
    optimizer: str | None = None
    #: True if only a few of equal layers are traced
    repeats: bool = True
    #: True if ops of unknown cost are run and measured
    measures: bool = False
    #: True if optimizer states on the host may stream to the device for their update
    streams: bool = True


def plan(
    model: nn.Module,
    *inputs: Any,
    memory: int | float | str | None = None,
    hardware: str | Path | None = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: str | None = None,
    host_memory: int | str | None = None,
    measure: bool = False,
    stream_states: bool = True,
    lora: str | Mapping[str, Any] | None = None,
    options: Mapping[str, object] | None = None,
    **keywords: Any,
) -> PlanReport:
    """Predict a training step of the model without the hardware: allocates nothing and runs
    nothing. The report is that of a compiled model, without measurements.

    model: may be on the meta device. inputs, keywords: its arguments; only shapes and dtypes of
    tensors matter, so they may be on the meta device too.
    memory: as in the backend's options; None: all memory of the device.
    hardware: name or file of a profile; None: this machine, which is measured once.
    loss: maps the model's output to the value to differentiate; None: the output itself.
    optimizer: "adamw", "adam", "momentum" or "sgd": the step includes its states and updates, as
    `offcompile.optim` runs them with `overlap=True`; None: the step ends with the gradients.
    stream_states: the device may make some updates of weights on the host, with states streamed to
    it and back (`stream` of `offcompile.optim`); False: the host makes all of them.
    lora: train only low-rank adapters: "r=16", with alpha=32 or targets=q_proj,v_proj behind a
    comma, or a dictionary of these; targets: names of linear layers (default: "all-linear").
    measure: run ops of unknown cost to measure them, instead of estimating.
    options: other options of the backend.

    Raises `Infeasible` if no plan fits, with the smallest change that would help.
    """
    refuse_measuring(hardware, measure)
    given = {"host_memory": host_memory} | dict(options or {})
    given |= {"memory": memory, "hardware": hardware}
    trained = check_model(model)
    if lora is not None:
        trained, _ = with_adapters(trained, LoraRequest.read(lora))
    asked = ForecastRequest(
        trained,
        inputs,
        keywords,
        Options.read(given),
        loss,
        optimizer,
        measures=measure,
        streams=stream_states,
    )
    with Progress("plan") as tell:
        try:
            return _compared(Ahead.of(asked, tell), tell)
        except NotAlike as error:  # e.g. with operands on the host, which are measured only now
            tell(f"{error} All of them are traced.")
            return _compared(Ahead.of(replace(asked, repeats=False), tell), tell)


def _compared(ahead: Ahead, tell: Tell) -> PlanReport:
    """Make the report; compare with simpler ways if something has to move."""
    report = ahead.report(tell)
    if report.fits:
        return report
    tell("comparing with simpler ways")
    return replace(report, simple_ways=tuple(simple_ways(ahead, report.budget_bytes)))


def simple_ways(ahead: Ahead, budget: int) -> list[SimpleWay]:
    found, updates = ahead.survey.problem(ahead.graphs), ahead.survey.updates
    factor = None if updates is None else updates.host_factor
    # a card's allocator leaves gaps whoever plans
    room = budget - (ahead.target.holes_bytes(budget) if ahead.target.device.type == "cuda" else 0)
    machine = ahead.survey.machine(room)
    return list(SimpleWays(found.problem, machine, room, found.labels, factor).all())


def refuse_measuring(hardware: str | Path | None, measure: bool) -> None:
    if hardware is not None and measure:
        detail = "ops cannot be run on a profile; leave out hardware or measure"
        raise InvalidInput([Violation("bad-value", "measure", detail)])


def check_model(model: object) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    detail = f"{type(model).__name__} is no torch.nn.Module; give the module that would be compiled"
    raise InvalidInput([Violation("bad-value", "model", detail)])


# --- planning --------------------------------------------------------------------------------


def target_ahead(options: Options, tell: Tell) -> Target:
    """The target of the named hardware profile; this machine if none is named."""
    if options.hardware is None:
        return target_for(options, None, tell)
    profile = load_profile(options.hardware)
    if profile.name == CPU:
        return CpuTarget(profile, options.spill, profile.device_memory_bytes, options.host_memory)
    disks = () if options.host_memory is None else options.spill
    return CudaTarget(profile, disks, profile.device_memory_bytes, options.host_memory)


@dataclass(eq=False)
class Ahead:
    """A traced model, to be planned under one budget or several."""

    asked: ForecastRequest
    target: Target
    graphs: Graphs
    survey: AheadProblemSource
    #: planning time of each search
    seconds: float
    #: traces to split: the model, and the same with one period of layers less
    traces: tuple[Traced, ...] = ()
    layers: Layers | None = None
    #: number of pieces of the loss; None: whole
    pieces: int | None = None
    _in_pieces: dict[int, Ahead] = field(default_factory=dict)

    @classmethod
    @rarely_collected()
    def of(cls, asked: ForecastRequest, tell: Tell, target: Target | None = None) -> Ahead:
        target = target or target_ahead(asked.options, tell)
        layers = find_layers(asked.model) if asked.repeats else None
        if layers is not None:
            try:
                return cls._from_few(asked, target, layers, tell)
            except NotAlike as error:
                tell(f"{error} All of them are traced.")
        tell("tracing")
        trace = _traced(asked, asked.model, target)
        return cls._made(asked, target, (trace,), None, None, tell)

    @classmethod
    def _from_few(cls, asked: ForecastRequest, target: Target, layers: Layers, tell: Tell) -> Ahead:
        traces = []
        for periods in (layers.traced, layers.traced - 1):
            kept = layers.kept(periods)
            tell(f"tracing {kept} of {layers.count} layers in {layers}")
            few_layers = shortened(asked.model, layers, periods)
            traces.append(_traced(asked, few_layers, target))
        return cls._made(asked, target, tuple(traces), layers, None, tell)

    @classmethod
    def few(cls, asked: ForecastRequest, target: Target, tell: Tell) -> Ahead | None:
        """The model with few of its layers; None if it has none to leave out."""
        layers = find_layers(asked.model) if asked.repeats else None
        if layers is None:
            return None
        trace = _traced(asked, shortened(asked.model, layers, layers.traced), target)
        return cls._made(asked, target, (trace,), None, None, tell)

    @classmethod
    def _made(
        cls,
        asked: ForecastRequest,
        target: Target,
        traces: tuple[Traced, ...],
        layers: Layers | None,
        pieces: int | None,
        tell: Tell,
    ) -> Ahead:
        graphs = [_graphs(trace, pieces) for trace in traces]
        survey = cls._survey(asked, target, graphs[0])
        if layers is not None:
            survey.twin = Twin(cls._survey(asked, target, graphs[1]), graphs[1], layers)
        found = survey.annotate(graphs[0], None, tell)
        seconds = planning_seconds(found.problem)
        return cls(asked, target, graphs[0], survey, seconds, traces, layers, pieces)

    # --- in pieces --------------------------------------------------------------------------

    def in_pieces(self, pieces: int, tell: Tell) -> Ahead:
        """Return the same model with its loss in pieces."""
        if pieces not in self._in_pieces:
            tell(f"putting the loss in {pieces} pieces")
            made = self._made(self.asked, self.target, self.traces, self.layers, pieces, tell)
            self._in_pieces[pieces] = made
        return self._in_pieces[pieces]

    @property
    def most_pieces(self) -> int:
        """The most pieces of the loss; 0 if there is nothing to split."""
        splits = self.traces[0].splits if self.traces else None
        return 0 if splits is None or self.graphs.backward is None else splits.most_pieces

    @property
    def may_split(self) -> bool:
        return self.asked.options.may_split and self.most_pieces > 1

    @property
    def words_split(self) -> int:
        """The largest word count of a loss that can be split."""
        splits = self.traces[0].splits
        found = None if splits is None else splits.found
        return 0 if found is None else max(region.words for region in found.regions)

    @staticmethod
    def _survey(asked: ForecastRequest, target: Target, graphs: Graphs) -> AheadProblemSource:
        # with a named profile, op costs are estimated, not measured
        hardware = asked.options.hardware or (None if asked.measures else CPU)
        options = replace(asked.options, hardware=hardware)
        updates = None
        if asked.optimizer is not None and graphs.backward is not None:
            on_card = isinstance(target, CudaTarget)
            updates = Updates.read(asked.optimizer, target.profile, on_card, asked.streams)
        return AheadProblemSource(options, target, Profile(), CPU, updates=updates, traced=graphs)

    def choose(
        self, memory: Any, tell: Tell, seconds: float | None = None, explains: bool = True
    ) -> Choice:
        """Plan the model, whole or with its loss in pieces. Raises `Infeasible`."""
        return self.candidate(memory, tell, seconds, explains).choice

    @rarely_collected()
    def candidate(
        self, memory: Any, tell: Tell, seconds: float | None = None, explains: bool = True
    ) -> Candidate:
        """Like `choose`, with the graphs that are planned. Raises `Infeasible`."""
        options = replace(self.asked.options, memory=memory)

        def ahead(pieces: int | None) -> Ahead:
            return self if pieces is None else self.in_pieces(pieces, tell)

        def choose(pieces: int | None, explain: bool, rival: Rival) -> Candidate:
            made = ahead(pieces).choose_whole(memory, tell, seconds, explains and explain, rival)
            return replace(made, pieces=pieces)

        splits = self.traces[0].splits if self.traces else None
        found, splitting = Ways(
            options,
            self.target.budget_bytes(options),
            partial(choose, None),
            choose,
            lambda pieces: ahead(pieces).estimate,
            self.parts,
            lambda: self.most_pieces,
            lambda: 0 if splits is None else splits.largest_bytes,
            lambda made: made.choice,
            lambda made: ahead(made.pieces).searched_on(made, memory, tell, seconds),
            explains,
        ).best()
        choice = found.choice
        made = choice.decided
        result = bounded_longer(choice.annotated.problem, made.machine, made.result)
        decided = replace(made, result=result)
        return replace(found, choice=replace(choice, decided=decided, splitting=splitting))

    @cached_property
    def estimate(self) -> StepEstimate:
        steps = self.variants
        floor = min(floor_of(step, self.survey.machine) for step in steps)
        return StepEstimate(steps[0], with_reserve(floor, self.target.reserve_bytes))

    @cached_property
    def variants(self) -> list[Problem]:
        """The step with all tensors on the device, and with weights on the host."""
        plain = self.survey.problem(self.graphs).problem
        weights = sum(t.nbytes for t in plain.tensors if t.kind == "weight")
        in_place = self.survey.target.in_place(2 * weights)
        if in_place is None:
            return [plain]
        return [plain, self.survey.problem(self.graphs, in_place).problem]

    def parts(self, pieces: int) -> tuple[SplitPart, ...]:
        """Describe what so many pieces split, in all layers."""
        traced = [trace.splits.parts(pieces) for trace in self.traces if trace.splits is not None]
        if self.layers is None:
            return traced[0]
        fewer = {replace(part, products=(), count=0): part.count for part in traced[1]}
        beyond = self.layers.beyond
        found = []
        for part in traced[0]:
            in_a_period = part.count - fewer.get(replace(part, products=(), count=0), 0)
            found.append(replace(part, count=part.count + beyond * in_a_period))
        return tuple(found)

    def choose_whole(
        self,
        memory: Any,
        tell: Tell,
        seconds: float | None = None,
        explains: bool = True,
        rival: Rival = NO_RIVAL,
    ) -> Candidate:
        """Plan the model without splitting further. Raises `Infeasible`, and `Beaten` if no plan
        can beat the rival."""
        planner = self.planner(self._options(memory, seconds), tell, explains, rival)
        return plan_in_order(planner, self.graphs)

    def searched_on(
        self, made: Candidate, memory: Any, tell: Tell, seconds: float | None
    ) -> Candidate:
        """Search on from a plan of the model without splitting further, if a trial found it."""
        return searched_on(self.planner(self._options(memory, seconds), tell), made)

    def _options(self, memory: Any, seconds: float | None) -> Options:
        options = self.survey.options
        return replace(options, memory=memory, seconds=seconds or options.seconds or self.seconds)

    def planner(
        self, options: Options, tell: Tell, explains: bool = True, rival: Rival = NO_RIVAL
    ) -> GraphPlanner:
        request = PlanRequest("the model", explains=explains, quick=True, rival=rival)
        return GraphPlanner(replace(self.survey, options=options), request, tell)

    def report(self, tell: Tell, choice: Choice | None = None) -> PlanReport:
        memory = self.asked.options.memory
        planner = self.planner(replace(self.survey.options, memory=memory), tell)
        return report_of(planner, choice or self.choose(memory, tell))


def _traced(asked: ForecastRequest, model: nn.Module, target: Target) -> Traced:
    lowering, for_card = asked.options.lowering, isinstance(target, CudaTarget)
    return trace_ahead(model, asked.inputs, asked.keywords, lowering, asked.loss, for_card)


def _graphs(traced: Traced, pieces: int | None = None) -> Graphs:
    forward, backward, outputs = traced.graphs
    if pieces is not None:
        assert traced.splits is not None
        forward, backward = traced.splits.into(pieces)
    return Graphs(forward, backward, outputs, traced.parameters, CPU, traced.names)
