"""Measurements of a machine, stored as JSON in the user's cache folder.

A document names the machine and versions that it describes (its identity). One that is broken,
that describes another machine, or that others may write to, counts as absent and is replaced. If
the folder cannot be written, measurements last only as long as the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from offcompile.ir.reading import read_bounded
from offcompile.runtime.base.once import first_time, made_once
from offcompile.runtime.base.posix import replace_text

#: version of the document format and of the way in which its contents are measured
FORMAT = 4
#: beyond this the oldest entries are dropped: thousands of shapes, a few hundred kilobytes
MOST_ENTRIES = 20_000
MOST_TRIES = 3
#: a figure measured again that differs by no more than this share stays as it was, so that plans
#: made with it are found again
NEARLY_SAME = 0.1
#: a document with `MOST_ENTRIES` entries takes a fifth of this
_MOST_BYTES = 64 << 20
#: larger than any measured figure of any machine, and products of such figures stay finite
_MOST_FIGURE = 1e30

Identity = Mapping[str, str | int | bool]

#: the topic of `measured_here` in `once`
MEASURED = "measured in this process"


def cache_folder() -> Path:
    """$OFFCOMPILE_CACHE_DIR, or else `offcompile` in the user's cache folder."""
    if own := os.environ.get("OFFCOMPILE_CACHE_DIR"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "offcompile"
    try:
        return Path.home() / ".cache" / "offcompile"
    except RuntimeError:  # no home: a folder that cannot be made leads to the one warning
        return Path("/nonexistent/offcompile")


def document_path(kind: str, identity: Identity) -> Path:
    text = json.dumps([FORMAT, dict(identity)], sort_keys=True)
    return cache_folder() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_document(kind: str, identity: Identity) -> dict[str, object] | None:
    """Returns the content stored for this identity; None if there is none to be trusted."""
    try:
        text = read_bounded(document_path(kind, identity), _MOST_BYTES, ours=True)
        found = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return None
    content = found.get("content")
    if found.get("identity") != dict(identity) or not isinstance(content, dict):
        return None
    return content


def measured_here(document: Path) -> set[str]:
    """Keys of a document that this process has measured, which it does not measure twice."""
    return made_once(MEASURED, document, set)


def digest_of(parts: Sequence[object]) -> str:
    """Tells apart documents for which so much decides that their identity would be long."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def write_among(
    kind: str, identity: Identity, content: Mapping[str, object], most_bytes: int
) -> None:
    """Replaces the document; deletes the least recently used of its kind beyond so many bytes."""
    write_document(kind, identity, content)
    drop_oldest(kind, most_bytes)


def write_document(kind: str, identity: Identity, content: Mapping[str, object]) -> bool:
    """Replaces the document atomically; False, after one warning, if that fails."""
    path = document_path(kind, identity)
    whole = {"format": FORMAT, "identity": dict(identity), "content": dict(content)}
    try:
        replace_text(path, json.dumps(whole, indent=0, sort_keys=True))
    except OSError as error:
        _warn_once(path.parent, error)
        return False
    return True


def used_now(kind: str, identity: Identity) -> None:
    """Note that the document is in use: the least recently used are deleted first."""
    with suppress(OSError):  # deleted by another process meanwhile
        os.utime(document_path(kind, identity))


def drop_oldest(kind: str, most_bytes: int) -> None:
    """Delete the least recently used documents of a kind beyond so many bytes."""
    found: list[tuple[float, int, Path]] = []
    for path in cache_folder().glob(f"{kind}-*.json"):
        with suppress(OSError):  # deleted by another process meanwhile
            told = path.stat()
            found.append((told.st_mtime, told.st_size, path))
    total_bytes = sum(nbytes for _, nbytes, _ in found)
    for _, nbytes, path in sorted(found):
        if total_bytes <= most_bytes:
            break
        with suppress(OSError):
            path.unlink(missing_ok=True)
        total_bytes -= nbytes


def _warn_once(folder: Path, error: OSError) -> None:
    if first_time("measurements cannot be kept", str(folder)):
        warnings.warn(
            f"measurements cannot be kept in {folder} ({error.strerror or error}): they are "
            "repeated in every process; set OFFCOMPILE_CACHE_DIR to a folder that can be written",
            stacklevel=3,
        )


def forget_costs() -> None:
    """Deletes all measured op costs in this folder, of every machine that stores them here."""
    for path in cache_folder().glob("costs-*.json"):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _warn_once(path.parent, error)


def positive_number(value: object) -> float | None:
    """Returns the value if it is a number above 0 that can be a measurement, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value <= _MOST_FIGURE else None


def nearly_same(before: float, now: float) -> bool:
    """True if no plan should change for a figure that was measured again."""
    return abs(now - before) <= NEARLY_SAME * before


@dataclass(frozen=True)
class CacheEntry:
    duration_us: float
    workspace_bytes: int
    #: number of measurements while other work used the processor; 0: measured undisturbed
    disturbed: int = 0


class CostCache:
    """Measured ops of one machine: key → (duration_us, workspace_bytes).

    An op that was measured on a busy machine is measured again by later processes, keeping the
    minimum, until it has been measured once undisturbed or `MOST_TRIES` times disturbed. Without
    an identity, entries last only as long as the object.
    """

    def __init__(self, identity: Identity | None = None) -> None:
        self.identity = identity
        self._entries: dict[str, CacheEntry] = {}
        self._new: dict[str, CacheEntry] = {}  # to be written
        if identity is not None:
            self._entries = _entries(read_document("costs", identity))
        #: keys measured in this process, which are not measured twice
        self._here = set() if identity is None else measured_here(document_path("costs", identity))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> tuple[float, int] | None:
        entry = self._entries.get(key)
        return None if entry is None else (entry.duration_us, entry.workspace_bytes)

    def settled(self, key: str) -> bool:
        """True if the key need not be measured (again) in this process."""
        entry = self._entries.get(key)
        return entry is not None and (key in self._here or not 0 < entry.disturbed < MOST_TRIES)

    def put(
        self, key: str, duration_us: float, workspace_bytes: int = 0, disturbed: bool = False
    ) -> None:
        entry, before = CacheEntry(duration_us, workspace_bytes), self._entries.get(key)
        if disturbed and before is not None:
            entry = CacheEntry(
                min(duration_us, before.duration_us),
                min(workspace_bytes, before.workspace_bytes),
                before.disturbed + 1,
            )
        elif disturbed:
            entry = replace(entry, disturbed=1)
        if before is not None and nearly_same(before.duration_us, entry.duration_us):
            entry = replace(entry, duration_us=before.duration_us)
        self._entries[key] = self._new[key] = entry
        self._here.add(key)

    def save(self) -> None:
        """Writes the new entries; keeps those that other processes wrote meanwhile."""
        if self.identity is None or not self._new:
            return
        merged = _entries(read_document("costs", self.identity)) | self._new
        kept = list(merged.items())[-MOST_ENTRIES:]
        rows = [[k, e.duration_us, e.workspace_bytes, e.disturbed] for k, e in kept]
        write_document("costs", self.identity, {"ops": rows})
        self._new.clear()


def _entries(content: Mapping[str, object] | None) -> dict[str, CacheEntry]:
    """Returns the valid entries; others are left out, and so measured again."""
    rows = (content or {}).get("ops")
    found: dict[str, CacheEntry] = {}
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, list) or len(row) != 4 or not isinstance(row[0], str):
            continue
        duration_us, (workspace, disturbed) = positive_number(row[1]), row[2:]
        counts = isinstance(workspace, int) and isinstance(disturbed, int)
        if duration_us is not None and counts and 0 <= workspace <= _MOST_FIGURE and disturbed >= 0:
            found[row[0]] = CacheEntry(duration_us, workspace, disturbed)
    return found
