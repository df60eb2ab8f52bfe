"""Explains stalls by what they wait for, and deadlocks by the rules that the plan breaks."""

from __future__ import annotations

from dataclasses import dataclass

from offcompile.ir import Violation

from .compiled import CompiledRun, Transfer
from .copies import FILLING, NONE, VALID
from .state import CopyLane, SimulationState


@dataclass(frozen=True)
class StuckWait:
    """`on`: the thing awaited, in a word; `rule`: the rule broken if it can never arrive."""

    on: str
    detail: str
    rule: str = "deadlock"


def waits_of(e: SimulationState, run: CompiledRun) -> list[StuckWait]:
    """The reasons why an op or host update may not start now."""
    waits = []
    for m in e.p.before_moves.get(run.number, ()):
        move = e.p.moves[m]
        if e.move_count[m] < (e.step if move.wraps else e.step + 1):
            rule = "late-move" if not move.wraps and _waits_for_run(e, move, run) else "deadlock"
            waits.append(StuckWait(move.id, f"move {move.id} has not arrived", rule))
    for key in run.reads:
        if e.status[key] != VALID:
            waits.append(_missing_read(e, run, key))
        elif key in run.host_reads and e.codec[key]:
            tensor, _ = e.name_of(key)
            waits.append(
                StuckWait(
                    tensor, f"the host copy of {tensor} is compressed: no direct access", "codec"
                )
            )
    for t in run.written:
        if e.moving[t]:
            name = e.base.problem.tensors[t].id
            waits.append(StuckWait(_mover(e, t), f"a move of {name}, which it writes, is running"))
    other = e.ops if run.on_host else e.updates
    if other.done < run.other_lane_runs:
        name = other.runs[run.other_lane_runs - 1].id
        waits.append(StuckWait(name, f"{name} comes first and touches the same tensor"))
    for tier, room in e.room_after(run).items():
        if room < 0:
            waits.append(_no_room(e, tier, -room))
    return waits


def _no_room(e: SimulationState, tier: int, missing: int) -> StuckWait:
    name = e.base.tier_names[tier]
    return StuckWait(
        f"space on {name}",
        f"{missing:,} bytes are missing on {name} ({e.used[tier]:,} of"
        f" {e.base.capacity[tier]:,} held)",
        "no-space",
    )


def _mover(e: SimulationState, tensor: int) -> str:
    for lane in e.lanes:
        if lane.move >= 0 and e.p.moves[lane.move].tensor == tensor:
            return e.p.moves[lane.move].id
    return e.base.problem.tensors[tensor].id


def _missing_read(e: SimulationState, run: CompiledRun, key: int) -> StuckWait:
    tensor, tier = e.name_of(key)
    for lane in e.lanes:
        if lane.move >= 0 and e.p.moves[lane.move].target == key:
            name = e.p.moves[lane.move].id
            return StuckWait(name, f"move {name} is bringing {tensor} to {tier}")
    if e.status[key] == FILLING:
        return StuckWait(tensor, f"{tensor} is being written on {tier}")
    suppliers = [m for m in e.p.moves if m.target == key and _still_to_come(e, m)]
    if suppliers:
        late = all(_waits_for_run(e, m, run) for m in suppliers)
        return StuckWait(
            suppliers[0].id,
            f"{tensor} is not on {tier}; move {suppliers[0].id} would bring it but "
            + ("starts only later" if late else "has not started"),
            "late-move" if late else "deadlock",
        )
    if e.status[key] != NONE:
        return StuckWait(
            tensor, f"the copy of {tensor} on {tier} is stale and no move renews it", "stale-read"
        )
    gone = e.drops.after.get(key)
    if gone is not None:
        return StuckWait(
            tensor,
            f"{tensor} on {tier} was freed by the drop after {gone} and no move brings it back",
            "read-after-drop",
        )
    return StuckWait(
        tensor, f"{tensor} has no copy on {tier} and no move brings one", "missing-copy"
    )


