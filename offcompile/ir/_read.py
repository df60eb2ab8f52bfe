"""Strict reading of parsed JSON: reports every fault with its location and an explanation.

Reading stops at `MOST_FAULTS` faults, not at the first. An unusable value is noted in the
`Report` and replaced by a stand-in of its type, so that the rest can be read; `Report.check` then
raises once, with all faults.
"""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from .errors import InvalidInput, Violation

T = TypeVar("T")
D = TypeVar("D")

#: Bytes and microseconds above this are refused, and rates below its inverse: sums and products
#: of them would overflow floats, or pass the figure that counts as unlimited, in the middle of a
#: simulation. No real figure comes near, and common stand-ins for infinity (2**63, 1e18) fit.
LARGEST = 1e30
_FASTEST = 1e100
_WORST_RATIO = 1e6

_SHOWN_CHARACTERS = 60
_SUGGESTIONS = 20  # nearest names are looked up for the first faults only, as this is slow
#: no file of ours has more; the report should fit into memory
MOST_FAULTS = 10_000


class JsonObject(dict[str, object]):
    """A JSON object that remembers which of its keys were written more than once."""

    __slots__ = ("repeated",)

    def __init__(self, pairs: Iterable[tuple[str, object]]) -> None:
        pairs = list(pairs)
        super().__init__(pairs)
        self.repeated: tuple[str, ...] = ()
        if len(self) < len(pairs):
            times = Counter(key for key, _ in pairs)
            self.repeated = tuple(key for key, count in times.items() if count > 1)


