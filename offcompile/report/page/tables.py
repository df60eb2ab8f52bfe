"""Builds the rows of the page's module table: tensors, treatment, cost and reasons per module."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from offcompile.report.explain import Fate
from offcompile.report.modes import Mode, modes, module_of, path_in
from offcompile.report.record import Record

#: name for tensors that no module made, such as most values of the backward pass
NO_MODULE = "(no module)"


@dataclass(frozen=True)
class _Row:
    fate: Fate
    mode: Mode | None
    module: str
    label: str

    @property
    def what(self) -> str:
        return self.mode.what if self.mode is not None else " and ".join(self.fate.modes)

    @property
    def whys(self) -> tuple[str, ...]:
        figure = self.mode.why if self.mode is not None else ""
        return tuple(filter(None, (figure, *self.fate.reasons)))

    def to_json(self) -> dict[str, Any]:
        fate = self.fate
        return {
            "id": fate.tensor.id,
            "label": self.label,
            "kind": fate.tensor.kind,
            "nbytes": fate.tensor.nbytes,
            "what": self.what,
            "waiting_us": round(fate.waiting_us, 3),
            "compute_us": round(fate.compute_us, 3),
            "lane_us": round(fate.lane_us, 3),
            "events": fate.events,
            "why": self.whys,
        }


def module_table(report: Record) -> list[dict[str, Any]]:
    """The modules, the most expensive first, each with its tensors in the same order."""
    fates = report.fates()
    found = modes(report.problem, report.plan, {fate.tensor.id: fate for fate in fates})
    mode_of = {mode.tensor: mode for mode in found}
    groups: dict[str, list[_Row]] = defaultdict(list)
    for fate in fates:
        tensor = fate.tensor.id
        module = module_named(report, tensor)
        label = report.labels.get(tensor, "")
        groups[module].append(_Row(fate, mode_of.get(tensor), module, label))
    rows = [_module(name, rows) for name, rows in groups.items()]
    return sorted(rows, key=lambda r: (-r["cost_us"], -r["lane_us"], -r["nbytes"], r["name"]))


def module_named(report: Record, tensor: str) -> str:
    """The module of a tensor, by its parameter's name or by the module that made it."""
    if name := report.names.get(tensor):
        return module_of(name)
    if tensor in report.labels:
        return path_in(report.labels[tensor]) or NO_MODULE
    # in problems written by hand, `a0.w` belongs to a0
    return tensor.rpartition(".")[0] or NO_MODULE


def _module(name: str, rows: list[_Row]) -> dict[str, Any]:
    holds: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    for row in rows:
        holds[row.fate.tensor.kind] += row.fate.tensor.nbytes
        ways[row.what] += row.fate.tensor.nbytes
    # the most expensive fate comes first
    dearest = rows[0]
    return {
        "name": name,
        "holds": holds.most_common(),
        "what": [what for what, _ in ways.most_common()],
        "why": dearest.whys[0] if dearest.whys else "",
        "nbytes": sum(holds.values()),
        "cost_us": round(sum(row.fate.cost_us for row in rows), 3),
        "lane_us": round(sum(row.fate.lane_us for row in rows), 3),
        "tensors": [row.to_json() for row in rows],
    }
