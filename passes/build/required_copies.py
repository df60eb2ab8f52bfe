"""Turns decisions into the tiers that hold each tensor, and the copies to make.

A walk along a tensor's accesses tracks the set of tiers that hold its value. An access on a tier
without the value requires a `Job` (a copy from a tier that has it); a gap with an eviction, or one
that needs no device copy, ends the residency with a drop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offcompile.ir import DEVICE, HOST, SELF_ENDING_KINDS, Drop, Infeasible, Tensor

from .decisions import Away, Decisions
from .program import Access, Program


@dataclass(slots=True)
class Job:
    """A copy to make, possibly over several lanes."""

    tensor: Tensor
    source: str
    target: str
    codec: str | None
    release: Access  # may start once this access has ended (the value exists)
    leave: Access  # evictions: the last access before the copy is dropped; else = release
    need: Access | None  # must arrive before this access
    #: for loads: first position of the gap; the target memory is free from its end on
    gap_from: int = -1


@dataclass(slots=True)
class Residency:
    """The residencies, copies and drops that the decisions require."""

    #: (tensor, from position, to position): device copy held continuously, both ends included
    held: list[tuple[Tensor, int, int]] = field(default_factory=list)
    outs: list[Job] = field(default_factory=list)
    loads: list[Job] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    #: tiers that hold the value at the start of the step
    start: dict[str, set[str]] = field(default_factory=dict)


def plan_residency(program: Program, decisions: Decisions) -> Residency:
    result = Residency()
    away: dict[str, tuple[Away, ...]] = {}
    for a in decisions.away:
        away[a.tensor] = (*away.get(a.tensor, ()), a)
    lasting, known = program.problem.surviving_ids, program.residencies
    for tensor in program.problem.tensors:
        decided = away.get(tensor.id)
        asked = tensor.id, decided
        part = known.get(asked)
        if part is None:
            part = Residency()
            lasts = tensor.id in lasting
            if decided or not _stays_all_along(program, tensor, lasts, part):
                _CopyWalk(program, tensor, {a.after: a for a in decided or ()}, part).run()
            known[asked] = part
        result.held += part.held
        if decided or part.drops or part.outs or part.loads:
            result.outs += part.outs
            result.loads += part.loads
            result.drops += part.drops
        if part.start:
            result.start.update(part.start)
    return result


def _stays_all_along(program: Program, tensor: Tensor, lasts: bool, out: Residency) -> bool:
    """Fast path for tensors used on the device only and never evicted: same result as `_CopyWalk`.

    Returns False without recording anything if the tensor is not one of them.
    """
    accesses, steady = program.accesses[tensor.id], program.problem.steady
    if not accesses or tensor.pinned or not (lasts or tensor.kind in SELF_ENDING_KINDS):
        return False
    first = accesses[0]
    if not steady and tensor.home not in (None, DEVICE):
        return False
    begins_here = lasts if steady else tensor.home == DEVICE
    if begins_here is not first.reads:
        return False
    for a in accesses:
        if a.tier != DEVICE or (lasts and a.writes and not a.reads and a is not first):
            return False
    held, before = out.held, first
    if begins_here and not steady:
        held.append((tensor, -1, first.position))
    for a in accesses[1:]:
        if a.reads:
            held.append((tensor, before.position, a.position))
        before = a
    if lasts:
        held.append((tensor, before.position, first.position if steady else len(program.runs)))
    if steady or begins_here:
        out.start[tensor.id] = {DEVICE} if begins_here else set()
    return True


class _CopyWalk:
    def __init__(
        self, program: Program, tensor: Tensor, away: dict[str | None, Away], out: Residency
    ) -> None:
        self.problem = problem = program.problem
        self.tensor, self.away, self.out = tensor, away, out
        self.n, self.steady = len(program.runs), problem.steady
        self.survives = problem.must_survive(tensor.id) or problem.stays_put(tensor.id)
        self.self_ending = tensor.kind in SELF_ENDING_KINDS
        self.accesses = list(program.accesses[tensor.id])
        if not self.steady and tensor.home is not None:
            # the initial value acts like a write before the first run
            self.accesses.insert(0, Access(-1, None, tensor.home, False, True))
        self.valid: dict[str, str | None] = {}  # tier → codec of the copy there
        self.written: Access | None = None
        self.emit = True

    def run(self) -> None:
        out, tensor = self.out, self.tensor
        if not self.accesses:
            if self.steady and (self.survives or tensor.home is not None):
                home = HOST if tensor.home in (None, DEVICE) else tensor.home
                home = tensor.home if tensor.pinned and tensor.home else home
                out.start[tensor.id] = {str(home)}
            return
        if self.steady:
            self._settle()
            out.start[tensor.id] = set(self.valid)
        elif tensor.home is not None:
            out.start[tensor.id] = {tensor.home}
        for i in range(len(self.accesses)):
            self._step(i)

    def _settle(self) -> None:
        """Walks the ring without emitting anything, to find the state at the start of a step."""
        self.emit = False
        first = self.accesses[0]
        pinned_to = self.tensor.home if self.problem.stays_put(self.tensor.id) else None
        self.valid = {pinned_to or first.tier: None} if first.reads or pinned_to else {}
        self.written = self.accesses[-1]
        for _ in range(2):
            for i in range(len(self.accesses)):
                self._step(i)
        self.emit = True

    def _step(self, i: int) -> None:
        a = self.accesses[i]
        if a.reads and a.tier not in self.valid:
            self._bring(a.tier, None, self._before(i), self._before(i), a)
        if a.writes:
            self.valid = {a.tier: None}
            self.written = a
        if DEVICE in self.valid:
            if a.tier == DEVICE or a.writes:
                self._after_device_access(i, a)
        elif a.tier == DEVICE:
            raise AssertionError(f"{self.tensor.id}: an access on the device left no copy there")
        if self._value_is_over(i) and not self._stays(a):
            self._end_value(a)

    def _stays(self, a: Access) -> bool:
        """True if the copy that `a` leaves outlives its value.

        Initial copies are dropped unless pinned.
        """
        return self.survives or (self.tensor.pinned and a.name is None)

    def _after_device_access(self, i: int, a: Access) -> None:
        reader, host_reader = self._next_readers(i)
        away = self.away.get(a.name)
        if host_reader is not None and HOST not in self.valid:
            self._bring(HOST, away.codec if away and not host_reader else None, a, a, host_reader)
        if reader is not None and away is None:
            self._hold(a, reader)
            return
        if reader is None and host_reader is None and not self._stays(a):
            return  # the value is over
        if away is not None and len(self.valid) == 1:
            self._bring(away.tier, away.codec, a, a, None)
        if len(self.valid) > 1:
            del self.valid[DEVICE]
            self._drop(DEVICE, a)
        elif reader is None:
            self._hold(a, self._after(i))  # the only copy of a value that must survive

    def _next_readers(self, i: int) -> tuple[Access | None, Access | None]:
        """Returns the value's next device read, and the first host read before the next write."""
        host: Access | None = None
        for b in self._following(i):
            if b.reads and b.tier == DEVICE:
                return b, host
            if b.reads and host is None:
                host = b
            if b.writes:
                break
        return None, host

    def _following(self, i: int) -> list[Access]:
        rest = self.accesses[i + 1 :]
        return rest + self.accesses[: i + 1] if self.steady else rest

    def _after(self, i: int) -> Access | None:
        following = self._following(i)
        return following[0] if following else None

    def _before(self, i: int) -> Access:
        return self.accesses[i - 1]

    def _value_is_over(self, i: int) -> bool:
        following = self._following(i)
        return not following or (following[0].writes and not following[0].reads)

    def _end_value(self, a: Access) -> None:
        tiers = list(self.valid)
        self.valid = {}
        if not self.self_ending or a.name is None:
            for tier in tiers:
                self._drop(tier, a)

    def _hold(self, a: Access, until: Access | None) -> None:
        if self.emit:
            last = self.n if until is None else until.position
            self.out.held.append((self.tensor, a.position, last))

    def _drop(self, tier: str, after: Access) -> None:
        if self.emit:
            self.out.drops.append(Drop(self.tensor.id, tier, after.name))

    def _bring(
        self, target: str, codec: str | None, release: Access, leave: Access, need: Access | None
    ) -> None:
        """Copies the value to `target` from the best tier that has it."""
        if not self.valid:
            raise Infeasible(
                f"{self.tensor.id} is read (by {need.name if need else 'some op'})"
                " before anything writes it.",
                None,
                f"Give {self.tensor.id} a home, or put the op that writes it first.",
            )
        if self.tensor.pinned:
            raise Infeasible(
                f"{self.tensor.id} is pinned to {', '.join(self.valid)}, but"
                f" {need.name if need else 'the plan'} needs it on {target}.",
                None,
                f"Do not pin {self.tensor.id}, or give it {target} as its home.",
            )
        # prefer a copy on another tier over the device's, which is already being written there
        further = sorted(set(self.valid) - {DEVICE})
        order = [HOST, DEVICE] if target == DEVICE else [*further, DEVICE]
        source = next((t for t in order if t in self.valid), next(iter(self.valid)))
        if source != DEVICE:
            codec = self.valid[source]
        self.valid[target] = None if target == DEVICE else codec
        if not self.emit:
            return
        written = self.written if self.written is not None else release
        if source == DEVICE:
            job = Job(self.tensor, source, target, codec, written, leave, need)
            self.out.outs.append(job)
        else:
            job = Job(self.tensor, source, target, codec, release, release, need)
            job.gap_from = release.position
            self.out.loads.append(job)