def _still_to_come(e: SimulationState, move: Transfer) -> bool:
    """True if a run of the move that may serve this step has yet to start."""
    return e.move_count[move.index] < (e.step if move.wraps else e.step + 1)


def _waits_for_run(
    e: SimulationState, move: Transfer, run: CompiledRun, seen: tuple[str, ...] = ()
) -> bool:
    """True if the move's trigger, followed through other moves, is this run or a later one."""
    kind, index = move.trigger
    if kind == "move":
        trigger = e.p.moves[index]
        return trigger.id not in seen and _waits_for_run(e, trigger, run, (*seen, move.id))
    return kind == ("update" if run.on_host else "run") and index >= run.index


def move_waits(e: SimulationState, lane: CopyLane, move: Transfer) -> list[StuckWait]:
    """The reasons why the move at the head of a lane may not start now."""
    waits = []
    if not e.triggered(move, lane.step):
        kind, index = move.trigger
        name = {"run": e.p.runs, "update": e.p.updates}.get(kind, e.p.moves)[index].id
        waits.append(StuckWait(name, f"{name} has not ended"))
    tensor, source = e.name_of(move.source)
    if e.status[move.source] != VALID and not waits:
        waits.append(_missing_source(e, move, tensor, source))
    _, target = e.name_of(move.target)
    if e.status[move.target] == VALID:
        waits.append(StuckWait(tensor, f"{target} already holds a valid copy of {tensor}"))
    elif e.status[move.target] == FILLING:
        waits.append(StuckWait(tensor, f"{tensor} on {target} is being filled"))
    extra = move.target_bytes - e.size[move.target]
    room = e.base.capacity[move.target_tier] - e.used[move.target_tier] - extra
    if extra > 0 and room < 0:
        waits.append(_no_room(e, move.target_tier, -room))
    return waits


def _missing_source(e: SimulationState, move: Transfer, tensor: str, tier: str) -> StuckWait:
    comes = any(m.target == move.source and _still_to_come(e, m) for m in e.p.moves)
    later = [run for lane in (e.ops, e.updates) for run in lane.runs[lane.started :]]
    comes = comes or any(move.source in run.writes for run in later)
    if comes:
        return StuckWait(tensor, f"{tensor} is not yet valid on {tier}")
    if e.status[move.source] != NONE:
        return StuckWait(tensor, f"the copy of {tensor} on {tier} is stale for ever", "stale-read")
    return StuckWait(tensor, f"{tensor} has no copy on {tier} and never gets one", "missing-copy")


def explain_stuck(e: SimulationState) -> list[Violation]:
    """Names the broken rules; if there is only waiting, the deadlock and the missing bytes."""
    blocked: list[tuple[str, list[StuckWait]]] = []
    for compute in (e.ops, e.updates):
        for run in compute.runs[compute.started : compute.started + 1]:
            blocked.append((run.id, waits_of(e, run)))
    for lane in e.lanes:
        head = e.lane_head(lane)
        if head is not None:
            move = e.p.moves[head]
            blocked.append((move.id, move_waits(e, lane, move)))
    causes: dict[Violation, None] = {}
    for name, waits in blocked:
        for wait in waits:
            if wait.rule != "deadlock":
                causes[Violation(wait.rule, name, f"{name}: {wait.detail}")] = None
            if wait.rule == "read-after-drop":
                detail = f"{name}: {wait.on} has no copy where it is read and no move brings one"
                causes[Violation("missing-copy", name, detail)] = None
    only_waiting = all(v.rule == "no-space" for v in causes)
    if only_waiting:
        chain = "; ".join(
            f"{name} waits: {', '.join(w.detail for w in waits)}" for name, waits in blocked
        )
        where = blocked[0][0] if blocked else "the end of the step"
        return [Violation("deadlock", where, f"nothing can go on: {chain}"), *causes]
    return list(causes)
