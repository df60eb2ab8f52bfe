"""Surveys a model of which only a few of the equal layers were traced."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from offcompile.graph.annotate import Annotated
from offcompile.graph.costs.op_costs import OpCost
from offcompile.graph.graphs import Graphs, Hint
from offcompile.graph.mask_bits import Compacted, compact
from offcompile.graph.sizes import hint_of
from offcompile.graph.storages import Place
from offcompile.graph.updates import Updates
from offcompile.ir import DEVICE, HOST, OffloadError, Problem
from offcompile.machine.in_place import InPlace
from offcompile.run.problem_source import ProblemSource

from .layers import Layers
from .unroll import Unrolled, unroll


class NotAlike(OffloadError):
    """Raised if layers that look equal do not compile to equal parts: trace all of them."""


@dataclass(frozen=True)
class Twin:
    """The same model with one period of layers less."""

    survey: ProblemSource
    graphs: Graphs
    layers: Layers


@dataclass(eq=False)
class Estimate:
    """The account of graphs whose ops are priced. It is shared by all copies of a survey, so that
    graphs which are planned again, for another rival, are not annotated again."""

    graphs: Graphs
    costs: Mapping[Place, OpCost]
    least_move_bytes: int
    touch_us_per_mib: float
    twin: Twin | None
    #: steps with no weight kept on the device, by the cost of operands in place: node by node, and
    #: as they are planned
    annotated: dict[InPlace | None, Annotated] = field(default_factory=dict)
    planned: dict[InPlace | None, Annotated] = field(default_factory=dict)
    #: how the first of these were extrapolated
    unrolled: dict[InPlace | None, Unrolled] = field(default_factory=dict)
    #: the step of the twin, with all tensors on the device
    smaller: Annotated | None = None


@dataclass(eq=False)
class AheadProblemSource(ProblemSource):
    """A survey that can extrapolate. `twin`: used to infer missing layers; None: none missing."""

    twin: Twin | None = None
    #: the steps of few layers with another batch, of which this gives all layers; None: the same
    few: Mapping[InPlace | None, Problem] | None = field(default=None, repr=False)
    updates: Updates | None = None
    #: graphs as traced; other graphs are the same with masks packed as bits
    traced: Graphs | None = field(default=None, repr=False)
    #: estimates of this model's graphs
    _estimates: list[Estimate] = field(default_factory=list, repr=False)
    #: graphs → the same with masks packed as bits
    _packed: list[tuple[Graphs, Compacted | None]] = field(default_factory=list, repr=False)
    #: the account of the graphs that were priced last
    _current: Estimate | None = field(default=None, repr=False)

    def apart(self, graphs: Graphs) -> Graphs:
        """Return the graphs unchanged, since they must stay like their twin's."""
        return graphs

    def packed(self, graphs: Graphs) -> Compacted | None:
        found = [made for given, made in self._packed if given is graphs]
        if not found:
            found = [super().packed(graphs)]
            self._packed.append((graphs, found[0]))
        return found[0]

    def price(self, graphs: Graphs, budget: int | None, progress: Callable[[str], None]) -> None:
        estimates = self.options.hardware is not None  # what is measured depends on the budget
        known = next((made for made in self._estimates if made.graphs is graphs), None)
        if known is not None and estimates:
            self._costs, self._min_move = dict(known.costs), known.least_move_bytes
            self._touch_us_per_mib, self.twin = known.touch_us_per_mib, known.twin
            self._current = known
            return
        if self.twin is not None:
            self.twin = self._twin_of(self.twin, graphs)
            self.twin.survey.price(self.twin.graphs, budget, progress)
        super().price(graphs, budget, progress)
        figures = (self._costs, self._min_move, self._touch_us_per_mib)
        self._current = Estimate(graphs, *figures, self.twin)
        if estimates:
            self._estimates.append(self._current)

    def measure_in_place(self, graphs: Graphs, in_place: InPlace) -> None:
        mine = self._unmeasured
        super().measure_in_place(graphs, in_place)
        if mine is None or not mine.measure:
            return
        if self._current is not None:  # costs change
            self._current.annotated.clear()
            self._current.planned.clear()
            self._current.unrolled.clear()
        if self.twin is None:
            return
        twin = self.twin.survey
        if twin._unmeasured is not None:  # two measurements of one op would differ
            twin._unmeasured.cache = mine.cache
        twin._min_move = self._min_move
        twin.measure_in_place(self.twin.graphs, in_place)

    def annotated(
        self, graphs: Graphs, in_place: InPlace | None, stays: frozenset[str], hint: Hint
    ) -> Annotated:
        kept = {} if (priced := self._priced(graphs)) is None else priced.annotated
        found = kept.get(in_place)
        if found is None:
            if self.twin is None:
                found = super().annotated(graphs, in_place, frozenset(), hint)
            else:
                found = self._unrolled(self.twin, graphs, in_place, hint)
            kept[in_place] = found
        if self.few is not None:
            found = replace(found, problem=self._of_other_batch(graphs, in_place))
        return replace(found, problem=staying(found.problem, stays))

    def problem(
        self,
        graphs: Graphs,
        in_place: InPlace | None = None,
        stays: frozenset[str] = frozenset(),
        hint: Hint | None = None,
    ) -> Annotated:
        other = stays or hint is not None or self.few is not None
        priced = None if other else self._priced(graphs)
        found = None if priced is None else priced.planned.get(in_place)
        if found is None:
            found = super().problem(graphs, in_place, stays, hint)
            found = found if self.updates is None else self.updates.added(found)
            if priced is not None:
                priced.planned[in_place] = found
        return found

    def _priced(self, graphs: Graphs) -> Estimate | None:
        current = self._current
        return current if current is not None and current.graphs is graphs else None

    def _unrolled(
        self, twin: Twin, graphs: Graphs, in_place: InPlace | None, hint: Hint
    ) -> Annotated:
        larger = super().annotated(graphs, in_place, frozenset(), hint)
        layers, priced = twin.layers, self._priced(graphs)
        known = None if priced is None else priced.unrolled.get(None)
        made = None if known is None else known.like(larger.problem)
        smaller = None if priced is None else priced.smaller
        if made is None or smaller is None:
            twin.survey._min_move = self._min_move
            smaller = twin.survey.annotated(twin.graphs, in_place, frozenset(), hint)
            made = unroll(larger.problem, smaller.problem, layers.beyond)
        if made is None:
            raise NotAlike(
                f"The {layers.count} layers of {layers} look alike and do not compile alike."
            )
        if priced is not None:
            priced.unrolled[in_place] = made
            priced.smaller = smaller if in_place is None else priced.smaller

        origin = made.origin
        return replace(
            larger,
            problem=made.problem,
            node_of={
                new: larger.node_of[old]
                for new, (old, _) in origin.items()
                if old in larger.node_of
            },
            labels=_of_all_layers(larger.labels, smaller.labels, made, layers),
            names=_of_all_layers(larger.names, smaller.names, made, layers),
            dtypes={
                new: larger.dtypes[old] for new, (old, _) in origin.items() if old in larger.dtypes
            },
        )

    def _of_other_batch(self, graphs: Graphs, in_place: InPlace | None) -> Problem:
        priced = self._priced(graphs)
        unrolled = None if priced is None else priced.unrolled.get(in_place)
        few = None if self.few is None else self.few.get(in_place)
        found = None if unrolled is None or few is None else unrolled.like(few)
        if found is None:
            raise NotAlike("The layers do not compile alike with another batch.")
        return found.problem

    def _twin_of(self, twin: Twin, graphs: Graphs) -> Twin:
        """Make the twin of these graphs, with its own survey: the first may still be in use."""
        if graphs is self.traced:
            return twin
        made = compact(twin.graphs, hint_of(self.sizes), fuses=self.options.lowering == "inductor")
        if made is None:
            raise NotAlike(f"The layers of {twin.layers} do not save alike.")
        return replace(twin, survey=replace(twin.survey), graphs=made.graphs)


