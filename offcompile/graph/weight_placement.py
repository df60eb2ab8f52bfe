"""Chooses where weights and their gradients live: all on the device, all on the host, or split.

Compares three kinds of plan: all weights on the device, so that only activations move; all on the
host; and some on the host, the others always on the device. Takes the simplest unless another gains
enough (`Terms`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

from offcompile.ir import HOST, Infeasible, Problem
from offcompile.outline import StepOutline, outline
from offcompile.passes.select.pinned_weights import (
    best_share,
    spread,
    weigh_little,
    weights_in_use_order,
)
from offcompile.planning.fit_budget import Decided
from offcompile.planning.floors import room_above
from offcompile.planning.planner import NO_RIVAL, OUTLINE_FROM_OPS, Beaten, Rival, device_us
from offcompile.planning.splitting import Splitting

from .annotate import Annotated

#: weights leave, and some stay after all, only if a step gains more than this share
WORTH_LEAVING = 0.01
#: a placement of weights is searched only if its bound is below this share of the best plan's step:
#: less than `WORTH_LEAVING` is no gain
WORTH_SEARCHING = 0.99
#: share of the usual search time: for plans that are only compared, and for plans that may still
#: gain `WORTH_LEAVING` according to their lower bound
TRIAL_SHARE, LONGER_SHARE = 1 / 5, 2.0
#: a plan is not searched again if it costs more than NEAR times the best, or if its gap is below
#: CLOSE; or if it costs more than NEAR_RIVAL times a rival, since a longer search gains about that
NEAR, CLOSE, NEAR_RIVAL = 1.1, 0.03, 1.04
CLOSE_ENOUGH = 0.01  # likewise, if a trial found the plan
NEAR_BOUND = 0.05  # a rival's choices, in other pieces, are not searched again this near the bound
#: likewise, if the search started from the choices of the rival's plan, or with outlines
NEAR_TWIN = 1.01
#: shares of the weights that stay in an outline, tried as long as fewer are faster
SHARES_OF_OUTLINE = (Fraction(1), Fraction(7, 8), Fraction(3, 4), Fraction(1, 2))
#: if plans take more than this multiple of what the outline says, other weights are tried as well:
#: if it lets some stay, and if it lets none
FAR_FROM_OUTLINE, FAR_IF_NONE_STAYS = 1.12, 1.05
DEAR = 2  # no places are compared if updates over the link take this many times the gain
#: processor time after which no more choices of weights are planned, and no search is extended
ENOUGH_SECONDS = 25.0


class Decide(Protocol):
    """Plans an annotated step; raises Infeasible. `share`: a share of the usual planning time.

    worth_us: raises `Beaten` if no plan can cost less than this. trial: the plan is only compared,
    and searched for again if it is chosen.
    """

    def __call__(
        self,
        found: Annotated,
        *,
        may_fit: bool,
        share: float = 1.0,
        worth_us: float = float("inf"),
        trial: bool = False,
    ) -> Decided: ...


@dataclass(frozen=True)
class Terms:
    """The terms on which weights and gradients leave the device."""

    #: gradients must leave regardless of the gain, unless everything fits
    must_leave: bool = False
    #: some weights may stay while others move to the host
    may_split: bool = True
    #: the least share of a step for which weights leave
    gain: float = WORTH_LEAVING


@dataclass(frozen=True)
class Choice:
    annotated: Annotated
    decided: Decided
    #: weights that stay on the device while others are on the host; None if no weight moves there
    stays: frozenset[str] | None = None
    #: how the graph was split into pieces; None if it was not
    splitting: Splitting | None = None

    @property
    def is_trial(self) -> bool:
        """True if a trial found the plan of a large step, so that a search may go on from it."""
        return self.decided.trial and _is_outlined(self.annotated.problem)


def choose(
    at_home: Annotated,
    on_host: Callable[[frozenset[str]], Annotated | None],
    decide: Decide,
    to_floor: bool,
    floor_of: Callable[[Problem], int],
    terms: Terms = Terms(),
    rival: Rival = NO_RIVAL,
) -> Choice:
    """Find the fastest plan that fits; with `to_floor`, the one with the lowest peak. Raises
    `Infeasible`, and `Beaten` if no plan can beat the rival.

    `on_host` annotates the step with all weights on the host but those given; None if that cannot
    be, or if no weight is worth a move."""
    if to_floor:
        return _least(at_home, on_host(frozenset()), decide, floor_of)
    until = time.thread_time() + ENOUGH_SECONDS
    must_leave, may_split = terms.must_leave, terms.may_split
    rival_us, stay = rival.worth_us(at_home.problem), None
    refused: Infeasible | Beaten | None = None
    # searches of large steps are short as long as places are compared; that of the best goes on
    outlined = may_split and _is_outlined(at_home.problem)
    try:
        share = TRIAL_SHARE if outlined else 1.0
        stay = decide(at_home, may_fit=True, share=share, worth_us=rival_us, trial=outlined)
    except (Infeasible, Beaten) as error:
        refused = error
    if stay is not None and outlined and not must_leave and terms.gain > WORTH_LEAVING:
        stay = searched_on(Choice(at_home, stay), decide, rival).decided
    hidden = stay is not None and _hides(stay, at_home.problem, terms.gain)
    if stay is not None and (stay.fits or (hidden and not must_leave)):
        return Choice(at_home, stay)
    if stay is None and rival.stays is not None:
        alike = _placed_alike(rival, on_host, decide)
        if alike is not None:
            return alike
    little = stay is not None and weigh_little(at_home.problem, stay.machine)
    all_there = None if little and not must_leave else on_host(frozenset())
    leave: Choice | None = None
    if all_there is not None:
        shortly = may_split and not rival.limits_bounds
        try:
            leave = Choice(all_there, _all_moved(all_there, decide, rival_us, shortly), frozenset())
        except Infeasible as error:
            refused = refused if isinstance(refused, Beaten) else error
        except Beaten as error:
            refused = error
    if leave is None:
        if stay is None:
            assert refused is not None
            raise refused
        found = Choice(at_home, stay)
        return searched_on(found, decide, rival) if outlined else found
    if may_split and not _bound_by_ops(leave):
        plans = [d for d in (stay, leave.decided) if d is not None]
        least_us = min(rival.cost_us, *(d.cost_us for d in plans))
        if not _dear_to_update(leave, stay):
            all_moved, moved = leave, leave.annotated.problem
            room_bytes = room_above(floor_of(moved), leave.decided.machine, moved)
            leave = _with_some_here(
                leave, _Contest(least_us, rival, until), on_host, decide, room_bytes, shortly
            )
            least_us = min(least_us, leave.decided.cost_us)
            # some may win for their updates alone; choices of a plan with all moved serve them too
            serves = leave is all_moved or (leave.stays and all_moved.decided.updates_us)
            if serves and not outlined:
                longer = _longer(all_moved, _Contest(least_us, rival, until), decide)
                leave = min(longer, leave, key=lambda c: c.decided.cost_us)
        if stay is not None and not outlined:
            contest = _Contest(min(least_us, leave.decided.cost_us), rival, until)
            stay = _longer(Choice(at_home, stay), contest, decide).decided
    best = leave
    if stay is not None and not (must_leave or _faster(leave.decided, stay, terms.gain)):
        best = Choice(at_home, stay)
    if outlined and (shortly or best.stays != frozenset()):
        best = searched_on(best, decide, rival)
    if best.decided.cost_us >= rival.cost_us:
        raise Beaten
    return best


def searched_on(trial: Choice, decide: Decide, rival: Rival = NO_RIVAL) -> Choice:
    """The trial's place, searched for the usual time if a plan may still gain by that."""
    made, outlined = trial.decided, _is_outlined(trial.annotated.problem)
    far = made.cost_us > rival.cost_us * (NEAR_TWIN if outlined else NEAR_RIVAL)
    done = made.fits or not made.trial or made.result.gap < CLOSE_ENOUGH
    if done or far or (outlined and rival.by_trials):
        return trial
    return replace(trial, decided=_longer_or(made, trial.annotated, decide))


