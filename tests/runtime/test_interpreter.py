"""Calls from inside a function that runs in a large chunk map no memory for their frames."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable

import pytest

from offcompile.runtime.base.interpreter import in_large_chunk

CALLS, DEEPEST = 200, 400


def leaf() -> None:
    """A frame as large as most."""
    a, b, c, d, e, f, g, h = range(8)
    del a, b, c, d, e, f, g, h


def page_faults(deep: int) -> int:
    """Page faults of a loop of calls, so many frames down."""
    if deep:
        return page_faults(deep - 1)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        leaf()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def most_page_faults(call: Callable[[int], int]) -> int:
    """The most at any depth, on a thread of its own."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(map(call, range(DEEPEST))))
    thread.start()
    thread.join()
    return max(found)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames are blocks of malloc's")
def test_no_loop_of_calls_maps_a_chunk_for_each() -> None:
    assert most_page_faults(page_faults) >= CALLS  # at some depth
    assert most_page_faults(in_large_chunk(page_faults)) < CALLS / 10


@in_large_chunk
def divided(a: int, *, by: int) -> float:
    """Divides."""
    return a / by


def test_it_is_called_as_before() -> None:
    assert divided(3, by=2) == 1.5
    assert (divided.__name__, divided.__doc__) == ("divided", "Divides.")
    with pytest.raises(ZeroDivisionError):
        divided(1, by=0)
