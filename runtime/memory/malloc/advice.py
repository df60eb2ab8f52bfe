"""Detects whether malloc leaves splinters around tensors, and suggests a remedy."""

from __future__ import annotations

from collections.abc import Mapping

from . import tensor_memory
from .launch import NO_CACHE, VARIABLE

#: size of a splinter, including the alignment of both ends
SPLINTER_BYTES = 112
HINT = (
    "steps take a fifth less where there is a C++ compiler (install g++, or name one in CXX), and 5"
    " to 8% less when started with `offcompile run SCRIPT`"
)


def malloc_leaves_holes(given: Mapping[str, str]) -> bool:
    """True if this process would run better with another allocator or with other settings of
    malloc."""
    return not (
        NO_CACHE + "=0" in given.get(VARIABLE, "").split(":")
        or tensor_memory.will_fit()
        or not tensor_memory.malloc_leaves_ends()
    )
