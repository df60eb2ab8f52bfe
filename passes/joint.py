"""The default policy: decides all kinds of tensors together.

It checks the floor first and reports if the step does not fit even with every evictable tensor off
the device, whatever runs again. Then it tries the best single policy, then greedy covers of the
excess with different headroom, then local search against the simulator until the bound is met or
the effort is spent. So it is never worse than any single policy, and tensors of all kinds compete
for the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from offcompile.ir import Infeasible, Machine, Plan, Problem, Timeline

from .build.contract import Judge
from .build.lanes import LaneClock
from .build.schedule import Builder
from .build.time_left import TimeIsUp, TimeLeft, is_short, timed_by
from .search.gradients_back import brought_home
from .search.least_memory import least_bytes
from .search.program_variant import (
    Choices,
    ProgramVariant,
    direct_choices,
    forced_choices,
    held_on_host,
    infeasible_host,
    recompute_everything,
)
from .search.recompute_starts import WORTH_ANOTHER
from .search.search import Search, SearchState
from .search.starts import Hints, OutlinedChoices, Starts
from .search.update_split import UpdateSplit
from .search.update_turns import taking_turns
from .select.gap_set import GapSet, Prices

#: sets of decisions tried per second, as assumed when budgeting the effort, per (run + move) of the
#: problem
EVALUATIONS_PER_SECOND = 75_000.0
HEADROOMS = (0.0, 0.03, 0.08, 0.15, 0.25, 0.5)


#: problems of at least LARGE runs and moves may take SLACK times longer than estimated: on a busy
#: machine their plans come later, but are no worse
LARGE, SLACK = 1000, 5.0
#: share of the usual time and plans that a search takes if its first plan comes this near to what
#: an outline promises
OUTLINED_SHARE, NEAR_OUTLINE = 0.3, 1.12
#: no more outlines are tried once a plan takes at most this multiple of what the first promises: in
#: trials, and in searches
TRIED_OUTLINE, SEARCHED_OUTLINE = 1.03, 1.005
#: for large problems, a plan this close to the bound is good enough
CLOSE = 0.002
#: share of the time and of all evaluations for each search for a split of the updates
SPLIT_SHARES = (0.2, 0.6)
#: share of the time for all single policies together
POLICY_SHARE = 0.5


class _WithinTime:
    """The judge given to single policies: keeps the best plan they try, and stops them on time.

    After their common share of the time, the running policy may still finish its first plan, and no
    other starts; after the deadline of the search, none continues.
    """

    def __init__(self, search: Search, deadline: float) -> None:
        self.search, self.deadline = search, deadline
        self.tried = 0  # valid plans of the running policy

    @property
    def all_over(self) -> bool:
        return self.search.best_plan is not None and time.thread_time() > self.deadline

    def time(self) -> TimeLeft:
        search, now = self.search, time.thread_time()
        if now <= min(self.deadline, search.deadline):
            return TimeLeft.ENOUGH
        if search.best_plan is None:
            return TimeLeft.SHORT
        return TimeLeft.OVER if self.tried or now > search.deadline else TimeLeft.SHORT

    def __call__(self, problem: Problem, machine: Machine, plan: Plan) -> Timeline:
        is_short()  # raises if the policy must stop
        search = self.search
        timeline = search.judge(problem, machine, plan)
        if problem is search.problem and machine is search.machine:
            search.offer(plan, timeline)
            self.tried += timeline.valid
        return timeline


def _is_large(problem: Problem) -> bool:
    return len(problem.ops) + len(problem.tensors) >= LARGE


def _policies() -> list[str]:
    """Returns all policy names, recomputation first, since the search explores it by itself too."""
    from .registry import POLICIES

    return sorted(POLICIES, key=lambda name: name != "recompute")


@dataclass(frozen=True)
class Joint:
    """Decides everything together. `seconds` bounds the search; `lossy` allows lossy codecs.

    The search budget is counted in decisions tried, so that a run can be repeated exactly; the
    clock only cuts it off on a machine much slower than assumed. The clock counts this thread's
    CPU time: next to other work, the same plan takes longer to find but is no worse.
    """

    name: ClassVar[str] = "joint"
    seconds: float = 10.0
    #: number of sets of decisions that the search may try; None: as many as `seconds` should allow
    evaluations: int | None = None
    lossy: bool = False
    judge: Judge | None = field(default=None, compare=False)
    progress: Callable[[str], None] | None = field(default=None, compare=False)
    #: what leaves the device in a relaxation
    hints: Hints = field(default_factory=dict, compare=False)
    #: lower bound on the time of any plan
    floor_us: float = 0.0
    #: returns the lower bound for plans without recomputation
    kept_floor_us: Callable[[], float] = field(default=lambda: 0.0, compare=False)
    #: True if the plan is only compared with others for which the policies have already been tried
    trial: bool = field(default=False, compare=False)
    #: choices that worked for the same step with its weights elsewhere: tried first
    known_choices: tuple[Choices, ...] = field(default=(), compare=False)
    #: outlines of the step, made one by one and tried first
    outlines: Iterable[OutlinedChoices] = field(default=(), compare=False)
    #: what the first outline promises, if a trial has tried it: `outlines` are the others then, and
    #: nothing else is tried if one of them makes a plan, as the trial has tried it
    tried_us: float = field(default=0.0, compare=False)

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        if self.judge is None:
            raise ValueError("joint needs the simulator: make it with a judge")
        began = time.thread_time()
        plain = self._plain(problem, machine)
        if plain is not None:
            return plain
        search = self._search(problem, machine, began)
        forced = forced_choices(problem, machine)
        starts = Starts(
            search,
            forced,
            self._longest(problem),
            self.lossy,
            self.hints,
            self.known_choices,
        )
        variant = starts.variant(forced)
        blocked = self._floor(variant)
        if blocked is not None and least_bytes(problem, machine) > variant.capacity:
            raise self._last_resorts(starts, variant, blocked, []) or blocked
        variants = [] if blocked is not None else [variant]
        free = direct_choices(problem, machine, only_free=True).directs
        if not free <= forced.directs:
            in_place = starts.variant(
                Choices(forced.directs | free, forced.recomputes, forced.hosted)
            )
            variants += [] if self._floor(in_place) is not None else [in_place]
        states, near = self._outlined(starts)
        if states:
            starts = replace(starts, is_outlined=True)
        goes_on = self.tried_us > 0
        if ((self.trial and near) or goes_on) and search.best_plan is not None:
            if not goes_on:
                starts.known()  # the plan that is chosen is searched for again, from here
            return brought_home(problem, machine, search.best_plan, self.judge)
        for one in variants:
            states = states + starts.moving(one, HEADROOMS[:1])
        states += starts.known()
        split = UpdateSplit.of(problem, machine)
        if not near:  # an outline says how to split the updates
            states += starts.splitting(split, states, SPLIT_SHARES[0])
        again = starts.recomputing(states, split)
        again += starts.splitting(split, again, SPLIT_SHARES[1])
        if self.known_choices:  # the first search shows which weights might as well stay for good
            again += taking_turns(search, split, again or states)
        states += again
        states += starts.balanced(states)
        states += starts.rerunning(states)
        # if recomputation beats everything possible without it, no policy without it is tried
        beaten = not self.trial and bool(again) and search.best_us <= self.kept_floor_us()
        for one in starts.worth_varying(states):
            if self.trial and search.done:
                break  # the plan that is chosen is searched for again
            states += starts.moving(one, HEADROOMS[1:])
        if not self.trial:
            others = [n for n in _policies() if n != self.name]
            self._single_policies(search, others[:1] if beaten else others, POLICY_SHARE)
        if search.best_plan is None:
            blocked = self._last_resorts(starts, variant, blocked, states)
            if search.best_plan is None and blocked is not None:
                raise blocked
        if not search.done:
            self._improve(starts, states)
        if search.best_plan is None:
            raise infeasible_host(
                "Everything that can leave the device fits it, but no schedule found gets it out"
                " and back within the other tiers."
            )
        return brought_home(problem, machine, search.best_plan, self.judge)

    def _outlined(self, starts: Starts) -> tuple[list[SearchState], bool]:
        """Starts with outlines' choices, and True if one comes near to what the first promises; the
        search takes less time then."""
        search = starts.search
        enough = TRIED_OUTLINE if self.trial else SEARCHED_OUTLINE
        outlines = self._made_meanwhile(search)
        states, promised_us = starts.outlined(outlines, enough, self.tried_us)
        near = bool(states) and search.best_us <= promised_us * NEAR_OUTLINE
        if near:
            self._shorten(search)
        return states, near

    def _shorten(self, search: Search) -> None:
        search.left = int(search.left * OUTLINED_SHARE)
        search.deadline -= (1 - OUTLINED_SHARE) * self._longest(search.problem)

    def _made_meanwhile(self, search: Search) -> Iterator[OutlinedChoices]:
        """The outlines; the search does not lose the time that they take."""
        outlines = iter(self.outlines)
        while True:
            began = time.thread_time()
            outline = next(outlines, None)
            search.deadline += time.thread_time() - began
            if outline is None:
                return
            yield outline

    def _plain(self, problem: Problem, machine: Machine) -> Plan | None:
        """Returns the plan without any eviction, if it fits and nothing waits."""
        assert self.judge is not None
        try:
            choices = Choices(hosted=held_on_host(problem))
            builder = Builder(problem, machine, choices.decisions(problem))
            plan = builder.best(self.judge)
        except Infeasible:
            return None
        timeline = self.judge(problem, machine, plan)
        compute_us = LaneClock.unhindered(builder.program).period
        if timeline.valid and timeline.cost_us <= max(compute_us, self.floor_us) + 1e-9:
            return plan
        return None

    def _search(self, problem: Problem, machine: Machine, began: float) -> Search:
        assert self.judge is not None
        size = len(problem.ops) + len(problem.tensors) + 1
        return Search(
            problem,
            machine,
            self.judge,
            evaluations=max(
                4, self.evaluations or int(self.seconds * EVALUATIONS_PER_SECOND / size)
            ),
            deadline=began + self._longest(problem),
            floor_us=self.floor_us,
            progress=self.progress,
            close=CLOSE if _is_large(problem) else 0.0,
        )

    def _longest(self, problem: Problem) -> float:
        return self.seconds * (SLACK if _is_large(problem) else 1.0)

    def _floor(self, variant: ProgramVariant) -> Infeasible | None:
        """Returns the error if the step does not fit even with everything evicted."""
        try:
            variant.check_floor()
        except Infeasible as error:
            return error
        return None

    def _last_resorts(
        self,
        starts: Starts,
        variant: ProgramVariant,
        blocked: Infeasible | None,
        states: list[SearchState],
    ) -> Infeasible | None:
        """Tries everything evicted, then all recomputed as well, then all possible in place.

        Returns the reason if none of these fits.
        """
        search = starts.search
        variants = [variant]
        if again := recompute_everything(search.problem):
            choices = Choices(variant.choices.directs, again, variant.choices.hosted)
            variants.append(starts.variant(choices))
        mine, direct = variant.choices, direct_choices(search.problem, search.machine).directs
        if direct - mine.directs:
            choices = Choices(mine.directs | direct, frozenset(), mine.hosted)
            variants.append(starts.variant(choices))
        for resort in variants:
            reason = self._floor(resort)
            if reason is not None:
                if blocked is not None and (reason.needed_bytes or 0) < (blocked.needed_bytes or 0):
                    blocked = reason
                continue
            blocked = None
            for away in (range(0), range(len(resort.gaps.gaps))):
                cover = GapSet(resort.gaps, away)
                if cover.repair(resort.capacity, Prices()):
                    state = search.evaluate(resort, cover, rounds=1)
                    states += [] if state is None else [state]
        return blocked

    def _single_policies(self, search: Search, names: Iterable[str], share: float) -> None:
        from .registry import make

        judge = _WithinTime(search, time.thread_time() + share * self.seconds)
        for name in names:
            if search.settled or judge.all_over:
                continue
            judge.tried = 0
            try:
                with timed_by(judge.time):
                    plan = make(name, judge, lossy=self.lossy).apply(
                        search.problem, search.machine, Plan()
                    )
                    judge(search.problem, search.machine, plan)
            except (Infeasible, TimeIsUp):
                continue

    def _improve(self, starts: Starts, states: list[SearchState]) -> None:
        search = starts.search
        if search.best_plan is not None:
            known = starts.state_of(search.best_plan)
            if known is not None:
                states.append(known)
        if not states:
            return
        states.sort(key=lambda s: s.cost)
        # a short walk from each of the best few, then the rest of the effort from the best result
        share = max(1, search.left // 8)
        walked = [search.walk(s, share) for s in states[:3]]
        best = min(walked, key=lambda s: s.cost)
        while not search.done and search.left >= 4:
            before_us = best.us
            best = search.walk(best, max(1, search.left // 2))
            if _is_large(search.problem) and best.us > before_us * (1 - WORTH_ANOTHER):
                break  # a walk this long found nothing: another would take as long
