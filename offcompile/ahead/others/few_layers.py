"""Traces few layers of a model with another batch, to be extrapolated like a model that is known.

A model with few of its layers is traced twice to find the pattern in which they repeat (`unroll`).
The pattern is the same for each batch, so another one takes one trace, and no search for a pattern.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from offcompile.ahead.plan import Ahead, ForecastRequest, Tell
from offcompile.graph.sizes import hint_of
from offcompile.ir import Problem
from offcompile.machine.in_place import InPlace
from offcompile.machine.target import Target

#: the step with all tensors on the device (None), and with weights on the host
Steps = Mapping[InPlace | None, Problem]


@dataclass(frozen=True)
class FewLayers:
    """The step of a model with few of its layers."""

    #: number of pieces of the loss (None: whole) → the step
    steps: Mapping[int | None, Steps]

    def all_layers(self, like: Ahead) -> list[Problem]:
        """The variants of the step with all layers, as they repeat in a model with another batch;
        none with so many pieces, maybe. Raises `NotAlike` if the layers do not repeat alike."""
        if like.pieces not in self.steps:
            return []
        survey = replace(like.survey, few=self.steps[like.pieces])
        return replace(like, survey=survey).variants


def few_layers(asked: ForecastRequest, target: Target, pieces: int, tell: Tell) -> FewLayers | None:
    """Trace few layers of a model, whole and with its loss in `pieces`, or in as many as there can
    be. None if it has no layers to leave out."""
    found = Ahead.few(asked, target, tell)
    if found is None:
        return None
    weights = {id(p): p.nbytes for p in asked.model.parameters()}
    in_place = target.in_place(2 * sum(weights.values()))
    steps: dict[int | None, Steps] = {None: _steps(found, in_place)}
    if found.may_split:
        number = min(pieces, found.most_pieces)
        steps[number] = _steps(found.in_pieces(number, tell), in_place)
    return FewLayers(steps)


def _steps(ahead: Ahead, in_place: InPlace | None) -> Steps:
    hint = hint_of(ahead.survey.sizes)
    places = dict.fromkeys((None, in_place))
    return {
        place: ahead.survey.annotated(ahead.graphs, place, frozenset(), hint).problem
        for place in places
    }
