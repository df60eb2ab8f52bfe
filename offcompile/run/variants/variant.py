"""One plan of a captured graph, compiled, and one call to find a plan for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from offcompile.planning.footprint import Footprint
from offcompile.report.report import PlanReport
from offcompile.run.accounts.apply_placement import WeightPlaces
from offcompile.run.accounts.graph_runs import GraphRuns
from offcompile.run.accounts.usage import ParameterSet
from offcompile.run.plan.planned import Planned
from offcompile.run.plan.request import PlanKind


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
