"""Problems, machines and plans as lines of text, for people, goldens and diffs.

    steady
    tensor w0 453000000 weight home host ratio fp16 0.5 pinned
    op F0 forward 1200.0 reads w0 x writes a0 workspace 10 direct w0 1900.0 host 12.0 recompute

    tier host unlimited
    lane h2d host -> device 12000.0 latency 10.0 toll 300.0 share 0.9 bypass 0.1
    codec fp16 lossy 200000.0
    link pcie_in 12000.0 lanes h2d reads

    start w0 host
    move m0 w0 host -> device on h2d after F3 before F5 wraps codec fp16
    drop w0 device after F0
    direct F0 w0
    recompute F2 before B2
    update w0 on host

Default values are left out; `ratio` and `direct` may be repeated. An id that is not a plain
word, or is a keyword of its own line, is quoted as a JSON string. `#` begins a comment. Lines are
parsed to the JSON shape, so the JSON reader validates both formats alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ._read import MOST_FAULTS, listed, nearest, quote, show
from .errors import InvalidInput, Violation
from .jsonio import (
    MOST_PARTS,
    machine_from_json,
    machine_to_json,
    plan_from_json,
    plan_to_json,
    problem_from_json,
    problem_to_json,
)
from .model import Machine, Problem
from .plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """One kind of line: the list its entries go to, its fixed words and its optional parts.

    A fixed word that begins with `=` is written literally; the others name keys.
    """

    section: str
    fixed: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)

    @property
    def keywords(self) -> frozenset[str]:
        words = {w for key in self.fixed for w in _NAMED_VALUES.get(key, ())}
        return frozenset(words | {w[1:] for w in self.fixed if w[0] == "="} | set(self.options))


_DURATIONS = ("duration_us", "host_duration_us", "latency_us")
_TOLLS = ("toll_us", "toll_share", "bypass_share")
_NUMBERS = frozenset(
    (*_DURATIONS, *_TOLLS, "nbytes", "workspace_bytes", "capacity_bytes", "bytes_per_us")
)
_ZERO_IF_LEFT_OUT = ("workspace_bytes", "latency_us", *_TOLLS)
_NAMED_VALUES: dict[str, dict[str, bool | None]] = {
    "capacity_bytes": {"unlimited": None},
    "lossless": {"lossless": True, "lossy": False},
}
_FLAGS = frozenset(("recompute", "wraps", "pinned", "in_place_reads", "in_place_writes", "updates"))
_LISTS = frozenset(("reads", "writes", "dead", "lanes"))
_FIGURES = frozenset(("ratios", "direct"))

_OP_OPTIONS = {
    "reads": "reads",
    "writes": "writes",
    "workspace": "workspace_bytes",
    "direct": "direct",
    "host": "host_duration_us",
    "recompute": "recompute",
}
_MOVE_OPTIONS = {
    "after": "start_after",
    "before": "ready_before",
    "wraps": "wraps",
    "codec": "codec",
}
_TENSOR_OPTIONS = {"home": "home", "ratio": "ratios", "pinned": "pinned"}
_PROBLEM = {
    "tensor": Line("tensors", ("id", "nbytes", "kind"), _TENSOR_OPTIONS),
    "op": Line("ops", ("id", "phase", "duration_us"), _OP_OPTIONS),
}
_MACHINE = {
    "tier": Line("tiers", ("name", "capacity_bytes")),
    "lane": Line(
        "lanes",
        ("name", "source", "=->", "target", "bytes_per_us"),
        {
            "latency": "latency_us",
            "toll": "toll_us",
            "share": "toll_share",
            "bypass": "bypass_share",
        },
    ),
    "codec": Line("codecs", ("name", "lossless", "bytes_per_us")),
    "link": Line(
        "shared",
        ("name", "bytes_per_us"),
        {
            "lanes": "lanes",
            "reads": "in_place_reads",
            "writes": "in_place_writes",
            "updates": "updates",
        },
    ),
}
_PLAN = {
    "start": Line("start", ("tensor", "tier")),
    "move": Line(
        "moves", ("id", "tensor", "source", "=->", "target", "=on", "lane"), _MOVE_OPTIONS
    ),
    "drop": Line("drops", ("tensor", "tier"), {"after": "after"}),
    "direct": Line("directs", ("op", "tensor")),
    "recompute": Line("recomputes", ("op", "=before", "before")),
    "update": Line("updates", ("weight", "=on", "where")),
}

# --- printing ------------------------------------------------------------------------------

# words that need no quotes; everything else is quoted, so that it survives mail and terminals
_PLAIN = re.compile(r"[\w.@:/+*-]+")


def print_problem(problem: Problem) -> str:
    return ("steady\n" if problem.steady else "") + print_lines(problem_to_json(problem), _PROBLEM)


def print_machine(machine: Machine) -> str:
    return print_lines(machine_to_json(machine), _MACHINE)


def print_plan(plan: Plan) -> str:
    return print_lines(plan_to_json(plan), _PLAN)


def print_lines(obj: dict[str, Any], grammar: dict[str, Line]) -> str:
    lines = []
    for name, line in grammar.items():
        for row in obj.get(line.section, ()):
            lines.append(" ".join((name, *_words(row, line))))
    return "".join(f"{line}\n" for line in lines)


def _words(row: dict[str, Any], line: Line) -> Iterator[str]:
    keywords = line.keywords
    for key in line.fixed:
        yield key[1:] if key[0] == "=" else _word(key, row[key], keywords)
    for word, key in line.options.items():
        value = row.get(key, False)  # JSON leaves out a flag that is false
        if key in _LISTS:
            yield from (word, *(_word(key, name, keywords) for name in value)) if value else ()
        elif key in _FIGURES:
            for name, number in value.items():
                yield from (word, _word(key, name, keywords), repr(number))
        elif key in _FLAGS:
            yield from (word,) if value else ()
        elif value is not None and (value or key not in _ZERO_IF_LEFT_OUT):
            yield from (word, _word(key, value, keywords))


def _word(key: str, value: Any, keywords: frozenset[str]) -> str:
    for word, meaning in _NAMED_VALUES.get(key, {}).items():
        if value is meaning:
            return word
    if not isinstance(value, str):
        return repr(value)
    return value if _PLAIN.fullmatch(value) and value not in keywords else quote(value)


# --- parsing -------------------------------------------------------------------------------


def parse_problem(text: str) -> Problem:
    return parse_lines(text, _PROBLEM, problem_from_json, ("steady",))


def parse_machine(text: str) -> Machine:
    return parse_lines(text, _MACHINE, machine_from_json)


def parse_plan(text: str) -> Plan:
    return parse_lines(text, _PLAN, plan_from_json)


@dataclass(frozen=True)
class _Token:
    text: str
    quoted: bool = False


class _Fault(Exception):
    """The reason why a line cannot be parsed."""

    def __init__(self, detail: str, rule: str = "bad-value") -> None:
        self.detail = detail
        self.rule = rule


_TOKEN = re.compile(r'(?:#.*|(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<bare>[^\s"#][^\s"]*))(?=\s|\Z)')


def parse_lines(
    text: str,
    grammar: dict[str, Line],
    from_json: Callable[[object], T],
    switches: tuple[str, ...] = (),
) -> T:
    obj: dict[str, Any] = {}
    rows: dict[str, list[dict[str, Any]]] = {line.section: [] for line in grammar.values()}
    numbers: dict[str, list[int]] = {section: [] for section in rows}
    faults: dict[int, Violation] = {}
    if (count := text.count("\n")) > MOST_PARTS:
        raise InvalidInput([_too_much(1, f"{count} lines")])
    words = 0
    for number, raw in enumerate(text.split("\n"), start=1):
        row: dict[str, Any] = {}
        try:
            tokens = _tokens(raw)
            words += len(tokens)
            if words > MOST_PARTS or len(faults) == MOST_FAULTS:
                faults[number] = _too_much(number, f"{words} words, {len(faults)} faults")
                break
            if not tokens:
                continue
            first, *rest = tokens
            if first.text in switches and not first.quoted:
                if rest:
                    raise _Fault(f"{show(rest[0].text)} after {first.text!r}; end the line there")
                obj[first.text] = True
                continue
            if first.text not in grammar or first.quoted:
                near = nearest(first.text, (*switches, *grammar))
                raise _Fault(f"no line begins with {show(first.text)} ({near})", "unknown-key")
            line = grammar[first.text]
            rows[line.section].append(row)
            numbers[line.section].append(number)
            _fill(row, line, rest)
        except _Fault as fault:
            faults[number] = Violation(fault.rule, f"line {number}", fault.detail)
    return _judge(obj | rows, numbers, faults, from_json)


def _too_much(number: int, found: str) -> Violation:
    detail = f"{found} up to here: no file of ours has as much; check what wrote it"
    return Violation("bad-value", f"line {number}", detail)


def _judge(
    obj: dict[str, Any],
    numbers: dict[str, list[int]],
    faults: dict[int, Violation],
    from_json: Callable[[object], T],
) -> T:
    """Lets the JSON reader validate, and adds the line numbers to its findings."""
    found = list(faults.items())
    try:
        value = from_json(obj)
    except InvalidInput as error:
        for violation in error.violations:
            place = re.match(r"(\w+)\[(\d+)\]", violation.where)
            number = numbers[place[1]][int(place[2])] if place else 0
            if number in faults:
                continue  # the fault already reported for that line is the cause
            where = f"line {number}: {violation.where}" if number else violation.where
            found.append((number, Violation(violation.rule, where, violation.detail)))
    else:
        if not faults:
            return value
    raise InvalidInput([violation for _, violation in sorted(found, key=lambda pair: pair[0])])


def _tokens(raw: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(raw):
        if raw[at].isspace():
            at += 1
            continue
        found = _TOKEN.match(raw, at) if len(tokens) <= MOST_PARTS else None
        if found is None:
            rest = show(raw[at:])
            raise _Fault(f"{rest}: a quote that does not end, or has no space beside it; mend it")
        at = found.end()
        if found["bare"]:
            tokens.append(_Token(found["bare"]))
        elif found["quoted"]:
            try:
                tokens.append(_Token(json.loads(found["quoted"]), quoted=True))
            except ValueError:
                detail = f"{show(found['quoted'])} is not a JSON string; mend its escapes"
                raise _Fault(detail) from None
    return tokens


def _fill(row: dict[str, Any], line: Line, tokens: list[_Token]) -> None:
    """Parses one line into `row`, which keeps everything understood before a fault."""
    row.update({k: None for k in line.options.values() if k not in _LISTS | _FIGURES | _FLAGS})
    row.update({k: [] for k in line.options.values() if k in _LISTS})
    row.update({k: 0 for k in _ZERO_IF_LEFT_OUT if k in row})
    keywords = line.keywords
    rest = tokens[::-1]  # a stack
    for key in line.fixed:
        if key[0] == "=":
            if not rest or rest[-1] != _Token(key[1:]):
                found = show(rest[-1].text) if rest else "the end of the line"
                raise _Fault(f"{found} where {key[1:]!r} belongs; {_shape(line)}")
            rest.pop()
        else:
            row[key] = _value(key, rest, keywords, line)
    seen = set()
    while rest:
        token = rest.pop()
        key = line.options.get(token.text, "")
        if not key or token.quoted:
            allowed = f"allowed: {listed(tuple(line.options))}" if line.options else "end it there"
            raise _Fault(f"{show(token.text)} is no part of this line; {allowed}", "unknown-key")
        if key in seen and key not in _FIGURES:
            raise _Fault(f"{token.text!r} stands twice in this line; keep one")
        seen.add(key)
        if key in _FLAGS:
            row[key] = True
        elif key in _LISTS:
            while rest and (rest[-1].quoted or rest[-1].text not in keywords):
                row[key].append(rest.pop().text)
        elif key in _FIGURES:
            name = _value("", rest, keywords, line)
            if name in row.setdefault(key, {}):
                raise _Fault(f"{token.text} {show(name)} stands twice in this line; keep one")
            row[key][name] = _value("bytes_per_us", rest, keywords, line)
        else:
            row[key] = _value(key, rest, keywords, line)


def _value(key: str, rest: list[_Token], keywords: frozenset[str], line: Line) -> Any:
    if not rest:
        raise _Fault(f"the line ends too early; {_shape(line)}")
    token = rest.pop()
    named = _NAMED_VALUES.get(key, {})
    if token.text in named and not token.quoted:
        return named[token.text]
    if named and key not in _NUMBERS:
        raise _Fault(f"{show(token.text)} is not one of {listed(tuple(named))}; choose one")
    if not token.quoted and token.text in keywords:
        raise _Fault(
            f"{token.text!r} is a word of this line; write it in quotes if it is an id; "
            f"{_shape(line)}"
        )
    if key in _NUMBERS and not token.quoted:
        for kind in (int, float):
            try:
                return kind(token.text)
            except ValueError:
                continue
    return token.text


def _shape(line: Line) -> str:
    """The syntax of this kind of line, for error messages."""
    fixed = " ".join(w[1:] if w[0] == "=" else w.upper() for w in line.fixed)
    return f"write {fixed}" + "".join(
        f" [{word}]" if key in _FLAGS else f" [{word} …]" for word, key in line.options.items()
    )
