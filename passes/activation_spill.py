"""Evicts saved activations between their forward and their backward use.

FlashNeuron §3.3 (`variant="printed"`) and our own variant (`"benefit"`) use the same candidates:
the gaps that an activation spends on the device if nothing moves. `spill_options.py` provides the
figures, `activation_selection.py` makes the choice, and the builder makes the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from offcompile.ir import DEVICE, HOST, Infeasible, Machine, Plan, Problem, Recompute, Timeline

from .build.contract import Judge
from .build.decisions import Decisions
from .recompute import partial_sets
from .search.trials import Trials
from .select.activation_selection import by_benefit, by_makespan, missing_bytes, printed
from .select.pressure import pressure
from .select.spill_options import decide, gaps_of, room_beyond

VARIANTS = ("benefit", "printed")
TIERS = ("host+disk", "host", "disk")
#: rounds of `by_makespan`, initially and in each answer to the judge; the last two minimize
#: transfer
FULL, BRIEF, TRANSFER, QUICK_TRANSFER = 24, 8, 0, -1


@dataclass(frozen=True)
class ActivationSpill:
    """Offloads activations to the host or to disk, plain or compressed, or recomputes them."""

    name: ClassVar[str] = "activation_spill"

    variant: str = "benefit"
    tiers: str = "host+disk"
    #: True if codecs that lose precision may be used
    lossy: bool = False
    #: True if activations may be recomputed instead
    recompute: bool = False
    #: number of further plans made after the judge saw stalls
    rounds: int = 8
    judge: Judge | None = None

    def __post_init__(self) -> None:
        for field, value, known in (
            ("variant", self.variant, VARIANTS),
            ("tiers", self.tiers, TIERS),
        ):
            if value not in known:
                raise ValueError(f"{field} is {value!r}; it must be one of {', '.join(known)}")

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        trials = Trials(problem, machine, self.judge)
        moves = _Moves(self, trials, ())
        if moves.missing <= 0 and max(moves.excess, default=0) <= 0:
            trials.attempt(Decisions())
        elif self.variant == "printed":
            moves.check_floor()
            moves.select_printed()
        else:
            ways = [moves]
            if self.recompute:
                sets = partial_sets(problem, machine)
                ways += [_Moves(self, trials, again) for again in sets]
            min(ways, key=lambda w: w.missing).check_floor()
            self._search(trials, [w for w in ways if w.missing <= 0])
        if trials.best is None:
            raise moves.nothing_works()
        return trials.best

    def _search(self, trials: Trials, ways: Sequence[_Moves]) -> None:
        """Tries each share of recomputation with the moves it leaves, then refines the best one."""
        refined: _Moves | None = None
        best, best_us = ways[0], float("inf")
        for way in ways:
            way.select()
            if trials.best_us < best_us:
                best = way
            if way is ways[0] and best is way and trials.best is not None:
                way.refine(self.rounds)
                refined = way
            best_us = trials.best_us
            if best_us <= ways[0].compute_us:
                return
        if trials.best is None:
            for way in ways:
                way.move_everything()
        elif best is not refined:
            best.refine(self.rounds)


class _Moves:
    """Chooses the gaps in which to evict, for a given set of recomputations."""

    def __init__(
        self, options: ActivationSpill, trials: Trials, again: tuple[Recompute, ...]
    ) -> None:
        self.problem, self.machine, self.trials = trials.problem, trials.machine, trials
        self.again = again
        self.base = pressure(self.problem, Decisions(recomputes=again))
        self.excess = self.base.excess(self.machine)
        self.compute_us = self.base.program.starts_us()[-1]
        tiers = [t for t in options.tiers.split("+") if t in self.machine.tier]
        if options.variant == "printed":
            tiers = tiers[-1:]  # a single tier: the SSD if there is one
        self.gaps = gaps_of(self.machine, self.base, tiers, options.lossy)
        self.candidates = [g.candidate for g in self.gaps]
        self.room = room_beyond(self.machine, self.base)
        self.limits = self.room
        #: bytes that could be evicted at each run, and the bytes missing even then
        self.coverable = [0] * len(self.excess)
        for gap in self.gaps:
            for at in range(gap.first, gap.last + 1):
                self.coverable[at] += gap.candidate.nbytes
        self.missing = max(
            (e - c for e, c in zip(self.excess, self.coverable, strict=True)), default=0
        )

    # ---- FlashNeuron's selection ---------------------------------------------------------

    def select_printed(self) -> None:
        """Selects among saved activations by sums (§3.3), and asks for more until the plan fits.

        The paper stops when the sums say that it fits. If they mislead, and the saved activations
        are not enough, every gap becomes a candidate, so that there is always a plan.
        """
        forward = [i for i, g in enumerate(self.gaps) if g.saved]
        ops = self.problem.ops
        forward_ns = sum(round(1000 * o.duration_us) for o in ops if o.phase == "forward")
        for pool in (forward, list(range(len(self.gaps)))):
            candidates = [self.candidates[i] for i in pool]
            total = sum(c.nbytes for c in candidates)
            left = list(self.excess)
            for i in pool:
                for at in range(self.gaps[i].first, self.gaps[i].last + 1):
                    left[at] -= self.gaps[i].candidate.nbytes
            asked = max(1, total + max(left))
            while self.trials.best is None:
                picked = dict(zip(pool, printed(candidates, asked, forward_ns), strict=True))
                choice = tuple(picked.get(i) for i in range(len(self.gaps)))
                missing = missing_bytes(self.candidates, choice, self.excess)
                if missing == 0:
                    self._attempt(choice)
                if asked > total:
                    break
                asked += max(missing, total // 16, 1)
        if self.trials.best is None:
            self.move_everything()

    # ---- ours ----------------------------------------------------------------------------

    def select(self) -> None:
        """Selects for the least transfer and for the least lane time."""
        for limits in self._limits():
            if self._cover(self.excess, QUICK_TRANSFER, limits):
                self.limits = limits
        self._cover(self.excess, TRANSFER, self.limits)
        self._cover(self.excess, FULL, self.limits)

    def refine(self, rounds: int) -> None:
        """Asks for more room where the plan stalled, and selects again."""
        need = list(self.excess)
        for at in range(rounds):
            timeline = self.trials.best_timeline
            if timeline is None or not timeline.stalls or not self.gaps:
                break  # also without a judge: there is nothing to learn from
            need = self._relieve(need, timeline)
            if self._cover(need, BRIEF if at % 2 else QUICK_TRANSFER, self.limits):
                need = list(self.excess)

    def move_everything(self) -> None:
        """The last resort: evicts everything possible."""
        for limits in [*self._limits(), {}]:
            if self._cover(self.coverable, QUICK_TRANSFER, limits):
                break

    def _cover(self, wanted: Sequence[int], rounds: int, limits: dict[str, int]) -> bool:
        need = [min(n, c) for n, c in zip(wanted, self.coverable, strict=True)]
        if rounds <= TRANSFER:
            quick = rounds == QUICK_TRANSFER
            choice = by_benefit(self.candidates, need, limits, quick)
        else:
            choice = by_makespan(self.candidates, need, *self._turn(), limits, rounds)
        return choice is not None and self._attempt(choice)

    def _attempt(self, choice: Sequence[int | None]) -> bool:
        return self.trials.attempt(decide(self.gaps, choice, self.again))

    def _relieve(self, need: list[int], timeline: Timeline) -> list[int]:
        """Returns `need` plus room for the tensors waited for, at the longest stalls."""
        moved = {m.id: m.tensor for m in (self.trials.best.moves if self.trials.best else ())}
        position = self.base.program.position
        need = list(need)
        for stall in sorted(timeline.stalls, key=lambda s: -s.duration_ns)[:8]:
            at = position.get(stall.op)
            if at is None:
                continue
            tensors = {moved[w] for w in stall.waited_for if w in moved}
            nbytes = sum(self.problem.tensor[t].nbytes for t in tensors)
            nbytes = nbytes or max(c.nbytes for c in self.candidates)
            for p in range(max(0, at - 2), at + 1):
                need[p] += nbytes
        return need

    # ---- figures -------------------------------------------------------------------------

    def _turn(self) -> tuple[int, int]:
        """Returns compute time before and after the run with the largest excess."""
        starts = self.base.program.starts_us()
        at = self.excess.index(max(self.excess))
        forward_ns = round(starts[at] * 1000)
        return forward_ns, round(starts[-1] * 1000) - forward_ns

    def _limits(self) -> list[dict[str, int]]:
        """Returns byte limits per tier: all its room, or less if transfers also pass through it."""
        stop = max((g.candidate.nbytes for g in self.gaps), default=0)
        room = self.room.get(HOST)
        if room is None or not any(g.over_host for g in self.gaps):
            return [self.room]
        reserves = (0, stop, 2 * stop, room)
        return [self.room | {HOST: max(0, room - reserve)} for reserve in reserves]

    def check_floor(self) -> None:
        """Raises if the device is too small even with everything possible evicted."""
        if self.missing <= 0:
            return
        left = [e - c for e, c in zip(self.excess, self.coverable, strict=True)]
        run = self.base.program.runs[left.index(self.missing)]
        capacity = self.machine.tier[DEVICE].capacity_bytes or 0
        needed = capacity + self.missing
        raise Infeasible(
            f"{run.name} needs {needed:,} bytes on the device even when every activation that"
            f" can leave has left ({len(self.gaps)} can), and the budget is {capacity:,}:"
            f" {self.missing:,} are missing.",
            self.missing,
            f"Raise the device budget to {needed:,} bytes, or let weights and states leave too"
            " (policy joint).",
        )

    def nothing_works(self) -> Infeasible:
        """Builds the error for when activations could be evicted, but no plan runs to its end."""
        excess = max(self.excess, default=0)
        if excess <= 0 and self.trials.error is not None:
            return self.trials.error  # not caused by activations
        change = "Raise the budgets of the other tiers"
        if excess > 0:
            change = f"Raise the device budget by {excess:,} bytes, so that nothing need leave"
        full = ", ".join(f"{tier}: {room:,} bytes free" for tier, room in self.room.items())
        return Infeasible(
            f"No choice of activations gives a plan that runs to its end. {self.trials.refused}",
            excess if excess > 0 else None,
            f"{change}{f', or make room elsewhere ({full})' if full else ''}; or let other"
            " tensors move too (policy joint).",
        )
