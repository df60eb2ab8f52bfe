"""Decides on the kind of plan for one graph, and on the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from offcompile.graph.annotate import Annotated
from offcompile.graph.graphs import Graphs
from offcompile.graph.in_backward_updates import Offers, read_after_update
from offcompile.graph.mask_bits import compact, has_bits
from offcompile.graph.sizes import hint_of
from offcompile.graph.weight_placement import TRIAL_SHARE, Choice, choose
from offcompile.ir import BACKWARD, DEVICE, Infeasible, Machine, Plan, Problem
from offcompile.ir.units import show_bytes
from offcompile.machine.in_place import InPlace
from offcompile.planning.empty_turn import decide_emptied
from offcompile.planning.endurance import planned_life
from offcompile.planning.feedback.corrections import with_factors
from offcompile.planning.feedback.profiling import WORTH, Settled, reconsider
from offcompile.planning.fit_budget import (
    NO_LOSS,
    Decided,
    Holes,
    decide,
    fits_as_it_is,
    floor_of,
    peak_alone,
    planning_seconds,
    with_figure,
    with_reserve,
)
from offcompile.planning.planned_layout import planned_returns
from offcompile.planning.planner import PlanResult
from offcompile.report.report import PlanReport
from offcompile.runtime.memory.heap import address_space_is_limited

from .problem_source import ProblemSource

#: kinds of the user's tensors that may leave for the host besides activations
LEAVING = ("weight", "gradient")
#: share of a step that packing and unpacking masks may take if everything fits with them packed
BITS_COST = 0.02
#: little to search for: everything that can leave does
TURNING_SECONDS = 0.2
Tell = Callable[[str], None]


@dataclass(eq=False)
class Planning:
    """Plans a surveyed graph. `settle` also sets `survey`, `offers`, `in_place` and `stays`."""

    name: str
    survey: ProblemSource
    #: bytes of the budget held by others
    held_bytes: int = 0
    #: a plan to reuse if the problem is the one that it was made for
    settled: Settled | None = None
    #: True if a refusal should name a budget that has a plan, which takes another search
    explains: bool = True
    #: True if everything that forward saves for backward must be able to leave
    turns: bool = False
    #: True if all weights must be on the host, like those of others
    hosts: bool = False
    #: True if masks are packed as bits without checking if a plan without that would be better
    quick: bool = False
    #: gradients that the graphs offer to an optimizer while they run
    offers: Offers | None = None
    in_place: InPlace | None = None
    #: weights that stay on the device although others are on the host
    stays: frozenset[str] = frozenset()

    def budget(self) -> int | None:
        """Bytes that the options leave this graph; None: as few as possible, found by planning."""
        budget = self.survey.options.memory_bytes(self.survey.target.device_bytes)
        if budget is None:
            return None
        budget -= self.held_bytes
        if budget > 0:
            return budget
        raise Infeasible(
            f"{self.name}: other compiled graphs of this process hold"
            f" {show_bytes(self.held_bytes)}, which is the whole budget.",
            -budget,
            f"Set memory to more than {show_bytes(self.held_bytes)}, or delete the models that are"
            " no longer used.",
        )

    def report(self, choice: Choice) -> PlanReport:
        """Report what is known before anything runs."""
        annotated, decided, target = choice.annotated, choice.decided, self.survey.target
        budget, peak = self.budget(), decided.order.peak_bytes
        reserve = 0 if decided.fits else target.reserve_bytes(budget or peak)
        whole_bytes = budget if budget is not None else peak + reserve
        return PlanReport(
            name=self.name,
            problem=annotated.problem,
            machine=decided.machine,
            result=decided.result,
            budget_bytes=whole_bytes,
            reserve_bytes=reserve,
            holes_bytes=decided.holes_bytes,
            worst_peak_bytes=peak,
            labels=annotated.labels,
            names=annotated.names,
            room=target.room(whole_bytes),
            touch_us_per_mib=self.survey.touch_again_us_per_mib,
            beside_bytes=self.held_bytes,
            split=choice.split,
            life=partial(planned_life, annotated.problem, decided.result.plan, target.runtime),
        )

    def settle(self, graphs: Graphs, updated: frozenset[int], tell: Tell) -> tuple[Graphs, Choice]:
        """Return the graphs to plan and the plan. If not everything fits, gradients are offered to
        the optimizer that updates during backward, if there is one.

        updated: arguments that have such an optimizer.
        """
        budget = self.budget()
        plain = self.survey.annotate(graphs, budget, tell)
        if self.turns:
            return graphs, self._turning(graphs, plain, budget, tell)
        if self.hosts:
            return graphs, self._choose(graphs, plain, budget, tell)
        fits = budget is not None and fits_as_it_is(plain.problem, self.survey.machine, budget)
        if not fits and (apart := self.survey.apart(graphs)) is not graphs:
            graphs, plain = apart, self.survey.annotate(apart, budget, tell)
        if self.settled is not None and not has_bits(self.settled.problem):
            return self._settle(graphs, plain, fits, updated, tell)
        found = None if fits else self._settle_bits(graphs, plain, updated, tell)
        return found or self._settle(graphs, plain, fits, updated, tell)

    def _turning(self, graphs: Graphs, plain: Annotated, budget: int | None, tell: Tell) -> Choice:
        """Plan to move everything that backward gets from forward: within the memory that the step
        needs alone if the budget allows that, else within the budget."""
        reserve, machine = self.survey.target.reserve_bytes, self.survey.machine
        enough = with_reserve(peak_alone(plain.problem, machine), reserve)
        if self.hosts or (budget is not None and enough > budget):
            return self._choose(graphs, plain, budget, tell)
        decided = decide(
            plain.problem,
            machine,
            enough,
            reserve,
            "turnover",
            TURNING_SECONDS,
            tell,
            may_fit=False,
        )
        return Choice(plain, decided)

    def _settle_bits(
        self, graphs: Graphs, plain: Annotated, updated: frozenset[int], tell: Tell
    ) -> tuple[Graphs, Choice] | None:
        """Like `settle`, with masks saved as bits if that makes a better plan; None if no masks
        matter."""
        fuses, budget = self.survey.options.lowering == "inductor", self.budget()
        made = compact(graphs, hint_of(self.survey.sizes), fuses=fuses)
        if made is None or not made.matters:
            return None
        packing = replace(self, survey=replace(self.survey))
        smaller = packing.survey.annotate(made.graphs, budget, tell)
        fits = budget is not None and fits_as_it_is(smaller.problem, self.survey.machine, budget)
        cheap = _compute_us(smaller) <= _compute_us(plain) * (1 + BITS_COST)
        found = None
        if self.settled is None and not (fits and cheap) and not (self.quick and cheap):
            try:
                keeping = replace(self, explains=False)
                found = keeping._settle(graphs, plain, False, updated, tell)
            except Infeasible:
                tell("planning with masks as bits")
        if found is not None:
            least_us = max(_compute_us(plain), found[1].decided.result.lower_bound_us)
            moving = found[1].decided.cost_us > least_us * (1 + BITS_COST)
            if (moving or budget is None) and packing._better(
                found[1], made.graphs, smaller, fits, updated, tell
            ):
                found = None
        if found is None:
            taken, found = packing, packing._settle(made.graphs, smaller, fits, updated, tell)
        else:
            taken = keeping
        self.survey, self.offers = taken.survey, taken.offers
        self.in_place, self.stays = taken.in_place, taken.stays
        return found

    def _better(
        self,
        than: Choice,
        graphs: Graphs,
        annotated: Annotated,
        fits: bool,
        updated: frozenset[int],
        tell: Tell,
    ) -> bool:
        """True if a shorter search finds a plan for these graphs that beats `than`."""
        trial = replace(self, survey=replace(self.survey), explains=False)
        try:
            _, found = trial._settle(graphs, annotated, fits, updated, tell, TRIAL_SHARE)
        except Infeasible:
            return False
        mine, other = found.decided, than.decided
        faster = mine.cost_us < other.cost_us * (1 - NO_LOSS)
        if self.budget() is not None:
            return faster
        peak, peak_before = mine.order.peak_bytes, other.order.peak_bytes
        return peak < peak_before or (peak == peak_before and faster)

    def _settle(
        self,
        graphs: Graphs,
        plain: Annotated,
        fits: bool,
        updated: frozenset[int],
        tell: Tell,
        share: float = 1.0,
    ) -> tuple[Graphs, Choice]:
        survey, budget = self.survey, self.budget()
        without: frozenset[str] = frozenset()
        # on CUDA the host runs ahead of compute, so updates overlap it once backward has returned
        while updated and survey.kind == "cpu" and not fits:
            offers = survey.with_offers(graphs, plain, updated, without)
            if offers is None:
                break
            annotated = survey.problem(offers.graphs)
            choice = self._choose(offers.graphs, annotated, budget, tell, share)
            late = read_after_update(offers, choice.annotated, choice.decided.order)
            if not late:
                self.offers = offers
                return offers.graphs, choice
            without |= late
        return graphs, self._choose(graphs, plain, budget, tell, share)

    def _choose(
        self,
        graphs: Graphs,
        annotated: Annotated,
        budget: int | None,
        tell: Tell,
        time_share: float = 1.0,
    ) -> Choice:
        survey = self.survey
        #: plans of the step with its weights placed differently, whose choices are tried
        known: list[Plan] = []

        def decided(
            found: Annotated,
            *,
            may_fit: bool,
            share: float = 1.0,
            worth_us: float = float("inf"),
            to_floor: bool = False,
        ) -> Decided:
            asked = None if to_floor else budget
            if self.settled is not None and self.settled.fits(found.problem, asked):
                return self.settled.decided
            made = self._decide(
                found.problem,
                asked,
                may_fit,
                time_share * share,
                tell,
                known=known,
                worth_us=worth_us,
            )
            if made.result.plan.recomputes or made.result.plan.updates:
                known.append(made.result.plan)
            return made

        weights = [t.nbytes for t in annotated.problem.tensors if t.kind == "weight"]
        in_place = survey.target.in_place(2 * sum(weights))  # gradients too

        def on_host(stays: frozenset[str]) -> Annotated | None:
            if in_place is None or (self.turns and not self.hosts):
                return None
            survey.measure_in_place(graphs, in_place)
            found = survey.problem(graphs, in_place, stays)
            leaves = any(not t.pinned for t in found.problem.tensors if t.kind in LEAVING)
            return found if leaves else None

        def hosting() -> Choice | None:
            """Put every weight on the host, and leave half of the room to the runtime's keeper if
            the other half is enough for a plan."""
            found = on_host(frozenset()) if self.hosts else None
            if found is None or budget is None:
                return None
            floor = with_reserve(
                floor_of(found.problem, survey.machine), survey.target.reserve_bytes
            )
            room = min(budget, max(floor, budget // 2))
            # if weights leave for others, their gradients had better leave as well
            ways = [(nbytes, ends) for ends in (True, False) for nbytes in (room, budget)]
            for nbytes, ends in dict.fromkeys(ways):
                try:
                    made = self._decide(found.problem, nbytes, False, time_share, tell, ends)
                except Infeasible:
                    if (nbytes, ends) == ways[-1]:
                        raise
                else:
                    return Choice(found, made, frozenset())
            return None

        def chosen(to_floor: bool) -> Choice:
            return choose(
                annotated,
                on_host,
                partial(decided, to_floor=to_floor),
                to_floor=to_floor,
                floor_of=partial(floor_of, machine_for=survey.machine),
                must_leave=survey.options.gradient_reserve is not None,
                # the other policies come from papers, which do not split
                may_split=survey.options.policy.partition(":")[0] == "joint" and time_share == 1.0,
            )

        try:
            found = hosting() or chosen(budget is None)
        except Infeasible as error:
            if budget is None or self.turns or not self.explains:
                raise
            try:  # the advice in the refusal must be enough
                least = chosen(True).decided.machine.tier[DEVICE].capacity_bytes
            except Infeasible:
                raise error from None
            assert least is not None
            total = with_reserve(least, survey.target.reserve_bytes) + self.held_bytes
            raise with_figure(error, total, budget + self.held_bytes) from None
        if found.stays is not None:
            self.in_place, self.stays = in_place, found.stays
        return found

    def _decide(
        self,
        problem: Problem,
        budget: int | None,
        may_fit: bool,
        share: float = 1.0,
        tell: Tell | None = None,
        ends: bool = False,
        known: Sequence[Plan] = (),
        worth_us: float = float("inf"),
    ) -> Decided:
        options, target = self.survey.options, self.survey.target
        seconds = share * (options.seconds or planning_seconds(problem))
        ends = ends and any(op.phase == BACKWARD for op in problem.ops)
        if (self.turns or ends) and budget is not None:
            return decide_emptied(
                problem,
                self.survey.machine,
                budget,
                target.reserve_bytes,
                options.whole_policy,
                seconds,
                tell,
                self.turns,
                ends,
            )
        return decide(
            problem,
            self.survey.machine,
            budget,
            target.reserve_bytes,
            options.whole_policy,
            seconds,
            tell,
            self.held_bytes,
            None if budget is None else self._holes(problem, budget),
            may_fit,
            known,
            worth_us,
        )

    def _holes(self, problem: Problem, budget: int) -> Holes:
        survey = self.survey
        room, wanted_bytes = survey.target.room(budget), survey.target.holes_bytes(budget)
        # costs corrected by measured steps already include it; and if the address space is
        # limited, holes cost no time: a step that finds no place fails
        us_per_mib = survey.touch_again_us_per_mib if survey.profile.factors is None else 0.0
        if room is None or not us_per_mib or problem.steady or address_space_is_limited():
            return Holes(wanted_bytes)

        def touching_us(machine: Machine, made: PlanResult) -> float:
            found = planned_returns(problem, machine, made.plan, made.timeline, room)
            return found.touched_mib * us_per_mib

        return Holes(wanted_bytes, touching_us)

    def reconsider(
        self, made: Decided, problem: Problem, dtypes: Mapping[str, torch.dtype], tell: Tell
    ) -> tuple[str, Settled | None]:
        """Describe what runs have shown, and return another plan if it is worth recompiling.

        made: the plan in use, for `problem`.
        """
        survey, options = self.survey, self.survey.options
        survey.learn_codecs()
        if self.survey.costs_as_planned is None:
            problem = with_factors(problem, survey.profile.factors)
        budget = options.memory_bytes(survey.target.device_bytes)
        left = None if budget is None else budget - self.held_bytes
        text, found = reconsider(
            problem,
            made.result.plan,
            survey.machine(made.machine.tier[DEVICE].capacity_bytes or 1),
            dtypes,
            survey.profile.densities,
            options.lossy,
            WORTH[options.lowering],
            lambda again: self._decide(again, left, False, tell=tell),
            survey.profile.seen,
        )
        return text, None if found is None else Settled(found[0], left, found[1])


def _compute_us(annotated: Annotated) -> float:
    return sum(op.duration_us for op in annotated.problem.ops)
