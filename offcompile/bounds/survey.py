"""The input of a bound: exact times of a problem, and the gaps between accesses.

Everything that a plan may choose (contract §2) remains a choice: direct access, host updates,
recomputation, codecs, the lane of each move, and for steady problems the start state of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from offcompile.ir import DEVICE, HOST, Lane, Machine, Op, Problem, Tensor
from offcompile.ir.units import compressed_bytes, move_ns, round_ns

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SurveyGap:
    """The time between two consecutive accesses of one tensor, named by op indices.

    `before` None: from the start of a problem that is not steady. `after` None: to the end of
    the step. `kind`: *live* (the op after reads the value), *keep* (no op reads it but it must
    survive), *late* (a host update may still be reading it).
    """

    tensor: str
    before: int | None
    after: int | None
    kind: str
    new_value: bool  # True if the op before writes the tensor
    wraps: bool
    free: bool  # False if the tensor can be taken to be on the device, whole, throughout


@dataclass(frozen=True)
class Survey:
    """One problem on one machine, in nanoseconds and op indices."""

    problem: Problem
    machine: Machine
    base_ns: tuple[int, ...]  # of each op, without in-place access
    host_ns: tuple[int | None, ...]  # as a host update; None: not allowed
    #: (op, tensor) → time that direct access of that operand adds; only choices that could help
    direct_ns: Mapping[tuple[int, str], int]
    #: op → minimum time of one recomputation
    again_ns: Mapping[int, int]
    #: tensor → ops that may recompute it
    rewriters: Mapping[str, tuple[int, ...]]
    gaps: Mapping[str, tuple[SurveyGap, ...]]
    wanted: Floats  # bytes on the device, per op, if nothing ever left
    crowded: Bools  # True for ops where the wanted tensors do not all fit at once
    tiers: tuple[str, ...]  # tiers off the device that can matter
    lanes: tuple[Lane, ...]
    #: (tensor, lane) → minimum time of one move of a tensor that may leave
    carry_ns: Mapping[tuple[str, str], int]

    @property
    def n_ops(self) -> int:
        return len(self.base_ns)

    @property
    def capacity(self) -> int | None:
        return self.machine.tier[DEVICE].capacity_bytes

    @property
    def trivial(self) -> bool:
        """True if every op can run on the device at its own pace without any move."""
        return (
            not self.crowded.any()
            and not self.direct_ns
            and all(h is None for h in self.host_ns)
            and not any(g.free for gaps in self.gaps.values() for g in gaps)
        )

    @cached_property
    def elastic(self) -> frozenset[int]:
        """Ops that may use direct access or run on the host."""
        on_host = (i for i, ns in enumerate(self.host_ns) if ns is not None)
        return frozenset((*(op for op, _ in self.direct_ns), *on_host))

    def optional(self, op: int, tensor: str) -> bool:
        """True if `op` can do without a device copy of `tensor`."""
        return self.host_ns[op] is not None or (op, tensor) in self.direct_ns


def survey(problem: Problem, machine: Machine) -> Survey:
    base = tuple(round_ns(o.duration_us) for o in problem.ops)
    has_host = HOST in machine.tier
    host = tuple(
        round_ns(o.host_duration_us)
        if has_host and o.phase == "update" and o.host_duration_us is not None
        else None
        for o in problem.ops
    )
    direct = {
        (i, t): round_ns(us) - base[i]
        for i, o in enumerate(problem.ops)
        for t, us in o.direct.items()
        if has_host and t in o.operands and not problem.tensor[t].pinned
    }
    again = {i: least_ns(base[i], o, direct, i) for i, o in enumerate(problem.ops) if o.recompute}
    rewriters: dict[str, tuple[int, ...]] = {}
    for i in again:
        for t in dict.fromkeys(problem.ops[i].writes):
            rewriters[t] = (*rewriters.get(t, ()), i)

    seen: dict[str, list[int]] = {t.id: [] for t in problem.tensors}
    for i, o in enumerate(problem.ops):
        for name in o.operands:
            seen[name].append(i)
    there = always_there(problem, host, rewriters)
    spans = {t.id: _spans(problem, t, seen[t.id], host, t.id in there) for t in problem.tensors}
    wanted, capacity = _wanted(problem, spans), machine.tier[DEVICE].capacity_bytes
    crowded = np.array([capacity is not None and w > capacity for w in wanted], dtype=np.bool_)
    if problem.steady:
        # drop choices that save neither time nor room, if the tensor has no other reason to leave
        roaming = {t for (_, t), delta in direct.items() if delta < 0} | {
            t for o, h in zip(problem.ops, host, strict=True) if h is not None for t in o.operands
        }
        direct = {
            (op, t): delta
            for (op, t), delta in direct.items()
            if t in roaming or crowded[op] or _pressed(spans[t], crowded)
        }
    optional = set(direct) | {
        (i, t) for i, h in enumerate(host) if h is not None for t in problem.ops[i].operands
    }
    gaps = {
        t: _gaps(t, found, problem, optional, crowded, t in there) for t, found in spans.items()
    }
    tiers, lanes = _reachable(problem, machine)
    carry = {
        (t.id, lane.name): whole_ns(t, lane, machine)
        for t in problem.tensors
        if any(g.free for g in gaps[t.id])
        for lane in lanes
    }
    return Survey(
        problem=problem,
        machine=machine,
        base_ns=base,
        host_ns=host,
        direct_ns=direct,
        again_ns=again,
        rewriters=rewriters,
        gaps=gaps,
        wanted=np.array(wanted, dtype=float),
        crowded=crowded,
        tiers=tiers,
        lanes=lanes,
        carry_ns=carry,
    )


def least_ns(base: int, op: Op, direct: Mapping[tuple[int, str], int], index: int) -> int:
    """The minimum time of an op on the compute lane: with every direct access that shortens it."""
    deltas = (direct.get((index, t), 0) for t in op.operands)
    return max(0, base + sum(d for d in deltas if d < 0))


def whole_ns(tensor: Tensor, lane: Lane, machine: Machine) -> int:
    """The minimum time in which one move carries the tensor over the lane, with any codec."""
    times = [move_ns(tensor.nbytes, lane.bytes_per_us, lane.latency_us)]
    for name, ratio in tensor.ratios.items():
        if name in machine.codec:
            size = compressed_bytes(tensor.nbytes, ratio)
            rate = machine.codec[name].bytes_per_us
            times.append(move_ns(size, lane.bytes_per_us, lane.latency_us, tensor.nbytes, rate))
    return min(times)


def least_bytes(tensor: Tensor, machine: Machine) -> int:
    """The minimum size of a copy off the device."""
    sizes = [
        compressed_bytes(tensor.nbytes, r) for n, r in tensor.ratios.items() if n in machine.codec
    ]
    return min([tensor.nbytes, *sizes])


def always_there(
    problem: Problem,
    host_ns: tuple[int | None, ...],
    rewriters: Mapping[str, tuple[int, ...]],
) -> frozenset[str]:
    """Pinned tensors that are on the device throughout every gap, under any plan.

    Excludes those that a host update may touch, and those that may die and be recomputed.
    """
    hosted = {
        t for o, h in zip(problem.ops, host_ns, strict=True) if h is not None for t in o.operands
    }
    return frozenset(
        t.id
        for t in problem.tensors
        if t.pinned and t.home in (None, DEVICE) and t.id not in hosted and t.id not in rewriters
    )


#: a gap in which the tensor may be wanted: (op before, op after, kind, new value, wraps)
_Span = tuple[int | None, int | None, str, bool, bool]


def _spans(
    problem: Problem, tensor: Tensor, seen: list[int], host_ns: tuple[int | None, ...], there: bool
) -> list[_Span]:
    """The gaps of one tensor, starting with the head of a value; dead gaps are left out."""
    t = tensor.id
    survives = problem.must_survive(t) or (there and problem.stays_put(t))
    reads = {i for i in seen if t in problem.ops[i].reads}
    writes = {i for i in seen if t in problem.ops[i].writes}

    def kind(before: int | None, after: int | None) -> str | None:
        if after in reads:
            return "live"
        if survives:
            return "keep"
        if before in reads and before not in writes and host_ns[before or 0] is not None:
            return "late"
        return None

    pairs: list[tuple[int | None, int | None, bool]] = []
    if problem.steady:
        pairs += [(a, b, False) for a, b in itertools.pairwise(seen)]
        if seen:
            pairs.append((seen[-1], seen[0], True))
        heads = [k for k, (before, _, _) in enumerate(pairs) if before in writes]
        if heads:
            pairs = pairs[heads[0] :] + pairs[: heads[0]]
    else:
        chain: list[int | None] = [None, *seen, None]
        pairs = [(a, b, False) for a, b in itertools.pairwise(chain)]
        if tensor.home is None:
            pairs = pairs[1:]
    found: list[_Span] = []
    for before, after, wraps in pairs:
        what = kind(before, after)
        if what == "late" and wraps:
            after, wraps = None, False
        if what is not None:
            found.append((before, after, what, before in writes, wraps))
    return found


def _inside(span: _Span, n: int) -> list[tuple[int, int]]:
    """The ops strictly inside a gap, as half-open ranges."""
    before, after, _, _, wraps = span
    first = 0 if before is None else before + 1
    last = n if after is None else after
    return [(first, n), (0, last)] if wraps else [(first, last)]


def _wanted(problem: Problem, spans: Mapping[str, list[_Span]]) -> list[int]:
    """Per op, the bytes on the device if nothing that may be wanted there ever left."""
    n, size = len(problem.ops), problem.tensor
    change = [0] * (n + 1)
    for t, found in spans.items():
        for span in found:
            for first, last in _inside(span, n):
                change[first] += size[t].nbytes
                change[last] -= size[t].nbytes
    resting = itertools.accumulate(change)
    return [
        rest + op.workspace_bytes + sum(size[t].nbytes for t in op.operands)
        for op, rest in zip(problem.ops, resting, strict=False)
    ]


def _pressed(spans: list[_Span], crowded: Bools) -> bool:
    """True if the device is ever crowded during the tensor's gaps or at an op that uses it."""
    ends = (i for s in spans for i in s[:2] if i is not None)
    return any(crowded[i] for i in ends) or any(
        crowded[a:b].any() for s in spans for a, b in _inside(s, len(crowded))
    )


