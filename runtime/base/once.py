"""Remembers what this process has done once: warnings, log lines, measurements, streams."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Made = TypeVar("Made")

# per process: a warning is for the person who reads its output, a figure for the machine it is on
_done: dict[tuple[str, Hashable], Any] = {}


def first_time(topic: str, key: Hashable = None) -> bool:
    """True on the first call with this topic and key in this process, on one thread of several."""
    marker = object()
    # setdefault is atomic under the GIL: exactly one of several threads is the first
    return _done.setdefault((topic, key), marker) is marker


def made_once(topic: str, key: Hashable, make: Callable[[], Made]) -> Made:
    """Returns what `make` returned at the first call with this topic and key."""
    if (topic, key) not in _done:
        _done.setdefault((topic, key), make())
    made: Made = _done[topic, key]
    return made


def forget(topic: str) -> dict[tuple[str, Hashable], Any]:
    """Nothing of the topic has been done any more; returns what had been."""
    keys = [key for key in tuple(_done) if key[0] == topic]
    return {key: _done.pop(key) for key in keys if key in _done}


@contextmanager
def afresh(topic: str) -> Iterator[None]:
    """Inside the block nothing of the topic has been done yet. For tests."""
    before = forget(topic)
    try:
        yield
    finally:
        forget(topic)
        _done.update(before)
