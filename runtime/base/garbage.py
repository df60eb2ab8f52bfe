"""Decides when to run Python's garbage collector.

A run visits every object that was ever imported. With torch loaded it takes a fifth of a second,
and runs used to take two fifths of the time of compiling a model block by block. So the collector
runs only where new garbage can have appeared since the last run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: thresholds with which the collector hardly ever runs
RARELY = (100_000, 50, 100)


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
