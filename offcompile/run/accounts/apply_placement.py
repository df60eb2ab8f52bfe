"""Places the weights of a graph where its plan wants them, before each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from offcompile.graph.annotate import Annotated
from offcompile.graph.direct_ops import scattered_reads
from offcompile.graph.graphs import Graphs
from offcompile.ir import FORWARD, HOST, Plan
from offcompile.runtime.base.interrupts import uninterrupted
from offcompile.runtime.base.weak import WeakTensor
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.moves.registry import runtime_for
from offcompile.runtime.moves.weights import claim, live_on_device, live_on_host
from offcompile.runtime.states import updates

from .wall import Watch


@dataclass(eq=False)
class WeightPlaces:
    """The places of a plan's weights, which are identified by argument index."""

    parameters: frozenset[int]
    #: key of the runtime that owns the host memory
    runtime: str
    #: True if memory that weights leave belongs to malloc
    on_cpu: bool
    #: weights that live on the host, in order of use
    hosted: tuple[int, ...] = ()
    #: hosted weights that are read by scattered rows only
    scattered: frozenset[int] = frozenset()
    #: hosted weights never used in place: their fetches wait for updates under way
    fetched: frozenset[int] = frozenset()
    #: weights that an optimizer with host states may update → True if the device should do it
    by_device: Mapping[int, bool] = field(default_factory=dict)
    #: checks over the first steps that training changes the weights that the graph reads
    watch: Watch | None = None
    _others_came: bool = field(default=False, init=False)
    _called_with: tuple[WeakTensor, ...] = field(default=(), init=False)

    @property
    def has_any(self) -> bool:
        """True if the plan has a weight on the host."""
        return bool(self.hosted)

    def has_all_of(self, other: WeightPlaces) -> bool:
        """True if this plan has all weights on the host that another plan has there."""
        return set(self.hosted) >= set(other.hosted)

    @uninterrupted
    def place(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Before a call, move hosted weights to host memory, and the others to the device if they
        were created on the host. False if a weight cannot leave because others share its memory;
        the plan cannot run then."""
        claim(arguments[i] for i in self.parameters.difference(self.fetched))
        if self.hosted:
            device = runtime_for(self.runtime).device
            moved, staying = live_on_host(device, [arguments[i] for i in self.hosted])
            if moved and self.on_cpu:
                heap().trim()  # the memory that they left
            if staying:
                return False
            for i in self.hosted:
                device.expect_scattered(arguments[i], i in self.scattered)
        if not self._others_came:
            self._others_came = True
            others = self.parameters.difference(self.hosted)
            live_on_device([arguments[i] for i in sorted(others)])
            for i, by_device in self.by_device.items():
                updates.advise([arguments[i]], by_device)
        if self.watch is not None and self.watch.look(arguments, self.parameters, self.hosted):
            self.watch = None
        return True

    def made_gradients(self) -> None:
        """Note that the plan's backward has run."""
        if self.watch is not None:
            self.watch.made_gradients = True

    def place_alike(
        self, arguments: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> None:
        """Move other weights to the host if they are as large as the smallest hosted weight of this
        call."""
        if self.hosted:
            least = min(arguments[i].untyped_storage().nbytes() for i in self.hosted)
            device = runtime_for(self.runtime).device
            live_on_host(device, [p for p in others if p.untyped_storage().nbytes() >= least])

    def of(self, arguments: Sequence[torch.Tensor]) -> tuple[WeakTensor, ...]:
        """The hosted weights of a call."""
        pairs = zip(self._called_with, self.hosted, strict=False)
        if not self._called_with or any(ref() is not arguments[i] for ref, i in pairs):
            self._called_with = tuple(WeakTensor(arguments[i]) for i in self.hosted)
        return self._called_with


def weight_places(
    before: WeightPlaces,
    graphs: Graphs,
    annotated: Annotated,
    plan: Plan,
    by_device: Mapping[str, bool],
) -> WeightPlaces:
    """Make the places of a plan. by_device: weight → True if the device should update it."""
    hosted = _hosted_arguments(graphs, annotated)
    in_place = {d.tensor for d in plan.directs}
    rows_only = scattered_reads(graphs, annotated.storage_of)
    return replace(
        before,
        hosted=tuple(hosted.values()),
        scattered=frozenset(i for t, i in hosted.items() if t in rows_only),
        fetched=frozenset(i for t, i in hosted.items() if t not in in_place),
        by_device={i: by_device[t] for t, i in hosted.items() if t in by_device},
    )


def _hosted_arguments(graphs: Graphs, annotated: Annotated) -> dict[str, int]:
    """Map each hosted weight to its argument index, in order of use."""
    hosted = {t.id for t in annotated.problem.tensors if t.home == HOST}
    order = dict.fromkeys(t for op in annotated.problem.ops for t in op.reads if t in hosted)
    index = {
        annotated.storage_of[FORWARD, node.name]: node.meta["desc"].idx
        for node in graphs.forward.graph.find_nodes(op="placeholder")
        if annotated.storage_of.get((FORWARD, node.name)) in hosted
    }
    return {t: index[t] for t in order}