def _longer_or(made: Decided, found: Annotated, decide: Decide) -> Decided:
    """The cheaper of a plan and that of a search of the usual time, which may find none."""
    with contextlib.suppress(Infeasible, Beaten):
        made = min(decide(found, may_fit=False), made, key=lambda d: d.cost_us)
    return replace(made, trial=False)


def _placed_alike(
    rival: Rival, on_host: Callable[[frozenset[str]], Annotated | None], decide: Decide
) -> Choice | None:
    """The plan with the weights where the rival's plan has them, which was the best of several
    places: other places are not tried if this plan fits. Raises `Beaten`."""
    assert rival.stays is not None
    annotated = on_host(rival.stays)
    if annotated is None:
        return None
    rival_us = rival.worth_us(annotated.problem)
    with contextlib.suppress(Infeasible):
        made = decide(annotated, may_fit=False, share=TRIAL_SHARE, worth_us=rival_us, trial=True)
        if made.cost_us > rival_us * NEAR_TWIN:
            raise Beaten
        far = made.result.gap > NEAR_BOUND and not rival.by_trials
        longer = far or not _is_outlined(annotated.problem)
        best = _longer_or(made, annotated, decide) if longer else made
        if best.cost_us >= rival.cost_us:
            raise Beaten
        return Choice(annotated, best, rival.stays)
    return None


