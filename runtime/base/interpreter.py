"""Saves time that Python's interpreter takes beside running code: for garbage, and for frames.

A run of the garbage collector visits every object that was ever imported. With torch loaded it
takes a fifth of a second, and runs used to take two fifths of the time of compiling a model block
by block. So the collector runs only where new garbage can have appeared since the last run.

CPython keeps frames in chunks of 16 KiB. A call that does not fit maps another chunk, and its
return unmaps it. A loop that happens to call across such a border pays two system calls and a page
fault for every call: planning again in the middle of a training loop so took 17 s instead of 12, 7
of them in the kernel, with a million page faults.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: thresholds with which the collector hardly ever runs
RARELY = (100_000, 50, 100)
#: values on the stack of a frame that takes a chunk of its own, twice as large: a little more than
#: 128 KiB, so that the chunk has 256, and nearly half of it is left to the frames of the calls
_VALUES = 17_000


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Run the collector rarely: plans are many small objects, hardly any of them in cycles."""
    often = gc.get_threshold()
    if often[0]:  # 0: it never runs
        gc.set_threshold(*map(max, RARELY, often))
    try:
        yield
    finally:
        gc.set_threshold(*often)


class Garbage:
    """The runs of the collector that a process may need."""

    def __init__(self) -> None:
        self._of_compiling = self._of_models = True

    def compiled(self) -> None:
        """Note that a compiler ran: compilers leave reference cycles that hold memory."""
        self._of_compiling = True

    def ran(self) -> None:
        """Note that a model may have had its last step. Do not call while a backward is pending."""
        self._of_models = True

    def collect_of_compiling(self) -> None:
        if self._of_compiling:
            self.collect()

    def collect_models(self) -> None:
        if self._of_models:
            self.collect()

    def collect(self) -> None:
        self._of_compiling = self._of_models = False
        gc.collect()


def in_large_chunk(call: Callable[P, R]) -> Callable[P, R]:
    """The function, run where some 120 KiB of frames fit into one chunk."""

    def entered(*arguments: Any, **named: Any) -> R:
        return call(*arguments, **named)

    # a frame takes the room that its code asks for, whether it uses it or not
    entered.__code__ = entered.__code__.replace(co_stacksize=_VALUES)
    return wraps(call)(entered)
