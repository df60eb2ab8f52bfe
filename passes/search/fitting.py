"""Makes the choices of a policy fit: evicts the tensors it names, then more, until all runs fit.

It serves policies that decide about some tensors only. If their choices do not fit, tensors of the
kind that they name are evicted first, then any others. If no choice gives a plan, everything
possible is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable

from offcompile.ir import DEVICE, HOST, Infeasible, Machine, Plan, Problem
from offcompile.passes.build.contract import Judge
from offcompile.passes.select.gap_set import GapSet, Prices

from .program_variant import (
    Choices,
    ProgramVariant,
    forced_choices,
    infeasible_host,
    may_run_on_host,
)
from .search import choices_of
from .trials import Trials

#: (tensor, op before the gap)
Key = tuple[str, str | None]


def with_hosted(problem: Problem, choices: Choices, hosted: Iterable[str]) -> Choices:
    """Returns the choices with these weights updated on the host, too, all operands in place.

    Weights stay on the device if an op that cannot run on the host updates them.
    """
    unable = {
        t
        for o in problem.ops
        if o.phase == "update" and not may_run_on_host(problem, o)
        for t in o.writes
    }
    weights = (choices.hosted | frozenset(hosted)) - unable
    ops = {o.id for o in problem.ops if o.phase == "update" and not weights.isdisjoint(o.writes)}
    directs = frozenset(d for d in choices.directs if d[0] not in ops)
    return Choices(directs, choices.recomputes, weights)


class Fitting:
    """Offers variants and gaps to the builder, starting with the decisions of an earlier plan."""

    def __init__(
        self, problem: Problem, machine: Machine, judge: Judge | None, plan: Plan, first: str
    ) -> None:
        self.problem, self.machine = problem, machine
        self.first = first  # the kind of tensors evicted before any other
        self.trials = Trials(problem, machine, judge)
        self.forced = with_hosted(problem, forced_choices(problem, machine), ())
        given = choices_of(plan)
        joined = Choices(given.directs | self.forced.directs, given.recomputes, given.hosted)
        #: the choices of the earlier plan, and those that no plan can do without
        self.base = with_hosted(problem, joined, self.forced.hosted)
        self.away: frozenset[Key] = frozenset(
            (d.tensor, d.after) for d in plan.drops if d.tier == DEVICE
        )

    @property
    def host(self) -> bool:
        return HOST in self.machine.tier

    def variant(self, choices: Choices) -> ProgramVariant:
        return ProgramVariant(self.problem, self.machine, choices)

    def offer(self, variant: ProgramVariant, away: Iterable[Key]) -> bool:
        """Makes the choice fit and builds it. True if the plan beats the earlier ones."""
        try:
            cover = variant.cover({*self.away, *away})
            if not self._fit(variant, cover):
                return False
        except Infeasible as error:
            self.trials.refused = error.reason
            return False
        return self.trials.attempt(variant.decisions(cover))

    def _fit(self, variant: ProgramVariant, cover: GapSet) -> bool:
        """Evicts more until everything fits: the kind named first, then any."""
        prices = Prices()
        fits = cover.repair(
            variant.capacity, prices, lambda gap: 1.0 if gap.tensor.kind == self.first else 0.0
        )
        return fits or cover.repair(variant.capacity, prices)

    def plan(self) -> Plan:
        """Returns the best plan offered, or a last resort; raises the reason if there is none."""
        if self.trials.best is None:
            self._last_resorts()
        if self.trials.best is None:
            self.variant(self.forced).check_floor()
            raise infeasible_host(
                "Everything that can leave the device fits it, but no plan found gets it out and"
                f" back within the other tiers. {self.trials.refused}".strip()
            )
        return self.trials.best

    def _last_resorts(self) -> None:
        """Tries evicting everything to the host, then to the other tiers; then greedily."""
        beyond = [t.name for t in self.machine.tiers if t.name not in (DEVICE, HOST)]
        for choices in dict.fromkeys((self.base, self.forced)):
            for tier in (HOST, *beyond):
                for everything in (True, False):
                    variant = ProgramVariant(self.problem, self.machine, choices, tier)
                    try:
                        count = len(variant.gaps.gaps) if everything else 0
                        cover = GapSet(variant.gaps, range(count))
                        if not cover.repair(variant.capacity, Prices()):
                            continue
                    except Infeasible as error:
                        self.trials.refused = error.reason
                        continue
                    if self.trials.attempt(variant.decisions(cover)):
                        return
