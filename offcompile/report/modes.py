"""Describes the treatment of each module's tensors, with the figures behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from offcompile.ir import DEVICE, FORWARD, HOST, Op, Plan, Problem
from offcompile.ir.units import show_us, size

from .explain import Fate

#: name for tensors without a known module
WHOLE = "(the model)"
#: a share of a duration up to this is not worth reporting
NOTHING = 0.005

STAYS = "stays on the device"
IN_PLACE = "in place on the host (DHA)"
MIXED = "in place in forward, loaded for backward (DFGB)"
MIXED_BACK = "loaded for forward, in place in backward"
LOADED = "loaded"
LOADED_ONCE = "loaded for forward, kept for backward (GFGB)"
LOADED_TWICE = "loaded for forward and again for backward (GFGB)"
WRITTEN = "written on the host"
SENT = "made on the device, sent to the host"
TAKEN = "updates its weight at once, and is gone"


@dataclass(frozen=True)
class Mode:
    """The treatment of one long-lived tensor."""

    tensor: str
    nbytes: int
    kind: str
    what: str
    why: str
    #: time that the treatment adds to the step
    cost_us: float = 0.0


def module_of(path: str) -> str:
    """The module that the parameter with this path belongs to."""
    return path.rpartition(".")[0] or WHOLE


def modules_of(names: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    """Tensor → its module, by the parameter's name, else by the module that made it."""
    found = {t: path_in(label) for t, label in labels.items()}
    return found | {t: module_of(name) for t, name in names.items()}


def path_in(label: str) -> str:
    """The path in a label `path shape type`; empty if no module made the value."""
    path, *rest = label.split(" ")
    return path if len(rest) == 2 else ""


def modes(problem: Problem, plan: Plan, fates: Mapping[str, Fate]) -> tuple[Mode, ...]:
    """The mode of every weight, gradient, optimizer state and saved activation, in the problem's
    order."""
    directs = {(d.op, d.tensor) for d in plan.directs}
    loads: dict[str, int] = {}
    readers: dict[str, list[Op]] = {}
    ways_in_place: dict[str, list[Op]] = {}
    for op in problem.ops:
        for t in op.reads:
            readers.setdefault(t, []).append(op)
        for t in op.direct:
            ways_in_place.setdefault(t, []).append(op)
    made = {t for op in problem.ops if op.phase == FORWARD for t in op.writes}
    saved = made.intersection(t for op in problem.ops if op.phase != FORWARD for t in op.reads)
    written_there = {d.tensor for d in plan.directs}
    left = {m.tensor for m in plan.moves if m.source == DEVICE}
    for move in plan.moves:
        if move.target == DEVICE:
            loads[move.tensor] = loads.get(move.tensor, 0) + 1
    found = []
    for tensor in problem.tensors:
        if tensor.kind == "weight":
            uses = readers.get(tensor.id, [])
            ways = {(op.phase == FORWARD, (op.id, tensor.id) in directs) for op in uses}
            what = STAYS if tensor.home != HOST else _way(ways, loads.get(tensor.id, 0))
        elif tensor.kind == "gradient":
            written = tensor.id in written_there
            taken = tensor.id in readers and not tensor.pinned
            what = TAKEN if taken else WRITTEN if written else SENT if tensor.id in left else STAYS
        elif tensor.kind == "state" or tensor.id in saved:
            what = " and ".join(fates[tensor.id].modes)
        else:
            continue
        fate = fates[tensor.id]
        why = _why(ways_in_place.get(tensor.id, []), tensor.id, fate)
        found.append(Mode(tensor.id, tensor.nbytes, tensor.kind, what, why, fate.cost_us))
    return tuple(found)


def _way(ways: set[tuple[bool, bool]], loads: int) -> str:
    """The treatment of a weight. `ways`: (in forward, in place) for each use."""
    forward = {direct for ahead, direct in ways if ahead}
    backward = {direct for ahead, direct in ways if not ahead}
    if forward | backward == {True}:
        return IN_PLACE
    if not backward:
        return LOADED
    if forward == {True}:
        return MIXED
    if backward == {True}:
        return MIXED_BACK
    return LOADED_ONCE if loads < 2 else LOADED_TWICE


def _why(users: list[Op], tensor: str, fate: Fate) -> str:
    """The figures for a tensor. `users`: the ops that could use it in place."""
    slower_us = sum(max(0.0, op.direct[tensor] - op.duration_us) for op in users)
    parts = []
    if users and slower_us <= NOTHING * sum(op.duration_us for op in users):
        parts.append("in place as fast as on the device")
    elif users:
        parts.append(f"in place everywhere {show_us(slower_us)} slower")
    if fate.lane_us:
        waited = f"{show_us(fate.waiting_us)} of it waited" if fate.waiting_us else "nothing waits"
        parts.append(f"moves for {show_us(fate.lane_us)}, {waited}")
    return ", ".join(parts)


def module_rows(
    found: tuple[Mode, ...], module: Mapping[str, str]
) -> Iterator[tuple[str, str, str, str, str]]:
    """Yields (module, kind, bytes, mode, why) for each module and treatment, most expensive first.

    `module`: tensor → its module. Tensors of a module with the same treatment share a row, with the
    figures of the largest one.
    """
    groups: dict[tuple[str, str, str], list[Mode]] = {}
    for mode in found:
        groups.setdefault((module.get(mode.tensor) or WHOLE, mode.kind, mode.what), []).append(mode)
    dearest = sorted(groups.items(), key=lambda g: -sum(m.cost_us for m in g[1]))
    for (name, kind, what), same in dearest:
        largest = max(same, key=lambda m: m.nbytes)
        yield name, kind, size(sum(m.nbytes for m in same)), what, largest.why
