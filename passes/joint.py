"""The default policy: decides all kinds of tensors together.

It checks the floor first and reports if the step does not fit even with every evictable tensor off
the device. Then it tries the best single policy, then greedy covers of the excess with different
headroom, then local search against the simulator until the bound is met or the effort is spent. So
it is never worse than any single policy, and tensors of all kinds compete for the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from offcompile.ir import DEVICE, HOST, Infeasible, Machine, Plan, Problem, Timeline

from .build.contract import Judge
from .build.gaps import Gap
from .build.lanes import LaneClock
from .build.schedule import Builder
from .build.time_left import TimeIsUp, TimeLeft, is_short, timed_by
from .search.balance import balanced
from .search.gradients_back import brought_home
from .search.program_variant import (
    Choices,
    ProgramVariant,
    direct_mode,
    forced_mode,
    held_on_host,
    hostable,
    infeasible_host,
    recompute_everything,
)
from .search.recompute_fit import reruns_beside_moves
from .search.recompute_starts import WORTH_ANOTHER, RecomputeStarts
from .search.rerun_loads import rerun_modes
from .search.search import Search, SearchState, mode_of
from .search.update_split import UpdateSplit
from .search.update_turns import taking_turns
from .select.gap_set import GapSet, Prices
from .select.rematerialization import Rematerialization, Rerun

#: sets of decisions tried per second, as assumed when budgeting the effort, per (run + move) of the
#: problem
EVALUATIONS_PER_SECOND = 75_000.0
HEADROOMS = (0.0, 0.03, 0.08, 0.15, 0.25, 0.5)


#: problems of at least LARGE runs and moves may take SLACK times longer than estimated: on a busy
#: machine their plans come later, but are no worse
LARGE, SLACK = 1000, 5.0
#: for large problems, a plan this close to the bound is good enough
CLOSE = 0.002
#: share of the time that the first covers may take
START_SHARE = 0.3
#: share of the time for starts with recomputation, and how many of them are refined
RECOMPUTE_SHARE, REFINED_STARTS = 0.6, 3
#: share of all evaluations for starts with recomputation: without and with modes known from other
#: searches
NEW_SHARE, KNOWN_SHARE = 0.6, 0.4
#: share of the time and of all evaluations for each search for a split of the updates
SPLIT_SHARES = (0.2, 0.6)
#: share of the time for all single policies together
POLICY_SHARE = 0.5
#: share of the host's time taken off the updates in the second split tried with recomputation
FEWER_HOSTED = 0.12
#: starts within this factor of the best are varied, up to this many
NEAR, VARIED = 1.25, 2
#: number of best starts that try recomputation in place of loads
RERUN_STARTS = 3


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
    #: (tensor, op before the gap) → fraction of the gap that a relaxation spends off the device
    hints: Mapping[tuple[str, str | None], float] = field(default_factory=dict, compare=False)
    #: lower bound on the time of any plan
    floor_us: float = 0.0
    #: returns the lower bound for plans without recomputation
    kept_floor_us: Callable[[], float] = field(default=lambda: 0.0, compare=False)
    #: True if the plan is only compared with others for which the policies have already been tried
    trial: bool = field(default=False, compare=False)
    #: modes that worked for the same step with its weights elsewhere: tried first
    known_modes: tuple[Choices, ...] = field(default=(), compare=False)

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        if self.judge is None:
            raise ValueError("joint needs the simulator: make it with a judge")
        began = time.thread_time()
        plain = self._plain(problem, machine)
        if plain is not None:
            return plain
        search = self._search(problem, machine, began)
        forced = forced_mode(problem, machine)
        frame = self._frame(problem, machine, forced)
        blocked = self._floor(frame)
        frames = [] if blocked is not None else [frame]
        free = direct_mode(problem, machine, only_free=True).directs
        if not free <= forced.directs:
            in_place = self._frame(
                problem, machine, Choices(forced.directs | free, forced.recomputes, forced.hosted)
            )
            frames += [] if self._floor(in_place) is not None else [in_place]
        states: list[SearchState] = []
        for one in frames:
            states += self._starts(search, one, HEADROOMS[:1])
        states += self._known(search, forced)
        split = UpdateSplit.of(problem, machine)
        states += self._splitting(search, split, forced, states, SPLIT_SHARES[0])
        again = self._recomputing(search, forced, states, split)
        again += self._splitting(search, split, forced, again, SPLIT_SHARES[1])
        if self.known_modes:  # the first search shows which weights might as well stay for good
            again += taking_turns(search, split, again or states)
        states += again
        states += self._balanced(search, states)
        states += self._rerunning(search, states)
        # if recomputation beats everything possible without it, no policy without it is tried
        beaten = bool(again) and search.best_us <= self.kept_floor_us()
        for one in self._worth_varying(search, states):
            if self.trial and search.done:
                break  # the plan that is chosen is searched for again
            states += self._starts(search, one, HEADROOMS[1:])
        if not self.trial:
            others = [n for n in _policies() if n != self.name]
            self._single_policies(search, others[:1] if beaten else others, POLICY_SHARE)
        if search.best_plan is None:
            blocked = self._last_resorts(search, frame, blocked, states)
            if search.best_plan is None and blocked is not None:
                raise blocked
        if not search.done:
            self._improve(search, states)
        if search.best_plan is None:
            raise infeasible_host(
                "Everything that can leave the device fits it, but no schedule found gets it out"
                " and back within the other tiers."
            )
        return brought_home(problem, machine, search.best_plan, self.judge)

    def _worth_varying(self, search: Search, states: list[SearchState]) -> list[ProgramVariant]:
        """Returns the frames of starts close to the best one, each once, best first."""
        if not states:
            return []
        near = [s for s in sorted(states, key=lambda s: s.cost) if s.us <= search.best_us * NEAR]
        frames = {s.frame.mode: s.frame for s in reversed(near)}
        return list(reversed(frames.values()))[:VARIED]

    def _plain(self, problem: Problem, machine: Machine) -> Plan | None:
        """Returns the plan without any eviction, if it fits and nothing waits."""
        assert self.judge is not None
        try:
            mode = Choices(hosted=held_on_host(problem))
            builder = Builder(problem, machine, mode.decisions(problem))
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

    def _frame(
        self, problem: Problem, machine: Machine, mode: Choices, tier: str = HOST
    ) -> ProgramVariant:
        return ProgramVariant(problem, machine, mode, tier, self.lossy)

    def _floor(self, frame: ProgramVariant) -> Infeasible | None:
        """Returns the error if the step does not fit even with everything evicted."""
        try:
            frame.check_floor()
        except Infeasible as error:
            return error
        return None

    def _last_resorts(
        self,
        search: Search,
        frame: ProgramVariant,
        blocked: Infeasible | None,
        states: list[SearchState],
    ) -> Infeasible | None:
        """Tries everything evicted, then all recomputed as well, then all possible in place.

        Returns the reason if none of these fits.
        """
        frames = [frame]
        if again := recompute_everything(search.problem):
            mode = Choices(frame.mode.directs, again, frame.mode.hosted)
            frames.append(self._frame(search.problem, search.machine, mode))
        if directs := direct_mode(search.problem, search.machine).directs - frame.mode.directs:
            mode = Choices(frame.mode.directs | directs, frozenset(), frame.mode.hosted)
            frames.append(self._frame(search.problem, search.machine, mode))
        for resort in frames:
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

    def _improve(self, search: Search, states: list[SearchState]) -> None:
        if search.best_plan is not None:
            known = self._state_of(search, search.best_plan)
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

    def _starts(
        self, search: Search, frame: ProgramVariant, headrooms: tuple[float, ...]
    ) -> list[SearchState]:
        found: list[SearchState] = []
        deadline = time.thread_time() + START_SHARE * self._longest(search.problem)
        tiers = [HOST, *(t.name for t in search.machine.tiers if t.name not in (DEVICE, HOST))]
        for tier in tiers if search.best_plan is None else tiers[:1]:
            here = (
                frame
                if tier == frame.tier
                else self._frame(search.problem, search.machine, frame.mode, tier)
            )
            covers: set[frozenset[int]] = set()
            largest = 2 * max((g.tensor.nbytes for g in here.gaps.gaps), default=0)
            for headroom in headrooms:
                for hinted in (False, True) if self.hints else (False,):
                    if search.settled or (found and time.thread_time() > deadline):
                        return found
                    cover = self._greedy(here, headroom, hinted)
                    if cover is None or frozenset(cover.away) in covers:
                        continue
                    covers.add(frozenset(cover.away))
                    spare = headroom * largest
                    state = search.evaluate(here, cover, rounds=2, reserve=spare)
                    if state is not None:
                        found.append(state)
        return found

    def _known(self, search: Search, forced: Choices) -> list[SearchState]:
        """Returns starts that reuse recomputations and host updates of plans for the same ops."""
        found: list[SearchState] = []
        may_host = frozenset(hostable(search.problem)) if self.known_modes else frozenset()
        for known in self.known_modes:
            if search.settled:
                break
            hosted = (known.hosted & may_host) | forced.hosted
            mode = Choices(forced.directs, known.recomputes, hosted)
            frame = self._frame(search.problem, search.machine, mode)
            cover = self._greedy(frame, 0.0, False)
            state = cover and search.evaluate(frame, cover, rounds=1)
            found += [state] if state else []
        return found

    def _splitting(
        self,
        search: Search,
        split: UpdateSplit,
        forced: Choices,
        states: list[SearchState],
        share: float,
    ) -> list[SearchState]:
        """Returns starts with other splits of the updates over host and device, near the best."""
        best = min(states, key=lambda s: s.cost, default=None)
        base = forced if best is None else best.frame.mode
        found: list[SearchState] = []
        deadline = time.thread_time() + share * self._longest(search.problem)
        least = search.left - int(share * search.left)

        def cost_of(hosted: frozenset[str]) -> float | None:
            mode = Choices(base.directs, base.recomputes, hosted | forced.hosted)
            frame = self._frame(search.problem, search.machine, mode)
            cover = self._greedy(frame, 0.0, False)
            state = cover and search.evaluate(frame, cover, rounds=1)
            if not state:
                return None
            found.append(state)
            return state.us

        def is_over() -> bool:
            return search.settled or search.left <= least or time.thread_time() > deadline

        around = split.share(base.hosted) if base.recomputes or base.hosted - split.held else None
        split.search(cost_of, is_over, around)
        found.sort(key=lambda s: s.cost)
        return found[:1]

    def _recomputing(
        self, search: Search, forced: Choices, states: list[SearchState], split: UpdateSplit
    ) -> list[SearchState]:
        """Returns starts with recomputation, from nearly free ops to whole blocks.

        If updates are split, each start is also tried with fewer of them on the host: the link time
        that recomputation saves shows only if the step does not wait for the host.
        """
        best = min(states, key=lambda s: s.cost, default=None)
        base = forced if best is None else best.frame.mode
        hosts = [base.hosted]
        if split.weights:
            fewer = split.hosted(split.share(base.hosted) - FEWER_HOSTED) | forced.hosted
            hosts += [fewer] if fewer != base.hosted else []
        found: list[SearchState] = []
        deadline = time.thread_time() + RECOMPUTE_SHARE * self._longest(search.problem)
        # little is left to find if other searches have found good modes
        share = KNOWN_SHARE if self.known_modes else NEW_SHARE
        least = search.left - int(share * search.left)

        def cost_of(reruns: frozenset[Rerun]) -> float | None:
            costs: list[float] = []
            for hosted in hosts:
                if costs and (is_over() or costs[0] > search.best_us * NEAR):
                    break
                mode = Choices(base.directs, reruns, hosted)
                frame = self._frame(search.problem, search.machine, mode)
                cover = self._greedy(frame, 0.0, False)
                state = cover and search.evaluate(frame, cover, rounds=1)
                if state:
                    found.append(state)
                    costs.append(state.us)
            return min(costs, default=None)

        def is_over() -> bool:
            return search.settled or search.left <= least or time.thread_time() > deadline

        for reruns in reruns_beside_moves(search.problem, search.machine):
            if is_over():
                break
            cost_of(reruns)
        RecomputeStarts(search.problem, cost_of, is_over).run()
        found.sort(key=lambda s: s.cost)
        return [
            again
            for state in found[:REFINED_STARTS]
            if (again := search.evaluate(state.frame, state.cover, rounds=2)) is not None
        ]

    def _balanced(self, search: Search, states: list[SearchState]) -> list[SearchState]:
        """Returns variants of the best start with loads made direct, if the lane limits it."""
        found: list[SearchState] = []
        best = min(states, key=lambda s: s.cost, default=None)
        while best is not None and not search.done:
            made = balanced(best)
            state = made and search.evaluate(*made, rounds=2, reserve=best.reserve)
            if state is None or state.us >= best.us:
                break
            found.append(state)
            best = state
        return found

    def _rerunning(self, search: Search, states: list[SearchState]) -> list[SearchState]:
        """Returns the best starts with loads replaced by recomputation, as long as that helps."""
        choices = Rematerialization(search.problem)
        found: list[SearchState] = []
        for start in sorted(states, key=lambda s: s.cost)[:RERUN_STARTS]:
            best: SearchState | None = start
            while best is not None and not search.done:
                made = (
                    search.evaluate(frame, cover, rounds=1)
                    for frame, cover in rerun_modes(best, choices)
                    if not search.done
                )
                better = [s for s in made if s is not None and s.us < best.us * (1 - WORTH_ANOTHER)]
                best = min(better, key=lambda s: s.cost, default=None)
                found += [] if best is None else [best]
        return found

    def _greedy(self, frame: ProgramVariant, headroom: float, hinted: bool) -> GapSet | None:
        cover = GapSet(frame.gaps)
        prices = Prices()
        spare = headroom * max((g.tensor.nbytes for g in frame.gaps.gaps), default=0) * 2
        hints = self.hints

        def weight(gap: Gap) -> float:
            return 0.05 + hints.get((gap.tensor.id, gap.after), 0.0) if hinted else 1.0

        cover.repair(frame.capacity - spare, prices, weight)
        if not cover.repair(frame.capacity, prices, weight):
            return None
        cover.prune(frame.capacity - spare, prices)
        return cover

    def _state_of(self, search: Search, plan: Plan) -> SearchState | None:
        """Converts a plan of another policy into a state of this search."""
        frame = self._frame(search.problem, search.machine, mode_of(plan))
        away = {(d.tensor, d.after) for d in plan.drops if d.tier == DEVICE}
        return search.evaluate(frame, frame.cover(away), rounds=2)
