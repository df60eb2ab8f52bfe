"""What could be done with each activation that waits on the device, and what it would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offcompile.ir import DEVICE, HOST, Lane, Machine, Op, Problem, Recompute, Tensor
from offcompile.ir.units import compressed_bytes, move_ns

from .activation_selection import Candidate, Choice, Option
from .decisions import Away, Decisions
from .pressure import Pressure

RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Gap:
    """An activation held from one access to the next, and the decision that each option means."""

    candidate: Candidate
    first: int
    last: int
    #: whether it lies between the forward phase and a later one
    saved: bool
    decisions: tuple[Away | Recompute, ...]
    #: whether an option goes over the host to a tier beyond
    over_host: bool = False

    def without_recompute(self) -> Gap:
        """The same with moves alone."""
        kept = [o for o, d in enumerate(self.decisions) if isinstance(d, Away)]
        if len(kept) == len(self.decisions):
            return self
        options = tuple(self.candidate.options[o] for o in kept)
        return replace(
            self,
            candidate=replace(self.candidate, options=options),
            decisions=tuple(self.decisions[o] for o in kept),
        )


def gaps_of(
    problem: Problem,
    machine: Machine,
    base: Pressure,
    tiers: Sequence[str],
    lossy: bool,
    recompute: bool = False,
) -> list[Gap]:
    """Every gap in which an activation could leave, in the order of release."""
    runs, starts = base.program.runs, base.program.starts_us()
    host_lanes = {x.name for x in machine.lanes_between(DEVICE, HOST)}
    gaps: list[Gap] = []
    for tensor, at, until in sorted(base.residency.held, key=lambda h: (h[1], h[0].id)):
        if tensor.kind != "activation" or tensor.nbytes <= 0 or until - at < 2 or at < 0:
            continue
        if not any(a.position == until and a.reads for a in base.program.accesses[tensor.id]):
            continue
        options: list[Option] = []
        decided: list[Away | Recompute] = []
        for tier in tiers:
            for codec in (None, *_codecs(machine, tensor, lossy)):
                option = _move_option(machine, tensor, tier, codec, at + 1, until - 1)
                if option is not None:
                    options.append(option)
                    decided.append(Away(tensor.id, runs[at].name, tier, codec))
        again = _recomputable(problem, base, tensor, at, until) if recompute else None
        if again is not None:
            duration_ns = round(1000 * again.duration_us)
            options.append(
                Option(RECOMPUTE, "", RECOMPUTE, 0, 0, 0, at + 1, until - 1, duration_ns)
            )
            decided.append(Recompute(again.id, runs[until].name))
        if not options:
            continue
        release, needed = round(1000 * starts[at + 1]), round(1000 * starts[until])
        candidate = Candidate(
            f"{tensor.id}@{runs[at].name}", tensor.nbytes, release, needed, tuple(options)
        )
        saved = runs[at].op.phase == "forward" and runs[until].op.phase != "forward"
        over_host = any(o.tier not in ("", HOST) and o.lane in host_lanes for o in options)
        gaps.append(Gap(candidate, at + 1, until - 1, saved, tuple(decided), over_host))
    return gaps


def decide(gaps: Sequence[Gap], choice: Choice) -> Decisions:
    taken = [g.decisions[o] for g, o in zip(gaps, choice, strict=True) if o is not None]
    return Decisions(
        away=tuple(d for d in taken if isinstance(d, Away)),
        recomputes=tuple(d for d in taken if isinstance(d, Recompute)),
    )


def room_beyond(machine: Machine, base: Pressure) -> dict[str, int]:
    """Bytes that each limited tier but the device still takes in."""
    nbytes = {t.id: t.nbytes for t in base.program.problem.tensors}
    used: dict[str, int] = {}
    for tensor, tiers in base.residency.start.items():
        for tier in tiers:
            used[tier] = used.get(tier, 0) + nbytes[tensor]
    return {
        t.name: max(0, t.capacity_bytes - used.get(t.name, 0))
        for t in machine.tiers
        if t.name != DEVICE and t.capacity_bytes is not None
    }


def _codecs(machine: Machine, tensor: Tensor, lossy: bool) -> list[str]:
    """Codecs that make this tensor smaller, if they may be used."""
    return [
        c.name
        for c in machine.codecs
        if tensor.ratios.get(c.name, 1.0) < 1.0 and (lossy or c.lossless)
    ]


def _move_option(
    machine: Machine, tensor: Tensor, tier: str, codec: str | None, first: int, last: int
) -> Option | None:
    out, back = _route(machine, DEVICE, tier), _route(machine, tier, DEVICE)
    if not out or not back:
        return None
    moved, rate = tensor.nbytes, None
    if codec is not None:
        moved = compressed_bytes(tensor.nbytes, tensor.ratios[codec])
        rate = machine.codec[codec].bytes_per_us

    def slowest_ns(route: Sequence[Lane]) -> int:
        return max(
            move_ns(moved, x.bytes_per_us, x.latency_us, tensor.nbytes, rate) for x in route
        )

    name = tier if codec is None else f"{tier}+{codec}"
    return Option(
        name,
        tier,
        # tiers that share a way out share its time
        out[0].name,
        moved,
        slowest_ns(out),
        slowest_ns(back),
        first,
        last,
        compressed=moved < tensor.nbytes,
    )


def _route(machine: Machine, source: str, target: str) -> list[Lane]:
    direct = machine.lanes_between(source, target)
    if direct:
        return [max(direct, key=lambda x: x.bytes_per_us)]
    first, second = machine.lanes_between(source, HOST), machine.lanes_between(HOST, target)
    return [first[0], second[0]] if first and second else []


def _recomputable(
    problem: Problem, base: Pressure, tensor: Tensor, at: int, until: int
) -> Op | None:
    """The op that could write `tensor` again before the run `until`, from what is there then."""
    runs, accesses = base.program.runs, base.program.accesses
    writes = [a.position for a in accesses[tensor.id] if a.writes]
    if len(writes) != 1 or writes[0] > at or tensor.home is not None:
        return None
    run = runs[writes[0]]
    op = run.op
    if not op.recompute or run.on_host or runs[until].on_host or op.writes != (tensor.id,):
        return None
    for read in op.reads:
        if any(a.writes and writes[0] <= a.position < until for a in accesses[read]):
            return None
        source = problem.tensor[read]
        ends = max(a.position for a in accesses[read])
        if source.kind in ("activation", "temporary") and ends < until:
            return None
    return op