def _all_moved(found: Annotated, decide: Decide, rival_us: float, shortly: bool) -> Decided:
    """The plan with all weights on the host. `shortly`: a short search finds it, even if it cannot
    beat the rival, since a plan with some weights on the device may."""
    if shortly:
        with contextlib.suppress(Infeasible):
            return decide(found, may_fit=False, share=TRIAL_SHARE, trial=True)
    return decide(found, may_fit=False, worth_us=rival_us)


def _least(
    at_home: Annotated,
    on_host: Annotated | None,
    decide: Decide,
    floor_of: Callable[[Problem], int],
) -> Choice:
    """The plan with the lowest peak; skips the plan with weights at home if its floor is above
    the other's peak."""
    leave: Choice | None = None
    if on_host is not None:
        with contextlib.suppress(Infeasible):  # the host may lack room for weights and gradients
            leave = Choice(on_host, decide(on_host, may_fit=False), frozenset())
    if leave is not None and floor_of(at_home.problem) >= leave.decided.order.peak_bytes:
        return leave
    try:
        stay = Choice(at_home, decide(at_home, may_fit=True))
    except Infeasible:
        if leave is None:
            raise
        return leave
    return stay if leave is None else min(stay, leave, key=lambda c: c.decided.order.peak_bytes)


@dataclass(frozen=True)
class _Contest:
    """The plans that another has to beat: the cost of the best, the caller's, and the processor
    time until which others may be sought."""

    least_us: float
    rival: Rival
    until: float

    def worth_us(self, problem: Problem, found: Iterable[Choice] = ()) -> float:
        """The problem is worth a search if its bound is below this."""
        best_us = min([self.least_us, *(choice.decided.cost_us for choice in found)])
        return min(best_us * WORTH_SEARCHING, self.rival.worth_us(problem))


def _longer(choice: Choice, contest: _Contest, decide: Decide) -> Choice:
    """Search again, for longer, if there is time and the plan may still beat the others."""
    made, rival_us = choice.decided, contest.rival.cost_us
    far = made.cost_us > min(contest.least_us * NEAR, rival_us * NEAR_RIVAL)
    late = time.thread_time() > contest.until
    worth_us = contest.worth_us(choice.annotated.problem)
    if far or made.result.gap < CLOSE or late or made.bound_us >= worth_us:
        return choice
    found = decide(choice.annotated, may_fit=False, share=LONGER_SHARE)
    return min(replace(choice, decided=found), choice, key=lambda c: c.decided.cost_us)


