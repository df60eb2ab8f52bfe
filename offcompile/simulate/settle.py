"""What must hold when a step ends: the settled state of a steady problem, nothing lost otherwise."""

from __future__ import annotations

from offcompile.ir import Violation

from .engine import VALID, Engine


def check_end(e: Engine) -> list[Violation]:
    if e.base.problem.steady:
        return _check_settled(e)
    return _check_nothing_lost(e)


def _write_back_missing(e: Engine, key: int) -> Violation:
    tensor, tier = e.name_of(key)
    return Violation(
        "missing-write-back",
        tensor,
        f"the drop of {tensor} on {tier} after {e.dropped_by.get(key, '?')} can never happen:"
        " no other tier gets a valid copy; move it back first",
    )


def _check_nothing_lost(e: Engine) -> list[Violation]:
    wrong = [_write_back_missing(e, key) for key in e.asked]
    for t, tensor in enumerate(e.base.problem.tensors):
        if e.base.must_survive[t] and all(e.status[k] != VALID for k in e.copies(t)):
            wrong.append(
                Violation("lost", tensor.id, f"{tensor.kind} {tensor.id} has no valid copy left")
            )
    return wrong


def _check_settled(e: Engine) -> list[Violation]:
    """The copies that remain once wrapped moves have arrived and all drops are done."""
    n = e.base.n_tiers
    copies = {k for k, status in enumerate(e.status) if status == VALID}
    drops = list(e.asked)
    for i in e.p.wrapped:
        if e.move_count[i] <= e.step:
            move = e.p.moves[i]
            copies.add(move.target)
            drops += [e.p.drops[d] for d in move.drops]
    copies -= {k for k in copies if k // n in e.ending}
    wrong = []
    for key in drops:
        if key not in copies:
            continue
        tensor = key // n
        spare = any(k != key and k in copies for k in e.copies(tensor))
        if spare or (not e.base.must_survive[tensor] and e.value_is_over(tensor)):
            copies.discard(key)
        else:
            wrong.append(_write_back_missing(e, key))
    if wrong:
        return wrong
    may_be_left_out = {e.p.moves[i].target for i in e.p.wrapped}
    missing = e.start_copies - copies
    extra = copies - e.start_copies - may_be_left_out
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