def quote(text: str) -> str:
    """A JSON string on one line, in readable characters where all of them are printable."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def show(value: object) -> str:
    """A value for an error message: exact if short, described in words if it could be endless."""
    if isinstance(value, str):
        cut = value[:_SHOWN_CHARACTERS]
        return quote(cut) + ("…" if cut != value else "")
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        bits = int(value).bit_length()
        return str(int(value)) if bits <= 256 else f"a whole number of {bits} bits"
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f"a value of type {type(value).__name__}"


def label(name: str) -> str:
    """An id or key as part of a location: unquoted if that reads well."""
    return name if name.isprintable() and 0 < len(name) <= _SHOWN_CHARACTERS else show(name)


def listed(words: Collection[str]) -> str:
    """Some names for an error message, at most ten of them."""
    shown = ", ".join(show(w) for w in islice(words, 10))
    return f"{shown}, …" if len(words) > 10 else shown


def nearest(word: object, known: Collection[str]) -> str:
    """Suggests the known name that was probably meant, or lists some if none is near."""
    if isinstance(word, str) and len(word) <= 100:
        near = difflib.get_close_matches(word, list(islice(known, 2000)), n=1, cutoff=0.5)
        if near:
            return f"did you mean {quote(near[0])}?"
    return f"known: {listed(known)}" if known else "none is known here"


class Report:
    """The violations found so far."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def add(self, rule: str, where: str, detail: str) -> None:
        self.violations.append(Violation(rule, where, detail))
        if len(self.violations) >= MOST_FAULTS:
            raise InvalidInput(self.violations)

    def check(self) -> None:
        if self.violations:
            raise InvalidInput(self.violations)

    def nearest(self, word: object, known: Collection[str]) -> str:
        """Like the function `nearest`, but suggests a name only while there are few faults."""
        return nearest(word if len(self.violations) < _SUGGESTIONS else None, known)

    def unique(self, named: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Maps ids to places, given (place, id) pairs; reports each id that occurs twice."""
        first: dict[str, str] = {}
        for where, name in named:
            if not name:
                continue
            if name in first:
                self.add(
                    "duplicate-id",
                    where,
                    f"{show(name)} already stands at {first[name]}; ids are unique: rename one",
                )
            first.setdefault(name, where)
        return first

    def known(self, where: str, name: str | None, noun: str, known: Collection[str]) -> bool:
        """True if `name` is one of the known ids; stand-ins and null are accepted."""
        if not name or name in known:
            return True
        near = self.nearest(name, known)
        detail = f"no {noun} is named {show(name)} ({near}); name one that exists or add it"
        self.add("unknown-id", where, detail)
        return False


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A type of value: `read` returns it converted, or None if it is not valid."""

    allowed: str
    fix: str
    stand_in: T
    read: Callable[[object], T | None]


def _ident(value: object) -> str | None:
    if not isinstance(value, str) or not value:
        return None
    try:
        value.encode()
    except UnicodeEncodeError:  # an unpaired surrogate could never be printed or saved
        return None
    return str(value)


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not 0 <= value <= LARGEST or value != math.floor(value):
        return None
    return int(value)


def figure(value: int | float) -> int | float:
    """A measured number as a float, if a float can represent it exactly."""
    try:
        as_float = float(value) + 0.0  # −0.0 becomes 0.0
    except OverflowError:
        return value
    return as_float if as_float == value else value


def _within(least: float, most: float) -> Callable[[object], float | None]:
    def read(value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return figure(value) if least <= value <= most else None

    return read


IDENT = Kind("a non-empty string of valid Unicode", 'write an id such as "w0"', "", _ident)
FLAG = Kind("true or false", "write one of the two, without quotes", False, _flag)
BYTES = Kind(
    "a whole number of bytes from 0 to 1e30",
    "write a plain number such as 4096, without quotes, sign or unit",
    0,
    _whole,
)
MICROSECONDS = Kind(
    "a finite number of microseconds from 0 to 1e30",
    "write a plain number such as 1200.0, without quotes or unit",
    0.0,
    _within(0.0, LARGEST),
)
RATE = Kind(
    "a finite number of bytes per microsecond above 0 (1e-30 to 1e100)",
    "write a plain number such as 12000.0; a link or codec that cannot work is left out",
    1.0,
    _within(1 / LARGEST, _FASTEST),
)
SHARE = Kind(
    "a number from 0 to 1",
    "write a plain number such as 0.5",
    0.0,
    _within(0.0, 1.0),
)
RATIO = Kind(
    "a finite number above 0, compressed size over raw size (1e-30 to 1e6)",
    "write a plain number such as 0.5",
    1.0,
    _within(1 / LARGEST, _WORST_RATIO),
)


def one_of(words: tuple[str, ...]) -> Kind[str]:
    def read(value: object) -> str | None:
        return value if isinstance(value, str) and value in words else None

    return Kind(f"one of {listed(words)}", "choose one of them", "", read)


class Entry:
    """One JSON object being read. `where` is its location; "" for the outermost."""

    def __init__(
        self, report: Report, raw: object, where: str, noun: str, keys: tuple[str, ...]
    ) -> None:
        self.report = report
        self.where = where
        self.keys = keys
        self.broken = not isinstance(raw, Mapping)
        self.raw: Mapping[object, object] = raw if isinstance(raw, Mapping) else {}
        if self.broken:
            self._bad(where or noun, raw, "an object", f"write {{…}} with the keys {listed(keys)}")
        for key in self.raw:
            if key not in keys:
                name = label(key) if isinstance(key, str) else show(key)
                near = report.nearest(key, keys)
                article = "an" if noun[0] in "aeiou" else "a"
                detail = f"{article} {noun} has no key {show(key)} ({near}); rename or remove it"
                report.add("unknown-key", self.at(name), detail)
        for key in raw.repeated if isinstance(raw, JsonObject) else ():
            report.add(
                "bad-value", self.at(label(key)), f"key {show(key)} is written twice; keep one"
            )

    def at(self, key: str) -> str:
        """The location of one key of this object."""
        return f"{self.where}.{key}" if self.where else key

    def _bad(self, where: str, value: object, allowed: str, fix: str) -> None:
        self.report.add("bad-value", where, f"{show(value)} is not {allowed}; {fix}")

    def _accept(self, where: str, value: object, kind: Kind[T], null: str = "") -> T:
        read = kind.read(value)
        if read is not None:
            return read
        self._bad(where, value, kind.allowed + null, kind.fix)
        return kind.stand_in

    def required(self, key: str, kind: Kind[T]) -> T:
        self.present(key, kind.allowed)
        return self._accept(self.at(key), self.raw[key], kind) if key in self.raw else kind.stand_in

    def optional(self, key: str, kind: Kind[T], default: D) -> T | D:
        """The value of a key that may be left out; null is allowed where it is the default."""
        value = self.raw.get(key, default)
        if key not in self.raw or (value is None and default is None):
            return default
        return self._accept(self.at(key), value, kind, " or null" if default is None else "")

    def present(self, key: str, allowed: str) -> None:
        """Reports a required key that is missing."""
        if not self.broken and key not in self.raw:
            self.report.add("bad-value", self.at(key), f"missing; add {quote(key)}: {allowed}")

    def _list(self, key: str, required: bool) -> list[object]:
        if required:
            self.present(key, "a list")
        value = self.raw.get(key, [])
        if isinstance(value, (list, tuple)):
            return list(value)
        self._bad(self.at(key), value, "a list", "write […]")
        return []

    def many(self, key: str, kind: Kind[T]) -> tuple[T, ...]:
        """A required list of plain values."""
        values = enumerate(self._list(key, required=True))
        return tuple(self._accept(f"{self.at(key)}[{i}]", v, kind) for i, v in values)

    def figures(self, key: str, kind: Kind[T]) -> dict[str, T]:
        """An object that maps names to numbers; empty if left out."""
        value = self.raw.get(key, {})
        if not isinstance(value, Mapping):
            self._bad(self.at(key), value, "an object", "write {…} from names to numbers")
            return {}
        for name in value.repeated if isinstance(value, JsonObject) else ():
            where = f"{self.at(key)}.{label(name)}"
            self.report.add("bad-value", where, f"key {show(name)} is written twice; keep one")
        read: dict[str, T] = {}
        for name, number in value.items():
            text = self._accept(self.at(key), name, IDENT)
            read[text] = self._accept(f"{self.at(key)}.{label(text)}", number, kind)
        return read

    def entries(self, key: str, noun: str, keys: tuple[str, ...]) -> Iterator[Entry]:
        """The objects of a list; each is located by its index and its first key."""
        for i, raw in enumerate(self._list(key, required=False)):
            name = raw.get(keys[0]) if isinstance(raw, Mapping) else None
            called = f" ({label(name)})" if isinstance(name, str) and name else ""
            yield Entry(self.report, raw, f"{self.at(key)}[{i}]{called}", noun, keys)
