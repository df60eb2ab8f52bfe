"""Checks at the end of a step: it ends as it began (steady), or nothing is lost."""

from __future__ import annotations

from offcompile.ir import Violation

from .copies import VALID
from .state import SimulationState


def check_end(e: SimulationState) -> list[Violation]:
    if e.base.problem.steady:
        return _check_settled(e)
    return _check_nothing_lost(e)


def _write_back_missing(e: SimulationState, key: int) -> Violation:
    tensor, tier = e.name_of(key)
    return Violation(
        "missing-write-back",
        tensor,
        f"the drop of {tensor} on {tier} after {e.drops.after.get(key, '?')} can never happen:"
        " no other tier gets a valid copy; move it back first",
    )


def _check_nothing_lost(e: SimulationState) -> list[Violation]:
    wrong = [_write_back_missing(e, key) for key in e.drops.asked]
    for t, tensor in enumerate(e.base.problem.tensors):
        if e.base.must_survive[t] and all(e.status[k] != VALID for k in e.copies(t)):
            wrong.append(
                Violation("lost", tensor.id, f"{tensor.kind} {tensor.id} has no valid copy left")
            )
    return wrong


def _settle(e: SimulationState) -> tuple[set[int], list[int]]:
    """Completes all pending moves, regardless of time: (copies, drops that can never happen)."""
    n = e.base.n_tiers
    copies = {k for k, status in enumerate(e.status) if status == VALID}
    copies -= {k for k in copies if k // n in e.ending}
    asked = list(e.drops.asked)
    coming = [e.p.moves[i] for i in e.p.wrapped if e.move_count[i] <= e.step]

    def spare(key: int) -> bool:
        tensor = key // n
        if any(k != key and k in copies for k in e.copies(tensor)):
            return True
        return not e.base.must_survive[tensor] and e.value_is_over(tensor)

    again = True
    while again:
        again = False
        for key in list(asked):
            if key not in copies or spare(key):
                asked.remove(key)
                copies.discard(key)
                again = True
        waiting = {m.index for m in coming}
        for move in list(coming):
            running = any(lane.move == move.index for lane in e.lanes)
            behind = move.trigger[0] == "move" and move.trigger[1] in waiting
            if running or (not behind and move.source in copies and move.target not in copies):
                coming.remove(move)
                copies.add(move.target)
                asked += [e.p.drops[d] for d in move.drops if e.p.drops[d] in copies]
                again = True
                break
    return copies, asked


def _check_settled(e: SimulationState) -> list[Violation]:
    """Checks the copies that remain once wrapped moves have arrived and all drops are done."""
    copies, undone = _settle(e)
    if undone:
        return [_write_back_missing(e, key) for key in undone]
    wrong = []
    may_be_left_out = {e.p.moves[i].target for i in e.p.wrapped}
    began = {key for key, _, _ in e.p.start}
    missing, extra = began - copies, copies - began - may_be_left_out
    for keys, what in ((missing, "gone at"), (extra, "left over at")):
        for key in sorted(keys):
            tensor, tier = e.name_of(key)
            wrong.append(
                Violation(
                    "steady",
                    tensor,
                    f"the copy of {tensor} on {tier} is {what} the end of step {e.step + 1}:"
                    " a steady step must end as it began",
                )
            )
    return wrong
