"""Says what each way to share a model takes on one rank, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from offcompile.ir import DEVICE, HOST
from offcompile.ir.units import show_us, size
from offcompile.planning.ranks.beside import with_collectives
from offcompile.report.report import PlanReport
from offcompile.simulate import Simulator

from .request import RankRequest, Shard
from .surveyed import AheadOnRank

#: assumptions behind the figures, for people
ASSUMED = (
    "Collectives are rings at the link's rate; nothing else uses the link, and all ranks compute at"
    " the same speed.",
    "Graphs are cut where buckets and groups end: compile DDP(model) and not the model in it, and"
    " fully_shard every numbered module.",
)


@dataclass(frozen=True)
class RankForecast:
    """One way to share a model. `step_us` is None if there is no plan, and `reason` says why."""

    shard: Shard
    step_us: float | None = None
    #: the same step without its collectives
    alone_us: float = 0.0
    #: time of the collectives on a link that nothing else uses
    communication_us: float = 0.0
    #: bytes that each rank passes on
    sent_bytes: int = 0
    #: peak on the device, with `beside_bytes`
    device_bytes: int = 0
    #: the part of it that DDP or FSDP2 takes beside the step's tensors
    beside_bytes: int = 0
    #: peak in host memory, of all ranks on a node
    node_host_bytes: int = 0
    reason: str = ""
    smallest_change: str = ""

    @property
    def fits(self) -> bool:
        return self.step_us is not None

    @property
    def hidden_us(self) -> float:
        """Communication that takes no time of the step: ops run meanwhile."""
        if self.step_us is None:
            return 0.0
        return min(self.communication_us, max(0.0, self.communication_us - self.waited_us))

    @property
    def waited_us(self) -> float:
        """Time by which collectives make the step longer."""
        return 0.0 if self.step_us is None else max(0.0, self.step_us - self.alone_us)

    def to_line(self) -> str:
        if self.step_us is None:
            return f"{self.shard:6}  {'no plan':>12}  {self.smallest_change or self.reason}"
        share = self.hidden_us / self.communication_us if self.communication_us else 1.0
        times = f"{show_us(self.step_us):>12}  {show_us(self.communication_us):>13}"
        sizes = f"{size(self.device_bytes):>11}  {size(self.node_host_bytes):>13}"
        return f"{self.shard:6}  {times}  {100 * share:5.0f}%  {sizes}"

    def to_json(self) -> dict[str, Any]:
        more = {"fits": self.fits, "hidden_us": self.hidden_us, "waited_us": self.waited_us}
        return asdict(self) | more


@dataclass(frozen=True)
class RanksAnswer:
    """The forecast for several ranks. `ways`: the one that was asked for, then the others."""

    asked: RankRequest
    gbps: float
    ways: tuple[RankForecast, ...]

    @property
    def chosen(self) -> RankForecast:
        return self.ways[0]

    def lines(self) -> Iterator[str]:
        asked, chosen = self.asked, self.chosen
        nodes = asked.ranks // asked.node_ranks
        yield (
            f"{asked.ranks} ranks on {nodes} node{'s' * (nodes > 1)}, {asked.shard}, over"
            f" {asked.link.title}, {self.gbps:g} GB/s"
        )
        if chosen.fits:
            step = show_us(chosen.step_us or 0.0)
            yield f"  step           {step}, to which collectives add {show_us(chosen.waited_us)}"
            yield (
                f"  communication  {show_us(chosen.communication_us)}"
                f" ({size(chosen.sent_bytes)} sent by each rank), {show_us(chosen.hidden_us)} of it"
                " hidden behind compute"
            )
            yield (
                f"  device         {size(chosen.device_bytes)} on each rank,"
                f" {size(chosen.beside_bytes)} of it for {chosen.shard}"
            )
            yield f"  host           {size(chosen.node_host_bytes)} on each node"
        yield ""
        yield (
            f"{'way':6}  {'step':>12}  {'communication':>13}  {'hidden':>6}  {'device peak':>11}"
            f"  {'host per node':>13}"
        )
        yield from (way.to_line() for way in self.ways)
        yield from ASSUMED

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": self.asked.ranks,
            "node_ranks": self.asked.node_ranks,
            "link": self.asked.link.name,
            "link_gbps": self.gbps,
            "shares_host_link": self.asked.link.takes_host_link,
            "shard": self.asked.shard,
            "ways": [way.to_json() for way in self.ways],
            "assumes": list(ASSUMED),
        }


def forecast(ahead: AheadOnRank, report: PlanReport, peaks: Mapping[str, int]) -> RankForecast:
    """Simulate the planned step of one rank with its collectives. `peaks`: bytes of each tier."""
    problem, machine, plan, ranks = report.problem, report.machine, report.plan, ahead.ranks
    beside = ahead.collectives(report.names)
    ring, some = beside.ring, beside.collectives(problem, plan)
    alone_us = Simulator(problem, machine).run(plan, record=False).makespan_us
    timeline = with_collectives(problem, machine, plan, ring, some)
    if timeline.violations:
        return RankForecast(ranks.shard, reason=f"{timeline.violations[0]}")
    return RankForecast(
        ranks.shard,
        timeline.makespan_us,
        alone_us,
        sum(map(ring.time_us, some)),
        sum(one.sent_bytes for one in some),
        peaks.get(DEVICE, 0) + ahead.beside_bytes,
        ahead.beside_bytes,
        peaks.get(HOST, 0) * ranks.node_ranks,
    )