def _of_all_layers(
    texts: Mapping[str, str], fewer: Mapping[str, str], made: Unrolled, layers: Layers
) -> dict[str, str]:
    """Extrapolate the labels of ops and tensors, or their names. `fewer`: those of the twin."""
    found: dict[str, str] = {}
    for new, (old, copy) in made.origin.items():
        if old not in texts:
            continue
        compared = made.twin if copy is None else made.later
        other = (fewer if copy is None else texts).get(compared.get(old, ""), texts[old])
        found[new] = texts[old]
        for path in layers.paths:
            found[new] = relabelled(found[new], other, path, copy, layers.beyond)
    return found


def relabelled(label: str, other: str, layers: str, copy: int | None, more: int) -> str:
    """Give a label the index that its layer has among all: `blocks.1.up 4×4` → `blocks.5.up 4×4`.

    `other` is the label in the smaller problem or, of a copy, that of one period later.
    """
    found, compared = _index_in(label, layers), _index_in(other, layers)
    if found is None or compared is None:
        return label
    start, end = found
    index, step = int(label[start:end]), int(other[slice(*compared)]) - int(label[start:end])
    if copy is None:
        index -= step * more
    else:
        index += step * copy if step > 0 else -step * (more - copy)
    return f"{label[:start]}{index}{label[end:]}"


def _index_in(label: str, layers: str) -> tuple[int, int] | None:
    found = _numbered(layers).search(label)
    return None if found is None else found.span(1)


@cache
def _numbered(layers: str) -> re.Pattern[str]:
    """The number of a layer in a label."""
    head = re.escape(f"{layers}.") if layers else ""
    return re.compile(rf"(?:^| ){head}(\d+)(?=[. ]|$)")


def staying(problem: Problem, stays: frozenset[str]) -> Problem:
    """Pin these weights to the device."""
    if not stays:
        return problem
    tensors = tuple(
        replace(t, home=DEVICE, pinned=True) if t.id in stays and t.home == HOST else t
        for t in problem.tensors
    )
    ops = tuple(
        replace(op, direct={t: us for t, us in op.direct.items() if t not in stays})
        for op in problem.ops
    )
    return replace(problem, tensors=tensors, ops=ops)