def _gaps(
    tensor: str,
    spans: list[_Span],
    problem: Problem,
    optional: set[tuple[int, str]],
    crowded: Bools,
    there: bool,
) -> tuple[SurveyGap, ...]:
    home = problem.tensor[tensor].home
    found = []
    for span in spans:
        before, after, kind, new_value, wraps = span
        # staying on the device at no cost to anything else is never worse than leaving
        free = not there and (
            any(crowded[a:b].any() for a, b in _inside(span, len(crowded)))
            or (before is None and home != DEVICE)
            or (before is not None and (before, tensor) in optional)
            or (after is not None and (after, tensor) in optional)
        )
        found.append(SurveyGap(tensor, before, after, kind, new_value, wraps, free))
    return tuple(found)


def _reachable(problem: Problem, machine: Machine) -> tuple[tuple[str, ...], tuple[Lane, ...]]:
    """The tiers off the device that can matter, and the lanes among them and the device."""
    off = [t for t in machine.tiers if t.name != DEVICE]
    roomy = any(t.name == HOST and t.capacity_bytes is None for t in off)
    homes = set() if problem.steady else {t.home for t in problem.tensors}
    touching = {
        e
        for lane in machine.lanes
        if DEVICE in (lane.source, lane.target)
        for e in (lane.source, lane.target)
    }
    tiers = tuple(
        t.name for t in off if t.name == HOST or not roomy or t.name in homes or t.name in touching
    )
    kept = {DEVICE, *tiers}
    lanes = tuple(
        x for x in machine.lanes if x.source in kept and x.target in kept and x.source != x.target
    )
    return tiers, lanes


def priced(ways: Floats, weights: Floats) -> Floats:
    """Times weighted by lane; infinite where there is no way at all."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(ways), np.inf, ways * weights)


def known(times: Floats) -> Floats:
    """Times, with 0 where there is no way at all."""
    return np.where(np.isinf(times), 0.0, times)
