"""Surveys a captured graph before planning: measures its costs and makes a Problem of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import sympy
import torch

from offcompile.graph.annotate import Annotated, annotate
from offcompile.graph.costs.fusion import calls_library
from offcompile.graph.costs.in_place import with_in_place
from offcompile.graph.costs.op_costs import CostModel, OpCost, costs_of_graph, open_cost_cache
from offcompile.graph.dropout import in_two_parts
from offcompile.graph.graphs import Graphs, Hint, storage_bytes, storage_key
from offcompile.graph.in_backward_updates import (
    Offers,
    costs_of_offers,
    with_early_gradients,
    with_offers,
)
from offcompile.graph.kernels import merge_kernels
from offcompile.graph.mask_bits import Compacted, compact
from offcompile.graph.sizes import hint_of
from offcompile.graph.storages import Place
from offcompile.ir import DEVICE, Lane, Machine
from offcompile.machine.hardware import BYTES_PER_US_PER_GBPS
from offcompile.machine.in_place import InPlace
from offcompile.machine.options import Options
from offcompile.machine.target import Target
from offcompile.planning.feedback.corrections import Factors, with_factors
from offcompile.planning.feedback.profiling import Profile
from offcompile.planning.feedback.sparsity import Packability, with_combinations, with_ratios
from offcompile.runtime.moves.registry import runtime_for

#: storages below this share of the largest are not worth a move
SMALL_SHARE = 1 / 2048
LEAST_MOVE_BYTES = 4096
#: ops that need less than this to run are measured whatever the budget
LEAST_ROOM_BYTES = 16 << 20


@dataclass(eq=False)
class ProblemSource:
    """The survey of one graph for given sizes. `target` is replaced once codec rates are known."""

    options: Options
    target: Target
    #: observations from runs of the graph
    profile: Profile
    #: the type of device that the graph was traced on
    kind: str
    sizes: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    _costs: dict[Place, OpCost] = field(default_factory=dict)
    _min_move: int = LEAST_MOVE_BYTES
    #: time to touch memory that went back to the system; 0: not measured
    _touch_us_per_mib: float = 0.0
    #: the model that measured the costs, until it has measured them with operands on the host too
    _unmeasured: CostModel | None = None
    _codecs_known: bool = False
    #: the cost corrections that were known when this was planned
    costs_as_planned: Factors | None = None
    #: the slowest machine of all ranks that plan together, and what their ops take over the costs
    #: measured here; None: this rank plans by itself
    slowest: tuple[Machine, Factors] | None = None

    def __post_init__(self) -> None:
        self.costs_as_planned = self.profile.factors

    @property
    def touch_again_us_per_mib(self) -> float:
        """Time to touch returned memory; 0 if corrections by measured steps already include it."""
        included = self.costs_as_planned is not None and self.profile.includes_touching
        return 0.0 if included else self._touch_us_per_mib

    def learn_codecs(self) -> None:
        """Measure the speed of codecs, if it may matter and no profile gives it."""
        asked = self.options.lossy is not None or self.profile.shows_zeros
        if asked and self.options.hardware is None and not self._codecs_known:
            self.target, self._codecs_known = self.target.with_codecs(), True

    def estimating(self) -> ProblemSource:
        """The same source, which estimates costs instead of measuring them."""
        options = replace(self.options, hardware=self.target.profile.name)
        return replace(self, options=options, _costs={}, _unmeasured=None)

    def estimated(self, graphs: Graphs, progress: Callable[[str], None]) -> ProblemSource:
        """The same source, with the ops of these graphs estimated."""
        found = self.estimating()
        found.annotate(graphs, None, progress)
        return replace(found, options=self.options, _touch_us_per_mib=self._touch_us_per_mib)

    def machine(self, device_bytes: int) -> Machine:
        """The target machine, with lanes as fast as they have shown to be."""
        measured = self.target.machine(device_bytes)
        machine = with_combinations(self.profile.lanes.applied(measured), self.options.lossy)
        if self.slowest is None:
            return machine
        return _slowed(machine, measured, self.slowest[0]).with_capacity(DEVICE, device_bytes)

    def apart(self, graphs: Graphs) -> Graphs:
        """Split ops that may be recomputed in part only, like dropout."""
        return in_two_parts(graphs)

    def packed(self, graphs: Graphs) -> Compacted | None:
        """Save masks of the graphs as bits; None if there are none."""
        fuses = self.options.lowering == "inductor"
        return compact(graphs, hint_of(self.sizes), fuses=fuses)

    def annotate(
        self, graphs: Graphs, budget: int | None, progress: Callable[[str], None]
    ) -> Annotated:
        """Annotate the step with all tensors on the device. Measures large ops, unless a hardware
        profile is named."""
        self.price(graphs, budget, progress)
        return self.problem(graphs)

    def price(self, graphs: Graphs, budget: int | None, progress: Callable[[str], None]) -> None:
        """Estimate or measure the costs of all ops."""
        hint = hint_of(self.sizes)
        standing = standing_bytes(graphs, hint, self.kind)
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
        self._unmeasured = model
        self._touch_us_per_mib = model.overheads.touch_us_per_mib
        self._costs = {
            (phase, name): cost
            for phase, module in graphs
            for name, cost in costs_of_graph(module.graph, model, hint).items()
        }
        found = annotate(graphs, self._costs, hint, LEAST_MOVE_BYTES)
        largest = max((t.nbytes for t in found.problem.tensors if not t.pinned), default=0)
        self._min_move = max(LEAST_MOVE_BYTES, int(largest * SMALL_SHARE))

    def measure_in_place(self, graphs: Graphs, in_place: InPlace) -> None:
        """Add to the costs the times of ops with weights and gradients on the host."""
        model, self._unmeasured = self._unmeasured, None
        if model is None or not model.measure:
            return
        hint, key = hint_of(self.sizes), self.target.runtime.key
        asked = annotate(graphs, self._costs, hint, self._min_move, in_place)
        self._costs = with_in_place(
            self._costs,
            graphs,
            asked,
            model,
            hint,
            lambda nbytes: runtime_for(key).device.addressable([nbytes])[0],
            key,
        )

    def problem(
        self,
        graphs: Graphs,
        in_place: InPlace | None = None,
        stays: frozenset[str] = frozenset(),
        hint: Hint | None = None,
    ) -> Annotated:
        """Annotate the step again, with fused kernels as one op, and with compression ratios.

        `hint`: sizes, if other than those that the plan is made for.
        """
        found = self.annotated(graphs, in_place, stays, hint or hint_of(self.sizes))
        if self.options.lowering == "inductor":
            found = merge_kernels(found, graphs, lambda node: not calls_library(node))
        machine, lossy = self.machine(1), self.options.lossy
        seen = self.profile.densities
        problem = with_factors(found.problem, None if self.slowest is None else self.slowest[1])
        problem = with_factors(problem, self.costs_as_planned)
        problem = with_ratios(problem, machine, Packability(found.dtypes, seen, lossy))
        return replace(found, problem=problem)

    def annotated(
        self, graphs: Graphs, in_place: InPlace | None, stays: frozenset[str], hint: Hint
    ) -> Annotated:
        """Annotate the step node by node, without fusion."""
        return annotate(graphs, self._costs, hint, self._min_move, in_place, stays)

    def with_offers(
        self, graphs: Graphs, plain: Annotated, wanted: frozenset[int], without: frozenset[str]
    ) -> Offers | None:
        """Make the graphs offer the gradients of these arguments to an optimizer."""
        hint, key = hint_of(self.sizes), self.target.runtime.key
        made = with_offers(graphs, plain, wanted, hint, self._min_move, key, without)
        if made is not None:
            bytes_per_us = self.target.profile.memory_gbps * BYTES_PER_US_PER_GBPS
            self._costs = {**self._costs, **costs_of_offers(made, hint, bytes_per_us)}
        return made

    def with_early_gradients(
        self, planned: Graphs, given: Graphs, annotated: Annotated, wanted: frozenset[int]
    ) -> Offers | None:
        """Make graphs that carry out a plan of those given, or these themselves, offer gradients of
        these arguments to what reduces them over ranks."""
        key = self.target.runtime.key
        return with_early_gradients(planned, given, annotated, wanted, key)


def _slowed(machine: Machine, measured: Machine, slowest: Machine) -> Machine:
    """Return the slowest machine of all ranks, after what this rank has learnt since they met: its
    codecs, and how far its lanes are from the rates that were measured. Other ranks are taken to
    have shared in that."""

    def lane(slow: Lane) -> Lane:
        changed = machine.lane[slow.name].bytes_per_us / measured.lane[slow.name].bytes_per_us
        return replace(slow, bytes_per_us=slow.bytes_per_us * changed)

    codecs = tuple(slowest.codec.get(codec.name, codec) for codec in machine.codecs)
    return replace(slowest, lanes=tuple(map(lane, slowest.lanes)), codecs=codecs)


def standing_bytes(graphs: Graphs, hint: Hint, kind: str) -> int:
    """Bytes on a device of that type before the step: arguments of forward, each storage once.

    Other arguments of backward are made by forward, and do not exist yet.
    """
    made: dict[int, int] = {}
    for node in graphs.forward.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == kind:
            key = storage_key(value)
            if key is not None:
                made[key] = storage_bytes(value, hint)
    return sum(made.values())


def values(graphs: Graphs) -> Iterator[object]:
    """The traced values of the placeholders of both graphs."""
    return (n.meta.get("val") for _, m in graphs for n in m.graph.find_nodes(op="placeholder"))
