"""Hooks into the lowering of a captured graph: plan its halves, and wrap them once compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from offcompile.graph.graphs import Graphs, mutated_inputs, outputs_of
from offcompile.graph.lowering.lower import Compiled, Halves, Phase
from offcompile.graph.split import Splits
from offcompile.runtime.base.interpreter import rarely_collected

from .plan.contract import GraphFacts, Instead, Planned, PlanRequest
from .plan.plan_graph import plan_graph
from .problem_source import ProblemSource
from .ranks.meeting import Meeting
from .replay.step_graph import StepGraph
from .running_step import RunningHalf


class CompileHooks:
    """The hooks of one lowering (`graph.lowering.lower.Hooks`). `planned` is set by the first."""

    def __init__(
        self,
        facts: GraphFacts,
        request: PlanRequest,
        meeting: Meeting | None = None,
        instead: Instead | None = None,
    ) -> None:
        self.facts, self.request, self.meeting, self.instead = facts, request, meeting, instead
        kind = facts.target.device.type
        self.source = ProblemSource(facts.options, facts.target, facts.profile, kind, request.sizes)
        facts.runs.usage.outside.compiles()
        # measures, so not while the graph is traced
        self.source.learn_codecs()
        self.planned: Planned | None = None
        #: captures the halves once their plan has settled; None: nobody asked for that
        self.step: StepGraph | None = None
        self._splits: Splits | None = None

    def compiles(self, phase: Phase) -> None:
        self.facts.runs.usage.outside.compiles()

    def may_split(self, splits: Splits) -> None:
        self._splits = splits

    def training(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, inputs: Any
    ) -> Halves | None:
        """Return new graphs for forward and backward; None if they stay unchanged."""
        made = self._plan(forward, backward, num_outputs)
        self._may_capture(forward if made is None else made.forward, num_outputs)
        if made is None:
            return None
        assert made.backward is not None
        return made.forward, made.backward

    def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule | None:
        made = self._plan(graph, None, len(outputs_of(graph)))
        self._may_capture(graph if made is None else made.forward, 0)
        return None if made is None else made.forward

    @property
    def no_buffer_reuse(self) -> bool:
        """True if buffers of evicted tensors must not be reused: the runtime may keep them."""
        return self.planned is not None and self.planned.request.kind.offload_saved

    def ready(self, phase: Phase, compiled: Compiled) -> Compiled:
        """Wrap a compiled graph to time, verify and account for each run."""
        if self.planned is None:
            return compiled
        return RunningHalf(self.facts, self.planned, phase, compiled, self.step)

    def _may_capture(self, forward: fx.GraphModule, num_outputs: int) -> None:
        """Make what captures both halves, if it was asked for."""
        if self.facts.options.cudagraphs and self.planned is not None:
            changed = {n for node in forward.graph.nodes for n in mutated_inputs(node)}
            given = forward.graph.find_nodes(op="placeholder")
            written = frozenset(i for i, node in enumerate(given) if node in changed)
            self.step = StepGraph(self.facts, self.planned, num_outputs, written)

    def _plan(
        self, forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int
    ) -> Graphs | None:
        facts, request = self.facts, self.request
        given = Graphs(
            forward,
            backward,
            num_outputs,
            facts.parameters,
            self.source.kind,
            facts.names,
            request.fixed,
        )
        splits, self._splits = self._splits, None  # holds the whole joint graph
        instead, self.instead = self.instead, None  # holds a batch
        with rarely_collected():
            self.planned, made = plan_graph(
                facts, request, self.source, given, splits, self.meeting, instead
            )
        return made
