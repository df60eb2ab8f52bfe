"""The counts of the long runs: rows of the table in docs/trust.md, and where they are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """`done` of `of` cases held; each of the others is named, with why it may."""

    what: str
    done: int
    of: int
    exceptions: tuple[str, ...] = ()
    #: (name, figure) pairs worth reading beside the count
    figures: tuple[tuple[str, str], ...] = ()

    @property
    def holds(self) -> bool:
        return self.done + len(self.exceptions) == self.of


_ROOT = Path(__file__).resolve().parents[2]
#: part → its rows, as its last full run counted them
KEPT = _ROOT / "benchmarks" / "results" / "trust.json"
PAGE = _ROOT / "docs" / "trust.md"
_IN_BRACKETS = re.compile(r" \(.*\)")
_BEGIN, _END = "<!-- written by `make soak` -->", "<!-- end of what is written -->"


def table(rows: Iterable[Row]) -> str:
    """The rows in Markdown, with the cases that did not hold below them."""
    rows = list(rows)
    lines = ["| what | held | of | figures |", "|---|---:|---:|---|"]
    for row in rows:
        figures = ", ".join(f"{name} {figure}" for name, figure in row.figures)
        mark = "" if row.holds else " **broken**"
        lines.append(f"| {row.what}{mark} | {row.done:,} | {row.of:,} | {figures} |")
    for told, whats in _exceptions(rows).items():
        lines += ["", f"Not counted as held, {'; '.join(whats)}:", ""]
        lines += [f"- {line}" for line in told]
    return "\n".join(lines)


def _exceptions(rows: Iterable[Row]) -> dict[tuple[str, ...], list[str]]:
    """Lines, one a reason with the cases that share it → the rows that they hold for. The file of
    the counts keeps what brackets add to a reason in each case."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        cases: dict[str, list[str]] = {}
        for exception in row.exceptions:
            case, _, why = exception.partition(": ")
            cases.setdefault(_IN_BRACKETS.sub("", why), []).append(case)
        if cases:
            told = tuple(f"{why}: {', '.join(names)}" for why, names in cases.items())
            found.setdefault(told, []).append(row.what)
    return found


def kept() -> dict[str, list[Row]]:
    """Rows that the file holds, by part; parts that never ran are not in it."""
    if not KEPT.exists():
        return {}
    found: Mapping[str, Sequence[Mapping[str, object]]] = json.loads(KEPT.read_text())
    return {part: [_row(fields) for fields in rows] for part, rows in found.items()}


def keep(counted: Mapping[str, Sequence[Row]], order: Sequence[str]) -> None:
    """Replace the rows of these parts, in the file and on the page."""
    parts = {**kept(), **counted}
    parts = {part: list(parts[part]) for part in order if part in parts}
    text = json.dumps({p: [asdict(row) for row in rows] for p, rows in parts.items()}, indent=1)
    KEPT.write_text(text + "\n")
    PAGE.write_text(page_with(parts))


def page_with(parts: Mapping[str, Sequence[Row]]) -> str:
    """The page, its table made from these rows."""
    page = PAGE.read_text()
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{PAGE} has no room for the table: it needs {_BEGIN!r} and {_END!r}")
    rows = [row for part in parts.values() for row in part]
    return f"{before}{_BEGIN}\n\n{table(rows)}\n\n{_END}{after}"


def _row(fields: Mapping[str, object]) -> Row:
    values = dict(fields)
    values["exceptions"] = tuple(values["exceptions"])  # type: ignore[arg-type]
    values["figures"] = tuple((a, b) for a, b in values["figures"])  # type: ignore[attr-defined]
    return Row(**values)  # type: ignore[arg-type]
