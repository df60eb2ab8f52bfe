"""Problems, machines and plans as JSON, exactly as the contract defines it.

Readers take parsed JSON (`*_from_json`) or its text (`loads_*`) and raise `InvalidInput` with
every violation found. Writers return plain dicts in the contract's order with all keys, the same
for equal values; only keys that the contract's first readers do not know (`_UNSAID`) are left out
where they are false or zero.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from ._read import (
    BYTES,
    FLAG,
    IDENT,
    MICROSECONDS,
    RATE,
    RATIO,
    SHARE,
    Entry,
    JsonObject,
    Report,
    figure,
    label,
    listed,
    one_of,
    show,
)
from .errors import InvalidInput, Violation
from .model import (
    DEVICE,
    HOST,
    KINDS,
    PHASES,
    Codec,
    Lane,
    Machine,
    Op,
    Problem,
    SharedLink,
    Tensor,
    Tier,
)
from .plan import Direct, Drop, Move, Plan, Recompute, Start, Update
from .reading import MOST_TOML_BYTES

_KIND = one_of(KINDS)
_PHASE = one_of(PHASES)
_PLACE = one_of((HOST, DEVICE))

#: our own keys beyond the contract, written only if not false, zero or empty
_UNSAID = (
    *("pinned", "toll_us", "toll_share", "bypass_share"),
    *("in_place_reads", "in_place_writes", "updates"),
)

#: limit on the commas and opening brackets of a file: ten times those of a long recording
MOST_PARTS = 10_000_000
#: limit on the dots in a line of TOML: parsing a dotted key takes time quadratic in its parts
_MOST_DOTS = 100


def _keys(noun: type[Any]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(noun))


# --- reading -------------------------------------------------------------------------------


def problem_from_json(obj: object) -> Problem:
    """The problem that parsed JSON describes."""
    report = Report()
    top = Entry(report, obj, "", "problem", ("steady", "tensors", "ops"))
    steady = top.optional("steady", FLAG, False)
    tensor_entries = list(top.entries("tensors", "tensor", _keys(Tensor)))
    tensors = tuple(_tensor(e) for e in tensor_entries)
    op_entries = list(top.entries("ops", "op", _keys(Op)))
    ops = tuple(_op(e) for e in op_entries)
    known = report.unique((e.at("id"), t.id) for e, t in zip(tensor_entries, tensors, strict=True))
    report.unique((e.at("id"), o.id) for e, o in zip(op_entries, ops, strict=True))
    for entry, op in zip(op_entries, ops, strict=True):
        _check_operands(report, entry, op, known)
    report.check()
    return Problem(tensors, ops, steady)


def _tensor(entry: Entry) -> Tensor:
    return Tensor(
        entry.required("id", IDENT),
        entry.required("nbytes", BYTES),
        entry.required("kind", _KIND),
        entry.optional("home", IDENT, None),
        entry.figures("ratios", RATIO),
        entry.optional("pinned", FLAG, False),
    )


def _op(entry: Entry) -> Op:
    return Op(
        entry.required("id", IDENT),
        entry.required("phase", _PHASE),
        entry.required("duration_us", MICROSECONDS),
        entry.many("reads", IDENT),
        entry.many("writes", IDENT),
        entry.optional("workspace_bytes", BYTES, 0),
        entry.figures("direct", MICROSECONDS),
        entry.optional("host_duration_us", MICROSECONDS, None),
        entry.optional("recompute", FLAG, False),
    )


def _check_operands(report: Report, entry: Entry, op: Op, known: Collection[str]) -> None:
    for key, names in (("reads", op.reads), ("writes", op.writes)):
        for i, name in enumerate(names):
            report.known(f"{entry.at(key)}[{i}]", name, "tensor", known)
    touched = frozenset(op.operands)
    for name in op.direct:
        where = f"{entry.at('direct')}.{label(name)}"
        if report.known(where, name, "tensor", known) and name and name not in touched:
            report.add(
                "bad-value",
                where,
                f"{show(name)} is neither read nor written by this op, which touches "
                f"{listed(op.operands) or 'nothing'}; remove the entry",
            )


def machine_from_json(obj: object) -> Machine:
    """The machine that parsed JSON describes."""
    report = Report()
    top = Entry(report, obj, "", "machine", _keys(Machine))
    tier_entries = list(top.entries("tiers", "tier", _keys(Tier)))
    tiers = tuple(
        Tier(e.required("name", IDENT), e.optional("capacity_bytes", BYTES, None))
        for e in tier_entries
    )
    lane_entries = list(top.entries("lanes", "lane", _keys(Lane)))
    lanes = tuple(_lane(e) for e in lane_entries)
    codec_entries = list(top.entries("codecs", "codec", _keys(Codec)))
    codecs = tuple(
        Codec(
            e.required("name", IDENT),
            e.optional("lossless", FLAG, False),
            e.required("bytes_per_us", RATE),
        )
        for e in codec_entries
    )
    link_entries = list(top.entries("shared", "shared link", _keys(SharedLink)))
    links = tuple(_shared_link(e) for e in link_entries)
    known = report.unique((e.at("name"), t.name) for e, t in zip(tier_entries, tiers, strict=True))
    known_lanes = report.unique(
        (e.at("name"), x.name) for e, x in zip(lane_entries, lanes, strict=True)
    )
    report.unique((e.at("name"), x.name) for e, x in zip(link_entries, links, strict=True))
    for entry, link in zip(link_entries, links, strict=True):
        for i, name in enumerate(link.lanes):
            report.known(f"{entry.at('lanes')}[{i}]", name, "lane", known_lanes)
    report.unique((e.at("name"), c.name) for e, c in zip(codec_entries, codecs, strict=True))
    for entry, lane in zip(lane_entries, lanes, strict=True):
        report.known(entry.at("source"), lane.source, "tier", known)
        report.known(entry.at("target"), lane.target, "tier", known)
    if not top.broken and DEVICE not in known:
        found = listed(known) or "none"
        report.add(
            "bad-value",
            "tiers",
            f'no tier is named "{DEVICE}" (found: {found}); name the tier that ops compute on so',
        )
    report.check()
    return Machine(tiers, lanes, codecs, links)


def _shared_link(entry: Entry) -> SharedLink:
    return SharedLink(
        entry.required("name", IDENT),
        entry.required("bytes_per_us", RATE),
        entry.many("lanes", IDENT),
        entry.optional("in_place_reads", FLAG, False),
        entry.optional("in_place_writes", FLAG, False),
        entry.optional("updates", FLAG, False),
    )


def _lane(entry: Entry) -> Lane:
    lane = Lane(
        entry.required("name", IDENT),
        entry.required("source", IDENT),
        entry.required("target", IDENT),
        entry.required("bytes_per_us", RATE),
        entry.optional("latency_us", MICROSECONDS, 0.0),
        entry.optional("toll_us", MICROSECONDS, 0.0),
        entry.optional("toll_share", SHARE, 0.0),
        entry.optional("bypass_share", SHARE, 0.0),
    )
    if lane.source and lane.source == lane.target:
        entry.report.add(
            "bad-value",
            entry.at("target"),
            f"{show(lane.target)} is the lane's source too; a lane links two different tiers: "
            "change one end",
        )
    return lane


def plan_from_json(obj: object) -> Plan:
    """The plan that parsed JSON describes. `verify` checks whether its ids exist."""
    report = Report()
    top = Entry(report, obj, "", "plan", _keys(Plan))
    start = tuple(
        Start(e.required("tensor", IDENT), e.required("tier", IDENT))
        for e in top.entries("start", "start copy", _keys(Start))
    )
    move_entries = list(top.entries("moves", "move", _keys(Move)))
    moves = tuple(_move(e) for e in move_entries)
    report.unique((e.at("id"), m.id) for e, m in zip(move_entries, moves, strict=True))
    drops = tuple(
        Drop(
            e.required("tensor", IDENT),
            e.required("tier", IDENT),
            e.optional("after", IDENT, None),
        )
        for e in top.entries("drops", "drop", _keys(Drop))
    )
    directs = tuple(
        Direct(e.required("op", IDENT), e.required("tensor", IDENT))
        for e in top.entries("directs", "direct access", _keys(Direct))
    )
    recomputes = tuple(
        Recompute(e.required("op", IDENT), e.required("before", IDENT))
        for e in top.entries("recomputes", "recomputation", _keys(Recompute))
    )
    updates = tuple(
        Update(e.required("weight", IDENT), e.required("where", _PLACE))
        for e in top.entries("updates", "update", _keys(Update))
    )
    report.check()
    return Plan(start, moves, drops, directs, recomputes, updates)


def _move(entry: Entry) -> Move:
    return Move(
        entry.required("id", IDENT),
        entry.required("tensor", IDENT),
        entry.required("source", IDENT),
        entry.required("target", IDENT),
        entry.required("lane", IDENT),
        _trigger(entry, "start_after"),
        _trigger(entry, "ready_before"),
        entry.optional("wraps", FLAG, False),
        entry.optional("codec", IDENT, None),
    )


def _trigger(entry: Entry, key: str) -> str | None:
    """A required name, which may be null."""
    entry.present(key, "the name of an op or move, or null")
    return entry.optional(key, IDENT, None)


def check_homes(problem: Problem, machine: Machine) -> tuple[Violation, ...]:
    """Homes that name no tier of the machine; checking this needs both problem and machine."""
    report = Report()
    for i, tensor in enumerate(problem.tensors):
        where = f"tensors[{i}] ({label(tensor.id)}).home"
        report.known(where, tensor.home, "tier of the machine", machine.tier)
    return tuple(report.violations)


# --- text ----------------------------------------------------------------------------------


def loads_problem(text: str) -> Problem:
    """Strict: no values beyond JSON, no duplicate keys."""
    return problem_from_json(loads_json(text, "problem"))


def loads_machine(text: str) -> Machine:
    return machine_from_json(loads_json(text, "machine"))


def loads_plan(text: str) -> Plan:
    return plan_from_json(loads_json(text, "plan"))


def machine_from_toml(text: str) -> Machine:
    """The same keys as in JSON; a tier without `capacity_bytes` is unlimited."""
    return machine_from_json(loads_toml(text, "machine"))


def loads_toml(text: str, noun: str) -> dict[str, Any]:
    """Strict, and fast: refuses a text of more than a page without parsing it."""
    if len(text) > MOST_TOML_BYTES:
        raise _too_much(noun, f"{len(text)} characters", f"{MOST_TOML_BYTES} at most")
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > _MOST_DOTS:
            raise _too_much(f"line {number}", f"{line.count('.')} dots", f"{_MOST_DOTS} at most")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(noun, "TOML", error) from None


def loads_json(text: str, noun: str) -> object:
    """Parsed JSON whose objects remember duplicate keys; refuses too large a text unparsed."""
    parts = sum(map(text.count, ",[{"))
    if parts > MOST_PARTS:
        raise _too_much(noun, f"{parts} commas and brackets", f"{MOST_PARTS} at most")
    # NaN and Infinity come through as floats: the readers refuse them wherever they are, together
    # with their location, which json's own hook does not know.
    try:
        obj: object = json.loads(text, object_pairs_hook=JsonObject)
    except (ValueError, RecursionError) as error:
        raise _unreadable(noun, "JSON", error) from None
    return obj


def _too_much(where: str, found: str, most: str) -> InvalidInput:
    detail = f"{found} are more than any file of ours has ({most}); check what wrote it"
    return InvalidInput([Violation("bad-value", where, detail)])


def _unreadable(noun: str, form: str, error: Exception) -> InvalidInput:
    where = noun
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):
        where, reason = f"line {error.lineno} column {error.colno}", error.msg
    elif isinstance(error, RecursionError):
        reason = f"nested too deeply: {noun} files are at most 4 levels deep"
    detail = f"this {noun} is not {form}: {reason}; mend the text there"
    return InvalidInput([Violation("bad-value", where, detail)])


# --- writing -------------------------------------------------------------------------------


def problem_to_json(problem: Problem) -> dict[str, Any]:
    return {
        "steady": problem.steady,
        "tensors": [_row(t) for t in problem.tensors],
        "ops": [_row(o) for o in problem.ops],
    }


def machine_to_json(machine: Machine) -> dict[str, Any]:
    found = {key: [_row(x) for x in getattr(machine, key)] for key in _keys(Machine)}
    if not machine.shared:
        del found["shared"]
    return found


def plan_to_json(plan: Plan) -> dict[str, Any]:
    return {key: [_row(x) for x in getattr(plan, key)] for key in _keys(Plan)}


def _row(thing: Any) -> dict[str, Any]:
    """One object as a dict, with its fields in the contract's order."""
    row = {f.name: _plain(getattr(thing, f.name), "float" in f.type) for f in fields(thing)}
    for key in _UNSAID:
        if key in row and not row[key]:
            del row[key]
    return row


def _plain(value: Any, measured: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(value[key], measured) for key in sorted(value)}
    if isinstance(value, tuple):
        return list(value)
    # 1200 and 1200.0 are equal, so they must be written the same way
    return figure(value) if measured and value is not None else value
