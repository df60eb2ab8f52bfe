"""Start a script with the settings of malloc that must be there when a process begins.

Up to 2.38, glibc's aligned allocations (torch's tensors) leave splinters of up to 96 bytes around
each block, and its caches for small blocks hand them out before the neighbour comes back: a freed
tensor's place is then too small for the next tensor of its size. Memory that moves tensors in and
out fills with holes, and giving those back costs 5 to 8% of a step. Without the caches splinters
and blocks merge again. Where there is a compiler, `runtime/memory/tensor_memory.py`
does better than that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

VARIABLE = "GLIBC_TUNABLES"
NO_CACHE = "glibc.malloc.tcache_count"


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The same variables, with what offcompile wants of malloc; what the user set stays."""
    settings = [s for s in given.get(VARIABLE, "").split(":") if s]
    if not any(s.startswith(NO_CACHE + "=") for s in settings):
        settings.append(NO_CACHE + "=0")
    return {**given, VARIABLE: ":".join(settings)}


def start(arguments: Sequence[str]) -> NoReturn:
    """Become `python ARGUMENTS…`."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *arguments], environment(os.environ))
