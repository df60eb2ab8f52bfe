"""Holds the plans of one captured graph, each compiled, and compiles it again for another plan."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from offcompile.graph.lowering.lower import lower
from offcompile.ir import Infeasible, OffloadError
from offcompile.ir.units import show_bytes
from offcompile.passes.select.rematerialization import Rematerialization
from offcompile.passes.step.lighter import Lighter
from offcompile.planning.feedback.profiling import Settled
from offcompile.planning.footprint import Footprint
from offcompile.report.report import PlanReport
from offcompile.run.accounts.apply_placement import WeightPlaces
from offcompile.run.accounts.fixed_weights import FixedWeights
from offcompile.run.accounts.graph_runs import GraphRuns
from offcompile.run.accounts.process import process
from offcompile.run.accounts.usage import ParameterSet
from offcompile.run.compile_hooks import CompileHooks
from offcompile.run.plan.carry_out import unplaced
from offcompile.run.plan.contract import (
    USUAL,
    FreeStates,
    GraphFacts,
    Instead,
    PlanKind,
    Planned,
    PlanRequest,
    TakenGradients,
)
from offcompile.run.ranks.agreement import Agreement
from offcompile.run.ranks.meeting import Meeting
from offcompile.run.replay.step_graph import StepGraph
from offcompile.run.trial import Trial
from offcompile.runtime.states.updates import (
    StatesOwner,
    Updater,
    holders_of,
    is_refused,
    optimizer_of,
    reducer_of,
)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a captured graph."""

    args: Sequence[Any]
    parameters: ParameterSet
    #: values of the graph's symbols; empty: as traced
    sizes: tuple[int, ...] = ()
    #: the arguments as Dynamo compiles with them; None: it is not compiling
    inputs: Sequence[Any] | None = None


@dataclass(frozen=True, eq=False)
class Variant:
    """One compilation of the graph, for given sizes and given memory held by others."""

    kind: PlanKind
    #: None if the lowering found nothing to plan
    planned: Planned | None
    placement: WeightPlaces
    run: Callable[..., Any]
    #: captures it as a CUDA graph; None: nobody asked for that
    step: StepGraph | None = None

    @property
    def report(self) -> PlanReport | None:
        return None if self.planned is None else self.planned.report

    @property
    def moves(self) -> bool:
        """True if any tensor leaves the device or is recomputed."""
        return self.planned is None or self.planned.moves

    @property
    def offers(self) -> bool:
        """True if the graph offers gradients to an optimizer while it runs."""
        return self.planned is not None and self.planned.offered is not None

    def needs_at(self, sizes: tuple[int, ...]) -> Footprint:
        """Return the memory needs of the plan for these values of the graph's symbols."""
        return Footprint() if self.planned is None else self.planned.needs.at(sizes)

    def host_bytes_at(self, sizes: tuple[int, ...]) -> int:
        """Return the bytes of the host tier that it takes, with what graphs keep there."""
        more_bytes = 0 if self.step is None else self.step.more_host_bytes
        return self.needs_at(sizes).host_bytes + more_bytes

    def ways_to_save_less(self) -> Sequence[Lighter]:
        """The ways in which the graph could save less for backward, if it were planned again."""
        return () if self.planned is None else self.planned.lighter

    def knows_needs_at(self, sizes: tuple[int, ...]) -> bool:
        """True if `needs_at` is already computed for these sizes."""
        return self.planned is None or not sizes or sizes in self.planned.needs.known

    def place_weights(self, arguments: Sequence[Any], runs: GraphRuns) -> bool:
        """Place weights before a call. False if a hosted weight cannot leave."""
        if not self.placement.place(arguments):
            return False
        changes = self.planned is not None and self.planned.changes_weights
        runs.weights = None if changes else self.placement.of(arguments)
        return True


#: a graph that needs more plans than this has sizes that never settle
MOST_VARIANTS = 16


@dataclass(eq=False)
class Traced:
    """A graph as Dynamo traced it."""

    gm: fx.GraphModule
    #: its arguments; holding the real ones would keep a batch alive
    inputs: Sequence[Any]
    context: TracingContext | None

    def leave_split(self) -> None:
        """Use a context of its own, for one part of a graph that DDPOptimizer split. All parts
        share one, so backward would look there for the notes of parts that were compiled right
        away."""
        if self.context is not None:
            self.context = copy.copy(self.context)
            self.context.ddp_optimizer_ctx = None
            self.context.fakify_first_call = False

    def lower(self, hooks: CompileHooks, inputs: Sequence[Any] | None) -> Callable[..., Any]:
        """Compile the graph. `inputs` is given while Dynamo compiles."""
        # lowering takes ownership of the graph that it is given
        graph, self.gm = self.gm, _copy(self.gm)
        lowering = hooks.facts.options.lowering
        if inputs is not None:
            return lower(graph, inputs, lowering, hooks)
        with tracing(self.context):
            return lower(graph, self.inputs, lowering, hooks)


