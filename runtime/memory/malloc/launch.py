"""Start a script with malloc settings that must be in place when a process begins.

Up to 2.38, glibc's aligned allocations (torch's tensors) leave splinters of up to 96 bytes around
each block, and its caches for small blocks hand them out before the neighbour is freed: a freed
tensor's place is then too small for the next tensor of its size. Memory that moves tensors in and
out gets fragmented, and returning the holes costs 5 to 8% of a step. Without the caches, splinters
and blocks merge again. Where there is a compiler, `tensor_memory.py` does better than that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

VARIABLE = "GLIBC_TUNABLES"
NO_CACHE = "glibc.malloc.tcache_count"


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The same variables, plus offcompile's malloc settings; those set by the user win."""
    settings = [s for s in given.get(VARIABLE, "").split(":") if s]
    if not any(s.startswith(NO_CACHE + "=") for s in settings):
        settings.append(NO_CACHE + "=0")
    return {**given, VARIABLE: ":".join(settings)}


def start(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by `python ARGUMENTS…`."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *arguments], environment(os.environ))
