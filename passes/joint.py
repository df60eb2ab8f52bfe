"""All tensor kinds decided together; the default.

Floor first: if everything that can leave leaves and it still does not fit, say so. Then the best
single policy, then greedy covers of the excess with different headroom, then local search against
the simulator until the bound is met or the effort is spent. So it is never worse than any single
policy, and tensors of all kinds trade places freely.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from offcompile.ir import DEVICE, HOST, Infeasible, Machine, Plan, Problem, Timeline

from .build.contract import Judge
from .build.gaps import Gap
from .build.lanes import Clock
from .build.patience import TimeIsUp, TimeLeft, is_short, timed_by
from .build.schedule import Builder
from .search.balance import balanced
from .search.frame import (
    Choices,
    ProgramVariant,
    direct_mode,
    forced_mode,
    held_on_host,
    hostable,
    infeasible_host,
    recompute_everything,
)
from .search.homecoming import brought_home
from .search.recompute_fit import FittingReruns
from .search.recompute_starts import WORTH_ANOTHER, RecomputeStarts
from .search.rerun_loads import rerun_modes
from .search.search import Search, State, mode_of
from .search.update_split import UpdateSplit
from .select.cover import GapSet, Prices
from .select.rematerialization import Rematerialization, Rerun

#: evaluations a second that the effort is reckoned at, per (run + move) of the problem
EVALUATIONS_PER_SECOND = 75_000.0
HEADROOMS = (0.0, 0.03, 0.08, 0.15, 0.25, 0.5)


#: problems of so many runs and moves may take so much longer than was reckoned: a busy machine
#: plans them no worse, only later
LARGE, SLACK = 1000, 5.0
#: of those a plan that is so near to the bound is good enough
CLOSE = 0.002
#: how much of the time the first covers may take
START_SHARE = 0.3
#: how much of it starts that compute again may take, and how many of them are built with care
RECOMPUTE_SHARE, REFINED_STARTS = 0.6, 3
#: into how many parts forward is cut for recomputation with which nothing has to move
FITTING_PARTS = (1, 24)
#: of all plans to be tried, those starts, where no other search has made any, and where one has
NEW_SHARE, KNOWN_SHARE = 0.6, 0.4
#: how much of the time and of all plans to be tried each look for a split of updates may take
SPLIT_SHARES = (0.2, 0.6)
#: how much of the time the single policies may take together
POLICY_SHARE = 0.5
#: how much less of the host's time updates take in the other split that recomputation is tried with
FEWER_HOSTED = 0.12
#: starts that take at most so many times the best are varied; so many of them
NEAR, VARIED = 1.25, 2
#: so many of the best starts give up loads for recomputation
RERUN_STARTS = 3


class _WithinTime:
    """The judge as single policies see it: keeps the best plan they try, and stops them.

    Past their common share of the time the one at work may still finish its first plan, and no
    other begins; past the search's own deadline none may go on.
    """

    def __init__(self, search: Search, deadline: float) -> None:
        self.search, self.deadline = search, deadline
        self.tried = 0  # valid plans of the policy at work

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
        is_short()  # stops it, if it is to stop
        search = self.search
        timeline = search.judge(problem, machine, plan)
        if problem is search.problem and machine is search.machine:
            search.offer(plan, timeline)
            self.tried += timeline.valid
        return timeline


def _is_large(problem: Problem) -> bool:
    return len(problem.ops) + len(problem.tensors) >= LARGE


def _policies() -> list[str]:
    """All of them; recomputation first, which the search looks at by itself too."""
    from .registry import POLICIES

    return sorted(POLICIES, key=lambda name: name != "recompute")


@dataclass(frozen=True)
class Joint:
    """Everything decided together. `seconds` bounds the search, `lossy` allows lossy codecs.

    The search is counted in plans tried, so that a run can be repeated exactly; the clock only
    cuts it off on a machine much slower than was reckoned with. It counts this thread's processor
    time: beside other work the same plan takes longer to find, and is not a worse one.
    """

    name: ClassVar[str] = "joint"
    seconds: float = 10.0
    #: how many plans the search may try; None: as many as `seconds` should allow for
    evaluations: int | None = None
    lossy: bool = False
    judge: Judge | None = field(default=None, compare=False)
    progress: Callable[[str], None] | None = field(default=None, compare=False)
    #: (tensor, op before the gap) → how much of it a relaxation spends away
    hints: Mapping[tuple[str, str | None], float] = field(default_factory=dict, compare=False)
    #: no plan can be faster
    floor_us: float = 0.0
    #: tells how fast a plan can be at best that computes nothing again
    kept_floor_us: Callable[[], float] = field(default=lambda: 0.0, compare=False)
    #: the plan is only compared with others, and the policies have had their turn with those
    trial: bool = field(default=False, compare=False)
    #: modes that served the same step with weights elsewhere: tried first
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
        states: list[State] = []
        for one in frames:
            states += self._starts(search, one, HEADROOMS[:1])
        states += self._known(search, forced)
        split = UpdateSplit.of(problem, machine)
        states += self._splitting(search, split, forced, states, SPLIT_SHARES[0])
        again = self._recomputing(search, forced, states, split)
        again += self._splitting(search, split, forced, again, SPLIT_SHARES[1])
        states += again
        states += self._balanced(search, states)
        states += self._rerunning(search, states)
        # where recomputation beats all that can be done without, that is looked at no further
        beaten = bool(again) and search.best_us <= self.kept_floor_us()
        for one in self._worth_varying(search, states):
            states += self._starts(search, one, HEADROOMS[1:])
        if not beaten and not (self.trial and search.best_plan is not None):
            self._single_policies(search, [n for n in _policies() if n != self.name], POLICY_SHARE)
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

    def _worth_varying(self, search: Search, states: list[State]) -> list[ProgramVariant]:
        """The frames of starts that come near the best one, each once, the best first."""
        if not states:
            return []
        near = [s for s in sorted(states, key=lambda s: s.cost) if s.us <= search.best_us * NEAR]
        frames = {s.frame.mode: s.frame for s in reversed(near)}
        return list(reversed(frames.values()))[:VARIED]

    def _plain(self, problem: Problem, machine: Machine) -> Plan | None:
        """When everything fits and nothing waits there is nothing to decide."""
        assert self.judge is not None
        try:
            mode = Choices(hosted=held_on_host(problem))
            builder = Builder(problem, machine, mode.decisions(problem))
            plan = builder.best(self.judge)
        except Infeasible:
            return None
        timeline = self.judge(problem, machine, plan)
        compute_us = Clock.unhindered(builder.program).period
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
        """Why nothing can fit, if with everything away it still does not."""
        try:
            frame.check_floor()
        except Infeasible as error:
            return error
        return None

    def _last_resorts(
        self, search: Search, frame: ProgramVariant, blocked: Infeasible | None, states: list[State]
    ) -> Infeasible | None:
        """Everything away, then everything computed again as well, then everything in place that
        may be; why none fits, if so."""
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

    def _improve(self, search: Search, states: list[State]) -> None:
        if search.best_plan is not None:
            known = self._state_of(search, search.best_plan)
            if known is not None:
                states.append(known)
        if not states:
            return
        states.sort(key=lambda s: s.cost)
        # a short walk from the best few, then the rest of the effort from the best of those
        share = max(1, search.left // 8)
        walked = [search.walk(s, share) for s in states[:3]]
        best = min(walked, key=lambda s: s.cost)
        while not search.done and search.left >= 4:
            before_us = best.us
            best = search.walk(best, max(1, search.left // 2))
            if _is_large(search.problem) and best.us > before_us * (1 - WORTH_ANOTHER):
                break  # a walk that long has found nothing: another would take as long

    def _starts(
        self, search: Search, frame: ProgramVariant, headrooms: tuple[float, ...]
    ) -> list[State]:
        found: list[State] = []
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

    def _known(self, search: Search, forced: Choices) -> list[State]:
        """Starts with what plans of the same ops computed again and updated on the host."""
        found: list[State] = []
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
        states: list[State],
        share: float,
    ) -> list[State]:
        """Starts that differ in which updates the host makes, around the best so far."""
        best = min(states, key=lambda s: s.cost, default=None)
        base = forced if best is None else best.frame.mode
        found: list[State] = []
        deadline = time.thread_time() + share * self._longest(search.problem)
        least = search.left - int(share * search.left)

        def cost_of(hosted: frozenset[str]) -> float | None:
            mode = Choices(base.directs, base.recomputes, hosted | forced.hosted)
            frame = self._frame(search.problem, search.machine, mode)
            cover = self._greedy(frame, 0.0, False)
            state = cover and search.evaluate(frame, cover, rounds=0)
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
        self, search: Search, forced: Choices, states: list[State], split: UpdateSplit
    ) -> list[State]:
        """Starts that compute activations again, from nearly free ones to all within a block.

        Where updates are split, each is tried with fewer of them on the host too: the time that
        recomputation saves the links shows only where the step does not wait for the host.
        """
        best = min(states, key=lambda s: s.cost, default=None)
        base = forced if best is None else best.frame.mode
        hosts = [base.hosted]
        if split.weights:
            fewer = split.hosted(split.share(base.hosted) - FEWER_HOSTED) | forced.hosted
            hosts += [fewer] if fewer != base.hosted else []
        found: list[State] = []
        deadline = time.thread_time() + RECOMPUTE_SHARE * self._longest(search.problem)
        # where others have found what pays, little is left to find
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
                state = cover and search.evaluate(frame, cover, rounds=0)
                if state:
                    found.append(state)
                    costs.append(state.us)
            return min(costs, default=None)

        def is_over() -> bool:
            return search.settled or search.left <= least or time.thread_time() > deadline

        for reruns in self._fitting(search, is_over):
            cost_of(reruns)
        RecomputeStarts(search.problem, cost_of, is_over).run()
        found.sort(key=lambda s: s.cost)
        return [
            again
            for state in found[:REFINED_STARTS]
            if (again := search.evaluate(state.frame, state.cover, rounds=2)) is not None
        ]

    def _fitting(self, search: Search, is_over: Callable[[], bool]) -> Iterator[frozenset[Rerun]]:
        """The least recomputation with which everything else may stay, where there is such."""
        capacity = search.machine.tier[DEVICE].capacity_bytes
        comes = any(t.home not in (None, DEVICE) and not t.pinned for t in search.problem.tensors)
        if capacity is None or comes:  # then something has to move anyhow
            return
        cuts = Rematerialization.of(search.problem)
        for parts in FITTING_PARTS:
            if is_over():
                return
            kept = cuts.boundaries(parts) if parts > 1 else frozenset()
            found = FittingReruns(search.problem, kept=kept).budgeted(capacity)
            if found.peak_bytes <= capacity:
                yield found.reruns

    def _balanced(self, search: Search, states: list[State]) -> list[State]:
        """The best start with loads made direct, where the lane holds it up."""
        found: list[State] = []
        best = min(states, key=lambda s: s.cost, default=None)
        while best is not None and not search.done:
            made = balanced(best)
            state = made and search.evaluate(*made, rounds=2, reserve=best.reserve)
            if state is None or state.us >= best.us:
                break
            found.append(state)
            best = state
        return found

    def _rerunning(self, search: Search, states: list[State]) -> list[State]:
        """The best starts with loads replaced by recomputation, as long as that helps."""
        choices = Rematerialization(search.problem)
        found: list[State] = []
        for start in sorted(states, key=lambda s: s.cost)[:RERUN_STARTS]:
            best: State | None = start
            while best is not None and not search.done:
                made = (
                    search.evaluate(frame, cover, rounds=1)
                    for frame, cover in rerun_modes(best, choices)
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

    def _state_of(self, search: Search, plan: Plan) -> State | None:
        """A plan of another policy as a state of this search."""
        frame = self._frame(search.problem, search.machine, mode_of(plan))
        away = {(d.tensor, d.after) for d in plan.drops if d.tier == DEVICE}
        return search.evaluate(frame, frame.cover(away), rounds=2)
