"""Compares the ways in which ranks may share a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from offcompile.ahead.plan import Tell
from offcompile.ir import Infeasible
from offcompile.report.report import PlanReport

from .collectives import ring_of
from .forecast import RankForecast, RanksAnswer, forecast
from .request import SHARDS
from .surveyed import AheadOnRank

#: peak bytes of each tier under a plan
Peaks = Callable[[PlanReport], Mapping[str, int]]


def way_of(ahead: AheadOnRank, report: PlanReport | Infeasible, peaks: Peaks) -> RankForecast:
    """Say what a way takes that has this plan, or none."""
    if isinstance(report, Infeasible):
        shard, change = ahead.ranks.shard, report.smallest_change or ""
        return RankForecast(shard, reason=report.reason, smallest_change=change)
    return forecast(ahead, report, peaks(report))


def compared(
    ahead: AheadOnRank, asked: RankForecast, peaks: Peaks, tell: Tell, seconds: float | None
) -> RanksAnswer:
    """Compare the way that was asked for with the others. `seconds`: to plan each of them; None:
    they are left out."""
    ways = [asked]
    for shard in SHARDS if seconds is not None else ():
        if shard == ahead.ranks.shard or (shard == "zero1" and ahead.asked.optimizer is None):
            continue
        tell(f"planning for {shard}")
        other = AheadOnRank.sharing(ahead, replace(ahead.ranks, shard=shard), tell)
        ways.append(way_of(other, _planned(other, tell, seconds), peaks))
    ring = ring_of(ahead.ranks, ahead.target.profile)
    return RanksAnswer(ahead.ranks, ring.gbps, tuple(ways))


def _planned(ahead: AheadOnRank, tell: Tell, seconds: float | None) -> PlanReport | Infeasible:
    try:
        choice = ahead.choose(ahead.asked.options.memory, tell, seconds, explains=False)
    except Infeasible as error:
        return error
    return ahead.report(tell, choice)
