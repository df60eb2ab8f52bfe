"""The options for each activation that is idle on the device, and their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offcompile.ir import DEVICE, HOST, Lane, Machine, Recompute, Tensor
from offcompile.ir.units import compressed_bytes, move_ns
from offcompile.passes.build.decisions import Away, Decisions

from .activation_selection import Candidate, Option
from .pressure import Pressure


@dataclass(frozen=True)
class SpillGap:
    """An activation held from one access to the next, and the decision for each option."""

    candidate: Candidate
    #: the positions, inclusive, at which it would be off the device
    first: int
    last: int
    #: True if it lies between the forward phase and a later one
    saved: bool
    decisions: tuple[Away, ...]
    #: True if an option goes through the host to another tier
    over_host: bool


def gaps_of(machine: Machine, base: Pressure, tiers: Sequence[str], lossy: bool) -> list[SpillGap]:
    """Returns every gap in which an activation could be evicted, in order of release."""
    runs, starts = base.program.runs, base.program.starts_us()
    host_lanes = {x.name for x in machine.lanes_between(DEVICE, HOST)}
    gaps: list[SpillGap] = []
    for tensor, at, until in sorted(base.residency.held, key=lambda h: (h[1], h[0].id)):
        if tensor.kind != "activation" or tensor.pinned or tensor.nbytes <= 0:
            continue
        if until - at < 2 or at < 0:
            continue
        if not any(a.position == until and a.reads for a in base.program.accesses[tensor.id]):
            continue
        # values that forward reads again stay exact
        rounds = lossy and runs[until].op.phase != "forward"
        options: list[Option] = []
        decisions: list[Away] = []
        for tier in tiers:
            for codec in (None, *_codecs(machine, tensor, rounds)):
                option = _option(machine, tensor, tier, codec, at + 1, until - 1)
                if option is not None:
                    options.append(option)
                    decisions.append(Away(tensor.id, runs[at].name, tier, codec))
        if not options:
            continue
        candidate = Candidate(
            id=f"{tensor.id}@{runs[at].name}",
            nbytes=tensor.nbytes,
            release_ns=round(1000 * starts[at + 1]),
            needed_ns=round(1000 * starts[until]),
            options=tuple(options),
        )
        saved = runs[at].op.phase == "forward" and runs[until].op.phase != "forward"
        over_host = any(o.tier != HOST and o.lane in host_lanes for o in options)
        gaps.append(SpillGap(candidate, at + 1, until - 1, saved, tuple(decisions), over_host))
    return gaps


def decide(
    gaps: Sequence[SpillGap], choice: Sequence[int | None], again: tuple[Recompute, ...] = ()
) -> Decisions:
    away = [g.decisions[o] for g, o in zip(gaps, choice, strict=True) if o is not None]
    return Decisions(away=tuple(away), recomputes=again)


def room_beyond(machine: Machine, base: Pressure) -> dict[str, int]:
    """Returns the bytes that each limited tier other than the device can still take."""
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
    """Returns the codecs that make this tensor smaller, if they may be used."""
    return [
        c.name
        for c in machine.codecs
        if tensor.ratios.get(c.name, 1.0) < 1.0 and (lossy or c.lossless)
    ]


def _option(
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
        return max(move_ns(moved, x.bytes_per_us, x.latency_us, tensor.nbytes, rate) for x in route)

    return Option(
        name=tier if codec is None else f"{tier}+{codec}",
        tier=tier,
        lane=out[0].name,  # tiers that share the lane out share its time
        moved_bytes=moved,
        out_ns=slowest_ns(out),
        back_ns=slowest_ns(back),
        first=first,
        last=last,
        compressed=moved < tensor.nbytes,
    )


def _route(machine: Machine, source: str, target: str) -> list[Lane]:
    direct = machine.lanes_between(source, target)
    if direct:
        return [max(direct, key=lambda x: x.bytes_per_us)]
    first, second = machine.lanes_between(source, HOST), machine.lanes_between(HOST, target)
    return [first[0], second[0]] if first and second else []