def _with_some_here(
    leave: Choice,
    contest: _Contest,
    on_host: Callable[[frozenset[str]], Annotated | None],
    decide: Decide,
    room_bytes: int,
    was_trial: bool,
) -> Choice:
    """Keep the share of weights on the device that makes the step fastest. room_bytes: memory of
    the device left at the op that needs most. was_trial: `leave` was searched for shortly."""
    sizes = _without_host_updates(leave)
    if room_bytes <= min((nbytes for _, nbytes in sizes), default=0):
        return leave
    found: list[Choice] = []
    known: dict[frozenset[str], float | None] = {frozenset(): leave.decided.cost_us}

    def planned(stays: frozenset[str]) -> float | None:
        """The cost with these weights on the device; None if there is no plan worth it."""
        if stays in known:
            return known[stays]
        known[stays] = None
        annotated = on_host(stays)
        if annotated is None:
            return None
        worth_us = contest.worth_us(annotated.problem, found)
        with contextlib.suppress(Infeasible, Beaten):
            made = decide(
                annotated, may_fit=False, share=TRIAL_SHARE, worth_us=worth_us, trial=True
            )
            found.append(Choice(annotated, made, stays))
            known[stays] = made.cost_us
        return known[stays]

    best_us = leave.decided.cost_us
    outlined = _outlined(leave)
    far_us = 0.0
    if outlined is not None:
        far_us = outlined.cost_us * (FAR_FROM_OUTLINE if outlined.stays else FAR_IF_NONE_STAYS)
        weights = weights_in_use_order(leave.annotated.problem)
        weights = [w for w in weights if w[0] in outlined.stays]
        for share in SHARES_OF_OUTLINE if weights else ():
            several = bool(found)
            cost_us = planned(spread(weights, share))
            if several and (cost_us is None or cost_us >= best_us):
                break
            best_us = min(best_us, cost_us or best_us)
    if best_us > far_us:
        _by_trials(planned, sizes, min(contest.least_us, best_us), contest.until, room_bytes)
    best = min(found, key=lambda c: c.decided.cost_us, default=leave)
    if not _faster(best.decided, leave.decided):
        best = leave
        if outlined is None:
            return leave
    if _is_outlined(best.annotated.problem) or (best is leave and not was_trial):
        return best
    # whatever the time: this search starts from the trials' choices, and gains more than they did
    return searched_on(best, decide, contest.rival)


def _by_trials(
    planned: Callable[[frozenset[str]], float | None],
    sizes: Sequence[tuple[str, int]],
    least_us: float,
    until: float,
    room_bytes: int,
) -> None:
    """Plan with several shares of the weights on the device, while there is time."""

    def cost(share: Fraction) -> float | None:
        return None if time.thread_time() > until else planned(spread(sizes, share))

    total_bytes = sum(nbytes for _, nbytes in sizes)
    best_share(cost, least_us, min(Fraction(1), Fraction(room_bytes, max(1, total_bytes))))


def _is_outlined(problem: Problem) -> bool:
    """True if an outline says which weights stay."""
    return len(problem.ops) >= OUTLINE_FROM_OPS


def _outlined(leave: Choice) -> StepOutline | None:
    """An outline of the step in which weights may stay on the device; None if there is none."""
    problem, decided = leave.annotated.problem, leave.decided
    if not _is_outlined(problem):
        return None
    moved = sum(t.nbytes for t in problem.tensors if t.kind == "weight" and t.home == HOST)
    return outline(problem, decided.machine, True, decided.updates_us / max(1, moved))


def _without_host_updates(leave: Choice) -> list[tuple[str, int]]:
    """The weights on the host that the device updates; it is better to leave there all weights that
    the host updates."""
    hosted = {u.weight for u in leave.decided.result.plan.updates if u.where == HOST}
    return [w for w in weights_in_use_order(leave.annotated.problem) if w[0] not in hosted]


def _hides(decided: Decided, problem: Problem, gain: float = WORTH_LEAVING) -> bool:
    """True if moves add no more than `gain` to the step, and updates on the host could take nothing
    from it."""
    return decided.cost_us <= device_us(problem) * (1 + gain)


def _bound_by_ops(choice: Choice) -> bool:
    """True if no other place of weights can gain enough: each takes at least the time of its ops
    but for updates, which the host may make."""
    return device_us(choice.annotated.problem) >= choice.decided.cost_us * WORTH_SEARCHING


def _dear_to_update(leave: Choice, stay: Decided | None) -> bool:
    """True if even the bound with all weights on the host gains far less than their updates cost,
    so that no share of them pays."""
    if stay is None or not leave.decided.updates_us:
        return False
    gain_us = stay.cost_us - leave.decided.result.lower_bound_us
    return gain_us * DEAR < leave.decided.updates_us


def _faster(leave: Decided, stay: Decided, gain: float = WORTH_LEAVING) -> bool:
    return leave.cost_us < stay.cost_us * (1 - gain)
