"""A captured graph, its plans, and the choice of the plan that a call runs."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import is_fake

from offcompile.graph.lowering.lower import lower
from offcompile.graph.names import argument_names
from offcompile.graph.sizes import symbols_of
from offcompile.ir import Infeasible, OffloadError
from offcompile.machine.options import Options
from offcompile.machine.target import Target
from offcompile.planning.feedback.profiling import Profile, Settled
from offcompile.report.log import log_decision
from offcompile.runtime.base.garbage import garbage
from offcompile.runtime.memory.heap import address_space_is_limited
from offcompile.runtime.moves.registry import lanes_moved
from offcompile.runtime.moves.weights import is_there_by_plan
from offcompile.runtime.states.update_ops import calling
from offcompile.runtime.states.updates import updater_of

from .accounts.fixed_weights import FixedWeights
from .accounts.graph_runs import GraphRuns
from .accounts.usage import DeviceUsage, ParameterSet
from .foreign_autograd import refuse_foreign_autograd
from .pipeline import Pipeline
from .recording import recorded
from .refusals import let_go
from .trial import Trial

_numbers = itertools.count()

#: a graph that needs more plans than this has sizes that never settle
MOST_VARIANTS = 16
#: share of the budget that a graph, plus the saved activations of another one like it, may take
#: in the first step
WITH_ANOTHER = 0.75


@dataclass
class Variant:
    """One compilation of the graph, for given sizes and given memory held by others."""

    pipeline: Pipeline
    run: Callable[..., Any]


class GraphVariants:
    """A captured graph, compiled as often as changes in its sizes and in others' memory require."""

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        target: Target,
        books: DeviceUsage,
    ) -> None:
        self.gm = gm
        #: the arguments as traced; holding the real ones would keep a batch alive
        self.traced = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        self.names = argument_names(gm)
        self.options, self.target, self.books = options, target, books
        self.name = f"graph {next(_numbers)}"
        self.entry = books.open(target.runtime.key)
        self.fixed = FixedWeights(self.name, self.names)
        self.context = TracingContext.try_get()
        self.parameters = frozenset(
            i for i, x in enumerate(example_inputs) if isinstance(x, torch.nn.Parameter)
        )
        self._in_order = sorted(self.parameters)
        #: symbols, with how to read their values from a call's arguments
        self.symbols = symbols_of(self.traced)
        self.budget = options.memory_bytes(target.device_bytes)
        self.variants: list[Variant] = []
        holes = 0
        # When other graphs run in between, a graph finds the places of its tensors taken more often
        # than when it runs alone; for the latter, a plan reserves three quarters of this. With a
        # limited address space, freed blocks go back at once and leave no holes.
        if self.budget is not None and not address_space_is_limited():
            holes = target.holes_bytes(self.budget) * 4 // 3
        self.executions = GraphRuns(
            self.name, self.budget, books, self.entry, target.runtime, holes
        )
        #: arguments that an optimizer updates during backward
        self.updated: frozenset[int] = frozenset()
        self.profile = Profile()
        self.trial = Trial()
        #: True if the graph returns something other than a loss
        self.goes_on = all(x.numel() > 1 for x in _tensors_out(gm))
        #: combinations of (everything saved may leave, all weights on the host) found infeasible
        self._in_vain: set[tuple[bool, bool]] = set()
        #: for each set of parameters, the sizes and the plan of the last run
        self._ran: weakref.WeakKeyDictionary[ParameterSet, tuple[tuple[int, ...], Variant]] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, *args: Any) -> Any:
        binding = self._binding(args)
        self.books.begins(self.entry, binding)
        self.books.results.given([x for i, x in enumerate(args) if i not in self.parameters])
        if not self.variants:
            self._plan_first(args, None)
        variant = self.variant_for(args)
        if torch._C._current_graph_task_id() == -1:  # a recomputed forward is no new step
            shown = self.profile.due()
            if self._lanes_due(variant) or shown:
                variant = self._reconsidered(variant, args)
            else:
                variant = self._tried(variant, args)
        while not variant.pipeline.place_weights(args):
            variant = self._without_fixed(variant, args)
        if variant.pipeline.moves:
            refuse_foreign_autograd(self.name)
        self._ran[binding] = self._sizes_of(args), variant
        self.profile.begin_step()
        self.executions.call(binding, self._sizes_of(args))
        if variant.pipeline.offers is None:
            outputs = variant.run(*args)
        else:
            with calling(self.name, args):
                outputs = variant.run(*args)
        sizes = self._sizes_of(args)
        kept = variant.pipeline.needs_at(sizes).kept_bytes
        whole = max(kept, self.variants[0].pipeline.needs_at(sizes).kept_bytes)
        one = self.entry.begin(outputs, binding, kept, whole)
        if one is None:
            self.books.results.made(self._tensors_here(outputs))
        if (recording := recorded()) is not None:
            recording.waits(one)
        return outputs

    def _tensors_here(self, outputs: object) -> list[torch.Tensor]:
        several = outputs if isinstance(outputs, tuple | list) else (outputs,)
        kind = self.target.device.type
        return [x for x in several if isinstance(x, torch.Tensor) and x.device.type == kind]

    def first(self, example_inputs: Sequence[Any]) -> None:
        """Compile while Dynamo compiles, for the sizes that it traced.

        DDPOptimizer splits a graph and gives each part fake tensors, even for weights. Such parts
        are planned at their first call, which passes the real weights.
        """
        if any(isinstance(x, torch.Tensor) and is_fake(x) for x in example_inputs):
            self.context = _on_its_own(self.context)
        else:
            self._plan_first(example_inputs, example_inputs)

    def _plan_first(self, args: Sequence[Any], inputs: Sequence[Any] | None) -> None:
        """Compile for the traced sizes. `inputs` is given while Dynamo compiles."""
        self.books.invalidate()
        self._look_at_weights(args)
        held = self._likely_held(args)
        try:
            self._make(held, (), inputs)
        except Infeasible:
            if self._surely_held(args) < held:
                self._plan_first(args, inputs)
            elif self._hosting(args, (), first_inputs=inputs) is None:
                raise

    def variant_for(self, args: Sequence[Any]) -> Variant:
        """Return the newest plan within the budget for these arguments; make one if needed."""
        newest = self.variants[-1]
        if self.budget is None:
            return newest
        values = self._sizes_of(args)
        again = self._again(args, values)
        if again is not None:
            return again
        if self._is_to_host(args):
            self._hosting(args, values)
        turning = self._turning(args, values)
        if turning is not None:
            return turning
        preferred = self._by_preference(args)
        quick = preferred[:1] == [newest] and newest.pipeline.knows_needs_at(values)
        if quick and self._peak_of(newest, values) + self.books.most_held() <= self.budget:
            return newest
        for look in (self._held, self._surely_held):
            held = look(args)
            for variant in preferred:
                if self._within(variant, held, values):
                    return variant
        self._look_at_weights(args)
        try:
            return self._make(held, values)
        except Infeasible:
            hosting = self._hosting(args, values)
            if hosting is None:
                raise
            return hosting

    def _again(self, args: Sequence[Any], values: tuple[int, ...]) -> Variant | None:
        """Inside a backward pass, return the plan of the last run, even if it exceeds the room:
        checkpoint expects a recomputed forward to save the same tensors as the first time."""
        if torch._C._current_graph_task_id() == -1:
            return None
        sizes, variant = self._ran.get(self._binding(args), (None, None))
        return variant if sizes == values else None

    def _is_to_host(self, args: Sequence[Any]) -> bool:
        """True if weights of the call left to make room for others, and no plan hosts any."""
        if (False, True) in self._in_vain or any(v.pipeline.places.has_any for v in self.variants):
            return False
        return not self.books.sent.isdisjoint(self._binding(args).ids)

    def _hosting(
        self,
        args: Sequence[Any],
        values: tuple[int, ...],
        turns: bool = False,
        first_inputs: Sequence[Any] | None = None,
    ) -> Variant | None:
        """Return a plan with all weights of this call on the host, for when weights of other calls
        (of this graph or others) take the room. Sends weights of as few other calls as possible to
        the host. None if that does not free enough."""
        others = self.books.others(self.entry, self._binding(args))
        if not (others or turns) or (turns, True) in self._in_vain:
            return None
        for variant in self.variants:
            may = variant.pipeline.hosts and variant.pipeline.turns == turns
            if may and self._have_leave(variant, others, args, values):
                return variant

        def make(held: int) -> Variant:
            return self._make(held, values, first_inputs, turns=turns, hosts=True, explains=False)

        held = self._held(args)
        sizes = [sum(map(self.books.holdings.takes, call)) for call in others]
        sizes = [nbytes for nbytes in sizes if nbytes]
        for count in _doubling(len(sizes)):
            with suppress(Infeasible):
                made = make(max(0, held - sum(sizes[:count])))
                break
        else:
            self._in_vain.add((turns, True))
            return None
        if self._have_leave(made, others, args, values):
            return made
        try:  # their small weights do not leave
            made = make(self._held(args))
        except Infeasible:
            self._in_vain.add((turns, True))
            return None
        return made if self._within(made, self._held(args), values) else None

    def _have_leave(
        self,
        variant: Variant,
        others: Sequence[Sequence[torch.Tensor]],
        args: Sequence[Any],
        values: tuple[int, ...],
    ) -> bool:
        """Send weights of other calls to the host, call by call, until `variant`, which has the
        weights of this call there, fits. Return True if it fits."""
        for call in others:
            if self._within(variant, self._held(args), values):
                break
            variant.pipeline.places.place_alike(args, call)
            self.books.holdings.expect_on_host(call)
            self.books.sent.update(map(id, call))
            self.books.invalidate()
        return self._within(variant, self._held(args), values)

    def _by_preference(self, args: Sequence[Any]) -> list[Variant]:
        """List the plans that do not turn: those that move nothing first, then the newest first.

        Once a plan has put weights on the host, they and the plan stay. If no weight of the call is
        on the host, the plans that leave weights on the device come first.
        """
        newest = self.variants[-1]
        found = [v for v in reversed(self.variants) if not v.pipeline.turns]
        if len(found) > 1 and newest.pipeline.moves and not newest.pipeline.places.has_any:
            found.sort(key=lambda v: v.pipeline.moves)
        if len(found) > 1 and any(v.pipeline.places.has_any for v in found):
            left = self._have_left(args)
            found.sort(key=lambda v: v.pipeline.places.has_any != left)
        return found

    def _have_left(self, args: Sequence[Any]) -> bool:
        """True if weights of the call are on the host because some plan has put them there."""
        return any(is_there_by_plan(args[i]) for i in self._in_order)

    def _held(self, args: Sequence[Any]) -> int:
        return self.books.held_beside(self.entry, self._binding(args)).in_step

    def _likely_held(self, args: Sequence[Any]) -> int:
        """Like `_held`, after collecting models that have had their last step."""
        if self._held(args):
            garbage.collect_models()
            self.books.invalidate()
        return self._held(args)

    def _surely_held(self, args: Sequence[Any]) -> int:
        """Like `_held`, after collecting all garbage, even forwards that will get no backward."""
        if self._held(args):
            let_go()
            garbage.collect()
            self.books.invalidate()
        return self._held(args)

    def _turning(self, args: Sequence[Any], values: tuple[int, ...]) -> Variant | None:
        """Return a plan that lets everything saved for backward leave, if this graph is one of
        several whose saved activations together exceed the budget. None if another plan will do."""
        assert self.budget is not None
        hosts = self._have_left(args)
        whole = self._by_preference(args)[-1] if hosts else self.variants[0]
        if not self.entry.trains or (True, True) in self._in_vain:
            return None
        held, peak = self._held(args), self._peak_of(whole, values)
        alone = self.entry.has_returned and not self.entry.in_turn
        if alone or peak > self.budget:
            return None
        wanted = held + self.books.unmoved_bytes() + peak
        kept = whole.pipeline.needs_at(values).kept_bytes
        crowded = self.books.crowded(self.entry, wanted, kept, self.budget)
        if crowded is None:
            crowded = self._may_crowd(args, wanted, kept)
        if not crowded:
            return None
        turning = [v.pipeline.turns and v.pipeline.places.has_any >= hosts for v in self.variants]
        for look in (self._held, self._surely_held):
            held = look(args)
            for variant in compress(self.variants, turning):
                if self._within(variant, held, values):
                    return variant
        if hosts or (True, False) in self._in_vain:
            return self._hosting(args, values, turns=True)
        try:
            made = self._make(held, values, turns=True)
        except Infeasible:
            self._in_vain.add((True, False))
            return self._hosting(args, values, turns=True)
        return made if self._within(made, held, values) else None

    def _may_crowd(self, args: Sequence[Any], wanted: int, kept_bytes: int) -> bool:
        """True if the first step had better leave room for graphs that may follow.

        A graph that gets the output of another graph is one of several, and may take half of the
        budget. A graph that does not end in a loss may be the first of several, unless another one
        like it would fit with some room to spare.
        """
        assert self.budget is not None
        others = (x for i, x in enumerate(args) if i not in self.parameters)
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in others):
            return wanted > self.budget // 2
        return self.goes_on and wanted + kept_bytes > self.budget * WITH_ANOTHER

    def _binding(self, args: Sequence[Any]) -> ParameterSet:
        return self.entry.bind([args[i] for i in self._in_order])

    def _sizes_of(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple(read(args) for _, read in self.symbols)

    def _reconsidered(self, variant: Variant, args: Sequence[Any]) -> Variant:
        """Plan again from what the steps so far have shown, if that is worth it."""
        if variant.pipeline.turns:
            return variant
        held = self._held(args)
        settled = variant.pipeline.reconsider(held)
        if settled is None:
            return variant
        self._look_at_weights(args)
        try:
            made = self._make(held, self._sizes_of(args), settled=settled)
        except Infeasible as error:  # does not fit in what is free just now
            self.profile.note(f"the plan stays, since for another one: {error.reason}")
            return variant
        if variant.pipeline.report is not None:
            self.trial.replaced(variant.pipeline.report)
        return made

    def _tried(self, variant: Variant, args: Sequence[Any]) -> Variant:
        """Return the plan, or a better one if the measured steps call for it; see `trial`. Measured
        times mean nothing for other sizes or if a hardware profile was named."""
        pipeline, report = variant.pipeline, variant.pipeline.report
        if report is None or self.symbols or self.options.hardware is not None:
            return variant
        step = self.trial.due(report, pipeline.steps_recorded)
        if step is None:
            return variant
        lost = self.trial.loses_to(report, step)
        former = next((v for v in self.variants if lost and v.pipeline.report is lost[0]), None)
        if lost and former and former.pipeline.places.has_all_of(pipeline.places):
            self.variants.remove(variant)
            self.profile.note(lost[1])
            log_decision(self.name, lost[1])
            return self.variant_for(args)
        factors = self.trial.factors(report, step)
        if factors is not None and not report.fits and not pipeline.turns:
            machine = self.target.machine(self.target.device_bytes)
            totals = lanes_moved(self.target.runtime.key)
            if self.profile.costs_due(factors, machine, totals):
                made = self._reconsidered(variant, args)
                if made is not variant:
                    return made
        self.trial.tell(report, step, pipeline.steps_recorded)
        return variant

    def _lanes_due(self, variant: Variant) -> bool:
        """True if lanes run at other speeds than this plan assumes. A named hardware profile
        already states how fast they are."""
        report = variant.pipeline.report
        asked = self.options.hardware is None and self.profile.looked
        if not asked or report is None or report.fits:
            return False
        machine = self.target.machine(self.target.device_bytes)
        return self.profile.lanes_due(machine, lanes_moved(self.target.runtime.key))

    def _look_at_weights(self, args: Sequence[Any]) -> None:
        """Note which weights an optimizer updates during backward, and which must not leave."""
        self.updated = frozenset(i for i in self.parameters if updater_of(args[i]) is not None)
        self.fixed.look(args, self._in_order)

    def _without_fixed(self, variant: Variant, args: Sequence[Any]) -> Variant:
        """Replace a plan that moves weights which must stay on the device."""
        self.fixed.look(args, variant.pipeline.places.hosted)
        fixed = self.fixed.indices
        gone = [v for v in self.variants if not fixed.isdisjoint(v.pipeline.places.hosted)]
        if variant not in gone:
            raise OffloadError(f"{self.name}: weights could not leave the device and have to.")
        made = self._make(self._held(args), self._sizes_of(args))
        self.variants[:] = [v for v in self.variants if v not in gone]
        return made

    def _within(self, variant: Variant, held: int, values: tuple[int, ...]) -> bool:
        assert self.budget is not None
        return self._peak_of(variant, values) + held <= self.budget

    def _peak_of(self, variant: Variant, values: tuple[int, ...]) -> int:
        return variant.pipeline.needs_at(values).peak_bytes

    def _sizes(self, values: tuple[int, ...]) -> dict[sympy.Symbol, int]:
        return {symbol: v for (symbol, _), v in zip(self.symbols, values, strict=True)}

    def _make(
        self,
        held: int,
        values: tuple[int, ...],
        first_inputs: Sequence[Any] | None = None,
        settled: Settled | None = None,
        turns: bool = False,
        hosts: bool = False,
        explains: bool = True,
    ) -> Variant:
        if len(self.variants) >= MOST_VARIANTS + self.profile.replans:
            raise OffloadError(
                f"{self.name} has been planned {MOST_VARIANTS} times, and again its sizes, or what"
                " is held beside it, do not fit. Give a larger budget, pad inputs to fewer"
                " lengths, or use memory='minimum'."
            )
        sizes = self._sizes(values) if values else {}
        pipeline = Pipeline(
            self.options,
            self.target,
            self._variant_name(),
            self.entry,
            self.parameters,
            held,
            sizes,
            self.names,
            self.updated,
            fixed=self.fixed.indices,
            profile=self.profile,
            settled=settled,
            turns=turns,
            hosts=hosts,
            explains=explains,
            executions=self.executions,
            symbols=tuple(symbol for symbol, _ in self.symbols),
        )
        # lowering takes ownership of the graph that it is given
        graph, self.gm = self.gm, _copy(self.gm)
        try:
            if first_inputs is not None:
                run = lower(graph, first_inputs, self.options.lowering, pipeline)
            else:
                with tracing(self.context):
                    run = lower(graph, self.traced, self.options.lowering, pipeline)
        except Infeasible as error:
            raise self.fixed.explained(error) from None
        if pipeline.moves or self.budget is None:
            self.fixed.tell()
        variant = Variant(pipeline, run)
        self.variants.append(variant)
        return variant

    def _variant_name(self) -> str:
        number = len(self.variants) + self.trial.given_up + 1
        return self.name if number == 1 else f"{self.name}, plan {number}"


def _doubling(most: int) -> list[int]:
    """0, 1, 2, 4, … and `most`."""
    powers = itertools.takewhile(lambda n: n < most, (1 << k for k in itertools.count()))
    return list(dict.fromkeys([0, *powers, most]))


def _on_its_own(context: TracingContext | None) -> TracingContext | None:
    """Copy the context for one part of a split graph. All parts share one context, so backward
    would look there for the notes of parts that were compiled right away."""
    made = copy.copy(context)
    if made is not None:
        made.ddp_optimizer_ctx = None
        made.fakify_first_call = False
    return made


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph; share its attributes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    made = fx.GraphModule(gm, graph)
    made.meta.update(gm.meta)
    for node in graph.nodes:
        node.meta.pop("grapharg", None)  # refers to the parameter; Dynamo drops its own, too
    return made


def _tensors_out(gm: fx.GraphModule) -> list[torch.Tensor]:
    nodes = gm.graph.output_node().all_input_nodes
    values = (n.meta.get("example_value") for n in nodes)
    return [x for x in values if isinstance(x, torch.Tensor)]
