"""Short names for steps small enough to work out by hand, run on simulator and oracle alike.

Lanes carry one byte per microsecond without latency unless a test says otherwise, so a move of
three bytes takes 3000 ns. The codec `half` halves every tensor and is as good as instant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oracle import run as run_oracle

from offcompile.ir import (
    Codec,
    Drop,
    Lane,
    Machine,
    Move,
    Op,
    Plan,
    Problem,
    Start,
    Tensor,
    Tier,
    Timeline,
)
from offcompile.simulate import simulate

LANES = {
    ("host", "device"): "h2d",
    ("device", "host"): "d2h",
    ("host", "disk"): "write",
    ("disk", "host"): "read",
}


def T(name: str, nbytes: int, kind: str = "weight", home: str | None = None) -> Tensor:
    return Tensor(name, nbytes, kind, home, {"half": 0.5})


def O(name: str, us: float, reads: str = "", writes: str = "", **more: Any) -> Op:  # noqa: E743
    more.setdefault("phase", "forward")
    return Op(
        name, duration_us=us, reads=tuple(reads.split()), writes=tuple(writes.split()), **more
    )


def M(
    name: str,
    tensor: str,
    path: str,
    after: str | None = None,
    ready: str | None = None,
    **more: Any,
) -> Move:
    source, target = path.split(">")
    lane = more.pop("lane", LANES[source, target])
    return Move(name, tensor, source, target, lane, after, ready, **more)


def D(copy: str, after: str | None) -> Drop:
    return Drop(*copy.split("@"), after)


def machine(device: int | None = None, host: int | None = None, **rates: float) -> Machine:
    tiers = (Tier("device", device), Tier("host", host), Tier("disk"))
    lanes = tuple(
        Lane(n, s, t, rates.get(n, 1), rates.get("latency", 0)) for (s, t), n in LANES.items()
    )
    return Machine(tiers, lanes, (Codec("half", False, rates.get("half", 1000)),))


@dataclass(frozen=True)
class Seen:
    timeline: Timeline

    def at(self, name: str, step: int = 0) -> tuple[int, int]:
        (span,) = [s for s in self.timeline.spans if (s.id, s.step) == (name, step)]
        return span.start_ns, span.end_ns

    @property
    def peak(self) -> dict[str, int]:
        return dict(self.timeline.peak_bytes)

    @property
    def makespan_ns(self) -> int:
        return round(self.timeline.makespan_us * 1000)

    @property
    def rules(self) -> set[str]:
        return {v.rule for v in self.timeline.violations}


def see(
    tensors: list[Tensor],
    ops: list[Op],
    on: Machine | None = None,
    start: str | None = None,
    **plan: Any,
) -> Seen:
    """Run it on both; `start` ("w@host …") makes the problem steady."""
    problem, on = Problem(tuple(tensors), tuple(ops), start is not None), on or machine()
    begin = [Start(t.id, t.home) for t in tensors if t.home]
    if start is not None:
        begin = [Start(*s.split("@")) for s in start.split()]
    full = Plan(tuple(begin), **{key: tuple(value) for key, value in plan.items()})
    timeline, naive = simulate(problem, on, full), run_oracle(problem, on, full)
    assert timeline.valid == naive["valid"], (timeline.violations, naive["rules"])
    if timeline.valid:
        spans = {(s.id, s.step): (s.start_ns, s.end_ns) for s in timeline.spans}
        under_way = naive["under way"]  # moves that outlast the record have no end yet
        assert {k: s[0] for k, s in spans.items()} == {k: s[0] for k, s in naive["spans"].items()}
        assert all(s == naive["spans"][k] for k, s in spans.items() if k not in under_way)
        assert dict(timeline.peak_bytes) == naive["peak"]
        assert round(timeline.makespan_us * 1000) == naive["makespan_ns"]
    return Seen(timeline)
