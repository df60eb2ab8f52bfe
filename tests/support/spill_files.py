"""Blocks of random bytes, and the open files without a name, for tests of spill files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from offcompile.runtime.memory.arena import Arena


def filled(arena: Arena, nbytes: int, seed: int = 0) -> memoryview:
    view = arena.block(nbytes).view
    np.frombuffer(view, np.uint8)[:] = np.random.default_rng(seed).integers(
        0, 256, len(view), np.uint8
    )
    return view


def descriptors(within: Path = Path("/")) -> list[str]:
    """The open files below a directory that have no name."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed them
            continue
        if target.endswith("(deleted)") and target.startswith(str(within)):
            found.append(name)
    return found
