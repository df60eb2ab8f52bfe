"""Where a plan has the weights of its graph, and having them there before each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from offcompile.graph.annotate import Annotated
from offcompile.graph.direct_ops import scattered_reads
from offcompile.graph.graphs import Graphs
from offcompile.ir import FORWARD, HOST, Plan
from offcompile.runtime.base.weak import WeakTensor
from offcompile.runtime.memory.heap import heap
from offcompile.runtime.moves.registry import runtime_for
from offcompile.runtime.moves.weights import claim, live_on_device, live_on_host
from offcompile.runtime.states import updates

from .wall import Watch


@dataclass(eq=False)
class WeightPlaces:
    """Weights are known by which arguments of the captured function they are."""

    parameters: frozenset[int]
    #: the key of the runtime whose host it is
    runtime: str
    #: whether what leaves the device was malloc's
    on_cpu: bool
    #: those that are to live on the host, in the order of their use
    hosted: tuple[int, ...] = ()
    #: those of them of which only rows here and there are read
    scattered: frozenset[int] = frozenset()
    #: those that are nowhere used in place: their fetches wait for updates under way
    fetched: frozenset[int] = frozenset()
    #: those that an optimizer with states on the host may update, and whether the device should
    by_device: Mapping[int, bool] = field(default_factory=dict)
    #: over the first steps, that what is trained is what the graph reads; None: there is none
    watch: Watch | None = None
    _others_came: bool = field(default=False, init=False)
    _called_with: tuple[WeakTensor, ...] = field(default=(), init=False)

    @property
    def has_any(self) -> bool:
        """Whether the plan has a weight on the host."""
        return bool(self.hosted)

    def has_all_of(self, other: WeightPlaces) -> bool:
        """Whether what another plan has on the host may stay there."""
        return set(self.hosted) >= set(other.hosted)

    def place(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Before a call: weights that the plan has on the host get memory there, others that were
        born there come to the device. False: others rest on a weight's memory, so it cannot leave,
        and the plan cannot run."""
        claim(arguments[i] for i in self.parameters.difference(self.fetched))
        if self.hosted:
            device = runtime_for(self.runtime).device
            moved, staying = live_on_host(device, [arguments[i] for i in self.hosted])
            if moved and self.on_cpu:
                heap().trim()  # where they stood
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
        """The plan's backward has run."""
        if self.watch is not None:
            self.watch.made_gradients = True

    def place_alike(
        self, arguments: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> None:
        """Give other weights memory on the host, if they are as large as those of a call that the
        plan has there."""
        if self.hosted:
            least = min(arguments[i].untyped_storage().nbytes() for i in self.hosted)
            device = runtime_for(self.runtime).device
            live_on_host(device, [p for p in others if p.untyped_storage().nbytes() >= least])

    def of(self, arguments: Sequence[torch.Tensor]) -> tuple[WeakTensor, ...]:
        """The weights of a call that are on the host."""
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
    """As the plan has them. by_device: weight → whether the device should update it."""
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
    """Weight on the host → which argument it is, in the order of use."""
    hosted = {t.id for t in annotated.problem.tensors if t.home == HOST}
    order = dict.fromkeys(t for op in annotated.problem.ops for t in op.reads if t in hosted)
    index = {
        annotated.storage_of[FORWARD, node.name]: node.meta["desc"].idx
        for node in graphs.forward.graph.find_nodes(op="placeholder")
        if annotated.storage_of.get((FORWARD, node.name)) in hosted
    }
    return {t: index[t] for t in order}
