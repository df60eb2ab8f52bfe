"""The traffic before and after one moment: a bound for problems too large for an LP.

Just before some op ends, the device holds only so much. A tensor that is not there at that moment
was carried out before it, or is loaded, accessed in place or recomputed after it. So the step
takes at least the time for which the lanes and the compute lane are then busy, before and after,
whichever tensors are away; the cheapest choice of those is a fractional knapsack.

Any weights of the lanes that add up to one prove a bound on the time for which several lanes are
busy at once; a small linear program finds the best weights (`weights`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from offcompile.bounds.survey import (
    Floats,
    Survey,
    SurveyGap,
    always_there,
    known,
    least_ns,
    priced,
)
from offcompile.ir import DEVICE

from .chains import Chains
from .choices import Cut
from .crossings import Crossings
from .ending import Ending
from .leading import ends_ns
from .sides import HostUpdates, Sides
from .ways import Serving
from .weights import best_weights

#: moments to try: the most crowded op of that many stretches, the ends of phases, and the
#: gradients with which that many equal parts of the host's updates begin
STRETCHES, PARTS = 6, 8
#: number of moments whose best weights are found; the others are judged by the weights of these
WEIGHED = 5
#: number of moments for which chains of recomputations are examined
CHAINED = 3


def cut_bound(survey: Survey, deadline: float) -> float:
    """The best such bound, in nanoseconds. The problem must not be steady."""
    assert not survey.problem.steady
    if survey.capacity is None:
        return 0.0
    account = _Account(survey)
    moments = _weighed(account, survey.capacity, deadline)
    best, choice = max((max(m.value, m.late) for m in moments), default=0.0), None
    for moment in moments[:CHAINED]:
        lasting = account.lasting(moment.op)
        chains = Chains(survey, lasting, account.crossing, moment.cut)
        # the weights and price of one moment are nearly the best of the others as well
        if choice is None:
            choice = found = chains.best(moment.weights, deadline)
        else:
            found = chains.like(choice)
        best = max(best, 0.0 if found is None else found.value)
    return best


@dataclass(frozen=True, eq=False)
class _Moment:
    """A moment, and the weights of the lanes that prove most there: the bound that they prove, and
    the one by what leads up to the moment (`leading`)."""

    op: int
    cut: Cut
    weights: list[Floats]
    value: float
    late: float


def _weighed(account: _Account, capacity: int, deadline: float) -> list[_Moment]:
    """The moments whose weights prove most, the best first.

    Any weights prove a bound at any moment, so those known tell where others are worth finding.
    """
    found: list[_Moment] = []
    releases = set(account.updates.releases(1))
    left: dict[int, Cut] = {}
    for op in account.moments():
        if found and time.thread_time() > deadline:
            break
        left[op] = account.at(op, capacity)
        if not found or op in releases:
            found += _best_at(account, op, left.pop(op))
    promised = dict.fromkeys(left, 0.0)
    judged = 0
    while found and left and len(found) < WEIGHED and time.thread_time() < deadline:
        for moment, op in itertools.product(found[judged:], left):
            promised[op] = max(promised[op], _bound(left[op], *moment.weights)[0] or 0.0)
        judged = len(found)
        op = max(left, key=promised.__getitem__)
        found += _best_at(account, op, left.pop(op))
    return sorted(found, key=lambda m: -m.value)


def _best_at(account: _Account, op: int, cut: Cut) -> list[_Moment]:
    """The moment with its best weights; none if the program has no solution."""
    weights = best_weights(cut)
    if weights is None:
        return []
    value = _bound(cut, *weights)[0] or 0.0
    late = float(account.ends[op]) + _after(cut, weights[1])
    return [_Moment(op, cut, list(weights), value, late)]


def _after(cut: Cut, weights: Floats) -> float:
    """The least time from the moment on, whatever happens before it."""
    any_before = np.zeros(len(weights))
    least = _bound(cut, any_before, weights)[0]
    if least is None:
        return 0.0
    wait = float(weights[-1]) * cut.sides.first_arrival_ns
    if not wait or cut.sides.needs_host:
        return least + wait
    # the host has nothing to do until a gradient has arrived, if it makes any update
    alone = _bound(cut, any_before, weights, may_host=False)[0]
    return least if alone is None else min(least + wait, alone)


# --- the account of one moment ---------------------------------------------------------------


@dataclass
class _Account:
    survey: Survey
    #: minimum time of each op on the compute lane
    least: Floats = field(init=False)
    #: the earliest end of each op
    ends: Floats = field(init=False)

    def __post_init__(self) -> None:
        s = self.survey
        self.least = np.array(
            [
                # an update that the host may run costs the compute lane nothing then
                0 if s.host_ns[i] is not None else least_ns(s.base_ns[i], op, s.direct_ns, i)
                for i, op in enumerate(s.problem.ops)
            ],
            dtype=float,
        )
        self.updates = HostUpdates.of(s)
        self.there = always_there(s.problem, s.host_ns, s.rewriters)
        self.crossings = Crossings(s)
        self.ends = ends_ns(s, self.crossings, self.least)
        self.results = self._results()
        lasting = (t for t in s.problem.tensors if t.home == DEVICE and s.problem.stays_put(t.id))
        self.lasting_bytes = sum(t.nbytes for t in lasting)

    def lasting(self, k: int) -> frozenset[str]:
        """Tensors that are present for recomputations after op `k`."""
        s = self.survey
        made_before = {t for op in s.problem.ops[: k + 1] for t in op.writes}
        at_home = {t.id for t in s.problem.tensors if t.home is not None}
        operands = s.problem.ops[k].operands
        return (
            frozenset(self.there | at_home | {t for t in operands if t not in made_before})
            | {t for t in s.problem.tensor if t not in made_before}
            | frozenset(operands)
        )

    def crossing(self, t: str) -> tuple[Serving, Serving]:
        """Ways out and back of a tensor that is kept only for recomputations."""
        return self.crossings.out(t), self.crossings.into(t)

    def moments(self) -> list[int]:
        """Ops with a duration above 0, the most crowded first."""
        s = self.survey
        phases = [op.phase for op in s.problem.ops]
        rest = [i for i in range(s.n_ops) if phases[i] != "update"]
        ends = np.cumsum(np.maximum(self.least, 1e-3))
        stretch = np.minimum((ends / ends[-1] * STRETCHES).astype(int), STRETCHES - 1)
        picked = {s.n_ops - 1}
        for k in range(STRETCHES):
            ops = np.flatnonzero(stretch == k)
            if len(ops):
                picked.add(int(ops[np.argmax(s.wanted[ops])]))
        picked |= {i for i, j in itertools.pairwise(rest) if phases[i] != phases[j]}
        picked |= set(self.updates.releases(PARTS))
        return sorted((i for i in picked if self.least[i] > 0), key=lambda i: (-s.wanted[i], i))

    def at(self, k: int, capacity: int) -> Cut:
        """The choices just before op `k` ends."""
        s = self.survey
        op, size = s.problem.ops[k], s.problem.tensor
        operands = frozenset(op.operands)
        held = op.workspace_bytes
        held += sum(size[t].nbytes for t in operands if not s.optional(k, t))
        names: list[str] = []
        nbytes, out, back, again, first = [], [], [], [], []
        for t, gaps in s.gaps.items():
            tensor = size[t]
            if not tensor.nbytes:
                continue
            waits = tensor.home not in (None, DEVICE) and not tensor.pinned
            if waits and gaps and gaps[0].before is None:
                early = [a for a in _reads_of(gaps, 0) if a <= k]
                if early:
                    first.append(self._back(t, early))
            at = next((i for i, g in enumerate(gaps) if _covers(g, k)), None)
            if at is None or t in operands or gaps[at].kind == "late":
                continue
            if t in self.there:
                held += tensor.nbytes
            elif not tensor.pinned:
                later = list(_reads_of(gaps, at)) if gaps[at].kind == "live" else []
                names.append(t)
                nbytes.append(tensor.nbytes)
                out.append(self._out(t, gaps, at))
                back.append(self._back(t, later))
                again.append(self._again(t) if later else np.inf)
        compute = float(self.least[: k + 1].sum()), float(self.least[k + 1 :].sum())
        return Cut(
            tuple(names),
            held + sum(nbytes) - capacity,
            np.array(nbytes, dtype=float),
            Serving.stack(out, self.crossings.width),
            Serving.stack(back, self.crossings.width),
            np.array(again),
            Serving.stack(first, self.crossings.width),
            compute,
            Sides(k, self.updates, self.crossings, names, self.least),
            self._ending(k, capacity),
        )

    def _ending(self, k: int, capacity: int) -> Ending:
        late = [(n, ways) for at, n, ways in self.results if at > k]
        nbytes = np.array([n for n, _ in late], dtype=float)
        out = Serving.stack([ways for _, ways in late], self.crossings.width)
        return Ending(nbytes, out, self.lasting_bytes + float(nbytes.sum()) - capacity)

    def _results(self) -> list[tuple[int, int, Serving]]:
        """Lists the results that the device makes: maker, bytes and ways out of each."""
        s, found = self.survey, []
        writers: dict[str, list[int]] = {}
        for i, op in enumerate(s.problem.ops):
            for t in op.writes:
                writers.setdefault(t, []).append(i)
        for tensor in s.problem.tensors:
            made = writers.get(tensor.id, [])
            lasts = tensor.home is None and s.problem.must_survive(tensor.id)
            if not lasts or tensor.pinned or not tensor.nbytes or len(made) != 1:
                continue
            if s.host_ns[made[0]] is None:
                ways = self.crossings.out(tensor.id)
                if s.optional(made[0], tensor.id):
                    ways = self.crossings.or_in_place(ways, tensor.id, made)
                found.append((made[0], tensor.nbytes, ways))
        return found

    def _back(self, t: str, reads: Sequence[int]) -> Serving:
        """Ways to serve these reads of one value that is not on the device."""
        ways = self.crossings.into(t)
        if all(self.survey.optional(a, t) for a in reads):
            return self.crossings.or_in_place(ways, t, reads)
        return ways

    def _out(self, t: str, gaps: Sequence[SurveyGap], at: int) -> Serving:
        """Ways in which a copy of a gap's value got off the device."""
        ways = self.crossings.out(t)
        head = next((g for g in reversed(gaps[: at + 1]) if g.new_value), None)
        if head is None or head.before is None:
            if self.survey.problem.tensor[t].home != DEVICE:
                return self.crossings.or_in_place(ways, t, ())
        elif self.survey.optional(head.before, t):
            return self.crossings.or_in_place(ways, t, (head.before,))
        return ways

    def _again(self, t: str) -> float:
        """The tensor's share of the time of the cheapest op that recomputes it."""
        s, size = self.survey, self.survey.problem.tensor
        return min(
            (
                s.again_ns[r]
                * size[t].nbytes
                / sum(size[w].nbytes for w in set(s.problem.ops[r].writes))
                for r in s.rewriters.get(t, ())
            ),
            default=np.inf,
        )


