"""The main path: what happens at a call of a captured graph, in order. Read on from here.

1. `accounts` learn that the graph runs with these parameters.
2. `variants.ladder` chooses a plan that fits beside what others hold. If there is none, it makes
   one: `graph.lowering.lower` traces the graph, calls `compile_hooks` with both halves, which let
   `plan.plan_graph` plan and rewrite them, and compiles what comes back.
3. `variants.judging` replaces the plan if measured steps speak against it.
4. The weights move to where the plan wants them, and the compiled graph runs; `running_step` wraps
   each half, the backward too when autograd calls it.
5. `accounts` learn which bytes forward has left for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import is_fake

from offcompile.graph.names import argument_names
from offcompile.graph.sizes import symbols_of
from offcompile.ir import OffloadError
from offcompile.machine.options import Options
from offcompile.machine.target import Target
from offcompile.planning.feedback.profiling import Profile
from offcompile.runtime.base.interrupts import uninterrupted
from offcompile.runtime.memory.malloc.heap import address_space_is_limited
from offcompile.runtime.states.update_ops import calling

from .accounts.fixed_weights import FixedWeights
from .accounts.graph_runs import GraphRuns
from .accounts.usage import DeviceUsage, ParameterSet
from .foreign_autograd import refuse_foreign_autograd
from .plan.contract import GraphFacts
from .ranks.agreement import Agreement
from .ranks.reduction import reduce_in_backward
from .recording import recorded
from .replay.halves import SMALL_BYTES
from .variants.judging import judged
from .variants.ladder import choose, encloses, make_first
from .variants.plans import Call, Plans, Traced, Variant
from .variants.spare import give_spare_room, note_spare_room


class CapturedGraph:
    """A graph that Dynamo captured: a callable that plans at its first call."""

    def __init__(
        self,
        name: str,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        target: Target,
        usage: DeviceUsage,
        agreement: Agreement,
    ) -> None:
        self.name, self.agreement = name, agreement
        traced = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        parameters = {i for i, x in enumerate(example_inputs) if isinstance(x, torch.nn.Parameter)}
        symbols = symbols_of(traced)
        budget, entry = target.budget_bytes(options), usage.open(target.runtime.key)
        reserve = usage.hole_reserve(budget or 0, _holes_bytes(target, budget))
        runs = GraphRuns(self.name, budget, usage, entry, target.runtime, reserve, target.machine)
        self.facts = GraphFacts(
            options,
            target,
            frozenset(parameters),
            argument_names(gm),
            tuple(symbol for symbol, _ in symbols),
            Profile(),
            runs,
        )
        self.plans = Plans(
            self.facts,
            Traced(gm, traced, TracingContext.try_get()),
            FixedWeights(self.name, self.facts.names),
            agreement,
            goes_on=all(x.numel() > 1 for x in _tensors_out(gm)),
        )
        if options.cudagraphs and not symbols:
            given = [x for i, x in enumerate(example_inputs) if i not in parameters]
            sizes = [_nbytes(x) for x in given if isinstance(x, torch.Tensor)]
            small = sum(nbytes for nbytes in sizes if nbytes <= SMALL_BYTES)
            self.plans.copies_bytes = small + sum(_nbytes(x) for x in _tensors_out(gm))
        #: read the values of symbols from a call's arguments
        self._readers = [read for _, read in symbols]
        self._in_order = sorted(parameters)

    def first(self, example_inputs: Sequence[Any]) -> None:
        """Compile while Dynamo compiles, for the sizes that it traced.

        DDPOptimizer splits a graph and gives each part fake tensors, even for weights. Such parts
        are planned at their first call, which passes the real weights.
        """
        if any(isinstance(x, torch.Tensor) and is_fake(x) for x in example_inputs):
            self.plans.traced.leave_split()
        else:
            args = example_inputs
            make_first(self.plans, Call(args, self._parameters_of(args), inputs=args))

    def __call__(self, *args: Any) -> Any:
        facts, runs, plans = self.facts, self.facts.runs, self.plans
        call = self._begin(args)
        sizes = call.sizes
        try:
            give_spare_room(plans)
            if not plans.variants:
                make_first(plans, Call(args, call.parameters))
            variant = judged(plans, choose(plans, call), call)
        except OffloadError as error:
            self.agreement.refused(error)
            raise
        self.agreement.stands()
        while not variant.place_weights(args, runs):
            variant = plans.without_fixed(variant, call)
        if variant.moves:
            refuse_foreign_autograd(self.name)

        plans.ran[call.parameters] = sizes, variant
        note_spare_room(plans, variant, call)
        call.parameters.host_bytes = variant.host_bytes_at(sizes)
        call.parameters.lighter = WeakMethod(variant.ways_to_save_less)
        plans.leave_graphs_of_others(variant)
        facts.profile.begin_step()
        runs.call(call.parameters, sizes)
        runs.encloses = encloses(plans, variant, call)
        if variant.offers:
            with calling(self.name, args):
                outputs = variant.run(*args)
        else:
            outputs = variant.run(*args)

        self._wait_for_backward(outputs, variant, call)
        return outputs

    @uninterrupted
    def _begin(self, args: Sequence[Any]) -> Call:
        """Note the call in the accounts of the device."""
        facts, usage = self.facts, self.facts.runs.usage
        sizes = tuple(read(args) for read in self._readers)
        call = Call(args, self._parameters_of(args), sizes)
        reduce_in_backward()
        usage.begins(facts.runs.entry, call.parameters)
        usage.results.given([x for i, x in enumerate(args) if i not in facts.parameters])
        return call

    @uninterrupted
    def _wait_for_backward(self, outputs: object, variant: Variant, call: Call) -> None:
        """Note the bytes that forward has left for backward. Outputs without a backward stay as
        results."""
        runs, plans, sizes = self.facts.runs, self.plans, call.sizes
        kept = variant.needs_at(sizes).kept_bytes
        whole = max(kept, plans.whole_at(sizes).kept_bytes)
        whole = kept if runs.encloses else whole
        waiting = runs.entry.begin(outputs, call.parameters, kept, whole)
        if waiting is None:
            runs.usage.results.made(self._tensors_here(outputs))
        else:
            waiting.encloses = runs.encloses
        if (recording := recorded()) is not None:
            recording.waits(waiting)

    def _parameters_of(self, args: Sequence[Any]) -> ParameterSet:
        return self.facts.runs.entry.bind([args[i] for i in self._in_order])

    def _tensors_here(self, outputs: object) -> list[torch.Tensor]:
        several = outputs if isinstance(outputs, tuple | list) else (outputs,)
        kind = self.facts.target.device.type
        return [x for x in several if isinstance(x, torch.Tensor) and x.device.type == kind]


def _holes_bytes(target: Target, budget: int | None) -> int:
    """Bytes that the keeper leaves to holes before any step has been measured. When other graphs
    run in between, a graph finds the places of its tensors taken more often than when it runs
    alone; for the latter, a plan reserves three quarters of this. With a limited address space,
    freed blocks go back at once and leave no holes."""
    if budget is None or address_space_is_limited():
        return 0
    return target.holes_bytes(budget) * 4 // 3


def _nbytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _tensors_out(gm: fx.GraphModule) -> list[torch.Tensor]:
    nodes = gm.graph.output_node().all_input_nodes
    values = (n.meta.get("example_value") for n in nodes)
    return [x for x in values if isinstance(x, torch.Tensor)]