@dataclass(eq=False)
class Plans:
    """The plans of one captured graph, and which kinds of plan are known to be impossible."""

    facts: GraphFacts
    traced: Traced
    fixed: FixedWeights
    agreement: Agreement
    #: True if the graph returns something other than a loss
    goes_on: bool
    trial: Trial = field(default_factory=Trial)
    variants: list[Variant] = field(default_factory=list)
    #: kinds found infeasible
    in_vain: set[PlanKind] = field(default_factory=set)
    taken: TakenGradients = field(default_factory=TakenGradients)
    #: bytes of the budget that plans leave free, because runs took them beyond what was planned
    lacking_bytes: int = 0
    #: bytes of the copies of inputs and outputs that a captured step has
    copies_bytes: int = 0
    #: bytes that plans leave to the program itself, and to small graphs, at the turn
    outside_bytes: int = 0
    #: calls so far that were judged
    calls: int = 0
    #: True if a step has shown what the plan does not know of, and nothing was decided since
    shown: bool = False
    #: for each set of parameters, the sizes and the plan of the last run
    ran: weakref.WeakKeyDictionary[ParameterSet, tuple[tuple[int, ...], Variant]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    # --- plans ----------------------------------------------------------------------------------

    def make(
        self,
        call: Call,
        held: int,
        kind: PlanKind = USUAL,
        explains: bool = True,
        settled: Settled | None = None,
        meeting: Meeting | None = None,
        instead: Instead | None = None,
    ) -> Variant:
        """Plan and compile for this call. Raises `Infeasible`. See `PlanRequest`. `meeting`: the
        exchange with other ranks, if there is one already. `instead`: see `plan_graph`."""
        facts = self.facts
        if len(self.variants) >= MOST_VARIANTS + facts.profile.replans:
            raise OffloadError(
                f"{facts.runs.name} has been planned {MOST_VARIANTS} times, and again its sizes,"
                " or what is held beside it, do not fit. Give a larger budget, pad inputs to fewer"
                " lengths, or use memory='minimum'."
            )
        if kind.is_usual:
            kind = kind._replace(outside_bytes=self.outside_bytes)
        sizes = dict(zip(facts.symbols, call.sizes, strict=True)) if call.sizes else {}
        request = PlanRequest(
            self._next_name(),
            kind,
            held,
            self.host_held(call),
            explains,
            settled=settled,
            taken=self.taken,
            fixed=self.fixed.indices,
            sizes=sizes,
            lacking_bytes=self.lacking_bytes + self.copies_bytes,
        )
        if meeting is None and not kind.ns_per_byte:  # each rank has prices of its own
            meeting = self.agreement.meeting()
        if meeting is None and kind.is_usual and settled is None:
            request = replace(request, states=self._free_states(call))
        hooks = CompileHooks(facts, request, meeting, None if meeting else instead)
        try:
            run = self.traced.lower(hooks, call.inputs)
        except Infeasible as error:
            raise self.fixed.explained(error) from None
        finally:
            Rematerialization.forget()
            if meeting is not None:
                meeting.end()
                self.agreement.keep(meeting)
        planned = hooks.planned
        placement = unplaced(facts) if planned is None else planned.placement
        made_kind = kind if planned is None else planned.request.kind
        variant = Variant(made_kind, planned, placement, run, hooks.step)
        if variant.moves or facts.runs.budget_bytes is None:
            self.fixed.tell()
        self.variants.append(variant)
        return variant

    def make_again(
        self, call: Call, kind: PlanKind = USUAL, settled: Settled | None = None
    ) -> Variant:
        """Like `make`, in the middle of training: the plan leaves their room to graphs that run
        before the backward of this one. Raises `Infeasible`, too, if it does not."""
        runs = self.facts.runs
        made = self.make(call, self.held(call), self.facts.kind_again(kind), settled=settled)
        budget, entry = runs.budget_bytes, runs.entry
        more_bytes = made.needs_at(call.sizes).kept_bytes - entry.most_kept_bytes
        if budget is None or not entry.in_turn or runs.encloses or more_bytes <= 0:
            return made
        lacking_bytes = entry.most_wanted_bytes + more_bytes - budget
        if lacking_bytes > 0:
            self.variants.remove(made)
            beside = f"graphs that run before its backward would lack {show_bytes(lacking_bytes)}"
            raise Infeasible(beside, None, "")
        return made

    def _free_states(self, call: Call) -> FreeStates | None:
        """The states that this plan may place; None if there are none, or no budget to keep to."""
        if self.facts.runs.budget_bytes is None or not torch.is_grad_enabled():
            return None
        runs, parameters = self.facts.runs, call.parameters
        sizes = {o: o.free_states(parameters.ids) for o in self._owners(call)}
        free = [weakref.ref(owner) for owner, nbytes in sizes.items() if nbytes]
        if not free:
            return None

        # the request lives as long as the plan: it holds neither the batch nor the optimizer
        def keep(share: float) -> int:
            for ref in free:
                owner = ref()
                if owner is not None:
                    owner.keep(share)
            runs.usage.invalidate()
            return runs.usage.held_beside(runs.entry, parameters).in_step

        return FreeStates(sum(sizes.values()), keep)

    def states_give_way(self, call: Call) -> bool:
        """Move states that a former plan has kept on the device off it; False if there are none."""
        freed = sum(owner.give_way() for owner in self._owners(call))
        self.facts.runs.usage.invalidate()
        return freed > 0

    def _owners(self, call: Call) -> list[StatesOwner]:
        weights = [call.args[i] for i in sorted(self.facts.parameters)]
        return [h for h in holders_of(weights) if isinstance(h, StatesOwner)]

    def look_at_weights(self, call: Call) -> None:
        """Note whose gradients are taken during backward, and which weights must not leave."""
        indices = self.facts.parameters
        on_cpu = self.facts.target.device.type == "cpu"
        optimizers = {i: optimizer_of(call.args[i]) for i in indices}
        # a gradient that a device keeps for later, or that is refused, would be in no plan
        updated = frozenset(
            i
            for i, found in optimizers.items()
            if found is not None and (on_cpu or _is_taken(found, call.args[i]))
        )
        reducers = {i: reducer_of(call.args[i]) for i in indices}
        reduced = frozenset(
            i
            for i, found in reducers.items()
            if found is not None and found.wants_early(call.args[i])
        )
        self.taken = TakenGradients(updated, reduced)
        self.fixed.look(call.args, sorted(indices))

    def without_fixed(self, variant: Variant, call: Call) -> Variant:
        """Replace a plan that moves weights which must stay on the device."""
        self.fixed.look(call.args, variant.placement.hosted)
        fixed = self.fixed.indices
        gone = [v for v in self.variants if not fixed.isdisjoint(v.placement.hosted)]
        if variant not in gone:
            name = self.facts.runs.name
            raise OffloadError(f"{name}: weights could not leave the device and have to.")
        made = self.make(call, self.held(call))
        self.variants[:] = [v for v in self.variants if v not in gone]
        return made

    def leave_graphs_of_others(self, variant: Variant) -> None:
        """Give up the pools of other plans of this graph: only the one that runs keeps its own."""
        for other in self.variants:
            if other is not variant and other.step is not None:
                other.step.give_way()

    def _next_name(self) -> str:
        number, name = len(self.variants) + self.trial.given_up + 1, self.facts.runs.name
        return name if number == 1 else f"{name}, plan {number}"

    def whole_at(self, sizes: tuple[int, ...]) -> Footprint:
        """Return the needs of the first plan for these sizes, even if it was passed over."""
        planned = self.variants[0].planned
        needs = None if planned is None else planned.needs.passed_over or planned.needs
        return Footprint() if needs is None else needs.at(sizes)

    # --- memory ---------------------------------------------------------------------------------

    def held(self, call: Call) -> int:
        """Bytes held beside the graph during a step."""
        runs = self.facts.runs
        return runs.usage.held_beside(runs.entry, call.parameters).in_step

    def host_held(self, call: Call) -> int:
        """Bytes of the host tier that plans of other calls take."""
        runs = self.facts.runs
        return runs.usage.host_beside(runs.entry, call.parameters)

    def likely_held(self, call: Call) -> int:
        """Like `held`, after collecting models that have had their last step."""
        if self.held(call):
            process.garbage.collect_models()
            self.facts.runs.usage.invalidate()
        return self.held(call)

    def surely_held(self, call: Call) -> int:
        """Like `held`, after collecting all garbage, even forwards that will get no backward, and
        without the pools that other graphs keep between steps."""
        if self.held(call):
            process.collect()
            self.facts.runs.usage.give_up_pools(self.facts.runs.entry)
            self.facts.runs.usage.invalidate()
        return self.held(call)

    def within(self, variant: Variant, held: int, call: Call) -> bool:
        """True if the plan and what is held beside it are within budget and host tier."""
        budget = self.facts.runs.budget_bytes
        assert budget is not None
        needs = variant.needs_at(call.sizes)
        return needs.peak_bytes + held <= budget and self._within_host(needs.host_bytes, call)

    def _within_host(self, nbytes: int, call: Call) -> bool:
        """True if so much of the host tier is left to this call."""
        capacity = self.facts.target.host_room_bytes
        return not nbytes or capacity is None or nbytes + self.host_held(call) <= capacity

    def first_within(self, variants: Sequence[Variant], call: Call) -> Variant | None:
        """Return the first plan that fits, if need be after collecting all garbage."""
        for look in (self.held, self.surely_held):
            held = look(call)
            for variant in variants:
                if self.within(variant, held, call):
                    return variant
        return None


def _is_taken(updater: Updater, parameter: torch.Tensor) -> bool:
    """True if a gradient that is offered is used up at once."""
    return updater.uses_up() and updater.takes(parameter) and not is_refused(parameter)


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph; share its attributes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    made = fx.GraphModule(gm, graph)
    made.meta.update(gm.meta)
    for node in graph.nodes:
        node.meta.pop("grapharg", None)  # refers to the parameter; Dynamo drops its own, too
    return made
