"""Updates that may run on the host, relative to one moment: each takes time on one side.

On the host an update takes the host's only lane for updates, after its gradient has arrived
there. On the device it takes the compute lane, after its states have arrived: either before the
moment, in which case they occupy device memory at that moment, or after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from offcompile.bounds.survey import Floats, Survey, known, least_ns, priced
from offcompile.ir import DEVICE, HOST

from .crossings import Crossings

Ints = npt.NDArray[np.int64]


@dataclass
class Legs:
    """Pieces of work, each on the cheapest of its lanes; one column per lane before the moment,
    then one per lane after it. A time is infinite where there is no way at all."""

    width: int
    ways: list[Mapping[int, float]] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    def add(self, owner: int, ways: Mapping[int, float]) -> None:
        self.ways.append(ways)
        self.owners.append(owner)

    @cached_property
    def table(self) -> Floats:
        """One row per leg, once all of them are known."""
        table = np.full((len(self.ways), 2 * self.width), np.inf)
        for row, ways in zip(table, self.ways, strict=True):
            for column, ns in ways.items():
                row[column] = ns
        return table

    def priced(self, weights: Floats, count: int) -> tuple[Floats, Floats]:
        """For each owner: the cost of its legs, and the time that they occupy each lane."""
        busy = np.zeros((count, 2 * self.width))
        if not self.ways:
            return np.zeros(count), busy
        prices = priced(self.table, weights)
        picked, rows = prices.argmin(axis=1), np.arange(len(prices))
        cost: Floats = np.zeros(count)
        np.add.at(cost, self.owners, prices[rows, picked])
        np.add.at(busy, (self.owners, picked), known(self.table[rows, picked]))
        return cost, busy


@dataclass(frozen=True)
class Priced:
    """The cheaper side of each update, for some weights of the lanes: its cost and busy lanes.

    `away`: nothing of it is on the device at the moment; `there`: its states are.
    """

    away: Floats
    away_busy: Floats
    there: Floats
    there_busy: Floats

    def busy(self, away: Floats) -> tuple[Floats, Floats]:
        """Busy time of the lanes before and after, given the part of each update that is away."""
        both = away @ self.away_busy + (1 - away) @ self.there_busy
        return both[: len(both) // 2], both[len(both) // 2 :]


class Sides:
    """The updates of one problem, seen from just before op `k` ends.

    `row`: per update, the row of its states among those that may be away then; -1: they need no
    room.
    """

    def __init__(
        self,
        k: int,
        updates: HostUpdates,
        crossings: Crossings,
        names: Sequence[str],
        least: Floats,
    ) -> None:
        """least: the time that each op takes of the compute lane."""
        self.survey, self.k, self.updates = crossings.survey, k, updates
        self.crossings, self.least = crossings, least
        self.width = crossings.width
        self.host, self.device = Legs(self.width), Legs(self.width)
        self.late, self.early = Legs(self.width), Legs(self.width)
        rows = {t: i for i, t in enumerate(names)}
        found: list[int] = []
        for u, host_ns in updates.host_ns.items():
            self._on_host(len(found), host_ns, updates.makers.get(u))
            found.append(self._on_device(len(found), u, updates.states[u], rows))
        self.row: Ints = np.array(found, dtype=np.int64)
        self.inside = self.row >= 0

    @cached_property
    def first_arrival_ns(self) -> float:
        """The least time after the moment until a gradient for the host has arrived there; 0 if one
        may be there already."""
        return min(
            (self._arrival_ns(u) for u, host_ns in self.updates.host_ns.items() if host_ns),
            default=0.0,
        )

    @cached_property
    def needs_host(self) -> bool:
        """True if the device cannot make some update that takes time."""
        takes = list(self.updates.host_ns.values())
        legs = zip(self.device.owners, self.device.ways, strict=True)
        return any(takes[owner] > 0 and not ways for owner, ways in legs)

    def _arrival_ns(self, update: int) -> float:
        maker, t = self.updates.makers.get(update, (-1, ""))
        if maker < self.k:
            return 0.0
        made_in = float(self.least[self.k + 1 : maker + 1].sum())
        if t in self.survey.rewriters:
            return made_in  # a recomputation may write it where the host can read it
        ways = list(self.crossings.ns_out(t).values())
        if (maker, t) in self.survey.direct_ns:
            ways.append(max(0.0, float(self.survey.direct_ns[maker, t])))
        return made_in + min(ways, default=0.0)

    def priced(self, before: Floats, after: Floats, *, may_host: bool = True) -> Priced:
        weights, count = np.concatenate((before, after)), len(self.row)
        host, host_busy = self.host.priced(weights, count)
        device, device_busy = self.device.priced(weights, count)
        late, late_busy = self.late.priced(weights, count)
        early, early_busy = self.early.priced(weights, count)
        here = device + late
        host = host if may_host else np.full(count, np.inf)
        hosted = (host <= here)[:, None]
        return Priced(
            np.minimum(host, here),
            np.where(hosted, host_busy, device_busy + late_busy),
            device + early,
            device_busy + early_busy,
        )

    def _on_host(self, i: int, host_ns: float, gradient: tuple[int, str] | None) -> None:
        column = self.width - 1
        if gradient is None or gradient[0] < self.k:
            self.host.add(i, {column: host_ns, self.width + column: host_ns})
            return
        # the gradient is made after the moment, and so is everything that waits for it
        self.host.add(i, {self.width + column: host_ns})
        maker, t = gradient
        if t in self.survey.rewriters:
            return  # a recomputation may write it where the host can read it
        ways = dict(self.crossings.ns_out(t))
        if (maker, t) in self.survey.direct_ns:
            ways[0] = max(0.0, float(self.survey.direct_ns[maker, t]))
        # it crosses once for all updates on the host that wait for it
        share = 1 / self.updates.waiting[gradient]
        self.host.add(i, {self.width + j: ns * share for j, ns in ways.items()})

    def _on_device(self, i: int, u: int, states: Sequence[str], rows: Mapping[str, int]) -> int:
        """The row of the states whose memory is counted, or -1."""
        s, op, shift = self.survey, self.survey.problem.ops[u], self.width if u > self.k else 0
        self.device.add(i, {shift: float(least_ns(s.base_ns[u], op, s.direct_ns, u))})
        counted = len(states) == 1 and u > self.k and states[0] in rows
        for t in self.survey.problem.ops[u].writes:
            if t in self.updates.back:  # the step ends with it on the host
                share = 1 / self.updates.writers[t]
                out = {j: ns * share for j, ns in self.crossings.ns_out(t).items()}
                later = {self.width + j: ns for j, ns in out.items()}
                self.device.add(i, later if u > self.k else out | later)
        for t in states:
            ways = {} if s.problem.tensor[t].pinned else dict(self.crossings.ns_into(t))
            if (u, t) in s.direct_ns:
                ways[0] = max(0.0, float(s.direct_ns[u, t]))
            late = {self.width + j: ns for j, ns in ways.items()}
            if counted:
                self.late.add(i, late)
                self.early.add(i, ways)
            else:  # the time that they spend on the device is not modelled
                self.device.add(i, ways | late if u > self.k else ways)
        return rows[states[0]] if counted else -1


@dataclass(frozen=True)
class HostUpdates:
    """The updates of a problem that the host may run, by their ops."""

    #: duration on the host
    host_ns: Mapping[int, float]
    #: the last device op that makes one of the update's operands, and that operand
    makers: Mapping[int, tuple[int, str]]
    #: tensors that are on the host until the update, which is their first user
    states: Mapping[int, Sequence[str]]
    #: the number of these updates that write each tensor
    writers: Mapping[str, int]
    #: tensors read at the very end by an op that only the host can run
    back: frozenset[str] = frozenset()

    @cached_property
    def waiting(self) -> Mapping[tuple[int, str], int]:
        """The number of updates that wait for each of `makers`."""
        return Counter(self.makers.values())

    @classmethod
    def of(cls, survey: Survey) -> HostUpdates:
        tensor, used = survey.problem.tensor, set[str]()
        written: dict[str, int] = {}
        host_ns: dict[int, float] = {}
        makers: dict[int, tuple[int, str]] = {}
        states: dict[int, Sequence[str]] = {}
        writers = Counter[str]()
        for i, op in enumerate(survey.problem.ops):
            time_ns = survey.host_ns[i]
            if time_ns is None:
                written.update(dict.fromkeys(op.writes, i))
            else:
                host_ns[i] = float(time_ns)
                writers.update(set(op.writes))
                made = [(written[t], t) for t in op.reads if t in written]
                if made:
                    makers[i] = max(made)
                for t in op.writes:
                    written.pop(t, None)
                states[i] = [
                    t
                    for t in dict.fromkeys(op.reads)
                    if t not in used and tensor[t].home not in (None, DEVICE) and tensor[t].nbytes
                ]
            used.update(op.operands)
        return cls(host_ns, makers, states, writers, _back(survey))

    def releases(self, parts: int) -> Iterator[int]:
        """The ops that make the gradients with which `parts` equal parts of the updates begin."""
        waiting = sorted(self.makers, key=lambda u: self.makers[u][0])
        whole = sum(self.host_ns[u] for u in waiting)
        done, part = 0.0, 0
        for u in waiting:
            if done * parts >= part * whole:
                yield self.makers[u][0]
                part += 1
            done += self.host_ns[u]


def _back(survey: Survey) -> frozenset[str]:
    """The tensors that an op reads on the host at the very end, whichever op wrote them."""
    tensor, last = survey.problem.tensor, survey.n_ops - 1
    if last < 0 or survey.host_ns[last] is None:
        return frozenset()
    reads = survey.problem.ops[last].reads
    pinned = any(tensor[t].pinned and tensor[t].home == HOST for t in reads)
    return frozenset(t for t in reads if not tensor[t].pinned) if pinned else frozenset()
