"""Figures that the steps of an earlier process have shown of the same plan.

Ops and lanes are never equally fast twice. If they nearly are, the figures of the earlier process
count: then the search that follows is found in the cache, and so is the graph that was compiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from offcompile.ir import Machine, Plan, Problem
from offcompile.ir.jsonio import machine_to_json, plan_to_json, problem_to_json
from offcompile.machine.cost_cache import (
    digest_of,
    positive_number,
    read_document,
    used_now,
    write_among,
)

from .corrections import SAME, Factors
from .lane_watch import MARGIN

KIND = "figures"
#: densities that differ by no more than this count as equal: batches differ
DRIFT = 0.1
#: figures kept of one plan, as of a busy machine and of an idle one
MOST_KEPT = 8
#: the least recently used documents beyond this are deleted
MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class Figures:
    """Figures of a plan's steps, as far as plans take them for other than those assumed before."""

    factors: Factors | None = None
    #: True if `factors` include the time to touch returned memory again
    includes_touching: bool = False
    #: lane → bytes per µs
    rates: Mapping[str, float] = field(default_factory=dict)
    densities: Mapping[str, float] = field(default_factory=dict)

    def distance(self, other: Figures, machine: Machine) -> float:
        """The greatest difference, as a part of what counts as equal. `machine`: as measured."""
        if self.includes_touching != other.includes_touching:
            return math.inf
        if self.densities.keys() != other.densities.keys():
            return math.inf
        a, b = self.factors or Factors(), other.factors or Factors()
        found = [_times(a.forward, b.forward, SAME), _times(a.backward, b.backward, SAME)]
        for lane in machine.lanes:
            one, two = (f.rates.get(lane.name, lane.bytes_per_us) for f in (self, other))
            found.append(_times(one, two, MARGIN))
        found += [abs(d - other.densities[name]) / DRIFT for name, d in self.densities.items()]
        return max(found)


def _times(one: float, two: float, equal: float) -> float:
    return abs(math.log(one / two)) / math.log(equal)


def as_found_before(
    now: Figures, problem: Problem, machine: Machine, plan: Plan, planner: str
) -> Figures:
    """The figures that an earlier process has found for this plan, if these are nearly the same;
    otherwise these, which are kept for later ones. `machine`: as measured; `planner`: its digest.
    """
    parts = [problem_to_json(problem), machine_to_json(machine), plan_to_json(plan)]
    identity = {"planner": planner, "plan": digest_of(parts)}
    kept = _read(read_document(KIND, identity))
    nearest = min(kept, key=lambda f: now.distance(f, machine), default=now)
    if kept and now.distance(nearest, machine) <= 1:
        used_now(KIND, identity)
        return nearest
    rows = [asdict(figures) for figures in (*kept, now)[-MOST_KEPT:]]
    write_among(KIND, identity, {"figures": rows}, MOST_BYTES)
    return now


def _read(content: Mapping[str, object] | None) -> list[Figures]:
    """The valid ones among those that were kept."""
    rows = (content or {}).get("figures")
    found = map(_figures, rows if isinstance(rows, list) else ())
    return [figures for figures in found if figures is not None]


def _figures(row: object) -> Figures | None:
    match row:
        case {
            "factors": factors,
            "includes_touching": bool(touching),
            "rates": dict(rates),
            "densities": dict(densities),
        }:
            pass
        case _:
            return None
    made = None
    if factors is not None:
        found = _positive(factors) if isinstance(factors, dict) else None
        if found is None or found.keys() != {"forward", "backward"}:
            return None
        made = Factors(**found)
    found_rates = _positive(rates)
    shares = all(type(d) is float and 0 <= d <= 1 for d in densities.values())
    if found_rates is None or not shares:
        return None
    return Figures(made, touching, found_rates, densities)


def _positive(row: Mapping[str, object]) -> dict[str, float] | None:
    found = {name: positive_number(value) for name, value in row.items()}
    return {n: v for n, v in found.items() if v is not None} if all(found.values()) else None
