"""When to look for what only Python's collector frees.

It looks through all that was ever imported: a fifth of a second beside torch, which had come to
two fifths of the time that compiling a model block by block takes. So it is called where something
can have come since the last time, and not otherwise.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: thresholds with which the collector hardly ever looks
RARELY = (100_000, 50, 100)


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Let the collector look rarely: plans are many small things, and hardly any in cycles."""
    often = gc.get_threshold()
    if often[0]:  # 0: it never looks
        gc.set_threshold(*map(max, RARELY, often))
    try:
        yield
    finally:
        gc.set_threshold(*often)


class Garbage:
    def __init__(self) -> None:
        self._of_compiling = self._of_models = True

    def compiled(self) -> None:
        """Compilers leave cycles, with memory in them."""
        self._of_compiling = True

    def ran(self) -> None:
        """A model may have had its last step; one that waits for its backward has not."""
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


garbage = Garbage()
