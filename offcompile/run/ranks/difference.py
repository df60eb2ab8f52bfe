"""Finds the first op in which the graph of another rank differs from the one of the same turn here.

Ranks count the graphs that they run, and keep the text of each in the store of the group.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any

_KEY = "offcompile/graph"


def keep(store: Any, rank: int, number: int, text: str) -> None:
    """Keep the text of this rank's graph of that number."""
    store.set(f"{_KEY}/{rank}/{number}", zlib.compress(text.encode()))


def first_difference(store: Any, rank: int, number: int, text: str) -> str:
    """Compare a graph with that of the same number on another rank, and say it in a sentence."""
    key = f"{_KEY}/{rank}/{number}"
    if not store.check([key]):
        return f"Rank {rank} has run fewer graphs so far."
    theirs = zlib.decompress(store.get(key)).decode()
    pairs = itertools.zip_longest(text.splitlines(), theirs.splitlines(), fillvalue="nothing")
    for mine, other in pairs:
        if mine != other:
            return (
                f"Graph {number} of rank {rank} first differs at `{_short(other)}`, where this rank"
                f" has `{_short(mine)}`."
            )
    return f"Graph {number} of rank {rank} is the same, but comes at another turn there."


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= 120 else f"{line[:117]}..."