def _covers(gap: SurveyGap, k: int) -> bool:
    return (gap.before is None or gap.before < k) and (gap.after is None or gap.after > k)


def _reads_of(gaps: Sequence[SurveyGap], at: int) -> Iterator[int]:
    """The ops that read the value of a gap, from the gap's end on."""
    for i in range(at, len(gaps)):
        gap = gaps[i]
        if (i > at and gap.new_value) or gap.kind != "live" or gap.after is None:
            return
        yield gap.after


# --- the bound of one moment -----------------------------------------------------------------


def _bound(
    cut: Cut, before: Floats, after: Floats, *, may_host: bool = True
) -> tuple[float | None, list[Floats]]:
    """The bound that weights of the lanes prove, and the time that each lane is busy in the
    cheapest choice; None if there is no choice at all."""
    out, first = cut.out.prices(before), cut.first.prices(before)
    back, again = cut.back.prices(after), priced(cut.again, after[0])
    n = len(cut.nbytes)
    rows = np.arange(n)
    by_out, by_back = out.argmin(axis=1), back.argmin(axis=1)
    moved = out[rows, by_out] + back[rows, by_back]
    anew = again < moved
    price = np.minimum(moved, again)
    updates = cut.sides.priced(before, after, may_host=may_host)
    inside = cut.sides.inside
    rows_of = cut.sides.row[inside]
    price[rows_of] = updates.away[inside] - updates.there[inside]
    share = _cheapest(cut, price)
    if share is None:
        return None, []
    busy = [np.zeros(len(before)), np.zeros(len(after))]
    busy[0][0], busy[1][0] = cut.compute
    gone = np.ones(len(inside))
    gone[inside] = share[rows_of]
    busy = [b + x for b, x in zip(busy, updates.busy(gone), strict=True)]
    carried = share * ~anew
    carried[rows_of] = 0.0
    busy[0] += cut.out.busy(by_out, carried)
    busy[1] += cut.back.busy(by_back, carried)
    busy[1][0] += float((share * anew * known(cut.again)).sum())
    if len(first):
        if np.isinf(first.min(axis=1)).any():
            return None, []
        busy[0] += cut.first.busy(first.argmin(axis=1), np.ones(len(first)))
    busy[1] += cut.ending.busy(after)
    return float(busy[0] @ before + busy[1] @ after), busy


def _cheapest(cut: Cut, price: Floats) -> Floats | None:
    """The part of each tensor that is away, so that enough bytes are, at the least cost."""
    share = np.where(price <= 0.0, 1.0, 0.0)
    left = cut.excess - float((share * cut.nbytes).sum())
    if left <= 0:
        return share
    order = np.argsort(price / cut.nbytes, kind="stable")
    order = order[(share[order] == 0.0) & np.isfinite(price[order])]
    sizes = cut.nbytes[order]
    before = np.cumsum(sizes) - sizes
    share[order] = np.clip((left - before) / sizes, 0.0, 1.0)
    return share if float(sizes.sum()) >= left else None
